// One head of the expanded path: its keys and values chunk by chunk, and every query tile's pass over a chunk.
#pragma once

#include "op_impl/cpu/attend-inl.h"
#include "op_impl/cpu/decompress-inl.h"

namespace flashmla {
namespace FLASHMLA_NS {

struct ExpandedHead {
  const float *w_uk;   // packed [d_n, rank], from transpose_w_uk
  const float *w_uv;   // packed [d_v, rank]
  float *k;            // [kv_chunk, ld_q]
  float *v;            // [kv_chunk, ld_v]
  float *o;            // [tokens, ld_v] running output
  float *m, *l;        // [tokens] running maximum and sum
  const float *q;      // [tokens, ld_q_rows], not yet rotated
  int64_t ld_q_rows;
  float *out;          // [tokens, ld_out]
  int64_t ld_out;
};

// What one worker holds beside the head.
struct ExpandedWorker {
  RowChunk chunk;
  float *buffer;       // a query [ld_q], or latents [decompress_rows, ld_cache]
};

// The head's weights as decompress_tile takes them.
static void prepare_weights(const Layer &layer, int64_t h, float *w_uk /* packed [d_n, rank] */, float *w_uv /* packed [d_v, rank] or nullptr */) {
  const PackedWeight uv = {layer.args.w_uv, h, 1, layer.d_v, layer.rank};
  const int64_t panels = stored_w_uk(layer, h).panels(), wide_panels = uv.data.dtype != kFloat32 ? uv.panels() : 0;
  layer.workers.run(panels + wide_panels, [&](int64_t item, int thread) {
    const int64_t p = item - panels;
    if (p < 0) transpose_w_uk(layer, h, item, item + 1, w_uk, thread);
    else widen_any(w_uv + uv.offset(p) - uv.offset(0), uv.data, uv.offset(p), uv.width(p) * uv.k);
  });
}

// k = [c W_UK | k_pe] and v = c W_UV for keys first .. first + n of a piece, at row `at` of the chunk.
static void decompress_tile(const Layer &layer, const ExpandedHead &head, const Piece &piece, int64_t first, int64_t n, int64_t at,
                            float *buffer /* [n, ld_cache] */, int thread) {
  const int64_t d_c = layer.rank + layer.d_r;
  float *k = head.k + at * layer.ld_q();  // [n, ld_q]
  float *v = head.v + at * layer.ld_v();  // [n, ld_v]
  int64_t ld;
  const float *c = gather_rows(layer.args.cache, {piece.blocks, 0, first, n}, d_c, buffer, round_up(d_c, kPanelAlign), &ld);  // [n, ld]
  decompress_keys(layer, head.w_uk, c, ld, first, n, k, thread);
  const GemmJob to_v = {c, ld, n, {{head.w_uv, kFloat32}, 0, 1, layer.d_v, layer.rank}, 0, layer.rank, v, layer.ld_v(), false, nullptr};
  gemm_all(to_v, layer.gemm, thread);
}

// Keys [begin, end) of one piece, at row `at` of the chunk's K and V.
struct KeyRange { int64_t piece, begin, end, at; };

// The tiles of a chunk: its rows of K and V as they are; those of the next tile are fetched meanwhile.
struct ChunkTiles {
  const Layer &layer;
  const ExpandedHead &head;
  const KeyRange &keys;
  Lines next_k, next_v;

  KvTile<float> load(int64_t first, int64_t n) {
    const int64_t at = keys.at + first - keys.begin;
    const int64_t next = tile_at(first + n, keys.end - first - n, layer.tiling.kv_tile, 0).length;
    const KvTile<float> tile = {head.k + at * layer.ld_q(), layer.ld_q(), head.v + at * layer.ld_v(), layer.ld_v()};
    next_k = {reinterpret_cast<const char *>(tile.k + n * tile.ldk), next * tile.ldk / kPiece};
    next_v = {reinterpret_cast<const char *>(tile.v + n * tile.ldv), next * tile.ldv / kPiece};
    return tile;
  }
  Lines &in_qk() { return next_k; }
  Lines &in_pv() { return next_v; }
  void finish() {}
};

// Tokens [token, token + tokens) of a piece against one range of keys.
struct QueryTile {
  const Piece &piece;
  const KeyRange &keys;
  int64_t token, tokens;
  int64_t row;         // of the first one in the group
};

// The first chunk starts a query tile's state, the last one writes its output.
static void attend_tile(const Layer &layer, const ExpandedHead &head, const QueryTile &tile, ExpandedWorker &worker) {
  RowChunk &chunk = worker.chunk;
  const int64_t position = tile.piece.position + tile.token, begin = tile.keys.begin, end = tile.keys.end;
  const bool first = begin == 0, last = end > position + tile.tokens - 1;
  float *m = head.m + tile.row, *l = head.l + tile.row;  // [tokens]
  chunk.pack = tile.piece.seq.qk_dim_pack;
  set_rows(chunk, tile.tokens, head.o + tile.row * layer.ld_v(), layer.ld_v(), !first);
  for (int64_t i = 0; i < tile.tokens; ++i) set_state(chunk, i, position + i + 1, first ? kMinusInf : m[i], first ? 0.0f : l[i]);
  set_queries(chunk, layer.args.attrs.softmax_scale, [&](int64_t i) {
    float *query = worker.buffer;  // [d_q]
    copy_row(query, head.q + (tile.row + i) * head.ld_q_rows, layer.d_q());
    rope(query + (layer.rope_full ? 0 : layer.d_n), layer.rope_row(position + i), layer.rope_dim);
    return static_cast<const float *>(query);
  });
  ChunkTiles tiles = {layer, head, tile.keys, {}, {}};
  attend(chunk, begin, end, layer.tiling.kv_tile, tiles);
  for (int64_t i = 0; i < tile.tokens; ++i) {
    m[i] = chunk.m[i];
    l[i] = chunk.l[i];
    if (!last) continue;
    float *out = head.out + (tile.row + i) * head.ld_out;  // [d_v]
    const float inverse = 1.0f / chunk.l[i];
    for (int64_t j = 0; j < layer.d_v; ++j) out[j] = chunk.o[i * chunk.ldo + j] * inverse;
  }
}

}  // namespace FLASHMLA_NS
}  // namespace flashmla
