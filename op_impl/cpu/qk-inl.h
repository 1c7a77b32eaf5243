// qk: S = Q K^T for a tile of keys.
#pragma once

#include "op_impl/cpu/qk_block-inl.h"

namespace flashmla {
namespace FLASHMLA_NS {

// All keys of a tile for one row group.
template <int NV, int PACK, typename E, typename Side>
static void qk_group(const float *qt /* [d / PACK][NV][kLanes] */, const KvTile<E> &tile, int64_t n, int64_t d, float *s /* [n, lds] */, int64_t lds,
                     Side &side, int64_t groups /* to come, this one included */) {
  constexpr int KEYS = kQkAccumulators / NV < 16 ? kQkAccumulators / NV : 16;
  const RowStrides strides(tile.ldk * int64_t(sizeof(E)));
  for (int64_t j = 0; j < n;) {
    const E *k = tile.k + j * tile.ldk;  // [keys, ldk]
    float *to = s + j * lds;                 // [keys, lds]
    const int64_t left = n - j;
    const int64_t keys = left >= KEYS ? KEYS : left >= 4 ? (KEYS < 4 ? KEYS : 4) : 1;
    const auto part = side.take((left + keys - 1) / keys + (groups - 1) * ((n + KEYS - 1) / KEYS));
    if (keys == KEYS) qk_block<KEYS, NV, PACK>(qt, k, tile.ldk, strides, d, to, lds, part);
    else if (keys == 4) qk_block<4, NV, PACK>(qt, k, tile.ldk, strides, d, to, lds, part);
    else qk_block<1, NV, PACK>(qt, k, tile.ldk, strides, d, to, lds, part);
    j += keys;
  }
}

// The row group of as many vectors as the ISA's registers hold at the most.
template <int NV, int PACK, typename E, typename Side>
static void qk_vecs(int64_t vecs, const float *qt /* [d / PACK][vecs][kLanes] */, const KvTile<E> &tile, int64_t n, int64_t d, float *s /* [n, lds] */,
                    int64_t lds, Side &side, int64_t groups) {
  if (vecs == NV) return qk_group<NV, PACK>(qt, tile, n, d, s, lds, side, groups);
  if constexpr (NV < kQkVecs) qk_vecs<NV + 1, PACK>(vecs, qt, tile, n, d, s, lds, side, groups);
}

template <int PACK, typename E, typename Side>
static void qk_packed(const RowChunk &c, const KvTile<E> &tile, int64_t n, Side &side) {
  for (int64_t group = 0; group < c.vecs();) {
    const int64_t vecs = group_vecs(c.vecs() - group);
    const float *qt = c.qt + group * c.depth() * kLanes;  // [depth][vecs][kLanes]
    float *s = c.s + group * (kLanes / PACK);             // [n, lds]
    const int64_t groups = (c.vecs() - group + vecs - 1) / vecs;
    qk_vecs<1, PACK>(vecs, qt, tile, n, c.d_qk, s, c.lds, side, groups);
    group += vecs;
  }
}

// S = Q K^T, [n][rows] in c.s.
template <typename E, typename Side>
static void qk(const RowChunk &c, const KvTile<E> &tile, int64_t n, Side &side) {
  if constexpr (sizeof(E) == sizeof(float)) {
    if (c.pack == 4) return qk_packed<4>(c, tile, n, side);
  }
  qk_packed<kLanes>(c, tile, n, side);
}

}  // namespace FLASHMLA_NS
}  // namespace flashmla
