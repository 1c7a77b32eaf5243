// The values of dtype and rope_mode, for the operators' lists and everything behind them.
#pragma once

#include <cstdint>

namespace flashmla {

enum DType : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kInt32 = 3 };
enum RopeMode : int32_t { kRopeDecoupled = 0, kRopeFull = 1 };

inline constexpr int64_t dtype_bytes(int32_t dtype) { return dtype == kFloat32 || dtype == kInt32 ? 4 : 2; }

}  // namespace flashmla
