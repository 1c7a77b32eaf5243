// Integer arithmetic of the tiling sources.
#pragma once

#include <algorithm>
#include <cstdint>

namespace flashmla {
namespace int_math {

constexpr int64_t kKiB = 1024;
constexpr int64_t kMiB = 1024 * 1024;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t align_up(int64_t n, int64_t multiple) { return ceil_div(n, multiple) * multiple; }
inline int64_t align_down(int64_t n, int64_t multiple) { return n / multiple * multiple; }
inline int64_t clamp(int64_t n, int64_t low, int64_t high) { return std::min(std::max(n, low), high); }

// The largest power of two not above n, n >= 1.
inline int64_t floor_pow2(int64_t n) {
  int64_t power = 1;
  while (power * 2 <= n) power *= 2;
  return power;
}

}  // namespace int_math
}  // namespace flashmla
