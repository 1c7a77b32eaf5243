// The absorbed paths, for few new tokens: attention runs on the latent itself, q~ = q W_UK, o = (p c) W_UV. Where RoPE turns
// the whole key (rope_mode full) W_UK cannot move to the query: K of a head is decompressed tile by tile, and V alone is
// absorbed.
#pragma once

#include "op_impl/cpu/combine-inl.h"
#include "op_impl/cpu/decompress-inl.h"

namespace flashmla {
namespace FLASHMLA_NS {

// The queries of the absorbed path, q~ [tokens, heads, ld_query] = [q_nope W_UK | rope(q_pe)].
static void absorb(const Layer &layer, const TokenGroup &g, float *query) {
  const int64_t ld_q = layer.heads * layer.ld_q(), ld_query = layer.heads * layer.ld_query();
  layer.workers.run(layer.heads, [&](int64_t h, int thread) {
    const GemmJob up = {layer.q + h * layer.ld_q(), ld_q, g.tokens, {layer.args.w_uk, h, 1, layer.rank, layer.d_n},
                        0, layer.d_n, query + h * layer.ld_query(), ld_query, false, nullptr};
    gemm_all(up, layer.gemm, thread);
    for (int64_t i = 0; i < g.tokens; ++i) {
      const Piece &piece = piece_of(g, g.row + i);
      float *pe = query + i * ld_query + h * layer.ld_query() + layer.rank;
      copy_row(pe, layer.q + i * ld_q + h * layer.ld_q() + layer.d_n, layer.d_r);
      rope(pe, layer.rope_row(piece.position + (g.row + i - piece.row)), layer.d_r);
    }
  });
}

// The queries of the value-absorbed path, rotated in place: [tokens, heads, ld_q].
static void rotate_queries(const Layer &layer, const TokenGroup &g) {
  layer.workers.run(g.tokens, [&](int64_t i, int) {
    const Piece &piece = piece_of(g, g.row + i);
    const float *table = layer.rope_row(piece.position + (g.row + i - piece.row));
    for (int64_t h = 0; h < layer.heads; ++h) rope(layer.q + (i * layer.heads + h) * layer.ld_q(), table, layer.rope_dim);
  });
}

// Tiles of the value-absorbed path: K of the request's head decompressed and rotated in place, V the latent.
template <typename T>
class DecompressedStream {
 public:
  // w_uk: [heads] as transpose_w_uk leaves them. k: [kv_tile, ld_q].
  DecompressedStream(const Layer &layer, const float *w_uk, TileStream<T> latent, float *k, int thread)
      : layer_(layer), w_uk_(w_uk), latent_(latent), k_(k), thread_(thread) {}

  KvTile load(const TileKeys &now, const TileKeys &next, const TileKeys &after) {
    KvTile tile = latent_.load(shared(now), shared(next), shared(after));
    decompress_keys(layer_, w_uk_ + now.kv_head * packed_size(1, layer_.d_n, layer_.rank), tile.v, tile.ldv, now.first, now.n, k_, thread_);
    tile.k = k_;
    tile.ldk = layer_.ld_q();
    return tile;
  }
  NextTile<T> &in_qk() { return latent_.in_qk(); }
  NextTile<T> &in_pv() { return latent_.in_pv(); }
  void finish() { latent_.finish(); }

 private:
  static TileKeys shared(TileKeys keys) {  // all heads read the one latent
    keys.kv_head = 0;
    return keys;
  }
  const Layer &layer_;
  const float *w_uk_;
  TileStream<T> latent_;
  float *k_;
  const int thread_;
};

// Which request a head of a piece belongs to, and which row of it a token of that head is.
struct RequestLayout {
  int64_t heads;
  bool per_head;  // one request a head; else one for all heads, rows token by token
  int64_t requests() const { return per_head ? heads : 1; }
  int64_t request(int64_t piece, int64_t head) const { return per_head ? piece * heads + head : piece; }
  int64_t row(int64_t token, int64_t head) const { return per_head ? token : token * heads + head; }
  int64_t token(int64_t row) const { return per_head ? row : row / heads; }
};

// o [tokens, heads * d_v] = combine(splits) W_UV, head by head.
static void combine_and_up_project(const Layer &layer, const TokenGroup &g, const AttentionRequest *requests, const RequestLayout &layout,
                                   float *o) {
  const int64_t item_tokens = layer.tiling.up_tokens;
  Scratch &scratch = layer.workers.scratch();
  const int64_t ld_latent = layer.ld_latent(), ld_v = layer.ld_v();
  float *memory = scratch.alloc<float>(layer.workers.threads() * item_tokens * (ld_latent + ld_v));
  const int64_t blocks = (g.tokens + item_tokens - 1) / item_tokens;
  layer.workers.run(layer.heads * blocks, [&](int64_t item, int thread) {
    const int64_t h = item / blocks, first = item % blocks * item_tokens;
    const int64_t tokens = g.tokens - first < item_tokens ? g.tokens - first : item_tokens;
    float *latent = memory + thread * item_tokens * (ld_latent + ld_v), *up = latent + item_tokens * ld_latent;
    for (int64_t i = 0; i < tokens; ++i) {
      const Piece &piece = piece_of(g, g.row + first + i);
      const AttentionRequest &r = requests[layout.request(&piece - g.pieces, h)];
      combine(r, layout.row(g.row + first + i - piece.row, h), latent + i * ld_latent, ld_latent);
    }
    const GemmJob project = {latent, ld_latent, tokens, {layer.args.w_uv, h, 1, layer.d_v, layer.rank},
                             0, layer.rank, up, ld_v, false, nullptr};
    gemm_all(project, layer.gemm, thread);
    for (int64_t i = 0; i < tokens; ++i)
      copy_row(o + (first + i) * layer.heads * layer.d_v + h * layer.d_v, up + i * ld_v, layer.d_v);
  });
}

static void attention_absorbed(Layer &layer, const TokenGroup &g) {
  Workers &workers = layer.workers;
  Scratch &scratch = workers.scratch();
  const int64_t heads = layer.heads, ld_latent = layer.ld_latent();
  const SoftmaxRule rule = {layer.args.attrs.softmax_scale, layer.args.attrs.unified_max != 0, layer.args.attrs.phi};
  const RequestLayout layout = {heads, g.path == kValueAbsorbed};

  AttentionRequest *requests = scratch.alloc<AttentionRequest>(g.num_pieces * layout.requests());
  for (int64_t p = 0; p < g.num_pieces; ++p) {
    const Piece &piece = g.pieces[p];
    for (int64_t h = 0; h < layout.requests(); ++h) {
      AttentionRequest &r = requests[layout.request(p, h)];
      r = {piece.blocks, p, h, layout.per_head ? piece.tokens : piece.tokens * heads, piece.position + piece.tokens, piece.seq,
           0, 0, nullptr, nullptr, nullptr};
      r.seq.num_splits = int32_t(tile_count(r.s_kv, r.seq.split_len));  // a piece may end before the sequence does
      r.o = scratch.alloc<float>(split_rows(r) * ld_latent);
      r.m = scratch.alloc<float>(split_rows(r));
      r.l = scratch.alloc<float>(split_rows(r));
    }
  }
  const auto limit = [&](const AttentionRequest &r, int64_t row) { return g.pieces[r.sequence].position + layout.token(row) + 1; };
  const auto first_token = [&](const AttentionRequest &r) { return g.pieces[r.sequence].row - g.row; };
  const int64_t count = g.num_pieces * layout.requests();
  const PagedCache &cache = layer.args.cache;
  const int64_t kv_tile = layer.tiling.kv_tile, tile_floats = TileStream<float>::floats(cache, kv_tile);
  float *tile_memory = scratch.alloc<float>(workers.threads() * tile_floats);
  with_dtype(cache.data.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto latent = [&](int thread) { return TileStream<T>(cache, layer.rank, kv_tile, tile_memory + thread * tile_floats); };
    if (layout.per_head) {
      rotate_queries(layer, g);
      float *w_uk = scratch.alloc<float>(heads * packed_size(1, layer.d_n, layer.rank));
      workers.run(heads, [&](int64_t h, int thread) { transpose_w_uk(layer, h, w_uk + h * packed_size(1, layer.d_n, layer.rank), thread); });
      float *k = scratch.alloc<float>(workers.threads() * kv_tile * layer.ld_q());
      attend_requests(workers, requests, count, layer.d_q(), layer.rank, rule, layer.tiling,
                      [&](int thread) { return DecompressedStream<T>(layer, w_uk, latent(thread), k + thread * kv_tile * layer.ld_q(), thread); },
                      [&](const AttentionRequest &r, int64_t row, float *) {
                        return layer.q + ((first_token(r) + row) * heads + r.kv_head) * layer.ld_q();
                      }, limit);
    } else {
      float *query = scratch.alloc<float>(g.tokens * heads * layer.ld_query());
      absorb(layer, g, query);
      attend_requests(workers, requests, count, cache.d, layer.rank, rule, layer.tiling, latent,
                      [&](const AttentionRequest &r, int64_t row, float *) { return query + (first_token(r) * heads + row) * layer.ld_query(); },
                      limit);
    }
  });

  float *o = scratch.alloc<float>(g.tokens * heads * layer.d_v);
  combine_and_up_project(layer, g, requests, layout, o);

  // epilog: y = residual + o W_o
  const Epilog epilog = layer_epilog(layer, g);
  const int64_t ld_y = round_up(layer.hidden, kPanelAlign);
  const GemmJob project = {o, heads * layer.d_v, g.tokens, {layer.args.w_o, 0, 1, layer.hidden, heads * layer.d_v},
                           0, heads * layer.d_v, scratch.alloc<float>(g.tokens * ld_y), ld_y, false, &epilog};
  run_gemms(workers, &project, 1, layer.gemm);
}

}  // namespace FLASHMLA_NS
}  // namespace flashmla
