// The expanded path, for many new tokens: K and V of one head at a time are decompressed from the latent, chunk by chunk,
// into scratch that holds that head alone, and every query tile of the group passes over the chunk.
#pragma once

#include "op_impl/cpu/expanded_head-inl.h"

namespace flashmla {
namespace FLASHMLA_NS {

// The chunks of keys that a group's query tiles pass over.
struct ChunkPlan {
  const TokenGroup &group;
  const TilingData &t;
  int threads;
  KeyRange *ranges;            // [num_pieces], of the current chunk
  int64_t count = 0;
  int64_t piece = 0, begin = 0;  // where the next chunk begins

  // The next chunk: at most kv_chunk keys in all, each range beginning at a multiple of kv_tile.
  bool next() {
    int64_t keys = 0;
    for (count = 0; piece < group.num_pieces; ++piece) {
      const int64_t s_kv = group.pieces[piece].position + group.pieces[piece].tokens;
      const int64_t room = (t.kv_chunk - keys) / t.kv_tile * t.kv_tile;
      if (room == 0) break;
      const int64_t end = s_kv - begin < room ? s_kv : begin + room;
      ranges[count++] = {piece, begin, end, keys};
      keys += round_up(end - begin, t.kv_tile);
      begin = end == s_kv ? 0 : end;
      if (end < s_kv) break;
    }
    return count > 0;
  }
  // Keys that a work item decompresses: even shares of a range for all threads, at most decompress_rows.
  int64_t key_rows(int64_t r) const {
    const int64_t keys = ranges[r].end - ranges[r].begin, blocks = round_up(tile_count(keys, t.decompress_rows), threads);
    const int64_t rows = round_up((keys + blocks - 1) / blocks, kGemmRows);
    return rows < t.decompress_rows ? rows : t.decompress_rows;
  }
  int64_t key_blocks(int64_t r) const { return tile_count(ranges[r].end - ranges[r].begin, key_rows(r)); }
  int64_t query_tiles(int64_t r) const { return tile_count(group.pieces[ranges[r].piece].tokens, t.q_tile); }
};

// K and V of the chunk's keys.
static void decompress_chunk(const Layer &layer, const ExpandedHead &head, const ChunkPlan &chunk, ExpandedWorker *workers /* [threads] */) {
  int64_t items = 0;
  for (int64_t r = 0; r < chunk.count; ++r) items += chunk.key_blocks(r);
  layer.workers.run(items, [&](int64_t item, int thread) {
    int64_t r = 0;
    while (item >= chunk.key_blocks(r)) item -= chunk.key_blocks(r++);
    const KeyRange &keys = chunk.ranges[r];
    const Tile tile = tile_at(keys.begin, keys.end - keys.begin, chunk.key_rows(r), item);
    decompress_tile(layer, head, chunk.group.pieces[keys.piece], tile.start, tile.length, keys.at + tile.start - keys.begin, workers[thread].buffer, thread);
  });
}

// All query tiles of the group over the chunk. The last tiles see the most keys: they go first, so that no thread is left with a
// long one.
static void attend_chunk(const Layer &layer, const ExpandedHead &head, const ChunkPlan &chunk, ExpandedWorker *workers /* [threads] */) {
  int64_t items = 0;
  for (int64_t r = 0; r < chunk.count; ++r) items += chunk.query_tiles(r);
  layer.workers.run(items, [&](int64_t item, int thread) {
    int64_t r = 0, index = items - 1 - item;
    while (index >= chunk.query_tiles(r)) index -= chunk.query_tiles(r++);
    const KeyRange &keys = chunk.ranges[r];
    const Piece &piece = chunk.group.pieces[keys.piece];
    const Tile tile = tile_at(0, piece.tokens, chunk.t.q_tile, index);
    if (keys.begin > piece.position + tile.start + tile.length - 1) return;  // all keys of the range lie in its future
    attend_tile(layer, head, {piece, keys, tile.start, tile.length, piece.row - chunk.group.row + tile.start}, workers[thread]);
  });
}

// Scratch of one head, of the group's queries and of the workers.
struct ExpandedScratch {
  float *w_uk;              // packed [d_n, rank]
  float *w_uv;              // packed [d_v, rank], nullptr where the stored one is float32
  ExpandedHead head;
  KeyRange *ranges;         // [num_pieces]
  ExpandedWorker *workers;  // [threads]
};

static ExpandedScratch make_scratch(const Layer &layer, const TokenGroup &g) {
  Scratch &scratch = layer.workers.scratch();
  const TilingData &t = layer.tiling;
  const int64_t ld_q = layer.ld_q(), ld_v = layer.ld_v(), ld_cache = round_up(layer.rank + layer.d_r, kPanelAlign);
  int64_t keys = 0;  // of the longest chunk
  for (int64_t p = 0; p < g.num_pieces; ++p) keys += round_up(g.pieces[p].position + g.pieces[p].tokens, t.kv_tile);
  keys = keys < t.kv_chunk ? keys : t.kv_chunk;

  ExpandedScratch s = {};
  s.w_uk = scratch.alloc<float>(packed_size(1, layer.d_n, layer.rank));
  s.w_uv = layer.args.w_uv.dtype == kFloat32 ? nullptr : scratch.alloc<float>(packed_size(1, layer.d_v, layer.rank));
  s.head.k = scratch.alloc<float>(keys * ld_q);
  s.head.v = scratch.alloc<float>(keys * ld_v);
  s.head.o = scratch.alloc<float>(g.tokens * ld_v);
  s.head.m = scratch.alloc<float>(g.tokens);
  s.head.l = scratch.alloc<float>(g.tokens);
  s.ranges = scratch.alloc<KeyRange>(g.num_pieces);
  s.workers = scratch.alloc<ExpandedWorker>(layer.workers.threads());
  for (int i = 0; i < layer.workers.threads(); ++i)
    s.workers[i] = {make_row_chunk(scratch, t.q_tile, layer.d_q(), layer.d_v, t), scratch.alloc<float>(t.decompress_rows * ld_cache + ld_q)};
  return s;
}

// One head of the group.
static void attend_head(const Layer &layer, const TokenGroup &g, int64_t h, ExpandedScratch &s, const float *q /* [tokens, ld_q_rows] */,
                        int64_t ld_q_rows, float *out /* [tokens, ld_out] */, int64_t ld_out) {
  prepare_weights(layer, h, s.w_uk, s.w_uv);
  const PackedWeight uv = {layer.args.w_uv, h, 1, layer.d_v, layer.rank};
  s.head.w_uk = s.w_uk;
  s.head.w_uv = s.w_uv != nullptr ? s.w_uv : element<float>(uv.data, uv.offset(0));
  s.head.q = q;
  s.head.ld_q_rows = ld_q_rows;
  s.head.out = out;
  s.head.ld_out = ld_out;
  ChunkPlan chunk = {g, layer.tiling, layer.workers.threads(), s.ranges};
  while (chunk.next()) {
    decompress_chunk(layer, s.head, chunk, s.workers);
    attend_chunk(layer, s.head, chunk, s.workers);  // for each KV tile: qk -> online_softmax -> pv
  }
}

static void attention_expanded(Layer &layer, const TokenGroup &g) {
  Workers &workers = layer.workers;
  Scratch &scratch = workers.scratch();
  const LayerArgs &args = layer.args;
  const int64_t heads = layer.heads, group = layer.tiling.head_group < heads ? layer.tiling.head_group : heads;
  ExpandedScratch s = make_scratch(layer, g);
  const int64_t ld_q = group * layer.ld_q();
  float *q = scratch.alloc<float>(g.tokens * ld_q);      // [tokens, group * ld_q]
  const int64_t ld_o = group * layer.d_v + kPanelAlign;  // apart from the multiples of 1 KiB at which rows collide in L1
  float *o = scratch.alloc<float>(g.tokens * ld_o);      // [tokens, ld_o]
  // y is summed over the head groups in float32: in the output itself where it has that form.
  const bool in_place = args.out.dtype == kFloat32 && layer.hidden % kPanelAlign == 0;
  const int64_t ld_y = round_up(layer.hidden, kPanelAlign);
  float *y = in_place ? static_cast<float *>(args.out.data) + g.row * ld_y : scratch.alloc<float>(g.tokens * ld_y);  // [tokens, ld_y]
  const Epilog epilog = layer_epilog(layer, g);

  for (int64_t first = 0; first < heads; first += group) {
    const int64_t count = heads - first < group ? heads - first : group;
    const GemmJob project_q = {layer.q_in, layer.ld_q_in, g.tokens, {args.w_q, first, count, layer.d_q(), layer.q_width()},
                               0, layer.q_width(), q, ld_q, false, nullptr};
    run_gemms(workers, &project_q, 1, layer.gemm);
    for (int64_t h = 0; h < count; ++h) attend_head(layer, g, first + h, s, q + h * layer.ld_q(), ld_q, o + h * layer.d_v, ld_o);
    // epilog: y += o W_o for these heads, bias and residual with the last ones
    const int64_t k0 = first * layer.d_v, k1 = (first + count) * layer.d_v;
    const GemmJob project = {o, ld_o, g.tokens, {args.w_o, 0, 1, layer.hidden, heads * layer.d_v}, k0, k1, y, ld_y,
                             first > 0, k1 == heads * layer.d_v ? &epilog : nullptr};
    run_gemms(workers, &project, 1, layer.gemm);
  }
}

}  // namespace FLASHMLA_NS
}  // namespace flashmla
