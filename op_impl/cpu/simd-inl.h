// The vector vocabulary of the kernels: VF and its operations for the ISA that the including unit was compiled for, the
// two 16-bit formats, and exp. Everything sits in namespace FLASHMLA_NS and is inlined, so that no unit can lend another
// one code of the wrong ISA; the standard library's templates stay out for the same reason.
#pragma once

#include <stdint.h>

#include <type_traits>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#include "op_impl/cpu/kernel_args.h"

#define FM_INLINE static inline __attribute__((always_inline))
#define FM_INLINE_MEMBER inline __attribute__((always_inline))
// Loops over register arrays must unroll, or the arrays live in memory; the compiler alone stops at 16 rounds.
#define FM_UNROLL _Pragma("GCC unroll 32")

namespace flashmla {
namespace FLASHMLA_NS {

struct Half { uint16_t bits; };
struct BFloat { uint16_t bits; };

FM_INLINE float from_bits(uint32_t u) { float f; __builtin_memcpy(&f, &u, sizeof(f)); return f; }
FM_INLINE uint32_t to_bits(float f) { uint32_t u; __builtin_memcpy(&u, &f, sizeof(u)); return u; }

FM_INLINE float to_float(BFloat b) { return from_bits(uint32_t{b.bits} << 16); }
FM_INLINE float to_float(Half h) {
  const uint32_t sign = uint32_t(h.bits & 0x8000) << 16;
  const uint32_t rest = h.bits & 0x7fff;
  if (rest >= 0x7c00) return from_bits(sign | 0x7f800000 | ((rest & 0x3ff) << 13) | (rest > 0x7c00 ? 0x400000 : 0));
  if (rest >= 0x400) return from_bits(sign | ((rest << 13) + 0x38000000));
  return from_bits(to_bits(rest * 0x1p-24f) | sign);  // denormal
}
// Round to nearest even; NaN stays NaN.
FM_INLINE BFloat to_bfloat(float f) {
  const uint32_t u = to_bits(f);
  if ((u & 0x7fffffff) > 0x7f800000) return {uint16_t((u >> 16) | 0x40)};
  return {uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16)};
}
FM_INLINE Half to_half(float f) {
  const uint32_t u = to_bits(f);
  const uint16_t sign = uint16_t((u >> 16) & 0x8000);
  const uint32_t rest = u & 0x7fffffff;
  if (rest > 0x7f800000) return {uint16_t(sign | 0x7e00 | ((rest >> 13) & 0x3ff))};
  if (rest >= 0x477ff000) return {uint16_t(sign | 0x7c00)};  // 65520 and above round to infinity
  if (rest >= 0x38800000) return {uint16_t(sign | ((rest - 0x38000000 + 0xfff + ((rest >> 13) & 1)) >> 13))};
  const float shifted = from_bits(rest) + 0.5f;              // one unit of 0.5 is 2^-24, the denormal step
  return {uint16_t(sign | uint16_t(to_bits(shifted) - 0x3f000000))};
}

// Of a leaf, load and store take [kLanes] elements, load_quad [4].
#if defined(__AVX512F__)
#include "op_impl/cpu/simd_avx512.h"
#elif defined(__AVX2__)
#include "op_impl/cpu/simd_avx2.h"
#else
#include "op_impl/cpu/simd_generic.h"
#endif

FM_INLINE VF zero() { return set1(0.0f); }

// Four floats, on every ISA.
typedef float Quad __attribute__((vector_size(16), aligned(4), may_alias));
FM_INLINE void scale_quad(float *to /* [4] */, const float *from /* [4] */, float scale) {
  *reinterpret_cast<Quad *>(to) = *reinterpret_cast<const Quad *>(from) * scale;
}

FM_INLINE float load_one(const float *p) { return *p; }
FM_INLINE float load_one(const Half *p) { return to_float(*p); }
FM_INLINE float load_one(const BFloat *p) { return to_float(*p); }
FM_INLINE void store_one(float *p, float f) { *p = f; }
FM_INLINE void store_one(Half *p, float f) { *p = to_half(f); }
FM_INLINE void store_one(BFloat *p, float f) { *p = to_bfloat(f); }

// e^x for x < 88, relative error below 2e-7; exactly 0 below -87 (2^-126), -inf included; NaN stays NaN.
// x = n ln2 + r with |r| <= ln2 / 2; e^r from a polynomial fitted to minimise the relative error on that interval, e^x = 2^n e^r.
FM_INLINE VF exp_float(VF x) {
  const VF low = set1(-87.0f);
  const VF t = max(low, x);
  const VF n = round_nearest(mul(t, set1(1.44269504f)));
  VF r = fma(n, set1(-0.693359375f), t);      // ln2 in two pieces, the first with few bits so that n * piece is exact
  r = fma(n, set1(2.12194440e-4f), r);
  VF p = set1(1.381454058e-3f);
  p = fma(p, r, set1(8.368745446e-3f));
  p = fma(p, r, set1(4.166838899e-2f));
  p = fma(p, r, set1(0.1666652113f));
  p = fma(p, r, set1(0.4999999404f));
  p = fma(mul(p, r), r, r);
  p = add(p, set1(1.0f));
  return select_less(x, low, zero(), scale_by_power_of_two(p, n));
}

// dst[0..n) = float(src[0..n)) and back; the same rounding in vectors and in the tail.
template <typename T>
FM_INLINE void widen(float *dst /* [n] */, const T *src /* [n] */, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(dst + i, load(src + i));
  for (; i < n; ++i) dst[i] = load_one(src + i);
}
template <typename T>
FM_INLINE void narrow(T *dst /* [n] */, const float *src /* [n] */, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(dst + i, load(src + i));
  for (; i < n; ++i) store_one(dst + i, src[i]);
}

template <typename T>
struct TypeTag { using type = T; };

// Calls f with the tag of the C++ type that stores a float dtype.
template <typename F>
FM_INLINE void with_dtype(int32_t dtype, F f) {
  if (dtype == kFloat32) f(TypeTag<float>{});
  else if (dtype == kFloat16) f(TypeTag<Half>{});
  else f(TypeTag<BFloat>{});
}

template <typename T>
FM_INLINE const T *element(const ConstStorage &s, int64_t i) { return static_cast<const T *>(s.data) + i; }

static inline void widen_any(float *dst /* [n] */, const ConstStorage &src, int64_t offset, int64_t n) {
  with_dtype(src.dtype, [&](auto tag) { widen(dst, element<typename decltype(tag)::type>(src, offset), n); });
}
// Whether s stores E, and a row of it as E: as it is where it does, else widened.
template <typename E>
static inline bool holds(const ConstStorage &s) {
  return s.dtype == (sizeof(E) == sizeof(float) ? kFloat32 : std::is_same_v<E, Half> ? kFloat16 : kBFloat16);
}
static inline void take_row(float *dst /* [n] */, const ConstStorage &src, int64_t offset, int64_t n) { widen_any(dst, src, offset, n); }
template <typename E>
static inline void take_row(E *dst /* [n] */, const ConstStorage &src, int64_t offset, int64_t n) {
  __builtin_memcpy(dst, element<E>(src, offset), n * sizeof(E));
}
static inline void narrow_any(const Storage &dst, int64_t offset, const float *src /* [n] */, int64_t n) {
  with_dtype(dst.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    narrow(static_cast<T *>(dst.data) + offset, src, n);
  });
}

}  // namespace FLASHMLA_NS
}  // namespace flashmla
