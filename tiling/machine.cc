#include "tiling/machine.h"

namespace flashmla {
namespace {

std::vector<Machine> make_machines() {
  std::vector<Machine> table;
#include "machines_gen.inc"
  return table;
}

}  // namespace

const std::vector<Machine>& machines() {
  static const std::vector<Machine> table = make_machines();
  return table;
}

const Machine* find_machine(const std::string& name) {
  for (const Machine& machine : machines()) {
    if (machine.name == name) return &machine;
  }
  return nullptr;
}

}  // namespace flashmla
