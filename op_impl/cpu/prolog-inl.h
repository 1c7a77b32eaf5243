// prolog: project, norm, rope, append to cache.
#pragma once

#include "op_impl/cpu/layer-inl.h"

namespace flashmla {
namespace FLASHMLA_NS {

// The group's hidden states as float32 [tokens, hidden]: in place, or widened.
static const float *float_hidden(Layer &layer, const TokenGroup &g) {
  const ConstStorage hidden = layer.args.hidden;
  if (hidden.dtype == kFloat32) return element<float>(hidden, g.row * layer.hidden);
  float *x = layer.workers.scratch().alloc<float>(g.tokens * layer.hidden);  // [tokens, hidden]
  layer.workers.run(g.tokens, [&](int64_t i, int) {
    widen_any(x + i * layer.hidden, hidden, (g.row + i) * layer.hidden, layer.hidden);
  });
  return x;
}

// The cache row of one token: [norm(c) * scale | rope(k_pe)], rounded to the cache's dtype.
static void append(const Layer &layer, float *kv /* [rank + d_r] */, const Piece &piece, int64_t position) {
  const FlashMLAAttrs &a = layer.args.attrs;
  if (layer.b_kv_a) add_row(kv, layer.b_kv_a, layer.rank + layer.d_r);
  rms_norm(kv, layer.kv_norm, layer.rank, a.kv_norm_eps, a.kv_lora_scale);
  if (!layer.rope_full) rope(kv + layer.rank, layer.rope_row(position), layer.d_r);
  const PagedCache &cache = layer.args.cache;
  const int64_t slot = int64_t(piece.blocks[position / cache.block_size]) * cache.block_size + position % cache.block_size;
  narrow_any(cache.data, slot * cache.d, kv, cache.d);
}

static const Piece &piece_of(const TokenGroup &g, int64_t row) {
  int64_t lo = 0, hi = g.num_pieces - 1;
  while (lo < hi) {
    const int64_t mid = (lo + hi + 1) / 2;
    if (g.pieces[mid].row <= row) lo = mid; else hi = mid - 1;
  }
  return g.pieces[lo];
}

static void prolog(Layer &layer, const TokenGroup &g) {
  Workers &workers = layer.workers;
  Scratch &scratch = workers.scratch();
  const LayerArgs &args = layer.args;
  layer.x = float_hidden(layer, g);

  // [c | k_pe] = x W_kva, beside it the first product on the way to q. The expanded path takes q head by head later.
  const int64_t ld_kv = round_up(layer.rank + layer.d_r, kPanelAlign);
  const int64_t ld_qa = round_up(layer.q_rank, kPanelAlign);
  const bool low_rank = layer.q_rank > 0, all_heads = g.path != kExpanded;
  float *kv = scratch.alloc<float>(g.tokens * ld_kv);                              // [tokens, ld_kv]
  float *q_a = low_rank ? scratch.alloc<float>(g.tokens * ld_qa) : nullptr;        // [tokens, ld_qa]
  layer.q_in = low_rank ? q_a : layer.x;
  layer.ld_q_in = low_rank ? ld_qa : layer.hidden;
  layer.q = all_heads ? scratch.alloc<float>(g.tokens * layer.heads * layer.ld_q()) : nullptr;
  const GemmJob project_kv = {layer.x, layer.hidden, g.tokens, {args.w_kv_a, 0, 1, layer.rank + layer.d_r, layer.hidden},
                              0, layer.hidden, kv, ld_kv, false, nullptr};
  const GemmJob project_q_a = {layer.x, layer.hidden, g.tokens, {args.w_q_a, 0, 1, layer.q_rank, layer.hidden},
                               0, layer.hidden, q_a, ld_qa, false, nullptr};
  const GemmJob project_q = {layer.q_in, layer.ld_q_in, g.tokens, {args.w_q, 0, layer.heads, layer.d_q(), layer.q_width()},
                             0, layer.q_width(), layer.q, layer.heads * layer.ld_q(), false, nullptr};
  const GemmJob first[2] = {project_kv, low_rank ? project_q_a : project_q};
  run_gemms(workers, first, low_rank || all_heads ? 2 : 1, layer.gemm);

  workers.run(g.tokens, [&](int64_t i, int) {
    const Piece &piece = piece_of(g, g.row + i);
    append(layer, kv + i * ld_kv, piece, piece.position + (g.row + i - piece.row));
    if (!low_rank) return;
    float *row = q_a + i * ld_qa;  // [q_rank]
    if (layer.b_q_a) add_row(row, layer.b_q_a, layer.q_rank);
    rms_norm(row, layer.q_norm, layer.q_rank, args.attrs.q_norm_eps, args.attrs.q_lora_scale);
  });
  if (low_rank && all_heads) run_gemms(workers, &project_q, 1, layer.gemm);
}

}  // namespace FLASHMLA_NS
}  // namespace flashmla
