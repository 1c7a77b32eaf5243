// The absorbed path, for few new tokens: attention runs on the latent itself, q~ = q W_UK, o = (p c) W_UV.
#pragma once

#include "op_impl/cpu/prolog-inl.h"

namespace flashmla {
namespace FLASHMLA_NS {

// q~ [tokens, heads, ld_query] = [q_nope W_UK | rope(q_pe)].
static void absorb(const Layer &layer, const TokenGroup &g, float *query) {
  const int64_t ld_q = layer.heads * layer.ld_q(), ld_query = layer.heads * layer.ld_query();
  layer.workers.run(layer.heads, [&](int64_t h, int thread) {
    const GemmJob up = {layer.q + h * layer.ld_q(), ld_q, g.tokens, {layer.args.w_uk, h, 1, layer.rank, layer.d_n},
                        0, layer.d_n, query + h * layer.ld_query(), ld_query, false, nullptr};
    gemm_all(up, layer.tiling, layer.wide, thread);
    for (int64_t i = 0; i < g.tokens; ++i) {
      const Piece &piece = piece_of(g, g.row + i);
      float *pe = query + i * ld_query + h * layer.ld_query() + layer.rank;
      copy_row(pe, layer.q + i * ld_q + h * layer.ld_q() + layer.d_n, layer.d_r);
      rope(pe, layer.rope_row(piece.position + (g.row + i - piece.row)), layer.d_r);
    }
  });
}

// o [tokens, heads * d_v] = combine(splits) W_UV, head by head.
static void combine_and_up_project(const Layer &layer, const TokenGroup &g, const AttentionRequest *requests, float *o) {
  constexpr int64_t kTokens = 32;  // of an item: enough rows to pay for widening a 16-bit W_UV
  Scratch &scratch = layer.workers.scratch();
  const int64_t ld_latent = layer.ld_latent(), ld_v = layer.ld_v();
  float *memory = scratch.alloc<float>(layer.workers.threads() * kTokens * (ld_latent + ld_v));
  const int64_t blocks = (g.tokens + kTokens - 1) / kTokens;
  layer.workers.run(layer.heads * blocks, [&](int64_t item, int thread) {
    const int64_t h = item / blocks, first = item % blocks * kTokens;
    const int64_t tokens = g.tokens - first < kTokens ? g.tokens - first : kTokens;
    float *latent = memory + thread * kTokens * (ld_latent + ld_v), *up = latent + kTokens * ld_latent;
    for (int64_t i = 0; i < tokens; ++i) {
      const Piece &piece = piece_of(g, g.row + first + i);
      combine(requests[&piece - g.pieces], (g.row + first + i - piece.row) * layer.heads + h, latent + i * ld_latent, ld_latent);
    }
    const GemmJob project = {latent, ld_latent, tokens, {layer.args.w_uv, h, 1, layer.d_v, layer.rank},
                             0, layer.rank, up, ld_v, false, nullptr};
    gemm_all(project, layer.tiling, layer.wide, thread);
    for (int64_t i = 0; i < tokens; ++i)
      copy_row(o + (first + i) * layer.heads * layer.d_v + h * layer.d_v, up + i * ld_v, layer.d_v);
  });
}

static void attention_absorbed(Layer &layer, const TokenGroup &g) {
  Workers &workers = layer.workers;
  Scratch &scratch = workers.scratch();
  const int64_t heads = layer.heads, ld_query = layer.ld_query(), ld_latent = layer.ld_latent();
  float *query = scratch.alloc<float>(g.tokens * heads * ld_query);
  absorb(layer, g, query);

  AttentionRequest *requests = scratch.alloc<AttentionRequest>(g.num_pieces);
  for (int64_t p = 0; p < g.num_pieces; ++p) {
    const Piece &piece = g.pieces[p];
    AttentionRequest &r = requests[p];
    r = {piece.blocks, p, 0, piece.tokens * heads, piece.position + piece.tokens, piece.seq, 0, 0, nullptr, nullptr, nullptr};
    r.seq.num_splits = int32_t(tile_count(r.s_kv, r.seq.split_len));  // a piece may end before the sequence does
    r.o = scratch.alloc<float>(split_rows(r) * ld_latent);
    r.m = scratch.alloc<float>(split_rows(r));
    r.l = scratch.alloc<float>(split_rows(r));
  }
  attend_requests(workers, requests, g.num_pieces, layer.args.cache, layer.rank, layer.args.attrs.softmax_scale, layer.tiling,
                  [&](const AttentionRequest &r, int64_t row, float *) {
                    return query + ((g.pieces[r.sequence].row - g.row) * heads + row) * ld_query;
                  },
                  [&](const AttentionRequest &r, int64_t row) { return g.pieces[r.sequence].position + row / heads + 1; });

  float *o = scratch.alloc<float>(g.tokens * heads * layer.d_v);
  combine_and_up_project(layer, g, requests, o);

  // epilog: y = residual + o W_o
  const Epilog epilog = layer_epilog(layer, g);
  const int64_t ld_y = round_up(layer.hidden, kPanelAlign);
  const GemmJob project = {o, heads * layer.d_v, g.tokens, {layer.args.w_o, 0, 1, layer.hidden, heads * layer.d_v},
                           0, heads * layer.d_v, scratch.alloc<float>(g.tokens * ld_y), ld_y, false, &epilog};
  run_gemms(workers, &project, 1, layer.tiling, layer.wide);
}

}  // namespace FLASHMLA_NS
}  // namespace flashmla
