// The queries of the absorbed paths.
#pragma once

#include "op_impl/cpu/prolog-inl.h"

namespace flashmla {
namespace FLASHMLA_NS {

// The queries of the absorbed path, q~ [tokens, heads, ld_query] = [q_nope W_UK | rope(q_pe)].
static void absorb(const Layer &layer, const TokenGroup &g, float *query /* [tokens, heads, ld_query] */) {
  const int64_t ld_q = layer.heads * layer.ld_q(), ld_query = layer.heads * layer.ld_query();
  layer.workers.run(layer.heads, [&](int64_t h, int thread) {
    const GemmJob up = {layer.q + h * layer.ld_q(), ld_q, g.tokens, {layer.args.w_uk, h, 1, layer.rank, layer.d_n},
                        0, layer.d_n, query + h * layer.ld_query(), ld_query, false, nullptr};
    gemm_all(up, layer.gemm, thread);
    for (int64_t i = 0; i < g.tokens; ++i) {
      const Piece &piece = piece_of(g, g.row + i);
      float *pe = query + i * ld_query + h * layer.ld_query() + layer.rank;  // [d_r]
      copy_row(pe, layer.q + i * ld_q + h * layer.ld_q() + layer.d_n, layer.d_r);
      rope(pe, layer.rope_row(piece.position + (g.row + i - piece.row)), layer.d_r);
    }
  });
}

// The queries of the value-absorbed path, rotated in place: [tokens, heads, ld_q].
static void rotate_queries(const Layer &layer, const TokenGroup &g) {
  layer.workers.run(g.tokens, [&](int64_t i, int) {
    const Piece &piece = piece_of(g, g.row + i);
    const float *table = layer.rope_row(piece.position + (g.row + i - piece.row));  // [rope_dim]
    for (int64_t h = 0; h < layer.heads; ++h) rope(layer.q + (i * layer.heads + h) * layer.ld_q(), table, layer.rope_dim);
  });
}

}  // namespace FLASHMLA_NS
}  // namespace flashmla
