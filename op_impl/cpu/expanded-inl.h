// The expanded path, for many new tokens: K and V of one head at a time are decompressed from the latent, chunk by chunk,
// into scratch that holds that head alone, and every query tile of the group passes over the chunk.
#pragma once

#include "op_impl/cpu/absorbed-inl.h"

namespace flashmla {
namespace FLASHMLA_NS {

// One head of the expanded path.
struct ExpandedHead {
  const float *w_uk;   // of the head, from transpose_w_uk
  const float *w_uv;   // packed [d_v, rank] of the head
  float *k;            // [kv_chunk, ld_q]
  float *v;            // [kv_chunk, ld_v]
  float *o;            // [tokens, ld_v] running output of the head
  float *m, *l;        // [tokens]
};

// The head's weights as decompress_tile takes them.
static void prepare_weights(const Layer &layer, int64_t h, float *w_uk, float *w_uv) {
  const PackedWeight uv = {layer.args.w_uv, h, 1, layer.d_v, layer.rank};
  const bool widen_uv = uv.data.dtype != kFloat32;
  layer.workers.run(widen_uv ? 2 : 1, [&](int64_t item, int thread) {
    if (item == 0) transpose_w_uk(layer, h, w_uk, thread);
    else widen_any(w_uv, uv.data, uv.offset(0), uv.n_padded() * uv.k);
  });
}

// k = [c W_UK | k_pe] and v = c W_UV for a tile of keys.
static void decompress_tile(const Layer &layer, const ExpandedHead &head, const Piece &piece, int64_t first, int64_t n, float *buffer,
                            float *k, float *v, int thread) {
  const int64_t d_c = layer.rank + layer.d_r;
  int64_t ld;
  const float *c = gather_rows(layer.args.cache, {piece.blocks, 0, first, n}, d_c, buffer, round_up(d_c, kPanelAlign), &ld);
  decompress_keys(layer, head.w_uk, c, ld, first, n, k, thread);
  const GemmJob to_v = {c, ld, n, {{head.w_uv, kFloat32}, 0, 1, layer.d_v, layer.rank}, 0, layer.rank, v, layer.ld_v(), false, nullptr};
  gemm_all(to_v, layer.gemm, thread);
}

// Keys [begin, end) of one piece, at row `at` of the chunk's K and V.
struct KeyRange { int64_t piece, begin, end, at; };

// The tiles of a chunk: its rows of K and V as they are.
struct ChunkTiles {
  const Layer &layer;
  const ExpandedHead &head;
  const KeyRange &keys;
  Lines next_k, next_v;

  KvTile load(int64_t first, int64_t n) {
    const int64_t at = keys.at + first - keys.begin;
    const int64_t next = tile_at(first + n, keys.end - first - n, layer.tiling.kv_tile, 0).length;
    const KvTile tile = {head.k + at * layer.ld_q(), layer.ld_q(), head.v + at * layer.ld_v(), layer.ld_v()};
    next_k = {reinterpret_cast<const char *>(tile.k + n * tile.ldk), next * tile.ldk / kPiece};
    next_v = {reinterpret_cast<const char *>(tile.v + n * tile.ldv), next * tile.ldv / kPiece};
    return tile;
  }
  Lines &in_qk() { return next_k; }
  Lines &in_pv() { return next_v; }
  void finish() {}
};

// One query tile against the keys of a chunk; the first chunk starts the state, the last one writes the tile's output.
static void attend_tile(const Layer &layer, const ExpandedHead &head, const TokenGroup &g, const Piece &piece, int64_t token, int64_t tokens,
                        const KeyRange &keys, const float *q /* [tokens, ld] */, int64_t ld_q, RowChunk &chunk, float *query,
                        float *out /* [tokens, ld_out] */, int64_t ld_out) {
  const int64_t state = piece.row - g.row + token;
  const bool fresh = keys.begin == 0;
  chunk.pack = piece.seq.qk_dim_pack;
  set_rows(chunk, tokens, head.o + state * layer.ld_v(), layer.ld_v(), !fresh);
  for (int64_t i = 0; i < tokens; ++i)
    set_state(chunk, i, piece.position + token + i + 1, fresh ? kMinusInf : head.m[state + i], fresh ? 0.0f : head.l[state + i]);
  set_queries(chunk, layer.args.attrs.softmax_scale, [&](int64_t i) {
    copy_row(query, q + i * ld_q, layer.d_q());
    rope(query + (layer.rope_full ? 0 : layer.d_n), layer.rope_row(piece.position + token + i), layer.rope_dim);
    return static_cast<const float *>(query);
  });
  ChunkTiles tiles = {layer, head, keys, {}, {}};
  attend(chunk, keys.begin, keys.end, layer.tiling.kv_tile, tiles);
  const bool done = keys.end > piece.position + token + tokens - 1;
  for (int64_t i = 0; i < tokens; ++i) {
    head.m[state + i] = chunk.m[i];
    head.l[state + i] = chunk.l[i];
    if (!done) continue;
    const float inverse = 1.0f / chunk.l[i];
    for (int64_t j = 0; j < layer.d_v; ++j) out[i * ld_out + j] = chunk.o[i * chunk.ldo + j] * inverse;
  }
}

// The next chunk's key ranges, at most kv_chunk keys in all, each beginning at a multiple of kv_tile.
static int64_t next_ranges(const TokenGroup &g, const TilingData &t, int64_t *piece, int64_t *begin, KeyRange *ranges, int64_t *keys) {
  int64_t count = 0;
  *keys = 0;
  while (*piece < g.num_pieces) {
    const int64_t s_kv = g.pieces[*piece].position + g.pieces[*piece].tokens;
    const int64_t room = (t.kv_chunk - *keys) / t.kv_tile * t.kv_tile;
    if (room == 0) break;
    const int64_t end = s_kv - *begin < room ? s_kv : *begin + room;
    ranges[count++] = {*piece, *begin, end, *keys};
    *keys += round_up(end - *begin, t.kv_tile);
    *begin = end == s_kv ? 0 : end;
    if (end < s_kv) break;
    ++*piece;
  }
  return count;
}

// All query tiles of one head over all chunks; out [tokens, ld_out] takes the head's output.
static void attend_head(const Layer &layer, const TokenGroup &g, const ExpandedHead &head, const float *q, int64_t ld_q, float *out,
                        int64_t ld_out, KeyRange *ranges, RowChunk *chunks, float *buffers, int64_t buffer_floats) {
  const TilingData &t = layer.tiling;
  const int64_t step = t.decompress_rows;
  int64_t piece = 0, begin = 0, keys = 0;
  while (const int64_t count = next_ranges(g, t, &piece, &begin, ranges, &keys)) {
    int64_t items = 0;
    for (int64_t r = 0; r < count; ++r) items += tile_count(ranges[r].end - ranges[r].begin, step);
    layer.workers.run(items, [&](int64_t item, int thread) {
      int64_t r = 0;
      while (item >= tile_count(ranges[r].end - ranges[r].begin, step)) item -= tile_count(ranges[r].end - ranges[r].begin, step), ++r;
      const Tile tile = tile_at(ranges[r].begin, ranges[r].end - ranges[r].begin, step, item);
      const int64_t at = ranges[r].at + tile.start - ranges[r].begin;
      decompress_tile(layer, head, g.pieces[ranges[r].piece], tile.start, tile.length, buffers + thread * buffer_floats,
                      head.k + at * layer.ld_q(), head.v + at * layer.ld_v(), thread);
    });
    items = 0;
    for (int64_t r = 0; r < count; ++r) items += tile_count(g.pieces[ranges[r].piece].tokens, t.q_tile);
    // The last tiles see the most keys: they go first, so that no thread is left with a long one.
    layer.workers.run(items, [&](int64_t item, int thread) {
      int64_t r = 0, index = items - 1 - item;
      while (index >= tile_count(g.pieces[ranges[r].piece].tokens, t.q_tile))
        index -= tile_count(g.pieces[ranges[r++].piece].tokens, t.q_tile);
      const Piece &p = g.pieces[ranges[r].piece];
      const Tile tile = tile_at(0, p.tokens, t.q_tile, index);
      if (ranges[r].begin > p.position + tile.start + tile.length - 1) return;  // all keys of the range lie in its future
      const int64_t at = p.row - g.row + tile.start;
      attend_tile(layer, head, g, p, tile.start, tile.length, ranges[r], q + at * ld_q, ld_q, chunks[thread],
                  buffers + thread * buffer_floats, out + at * ld_out, ld_out);
    });
  }
}

static void attention_expanded(Layer &layer, const TokenGroup &g) {
  Workers &workers = layer.workers;
  Scratch &scratch = workers.scratch();
  const LayerArgs &args = layer.args;
  const TilingData &t = layer.tiling;
  const int64_t ld_q = layer.ld_q(), ld_v = layer.ld_v(), d_c = round_up(layer.rank + layer.d_r, kPanelAlign);
  const int64_t group = t.head_group < layer.heads ? t.head_group : layer.heads;
  int64_t keys = 0;  // of the longest chunk
  for (int64_t p = 0; p < g.num_pieces; ++p) keys += round_up(g.pieces[p].position + g.pieces[p].tokens, t.kv_tile);
  keys = keys < t.kv_chunk ? keys : t.kv_chunk;

  float *w_uk = scratch.alloc<float>(packed_size(1, layer.d_n, layer.rank));
  float *w_uv = args.w_uv.dtype == kFloat32 ? nullptr : scratch.alloc<float>(packed_size(1, layer.d_v, layer.rank));
  ExpandedHead head = {w_uk, w_uv, scratch.alloc<float>(keys * ld_q), scratch.alloc<float>(keys * ld_v),
                       scratch.alloc<float>(g.tokens * ld_v), scratch.alloc<float>(g.tokens), scratch.alloc<float>(g.tokens)};
  float *q = scratch.alloc<float>(g.tokens * group * ld_q);
  const int64_t ld_o = group * layer.d_v + kPanelAlign;  // apart from the multiples of 1 KiB at which rows collide in L1
  float *o = scratch.alloc<float>(g.tokens * ld_o);
  KeyRange *ranges = scratch.alloc<KeyRange>(g.num_pieces);
  const int64_t buffer_floats = t.decompress_rows * d_c + ld_q;
  float *buffers = scratch.alloc<float>(workers.threads() * buffer_floats);
  RowChunk *chunks = scratch.alloc<RowChunk>(workers.threads());
  for (int i = 0; i < workers.threads(); ++i)
    chunks[i] = make_row_chunk(scratch, t.q_tile, layer.d_q(), layer.d_v, t);

  // y is summed over the head groups in float32: in the output itself where it has that form.
  const bool in_place = args.out.dtype == kFloat32 && layer.hidden % kPanelAlign == 0;
  const int64_t ld_y = round_up(layer.hidden, kPanelAlign);
  float *y = in_place ? static_cast<float *>(args.out.data) + g.row * ld_y : scratch.alloc<float>(g.tokens * ld_y);
  const Epilog epilog = layer_epilog(layer, g);

  for (int64_t first = 0; first < layer.heads; first += group) {
    const int64_t count = layer.heads - first < group ? layer.heads - first : group;
    const GemmJob project_q = {layer.q_in, layer.ld_q_in, g.tokens, {args.w_q, first, count, layer.d_q(), layer.q_width()},
                               0, layer.q_width(), q, group * ld_q, false, nullptr};
    run_gemms(workers, &project_q, 1, layer.gemm);
    for (int64_t h = 0; h < count; ++h) {
      prepare_weights(layer, first + h, w_uk, w_uv);
      if (w_uv == nullptr) {
        const PackedWeight uv = {args.w_uv, first + h, 1, layer.d_v, layer.rank};
        head.w_uv = element<float>(args.w_uv, uv.offset(0));
      }
      attend_head(layer, g, head, q + h * ld_q, group * ld_q, o + h * layer.d_v, ld_o, ranges, chunks, buffers, buffer_floats);
    }
    // epilog: y += o W_o for these heads, bias and residual with the last ones
    const int64_t k0 = first * layer.d_v, k1 = (first + count) * layer.d_v;
    const GemmJob project = {o, ld_o, g.tokens, {args.w_o, 0, 1, layer.hidden, layer.heads * layer.d_v}, k0, k1, y, ld_y,
                             first > 0, k1 == layer.heads * layer.d_v ? &epilog : nullptr};
    run_gemms(workers, &project, 1, layer.gemm);
  }
}

}  // namespace FLASHMLA_NS
}  // namespace flashmla
