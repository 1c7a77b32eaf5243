// Where in the kernel's source something was asked for, and the errors that name it.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace twin {

// As a default argument it is evaluated where the call stands, so that the kernel's source needs no macro for it.
struct Site {
  const char* file = "";
  int line = 0;
  const char* call = "";  // name of the AscendC call
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line, ""}; }
  constexpr Site named(const char* name) const { return {file, line, name}; }
};

// "mla_attention.h:120 DataCopy"
std::string text(const Site& site);

// What kind of fault a run found; the first word of its message.
enum class Fault { kIllegal, kCapacity, kAlignment, kLayout, kBounds, kRace, kEvent, kDeadlock };
const char* fault_name(Fault fault);

class TwinError : public std::runtime_error {
 public:
  TwinError(Fault fault, const std::string& what) : std::runtime_error(std::string(fault_name(fault)) + ": " + what), fault(fault) {}
  const Fault fault;
};

[[noreturn]] void fail(Fault fault, const Site& site, const std::string& what);

inline void require(bool ok, Fault fault, const Site& site, const char* what) {
  if (!ok) fail(fault, site, what);
}

}  // namespace twin
