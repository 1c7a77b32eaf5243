#include "tiling/switches.h"

#include <array>
#include <atomic>
#include <climits>
#include <cstdlib>
#include <sstream>
#include <stdexcept>

namespace flashmla {
namespace {

enum Switch : size_t { kRowPacking, kFewRows, kNextTile, kFlatGemm, kDataflow, kSwitches };
const char* const kNames[kSwitches] = {"row_packing", "few_rows", "next_tile", "flat_gemm", "dataflow"};

size_t switch_named(const std::string& name, const char* where) {
  std::string known;
  for (size_t i = 0; i < kSwitches; ++i) {
    if (name == kNames[i]) return i;
    known += (i ? ", " : "") + std::string(kNames[i]);
  }
  throw std::invalid_argument(std::string(where) + " names '" + name + "', expected one of " + known);
}

struct Switches {
  std::array<std::atomic<bool>, kSwitches> off{};
  Switches() {
    const char* list = std::getenv("MS_FLASHMLA_OFF");
    std::istringstream names(list == nullptr ? "" : list);
    for (std::string name; std::getline(names, name, ',');) off[switch_named(name, "MS_FLASHMLA_OFF")] = true;
  }
};

Switches& switches() {
  static Switches s;  // an exception leaves it unmade: every call says what is wrong
  return s;
}

}  // namespace

void check_switches() { switches(); }

void set_switch(const std::string& name, bool on) { switches().off[switch_named(name, "set_switch")] = !on; }

void apply_switches(const Machine& machine, TilingData* t) {
  const Switches& s = switches();
  if (s.off[kRowPacking]) {
    t->qk_row_pack = 1;
    t->qk_dim_pack = machine.vector_lanes;
  }
  if (s.off[kFewRows]) t->few_rows = 0;
  if (s.off[kNextTile]) t->next_tile = 0;
  for (GemmChoice& choice : t->gemm) {
    if (s.off[kFlatGemm]) choice.gemv_rows = choice.flat_rows = 0;
    else if (s.off[kDataflow]) choice.gemv_rows = 0, choice.flat_rows = INT_MAX;
  }
}

}  // namespace flashmla
