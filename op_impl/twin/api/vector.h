// Vector instructions on the UB. Three forms: over `count` elements in a row; and over `repeat` repeats of a mask of
// elements, whose eight blocks of 32 bytes and whose repeats lie strides of blocks apart.
#pragma once

#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>

#include "op_impl/twin/api/copies.h"

namespace AscendC {

// Where an operand's elements lie: element i of repeat r is in block i / (32 / element) of the repeat.
struct TwinOperand {
  TwinLocal at;
  int64_t block_stride = 1, repeat_stride = 8;  // in blocks of 32 bytes
  int64_t offset(int64_t repeat, int64_t i) const {  // in elements
    const int64_t a_block = 32 / at.element;
    return (repeat * repeat_stride + i / a_block * block_stride) * a_block + i % a_block;
  }
};

// Checks the operands and gives the accesses to `list`.
void twin_vector_access(const TwinOperand& operand, bool write, int64_t mask, int64_t repeat, const Site& site, std::vector<twin::Access>* list);
uint8_t* twin_vector_memory(const TwinLocal& at, const Site& site);
void twin_vector_issue(const Site& site, double bytes, bool slow, std::vector<twin::Access> accesses, std::function<void()> effect);
void twin_repeat_limits(int64_t mask, int64_t most, int64_t repeat, const Site& site);

namespace twin_detail {

template <typename T>
struct Source {
  using type = T;
  TwinOperand operand;
};

// dst = f(old dst, sources...) element by element; `reads_dst`: the old value counts. repeat 0: the count form.
template <typename D, typename F, typename... T>
void run(const Site& site, const F& f, bool slow, bool reads_dst, int64_t mask, int64_t repeat, const TwinOperand& dst, const Source<T>&... sources) {
  std::vector<twin::Access> accesses;
  (twin_vector_access(sources.operand, false, mask, repeat, site, &accesses), ...);
  if (reads_dst) twin_vector_access(dst, false, mask, repeat, site, &accesses);
  twin_vector_access(dst, true, mask, repeat, site, &accesses);
  D* out = reinterpret_cast<D*>(twin_vector_memory(dst.at, site));
  auto in = std::make_tuple(reinterpret_cast<const T*>(twin_vector_memory(sources.operand.at, site))...);
  auto operands = std::make_tuple(sources.operand...);
  int64_t widest = sizeof(D);
  ((widest = std::max<int64_t>(widest, sizeof(T))), ...);
  // A repeat costs a whole pass whatever its mask.
  const double bytes = repeat > 0 ? 256.0 * repeat : double(mask) * widest;
  twin_vector_issue(site, bytes, slow, std::move(accesses), [=] {
    const bool flat = repeat == 0;
    for (int64_t r = 0; r < (flat ? 1 : repeat); ++r) {
      for (int64_t i = 0; i < mask; ++i) {
        const int64_t to = flat ? i : dst.offset(r, i);
        out[to] = std::apply([&](auto... source) {
          return std::apply([&](auto... operand) { return f(out[to], source[flat ? i : operand.offset(r, i)]...); }, operands);
        }, in);
      }
    }
  });
}

// A count form is one repeat (0) of `count` elements in a row.
template <typename T>
TwinOperand flat(const LocalTensor<T>& t) { return {twin_local(t), 1, 0}; }
template <typename T>
Source<T> flat_source(const LocalTensor<T>& t) { return {flat(t)}; }
template <typename T>
TwinOperand strided(const LocalTensor<T>& t, int64_t block, int64_t repeat) { return {twin_local(t), block, repeat}; }

template <typename T>
constexpr int64_t per_repeat = 256 / sizeof(T);

}  // namespace twin_detail

#define TWIN_BINARY(name, slow, expression)                                                                                          \
  template <typename T, bool isSetMask = true>                                                                                      \
  void name(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, const int32_t& count,                 \
            const Site& site = Site::here()) {                                                                                       \
    twin_detail::run<T>(site.named(#name), [](T, T a, T b) -> T { return expression; }, slow, false, count, 0, twin_detail::flat(dst), \
                        twin_detail::flat_source(src0), twin_detail::flat_source(src1));                                             \
  }                                                                                                                                  \
  template <typename T, bool isSetMask = true>                                                                                      \
  void name(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, uint64_t mask, const uint8_t repeatTime, \
            const BinaryRepeatParams& p, const Site& site = Site::here()) {                                                          \
    twin_repeat_limits(mask, twin_detail::per_repeat<T>, repeatTime, site.named(#name));                                             \
    if (repeatTime == 0) return;                                                                                                     \
    twin_detail::run<T>(site.named(#name), [](T, T a, T b) -> T { return expression; }, slow, false, mask, repeatTime,               \
                        twin_detail::strided(dst, p.dstBlkStride, p.dstRepStride),                                                   \
                        twin_detail::Source<T>{twin_detail::strided(src0, p.src0BlkStride, p.src0RepStride)},                        \
                        twin_detail::Source<T>{twin_detail::strided(src1, p.src1BlkStride, p.src1RepStride)});                       \
  }
TWIN_BINARY(Add, false, T(a + b))
TWIN_BINARY(Sub, false, T(a - b))
TWIN_BINARY(Mul, false, T(a * b))
TWIN_BINARY(Div, true, T(a / b))
TWIN_BINARY(Max, false, (a > b ? a : b))
TWIN_BINARY(Min, false, (a < b ? a : b))
#undef TWIN_BINARY

// dst = src0 * dst + src1
template <typename T, bool isSetMask = true>
void FusedMulAdd(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, uint64_t mask, const uint8_t repeatTime,
                 const BinaryRepeatParams& p, const Site& site = Site::here()) {
  twin_repeat_limits(mask, twin_detail::per_repeat<T>, repeatTime, site.named("FusedMulAdd"));
  if (repeatTime == 0) return;
  twin_detail::run<T>(site.named("FusedMulAdd"), [](T old, T a, T b) -> T { return a * old + b; }, false, true, mask, repeatTime,
                      twin_detail::strided(dst, p.dstBlkStride, p.dstRepStride), twin_detail::Source<T>{twin_detail::strided(src0, p.src0BlkStride, p.src0RepStride)},
                      twin_detail::Source<T>{twin_detail::strided(src1, p.src1BlkStride, p.src1RepStride)});
}

#define TWIN_SCALAR(name, expression)                                                                                               \
  template <typename T, bool isSetMask = true>                                                                                      \
  void name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, const int32_t& count, const Site& site = Site::here()) { \
    const T b = scalarValue;                                                                                                        \
    twin_detail::run<T>(site.named(#name), [b](T, T a) -> T { return expression; }, false, false, count, 0, twin_detail::flat(dst),  \
                        twin_detail::flat_source(src));                                                                             \
  }                                                                                                                                 \
  template <typename T, bool isSetMask = true>                                                                                      \
  void name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, uint64_t mask, const uint8_t repeatTime,     \
            const UnaryRepeatParams& p, const Site& site = Site::here()) {                                                          \
    twin_repeat_limits(mask, twin_detail::per_repeat<T>, repeatTime, site.named(#name));                                            \
    if (repeatTime == 0) return;                                                                                                    \
    const T b = scalarValue;                                                                                                        \
    twin_detail::run<T>(site.named(#name), [b](T, T a) -> T { return expression; }, false, false, mask, repeatTime,                 \
                        twin_detail::strided(dst, p.dstBlkStride, p.dstRepStride),                                                  \
                        twin_detail::Source<T>{twin_detail::strided(src, p.srcBlkStride, p.srcRepStride)});                         \
  }
TWIN_SCALAR(Adds, T(a + b))
TWIN_SCALAR(Muls, T(a * b))
TWIN_SCALAR(Maxs, (a > b ? a : b))
TWIN_SCALAR(Mins, (a < b ? a : b))
#undef TWIN_SCALAR

#define TWIN_UNARY(name, slow, expression)                                                                                          \
  template <typename T>                                                                                                             \
  void name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t& count, const Site& site = Site::here()) {           \
    twin_detail::run<T>(site.named(#name), [](T, T a) -> T { return expression; }, slow, false, count, 0, twin_detail::flat(dst),    \
                        twin_detail::flat_source(src));                                                                             \
  }                                                                                                                                 \
  template <typename T, bool isSetMask = true>                                                                                      \
  void name(const LocalTensor<T>& dst, const LocalTensor<T>& src, uint64_t mask, const uint8_t repeatTime, const UnaryRepeatParams& p, \
            const Site& site = Site::here()) {                                                                                      \
    twin_repeat_limits(mask, twin_detail::per_repeat<T>, repeatTime, site.named(#name));                                            \
    if (repeatTime == 0) return;                                                                                                    \
    twin_detail::run<T>(site.named(#name), [](T, T a) -> T { return expression; }, slow, false, mask, repeatTime,                   \
                        twin_detail::strided(dst, p.dstBlkStride, p.dstRepStride),                                                  \
                        twin_detail::Source<T>{twin_detail::strided(src, p.srcBlkStride, p.srcRepStride)});                         \
  }
TWIN_UNARY(Exp, true, T(std::exp(a)))
TWIN_UNARY(Ln, true, T(std::log(a)))
TWIN_UNARY(Sqrt, true, T(std::sqrt(a)))
TWIN_UNARY(Abs, false, T(std::fabs(a)))
#undef TWIN_UNARY

template <typename T, bool isSetMask = true>
void Duplicate(const LocalTensor<T>& dst, const T& scalarValue, const int32_t& count, const Site& site = Site::here()) {
  const T value = scalarValue;
  twin_detail::run<T>(site.named("Duplicate"), [value](T) -> T { return value; }, false, false, count, 0, twin_detail::flat(dst));
}
template <typename T, bool isSetMask = true>
void Duplicate(const LocalTensor<T>& dst, const T& scalarValue, uint64_t mask, const uint8_t repeatTime, const uint16_t dstBlockStride,
               const uint8_t dstRepeatStride, const Site& site = Site::here()) {
  twin_repeat_limits(mask, twin_detail::per_repeat<T>, repeatTime, site.named("Duplicate"));
  if (repeatTime == 0) return;
  const T value = scalarValue;
  twin_detail::run<T>(site.named("Duplicate"), [value](T) -> T { return value; }, false, false, mask, repeatTime,
                      twin_detail::strided(dst, dstBlockStride, dstRepeatStride));
}
// The elements whose bits are set in mask[0], mask[1].
template <typename T, bool isSetMask = true>
void Duplicate(const LocalTensor<T>& dst, const T& scalarValue, uint64_t mask[], const uint8_t repeatTime, const uint16_t dstBlockStride,
               const uint8_t dstRepeatStride, const Site& site = Site::here()) {
  twin_repeat_limits(1, twin_detail::per_repeat<T>, repeatTime, site.named("Duplicate"));
  if (repeatTime == 0) return;
  const uint64_t low = mask[0], high = sizeof(T) == 4 ? 0 : mask[1];
  const int64_t elements = high != 0 ? 128 - __builtin_clzll(high) : low != 0 ? 64 - __builtin_clzll(low) : 0;  // up to the last set bit
  if (elements == 0) return;
  const T value = scalarValue;
  const TwinOperand operand = twin_detail::strided(dst, dstBlockStride, dstRepeatStride);
  std::vector<twin::Access> accesses;
  twin_vector_access(operand, true, elements, repeatTime, site.named("Duplicate"), &accesses);
  T* out = reinterpret_cast<T*>(twin_vector_memory(operand.at, site));
  const int64_t repeat = repeatTime;
  twin_vector_issue(site.named("Duplicate"), 256.0 * repeat, false, std::move(accesses), [=] {
    for (int64_t r = 0; r < repeat; ++r) {
      for (int64_t i = 0; i < twin_detail::per_repeat<T>; ++i) {
        if ((i < 64 ? low >> i : high >> (i - 64)) & 1) out[operand.offset(r, i)] = value;
      }
    }
  });
}

// Between float and the 16-bit types.
template <typename T, typename U>
constexpr bool twin_cast_exists(RoundMode mode) {
  constexpr bool narrow = std::is_same<U, float>::value && sizeof(T) == 2, wide = std::is_same<T, float>::value && sizeof(U) == 2;
  return narrow ? mode == RoundMode::CAST_RINT : wide ? mode == RoundMode::CAST_NONE : false;
}
template <typename T, typename U>
void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, const RoundMode& mode, const uint32_t count, const Site& site = Site::here()) {
  twin::require(twin_cast_exists<T, U>(mode), Fault::kIllegal, site.named("Cast"), "the twin casts float to 16 bits with CAST_RINT, and back with CAST_NONE");
  twin_detail::run<T>(site.named("Cast"), [](T, U a) -> T { return T(float(a)); }, false, false, count, 0, twin_detail::flat(dst), twin_detail::flat_source(src));
}
template <typename T, typename U, bool isSetMask = true>
void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, const RoundMode& mode, const uint64_t mask, const uint8_t repeatTime,
          const UnaryRepeatParams& p, const Site& site = Site::here()) {
  twin::require(twin_cast_exists<T, U>(mode), Fault::kIllegal, site.named("Cast"), "the twin casts float to 16 bits with CAST_RINT, and back with CAST_NONE");
  twin_repeat_limits(mask, 256 / std::max(sizeof(T), sizeof(U)), repeatTime, site.named("Cast"));
  if (repeatTime == 0) return;
  twin_detail::run<T>(site.named("Cast"), [](T, U a) -> T { return T(float(a)); }, false, false, mask, repeatTime,
                      twin_detail::strided(dst, p.dstBlkStride, p.dstRepStride), twin_detail::Source<U>{twin_detail::strided(src, p.srcBlkStride, p.srcRepStride)});
}

void twin_reduce(const TwinLocal& dst, const TwinLocal& src, bool maximum, int64_t mask, int64_t repeat, int64_t dst_stride, int64_t src_block, int64_t src_repeat, const Site& site);
void twin_brcb(const TwinLocal& dst, const TwinLocal& src, int64_t repeat, const BrcbRepeatParams& params, const Site& site);

// One value for each repeat of at most 64 elements.
template <ReduceType type, typename T, typename U, bool isSetMask = true>
void ReduceRepeat(const LocalTensor<T>& dst, const LocalTensor<U>& src, const int32_t mask, const int32_t repeatTime, const int32_t dstRepStride,
                  const int32_t srcBlkStride, const int32_t srcRepStride, ReduceOrder order = ReduceOrder::ORDER_VALUE_INDEX, const Site& site = Site::here()) {
  static_assert(std::is_same<T, float>::value && std::is_same<U, float>::value, "the twin reduces float");
  static_assert(type == ReduceType::MAX || type == ReduceType::SUM, "the twin reduces by maximum or sum");
  twin::require(type == ReduceType::SUM || order == ReduceOrder::ORDER_ONLY_VALUE, Fault::kIllegal, site.named("ReduceRepeat"), "the twin gives values only");
  twin_reduce(twin_local(dst), twin_local(src), type == ReduceType::MAX, mask, repeatTime, dstRepStride, srcBlkStride, srcRepStride, site.named("ReduceRepeat"));
}

// Element 8 i + j fills block j of repeat i.
template <typename T>
void Brcb(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const uint8_t repeatTime, const BrcbRepeatParams& params, const Site& site = Site::here()) {
  twin_brcb(twin_local(dst), twin_local(src0), repeatTime, params, site.named("Brcb"));
}

}  // namespace AscendC
