// What the CPU kernel holds: the tiles of each path, and the scratch around them. All of it is float32.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "tiling/int_math.h"
#include "tiling/tiling.h"

namespace flashmla {

constexpr int64_t kColumnAlign = 16;  // rows of float32 start at multiples of this, as the packed panels do

struct Matrix {
  const char* name;
  int64_t rows, cols;
  int64_t bytes() const { return 4 * rows * cols; }
};

template <typename Matrices>
int64_t total_bytes(const Matrices& matrices) {
  int64_t bytes = 0;
  for (const Matrix& matrix : matrices) bytes += matrix.bytes();
  return bytes;
}

inline int64_t aligned(int64_t columns) { return int_math::align_up(columns, kColumnAlign); }
inline int64_t latent_width(const Problem& p) { return p.kv_lora_rank + p.qk_rope_head_dim; }
inline int64_t d_qk(const Problem& p) { return p.qk_nope_head_dim + p.qk_rope_head_dim; }

// Softmax state of a row: maximum, sum, and a 64-bit number of keys.
constexpr int64_t kStateFloats = 4;

// What a thread works on in a pass over KV tiles, absorbed: V is the first kv_lora_rank columns of the KV tile.
inline std::array<Matrix, 5> absorbed_tiles(const Problem& p, int64_t rows, int64_t kv_tile, int64_t lanes) {
  return {{{"kv tile", kv_tile, aligned(latent_width(p))},
           {"q rows", rows, latent_width(p)},
           {"output rows", rows, aligned(p.kv_lora_rank)},
           {"scores of a lane group", kv_tile, lanes},
           {"softmax state", rows, kStateFloats}}};
}

// The same for one query tile of one head, expanded.
inline std::array<Matrix, 6> expanded_tiles(const Problem& p, int64_t q_tile, int64_t kv_tile, int64_t lanes) {
  return {{{"k tile", kv_tile, aligned(d_qk(p))},
           {"v tile", kv_tile, aligned(p.v_head_dim)},
           {"q tile", q_tile, d_qk(p)},
           {"output tile", q_tile, aligned(p.v_head_dim)},
           {"scores of a lane group", kv_tile, lanes},
           {"softmax state", q_tile, kStateFloats}}};
}

// What decompressing a tile of keys needs on a thread beside L1: the latent rows, and the K and V tile that they become.
inline std::array<Matrix, 3> decompression_tiles(const Problem& p, int64_t kv_tile) {
  return {{{"latent tile", kv_tile, aligned(latent_width(p))},
           {"k tile", kv_tile, aligned(d_qk(p))},
           {"v tile", kv_tile, aligned(p.v_head_dim)}}};
}

// Scratch of a group of tokens, all threads together; one token's is asked for to choose the size of a group.
std::vector<Matrix> absorbed_scratch(const Problem& p, int64_t tokens);
std::vector<Matrix> expanded_scratch(const Problem& p, const TilingData& t, int64_t tokens);

// Outputs of the absorbed path by KV split: this many bytes cut a group of tokens short, but one token may take more.
constexpr int64_t kSplitOutputBytes = 32 * int_math::kMiB;
Matrix split_outputs(const Problem& p, const TilingData& t);

}  // namespace flashmla
