// What the host hands to the kernel: plain data, filled by op_host/make_kernel_data.cc.
#pragma once

#include <cstdint>

#include "tiling/tiling_data.h"

namespace flashmla {

// Byte offsets in the workspace. A buffer that a call does not need has the offset of its neighbour.
struct WorkspaceLayout {
  int64_t zeros;         // [16, kZeroColumns] zeros: rows that fill up a fractal come from here
  int64_t kv_raw;        // [T, ld_kv] float32: x W_kva
  int64_t q_a_raw;       // [T, ld_q_a] float32: x W_qa
  int64_t q_a[2];        // [T, ld_q_a]: normed; as all with [2], what rounding left off stands in the second one, right behind
  int64_t q[2];          // [T, heads, ld_q]
  int64_t q_latent;      // [T, heads, ld_latent] float32: q_nope W_UK
  int64_t query;         // [T, heads, ld_query]: [latent | pe], divided by its row_scale
  int64_t row_scale;     // [T, heads] float32
  int64_t partial_o;     // [2 * cores, rows, ld_out] float32: outputs by split, not yet divided by their sum
  int64_t partial_state; // [2 * cores, 2, rows] float32: row maximum, row sum
  int64_t o_latent[2];   // [heads, parts, T, rank]
  int64_t o_padded;      // [T, heads, ld_v], where v_head_dim is no multiple of 16
  int64_t o;             // [T, heads * d_v]
  int64_t k_raw;         // [heads of a round][keys, d_n padded] float32, where K is rotated or d_n no multiple of 16
  int64_t k_expanded;    // [heads of a round][keys, ld_q]
  int64_t v_expanded;    // [heads of a round][keys, ld_v]
  int64_t total_bytes;
};

// How a product is cut: the block of its result that a core takes at a time; the columns of it whose weights are a buffer of L1, and K of such a step.
struct ProductBlocks {
  int32_t rows, columns, piece, step;
};

// Hidden states, queries, W_UK, W_UV, W_o; keys that are decompressed.
struct ProductTiling {
  ProductBlocks hidden, query, absorb, up, output, keys;
};

struct KernelData {
  int32_t hidden, heads, rank, d_n, d_r, d_v, q_rank;
  int32_t rope_mode;     // RopeMode
  int32_t path;          // AttentionPath: kAbsorbed or kExpanded
  int32_t cores;         // AICs of the launch
  int64_t num_tokens;    // T
  int64_t batch;         // B
  int64_t max_blocks;
  CacheLayout cache;
  int32_t has_b_q_a, has_b_kv_a, has_b_o, has_residual;
  float q_norm_eps, kv_norm_eps, q_lora_scale, kv_lora_scale, softmax_scale;

  AscendBlocks blocks;   // of the path
  int32_t parts;         // 2: what stands between two products is kept as two 16-bit parts, so that it is rounded once, at the end; 1: as one
  int32_t min_tiles;     // KV tiles that a core takes at least
  ProductTiling products;
  int32_t round_heads;   // expanded: heads whose K and V the workspace holds
  int64_t round_keys;    // expanded: keys of all sequences together that it has room for, per head
  WorkspaceLayout workspace;
};

}  // namespace flashmla
