// The register block of QK: some keys by some vectors of rows, over the whole head dimension.
#pragma once

#include "op_impl/cpu/kv_tile-inl.h"
#include "op_impl/cpu/row_chunk-inl.h"

namespace flashmla {
namespace FLASHMLA_NS {

// Rows of K by address arithmetic alone: row 8 b + j stands at base[b] plus one of these strides, scaled by the address unit.
// Without them the compiler keeps a pointer a row, most of them on the stack, and reloading those takes the load slots that
// feed the FMAs.
struct RowStrides {
  int64_t one, three, five, seven;  // bytes; opaque to the compiler, which would turn the sums back into pointers
  explicit RowStrides(int64_t row_bytes) : one(row_bytes), three(one * 3), five(one * 5), seven(one * 7) {
    __asm__("" : "+r"(one), "+r"(three), "+r"(five), "+r"(seven));
  }
};
template <int J, typename E>
FM_INLINE const E *k_row(const char *base /* [8, ldk]: rows of K from 8 b on */, const RowStrides &s) {
  constexpr int j = J % 8;
  const int64_t offset = j == 1 ? s.one : j == 2 ? s.one * 2 : j == 3 ? s.three : j == 4 ? s.one * 4 : j == 5 ? s.five : j == 6 ? s.three * 2 : j == 7 ? s.seven : 0;
  return reinterpret_cast<const E *>(base + offset);
}

template <int PACK, typename E>
FM_INLINE VF load_pack(const E *k /* [PACK] */) {  // PACK elements of a key, for every row of a vector
  if constexpr (PACK == kLanes) return load(k); else return load_quad(k);
}

// Sums of KEYS keys by NV vectors of rows.
template <int KEYS, int NV, int PACK, typename E>
struct QkSums {
  VF acc[KEYS][NV];

  template <int J = 0>
  FM_INLINE_MEMBER void add_pack(const char *const *base /* [ceil(KEYS / 8)] */, const RowStrides &strides, const VF *q /* [NV] */) {
    if constexpr (J < KEYS) {
      const VF x = load_pack<PACK>(k_row<J, E>(base[J / 8], strides));
      FM_UNROLL
      for (int v = 0; v < NV; ++v) acc[J][v] = fma(x, q[v], acc[J][v]);
      add_pack<J + 1>(base, strides, q);
    }
  }
  // The sums over the elements of a row, one float a row.
  FM_INLINE_MEMBER void store_rows(float *s /* [KEYS, lds] */, int64_t lds) {
    const VF none = zero();
    if constexpr (PACK == kLanes && kLanes != 4) {
      FM_UNROLL
      for (int v = 0; v < NV; ++v)
        FM_UNROLL
        for (int j = 0; j < KEYS; j += 4) {
          float sums[4];  // of keys j, j + 1, j + 2, j + 3
          sum_each(acc[j][v], j + 1 < KEYS ? acc[j + 1][v] : none, j + 2 < KEYS ? acc[j + 2][v] : none, j + 3 < KEYS ? acc[j + 3][v] : none, sums);
          FM_UNROLL
          for (int i = 0; i < 4; ++i)
            if (j + i < KEYS) s[(j + i) * lds + v] = sums[i];
        }
    } else {
      FM_UNROLL
      for (int j = 0; j < KEYS; ++j) {
        const VF *a = acc[j];  // [NV]
        FM_UNROLL
        for (int v = 0; v < NV; v += 4)
          store(s + j * lds + v * (kLanes / 4), sum_quads(a[v], v + 1 < NV ? a[v + 1] : none, v + 2 < NV ? a[v + 2] : none, v + 3 < NV ? a[v + 3] : none));
      }
    }
  }
};

// S[KEYS][NV vectors of rows] = K Q^T. Elements d, d + PACK, ... of a product are summed in ascending order, then those sums in
// one order, whatever KEYS and NV.
template <int KEYS, int NV, int PACK, typename E, typename TS>
FM_INLINE void qk_block(const float *qt /* [d / PACK][NV][kLanes] */, const E *k /* [KEYS, ldk] */, int64_t ldk, const RowStrides &strides,
                        int64_t d, float *s /* [KEYS, lds] */, int64_t lds, const Slice<TS> &side) {
  QkSums<KEYS, NV, PACK, E> sums;
  VF q[NV];
  FM_UNROLL
  for (int j = 0; j < KEYS; ++j)
    FM_UNROLL
    for (int v = 0; v < NV; ++v) sums.acc[j][v] = zero();
  const char *base[(KEYS + 7) / 8];
  FM_UNROLL
  for (int b = 0; b < (KEYS + 7) / 8; ++b) base[b] = reinterpret_cast<const char *>(k + b * 8 * ldk);
  Pace<TS> pace(side, d / PACK);
  for (int64_t i = 0; i < d / PACK; ++i, qt += NV * kLanes) {
    pace.round();
    FM_UNROLL
    for (int v = 0; v < NV; ++v) q[v] = load(qt + v * kLanes);
    sums.add_pack(base, strides, q);
    FM_UNROLL
    for (int b = 0; b < (KEYS + 7) / 8; ++b) base[b] += PACK * sizeof(E);
  }
  pace.finish();
  if (d % PACK != 0) {  // the last elements of a key, with nothing read behind them
    float rest[KEYS * PACK] = {};
    for (int j = 0; j < KEYS; ++j)
      for (int64_t e = 0; e < d % PACK; ++e) rest[j * PACK + e] = load_one(k + j * ldk + d / PACK * PACK + e);
    FM_UNROLL
    for (int v = 0; v < NV; ++v) q[v] = load(qt + v * kLanes);
    FM_UNROLL
    for (int j = 0; j < KEYS; ++j)
      FM_UNROLL
      for (int v = 0; v < NV; ++v) sums.acc[j][v] = fma(load_pack<PACK>(rest + j * PACK), q[v], sums.acc[j][v]);
  }
  sums.store_rows(s, lds);
}

}  // namespace FLASHMLA_NS
}  // namespace flashmla
