// Keys of one head from the latent, for the paths where W_UK does not move to the query.
#pragma once

#include "op_impl/cpu/prolog-inl.h"

namespace flashmla {
namespace FLASHMLA_NS {

// W_UK of one head as float32 panels along d_n. It is stored as the absorbed path reads it, [d_n][rank] in panels along rank.
static void transpose_w_uk(const Layer &layer, int64_t h, float *w_uk, int thread) {
  const PackedWeight from = {layer.args.w_uk, h, 1, layer.rank, layer.d_n};
  const PackedWeight to = {{w_uk, kFloat32}, 0, 1, layer.d_n, layer.rank};
  float *line = layer.gemm.wide(thread);
  for (int64_t p = 0; p < from.panels(); ++p) {
    const int64_t first = from.column(p), count = layer.rank - first < from.width(p) ? layer.rank - first : from.width(p);
    for (int64_t q = 0; q < to.panels(); ++q) {
      const int64_t width = to.width(q);
      for (int64_t i = 0; i < width; ++i) {
        const int64_t n = to.column(q) + i;
        if (n < layer.d_n) widen_any(line, from.data, from.offset(p) + n * from.width(p), count); else zero_row(line, count);
        float *dst = w_uk + to.offset(q) + first * width + i;
        for (int64_t r = 0; r < count; ++r) dst[r * width] = line[r];
      }
    }
  }
}

// k [n, ld_q] = [c W_UK | k_pe], or c W_UK rotated over the whole head when rope_mode is full, for keys first .. first + n.
static void decompress_keys(const Layer &layer, const float *w_uk /* from transpose_w_uk */, const float *c /* [n, ldc] */, int64_t ldc,
                            int64_t first, int64_t n, float *k, int thread) {
  const GemmJob up = {c, ldc, n, {{w_uk, kFloat32}, 0, 1, layer.d_n, layer.rank}, 0, layer.rank, k, layer.ld_q(), false, nullptr};
  gemm_all(up, layer.gemm, thread);
  for (int64_t j = 0; j < n; ++j) {
    float *row = k + j * layer.ld_q();
    if (layer.rope_full) rope(row, layer.rope_row(first + j), layer.rope_dim);
    else copy_row(row + layer.d_n, c + j * ldc + layer.rank, layer.d_r);
  }
}

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

}  // namespace FLASHMLA_NS
}  // namespace flashmla
