// The absorbed paths, for few new tokens: attention runs on the latent itself, q~ = q W_UK, o = (p c) W_UV. Where RoPE turns
// the whole key (rope_mode full) W_UK cannot move to the query: K of a head is decompressed tile by tile, and V alone is
// absorbed.
#pragma once

#include "op_impl/cpu/absorbed_queries-inl.h"
#include "op_impl/cpu/combine-inl.h"
#include "op_impl/cpu/decompress-inl.h"

namespace flashmla {
namespace FLASHMLA_NS {

// The group's rows as requests: one a piece, its rows token by token with all heads; or one a piece and head, its rows the tokens.
struct AbsorbedRequests {
  const TokenGroup &group;
  int64_t heads;
  bool per_head;
  AttentionRequest *requests;  // [num_pieces, per_piece]

  int64_t per_piece() const { return per_head ? heads : 1; }
  int64_t count() const { return group.num_pieces * per_piece(); }
  AttentionRequest &of(int64_t piece, int64_t head) const { return requests[per_head ? piece * heads + head : piece]; }
  int64_t row(int64_t token, int64_t head) const { return per_head ? token : token * heads + head; }
  // Of a request's row: its token in the group, its head, and the keys it sees.
  int64_t token(const AttentionRequest &r, int64_t row) const { return group.pieces[r.part].row - group.row + (per_head ? row : row / heads); }
  int64_t head(const AttentionRequest &r, int64_t row) const { return per_head ? r.kv_head : row % heads; }
  int64_t limit(const AttentionRequest &r, int64_t row) const { return group.pieces[r.part].position + (per_head ? row : row / heads) + 1; }
};

static AbsorbedRequests make_requests(const Layer &layer, const TokenGroup &g) {
  Scratch &scratch = layer.workers.scratch();
  AbsorbedRequests all = {g, layer.heads, g.path == kValueAbsorbed, nullptr};
  all.requests = scratch.alloc<AttentionRequest>(all.count());
  for (int64_t p = 0; p < g.num_pieces; ++p) {
    const Piece &piece = g.pieces[p];
    for (int64_t h = 0; h < all.per_piece(); ++h) {
      AttentionRequest &r = all.of(p, h);
      r = {piece.blocks, p, h, all.per_head ? piece.tokens : piece.tokens * layer.heads, piece.position + piece.tokens, piece.seq,
           0, 0, nullptr, nullptr, nullptr};
      r.seq.num_splits = int32_t(tile_count(r.s_kv, r.seq.split_len));  // a piece may end before the sequence does
      alloc_outputs(scratch, r, layer.ld_latent());
    }
  }
  return all;
}

// q~ against the cached rows themselves.
static void attend_latent(const Layer &layer, const AbsorbedRequests &requests, const AttentionJob &job) {
  const TokenGroup &g = requests.group;
  float *query = layer.workers.scratch().alloc<float>(g.tokens * layer.heads * layer.ld_query());  // [tokens, heads, ld_query]
  absorb(layer, g, query);
  const auto load_query = [&](const AttentionRequest &r, int64_t row, float *) {
    return query + (requests.token(r, row) * layer.heads + requests.head(r, row)) * layer.ld_query();
  };
  const auto limit = [&](const AttentionRequest &r, int64_t row) { return requests.limit(r, row); };
  attend_cache(layer.workers, layer.args.cache, job, layer.tiling, load_query, limit);
}

// q against the decompressed keys of its head, the cached latents as values.
static void attend_decompressed(const Layer &layer, const AbsorbedRequests &requests, const AttentionJob &job) {
  Workers &workers = layer.workers;
  const int64_t kv_tile = layer.tiling.kv_tile, weight_floats = packed_size(1, layer.d_n, layer.rank);
  rotate_queries(layer, requests.group);
  float *w_uk = workers.scratch().alloc<float>(layer.heads * weight_floats);                // [heads] of packed [d_n, rank]
  workers.run(layer.heads, [&](int64_t h, int thread) { transpose_w_uk(layer, h, 0, stored_w_uk(layer, h).panels(), w_uk + h * weight_floats, thread); });
  float *k = workers.scratch().alloc<float>(workers.threads() * kv_tile * layer.ld_q());    // [threads, kv_tile, ld_q]
  const auto load_query = [&](const AttentionRequest &r, int64_t row, float *) {
    return layer.q + (requests.token(r, row) * layer.heads + requests.head(r, row)) * layer.ld_q();
  };
  const auto limit = [&](const AttentionRequest &r, int64_t row) { return requests.limit(r, row); };
  with_tile_streams<false>(workers, layer.args.cache, layer.rank, layer.tiling, [&](const auto &latent) {
    const auto make_stream = [&](int thread) { return DecompressedStream(layer, w_uk, latent(thread), k + thread * kv_tile * layer.ld_q(), thread); };
    attend_requests(workers, job, layer.tiling, make_stream, load_query, limit);
  });
}

// o [tokens, heads * d_v] = combine(splits) W_UV, head by head.
static void combine_and_up_project(const Layer &layer, const TokenGroup &g, const AbsorbedRequests &requests, float *o /* [tokens, heads * d_v] */) {
  const int64_t item_tokens = layer.tiling.up_tokens;
  Scratch &scratch = layer.workers.scratch();
  const int64_t ld_latent = layer.ld_latent(), ld_v = layer.ld_v();
  float *memory = scratch.alloc<float>(layer.workers.threads() * item_tokens * (ld_latent + ld_v));  // [threads][item_tokens][latent | up]
  const int64_t blocks = (g.tokens + item_tokens - 1) / item_tokens;
  layer.workers.run(layer.heads * blocks, [&](int64_t item, int thread) {
    const int64_t h = item / blocks, first = item % blocks * item_tokens;
    const int64_t tokens = g.tokens - first < item_tokens ? g.tokens - first : item_tokens;
    float *latent = memory + thread * item_tokens * (ld_latent + ld_v);  // [item_tokens, ld_latent]
    float *up = latent + item_tokens * ld_latent;                        // [item_tokens, ld_v]
    for (int64_t i = 0; i < tokens; ++i) {
      const Piece &piece = piece_of(g, g.row + first + i);
      const AttentionRequest &r = requests.of(&piece - g.pieces, h);
      combine(r, requests.row(g.row + first + i - piece.row, h), latent + i * ld_latent, ld_latent);
    }
    const GemmJob project = {latent, ld_latent, tokens, {layer.args.w_uv, h, 1, layer.d_v, layer.rank},
                             0, layer.rank, up, ld_v, false, nullptr};
    gemm_all(project, layer.gemm, thread);
    for (int64_t i = 0; i < tokens; ++i)
      copy_row(o + (first + i) * layer.heads * layer.d_v + h * layer.d_v, up + i * ld_v, layer.d_v);
  });
}

static void attention_absorbed(Layer &layer, const TokenGroup &g) {
  Scratch &scratch = layer.workers.scratch();
  const AbsorbedRequests requests = make_requests(layer, g);

  // for each KV tile: qk -> online_softmax -> pv
  const FlashMLAAttrs &attrs = layer.args.attrs;
  const int64_t d_qk = requests.per_head ? layer.d_q() : layer.args.cache.d;
  const AttentionJob job = {requests.requests, requests.count(), d_qk, layer.rank, {attrs.softmax_scale, attrs.unified_max != 0, attrs.phi}};
  if (requests.per_head) attend_decompressed(layer, requests, job); else attend_latent(layer, requests, job);

  // combine
  const int64_t width = layer.heads * layer.d_v, ld_y = round_up(layer.hidden, kPanelAlign);
  float *o = scratch.alloc<float>(g.tokens * width);   // [tokens, heads * d_v]
  combine_and_up_project(layer, g, requests, o);

  // epilog: y = residual + o W_o
  const Epilog epilog = layer_epilog(layer, g);
  float *y = scratch.alloc<float>(g.tokens * ld_y);    // [tokens, ld_y]
  const GemmJob project = {o, width, g.tokens, {layer.args.w_o, 0, 1, layer.hidden, width}, 0, width, y, ld_y, false, &epilog};
  run_gemms(layer.workers, &project, 1, layer.gemm);
}

}  // namespace FLASHMLA_NS
}  // namespace flashmla
