// Work on single rows: RMS norm and half-split RoPE.
#pragma once

#include "op_impl/cpu/simd-inl.h"

namespace flashmla {
namespace FLASHMLA_NS {

// x = x / sqrt(mean(x^2) + eps) * weight * scale, in place.
static void rms_norm(float *x /* [n] */, const float *weight /* [n] */, int64_t n, float eps, float scale) {
  VF squares = zero();
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
  float sum = reduce_add(squares);
  for (; i < n; ++i) sum += x[i] * x[i];
  const float factor = 1.0f / __builtin_sqrtf(sum / float(n) + eps);
  const VF f = set1(factor), s = set1(scale);
  for (i = 0; i + kLanes <= n; i += kLanes) store(x + i, mul(mul(mul(load(x + i), f), load(weight + i)), s));
  for (; i < n; ++i) x[i] = x[i] * factor * weight[i] * scale;
}

// Rotates the pairs (i, i + d/2) of x by the angles of one position.
static void rope(float *x /* [d] */, const float *table /* [d] = [cos d/2 | sin d/2] */, int64_t d) {
  const int64_t half = d / 2;
  const float *cosine = table, *sine = table + half;  // [half]
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const VF a = load(x + i), b = load(x + half + i), c = load(cosine + i), s = load(sine + i);
    store(x + i, sub(mul(a, c), mul(b, s)));
    store(x + half + i, add(mul(b, c), mul(a, s)));
  }
  for (; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    x[i] = a * cosine[i] - b * sine[i];
    x[half + i] = b * cosine[i] + a * sine[i];
  }
}

static void add_row(float *x /* [n] */, const float *y /* [n] */, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(x + i, add(load(x + i), load(y + i)));
  for (; i < n; ++i) x[i] += y[i];
}

static void copy_row(float *dst /* [n] */, const float *src /* [n] */, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(dst + i, load(src + i));
  for (; i < n; ++i) dst[i] = src[i];
}

static void zero_row(float *x /* [n] */, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = 0.0f;
}

}  // namespace FLASHMLA_NS
}  // namespace flashmla
