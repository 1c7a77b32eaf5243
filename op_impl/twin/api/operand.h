// Checks that several calls share.
#pragma once

#include <string>

#include "op_impl/twin/api/copies.h"

namespace AscendC {

inline int64_t twin_round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

inline void require_core(const twin::Engine& engine, bool aic, const Site& site) {
  if ((engine.core() == twin::kAIC) != aic) twin::fail(Fault::kIllegal, site, std::string(twin::core_name(engine.core())) + " has no pipe for this");
}

inline void require_path(bool exists, const char* from, const char* to, const Site& site) {
  if (!exists) twin::fail(Fault::kIllegal, site, std::string("there is no path ") + from + " -> " + to + " for this call");
}

// An operation touches `bytes` from the tensor's start, which has to be aligned.
inline void require_inside(const TwinLocal& tensor, int64_t bytes, const Site& site, int alignment = 32) {
  if (tensor.address % alignment != 0) {
    twin::fail(Fault::kAlignment, site, std::string("byte ") + std::to_string(tensor.address) + " of " + twin::space_name(tensor.space) + " is not a multiple of " + std::to_string(alignment));
  }
  if (tensor.address + bytes > tensor.end) {
    twin::fail(Fault::kBounds, site, "touches " + std::to_string(bytes) + " bytes of a tensor in " + twin::space_name(tensor.space) + " that has " +
                                         std::to_string(int64_t{tensor.end} - int64_t{tensor.address}) + " left");
  }
}

}  // namespace AscendC
