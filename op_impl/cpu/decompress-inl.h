// Keys of one head from the latent, for the paths where W_UK does not move to the query (rope_mode full, and many new tokens).
#pragma once

#include "op_impl/cpu/kv_tile-inl.h"
#include "op_impl/cpu/prolog-inl.h"

namespace flashmla {
namespace FLASHMLA_NS {

static PackedWeight stored_w_uk(const Layer &layer, int64_t h) { return {layer.args.w_uk, h, 1, layer.rank, layer.d_n}; }

// Panels [p0, p1) of a head's W_UK as float32 panels along d_n. It is stored as the absorbed path reads it, [d_n][rank] in panels along rank.
static void transpose_w_uk(const Layer &layer, int64_t h, int64_t p0, int64_t p1, float *w_uk /* packed [d_n, rank] */, int thread) {
  const PackedWeight from = stored_w_uk(layer, h);
  const PackedWeight to = {{w_uk, kFloat32}, 0, 1, layer.d_n, layer.rank};
  float *line = layer.gemm.wide(thread);  // [kPanel]
  for (int64_t p = p0; p < p1; ++p) {
    const int64_t first = from.column(p), count = layer.rank - first < from.width(p) ? layer.rank - first : from.width(p);
    for (int64_t q = 0; q < to.panels(); ++q) {
      const int64_t width = to.width(q);
      for (int64_t i = 0; i < width; ++i) {
        const int64_t n = to.column(q) + i;
        if (n < layer.d_n) widen_any(line, from.data, from.offset(p) + n * from.width(p), count); else zero_row(line, count);
        float *dst = w_uk + to.offset(q) + first * width + i;  // [count, width], one column
        for (int64_t r = 0; r < count; ++r) dst[r * width] = line[r];
      }
    }
  }
}

// k [n, ld_q] = [c W_UK | k_pe], or c W_UK rotated over the whole head when rope_mode is full, for keys first .. first + n.
static void decompress_keys(const Layer &layer, const float *w_uk /* packed [d_n, rank] */, const float *c /* [n, ldc] */, int64_t ldc,
                            int64_t first, int64_t n, float *k /* [n, ld_q] */, int thread) {
  const GemmJob up = {c, ldc, n, {{w_uk, kFloat32}, 0, 1, layer.d_n, layer.rank}, 0, layer.rank, k, layer.ld_q(), false, nullptr};
  gemm_all(up, layer.gemm, thread);
  for (int64_t j = 0; j < n; ++j) {
    float *row = k + j * layer.ld_q();  // [ld_q]
    if (layer.rope_full) rope(row, layer.rope_row(first + j), layer.rope_dim);
    else copy_row(row + layer.d_n, c + j * ldc + layer.rank, layer.d_r);
  }
}

// Tiles of the value-absorbed path: K of the request's head decompressed and rotated in place, V the latent.
template <typename Latent>
class DecompressedStream {
 public:
  // latent: a TileStream.
  DecompressedStream(const Layer &layer, const float *w_uk /* [heads] of packed [d_n, rank] */, const Latent &latent,
                     float *k /* [kv_tile, ld_q] */, int thread)
      : layer_(layer), w_uk_(w_uk), latent_(latent), k_(k), thread_(thread) {}

  KvTile<float> load(const TileKeys &now, const TileKeys &next, const TileKeys &after) {
    KvTile<float> tile = latent_.load(shared(now), shared(next), shared(after));
    decompress_keys(layer_, w_uk_ + now.kv_head * packed_size(1, layer_.d_n, layer_.rank), tile.v, tile.ldv, now.first, now.n, k_, thread_);
    tile.k = k_;
    tile.ldk = layer_.ld_q();
    return tile;
  }
  decltype(auto) in_qk() { return latent_.in_qk(); }
  decltype(auto) in_pv() { return latent_.in_pv(); }
  void finish() { latent_.finish(); }

 private:
  static TileKeys shared(TileKeys keys) {  // all heads read the one latent
    keys.kv_head = 0;
    return keys;
  }
  const Layer &layer_;
  const float *w_uk_;  // [heads] of packed [d_n, rank]
  Latent latent_;
  float *k_;           // [kv_tile, ld_q]
  const int thread_;
};

}  // namespace FLASHMLA_NS
}  // namespace flashmla
