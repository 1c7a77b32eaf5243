// The loop over KV tiles for one row chunk: qk -> online_softmax -> pv.
#pragma once

#include "op_impl/cpu/online_softmax-inl.h"
#include "op_impl/cpu/qk-inl.h"
#include "op_impl/cpu/register_block-inl.h"
#include "tiling/tiles.h"

namespace flashmla {
namespace FLASHMLA_NS {

// O = O * rescale + P V for rows [row, row + rows): the rescale happens as O is added to the tile's sum.
template <typename E, typename Side>
static void pv(const RowChunk &c, const KvTile<E> &tile, int64_t row, int64_t rows, int64_t n, Side &side) {
  block_product<false>(rows, round_up(c.d_v, kPanelAlign), c.s + row, 1, c.lds, tile.v, tile.ldv, n, c.o + row * c.ldo, c.ldo,
                       c.started ? Start::kAdd : Start::kZero, c.started && !c.unified ? c.rescale + row : nullptr, side);
}

// The diagonal: a row takes the values it may see and no others, so that a NaN in a later token's value, times a probability
// of 0, cannot reach it.
template <typename E>
static void pv_masked(const RowChunk &c, const KvTile<E> &tile, int64_t first, int64_t n) {
  Lines none;
  for (int64_t row = 0, end; row < c.rows; row = end) {
    for (end = row + 1; end < c.rows && c.limit[end] == c.limit[row];) ++end;
    const int64_t seen = c.limit[row] > first ? c.limit[row] - first : 0;
    pv(c, tile, row, end - row, seen < n ? seen : n, none);
  }
}

// Attends the chunk's rows to keys [begin, end): where tiles begin and end and which of them cross the diagonal is decided by
// tiling/tiles.h. tiles.load(first, n) gives a tile as float32 rows; what tiles.in_qk() and tiles.in_pv() give rides along, and
// tiles.finish() does what is left of it.
template <typename Tiles>
static void attend(RowChunk &c, int64_t begin, int64_t end, int64_t kv_tile, Tiles &tiles) {
  const CausalRange keys = causal_range({begin, end - begin}, c.min_limit - 1, c.max_limit - 1);
  const int64_t length = keys.end - keys.start, count = tile_count(length, kv_tile);
  for (int64_t i = 0; i < count; ++i) {
    const auto [first, n] = tile_at(keys.start, length, kv_tile, i);
    const auto tile = tiles.load(first, n);
    qk(c, tile, n, tiles.in_qk());
    const bool masked = first + n > keys.unmasked_end;
    if (masked) mask_scores(c, first, n);
    if (c.unified) unified_softmax(c, n); else online_softmax(c, n);
    if (masked) pv_masked(c, tile, first, n); else pv(c, tile, 0, c.rows, n, tiles.in_pv());
    tiles.finish();
    c.started = true;
  }
}

}  // namespace FLASHMLA_NS
}  // namespace flashmla
