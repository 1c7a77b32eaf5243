// What the CPU kernel holds: the tiles of each path, and the scratch around them.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "op_proto/op_list.h"
#include "tiling/int_math.h"
#include "tiling/tiling.h"

namespace flashmla {

constexpr int64_t kColumnAlign = kPanelAlign;  // rows of float32 start where those of the packed panels do
constexpr int64_t kQkDimPack = 4;     // elements of the head dimension that a row has in a vector of QK

struct Matrix {
  const char* name;
  int64_t rows, cols;
  int64_t element_bytes = 4;  // float32; 8: int64
  int32_t copies = 1;         // 2: the next one is made ready while this one is at work
  int64_t bytes() const { return copies * element_bytes * rows * cols; }
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

// What a thread works on in a pass of `rows` rows over KV tiles. Absorbed: K is the latent with k_pe, and V is part of it;
// value-absorbed: K of a head stands beside the latent; expanded: K and V of a head stand in its chunk.
inline std::array<Matrix, 8> pass_tiles(const Problem& p, int32_t path, int64_t rows, int64_t kv_tile, int64_t lanes) {
  const int64_t d_k = path == kAbsorbed ? latent_width(p) : d_qk(p);
  const int64_t d_v = path == kExpanded ? p.v_head_dim : p.kv_lora_rank;
  const int64_t score_rows = int_math::align_up(rows, lanes) + lanes;  // the last row group stores whole vectors
  // The cache's tiles come in two buffers: the next one is widened while one is at work. K and V of a chunk stand where they are.
  return {{{path == kAbsorbed ? "kv tile" : "k tile", kv_tile, aligned(d_k), 4, path == kAbsorbed ? 2 : 1},
           {path == kExpanded ? "v tile" : "latent tile", path == kAbsorbed ? 0 : kv_tile, aligned(d_v), 4, path == kExpanded ? 1 : 2},
           {"packed q rows", int_math::align_up(rows, lanes / kQkDimPack), int_math::align_up(d_k, lanes)},
           {"q row to pack", 1, d_k},
           {"scores", kv_tile, score_rows},
           {"maximum, sum, rescale", 3, score_rows},
           {"keys a row sees", rows, 1, 8},
           {"output rows", rows, aligned(d_v)}}};
}

// What decompressing keys for the expanded path needs on a thread beside L1: the latent rows, and the K and V that they become.
inline std::array<Matrix, 3> decompression_tiles(const Problem& p, int64_t keys) {
  return {{{"latents", keys, aligned(latent_width(p))}, {"k of a head", keys, aligned(d_qk(p))}, {"v of a head", keys, aligned(p.v_head_dim)}}};
}

// Where V is absorbed: outputs of a head, joined over the splits, and what W_UV makes of them.
inline std::array<Matrix, 2> up_projection_tiles(const Problem& p, int64_t tokens) {
  return {{{"latent outputs", tokens, aligned(p.kv_lora_rank)}, {"outputs of a head", tokens, aligned(p.v_head_dim)}}};
}

// W_UK of all heads as the value-absorbed path decompresses with it: K of every head is needed at once.
inline Matrix transposed_w_uk(const Problem& p) {
  return {"W_UK of all heads", p.num_heads * aligned(p.qk_nope_head_dim), p.kv_lora_rank};
}

// Scratch of a group of tokens, all threads together; one token's is asked for to choose the size of a group.
std::vector<Matrix> absorbed_scratch(const Problem& p, int64_t tokens);
std::vector<Matrix> expanded_scratch(const Problem& p, const TilingData& t, int64_t tokens);

// Outputs of the absorbed paths by KV split.
Matrix split_outputs(const Problem& p, const TilingData& t);

}  // namespace flashmla
