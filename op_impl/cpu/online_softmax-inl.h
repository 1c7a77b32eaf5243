// online_softmax: scores become probabilities, in place; with its mask, and the form that takes one maximum for all rows.
#pragma once

#include "op_impl/cpu/row_chunk-inl.h"

namespace flashmla {
namespace FLASHMLA_NS {

// Masked scores become -inf, whose exponential is exactly 0: a finite mask value would tie with valid very negative logits.
static void mask_scores(const RowChunk &c, int64_t first, int64_t n) {
  for (int64_t row = 0; row < c.rows; ++row)
    for (int64_t j = c.limit[row] > first ? c.limit[row] - first : 0; j < n; ++j) c.s[j * c.lds + row] = kMinusInf;
}

// S -> P = exp(S - max), updates m and l, and gives the factor by which the output so far is to be rescaled.
static void online_softmax(const RowChunk &c, int64_t n) {
  for (int64_t row = 0; row < c.rows; row += kLanes) {
    float *s = c.s + row;  // [n, lds]
    const VF before = load(c.m + row);
    VF now = before;
    for (int64_t j = 0; j < n; ++j) now = max(now, load(s + j * c.lds));
    // A row that has seen no key yet keeps -inf; prevent (-inf) - (-inf) = nan.
    const VF base = select_less(now, set1(-__FLT_MAX__), zero(), now);
    const VF factor = exp_float(sub(before, base));
    VF sum = zero();  // of this tile; summed key by key onto the whole, 100000 keys would drift
    for (int64_t j = 0; j < n; ++j) {
      const VF p = exp_float(sub(load(s + j * c.lds), base));
      sum = add(sum, p);
      store(s + j * c.lds, p);
    }
    store(c.m + row, now);
    store(c.l + row, fma(load(c.l + row), factor, sum));
    store(c.rescale + row, factor);
  }
}

// The window in which exponentials against phi lose nothing: e^60 times any number of keys stays finite, and beside a largest
// term of e^-40 those that vanish, below e^-87, are beyond float32.
constexpr float kPhiBelow = 40.0f, kPhiAbove = 60.0f;

// S -> P = exp(S - phi) with one phi for all rows (FlashDecoding++, arXiv 2311.01282): nothing is rescaled, neither from tile to
// tile nor between KV splits. m keeps the running maximum, by which a row that leaves the window is found.
static void unified_softmax(const RowChunk &c, int64_t n) {
  const VF base = set1(c.phi);
  for (int64_t row = 0; row < c.rows; row += kLanes) {
    float *s = c.s + row;  // [n, lds]
    VF now = load(c.m + row), sum = zero();
    for (int64_t j = 0; j < n; ++j) {
      const VF score = load(s + j * c.lds);
      now = max(now, score);
      const VF p = exp_float(sub(score, base));
      sum = add(sum, p);
      store(s + j * c.lds, p);
    }
    store(c.m + row, now);
    store(c.l + row, add(load(c.l + row), sum));
  }
}

// Whether exponentials against phi stood for a row: false for NaN too. A row that saw no key has nothing to lose.
static inline bool in_window(const RowChunk &c, int64_t row) {
  return c.m[row] == kMinusInf || (c.m[row] >= c.phi - kPhiBelow && c.m[row] <= c.phi + kPhiAbove);
}

}  // namespace FLASHMLA_NS
}  // namespace flashmla
