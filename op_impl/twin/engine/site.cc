#include "op_impl/twin/engine/site.h"

#include <cstring>

namespace twin {

std::string text(const Site& site) {
  const char* name = std::strrchr(site.file, '/');
  return std::string(name ? name + 1 : site.file) + ":" + std::to_string(site.line) + (site.call[0] ? std::string(" ") + site.call : "");
}

const char* fault_name(Fault fault) {
  switch (fault) {
    case Fault::kIllegal: return "illegal operation";
    case Fault::kCapacity: return "over capacity";
    case Fault::kAlignment: return "misaligned";
    case Fault::kLayout: return "wrong layout";
    case Fault::kBounds: return "out of bounds";
    case Fault::kRace: return "data race";
    case Fault::kEvent: return "event misuse";
    case Fault::kDeadlock: return "deadlock";
  }
  return "fault";
}

void fail(Fault fault, const Site& site, const std::string& what) { throw TwinError(fault, text(site) + ": " + what); }

}  // namespace twin
