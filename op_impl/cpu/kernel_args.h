// What the host hands to the kernels of every ISA: plain data, shapes in comments.
#pragma once

#include <cstdint>

#include "op_proto/op_list.h"
#include "tiling/tiling_data.h"

namespace flashmla {

// Elements of one of the three float dtypes that are only read; offsets are in elements.
struct ConstStorage {
  const void *data;  // [elements], as many as the holder's comment says
  int32_t dtype;     // DType
  bool present() const { return data != nullptr; }
};

// The same, written.
struct Storage {
  void *data;        // [elements]
  int32_t dtype;     // DType
  bool present() const { return data != nullptr; }
  operator ConstStorage() const { return {data, dtype}; }
};

// A paged cache: row `slot` of kv head `h` starts at element (slot * h_kv + h) * d, slot = block * block_size + offset.
struct PagedCache {
  Storage data;         // [num_blocks, block_size, h_kv, d]
  int64_t num_blocks;
  int64_t block_size;
  int64_t h_kv;
  int64_t d;
};

// The sequences of one call.
struct Batch {
  int64_t size;                  // B
  int64_t max_blocks;
  const int32_t *block_table;    // [B, max_blocks]
  const int32_t *q_seq_lens;     // [B]
  const int32_t *context_lens;   // [B]
};

// How scores become probabilities.
struct SoftmaxRule {
  float scale;
  bool unified;  // exponentials against phi for all rows, instead of against each row's running maximum
  float phi;
};

struct LayerArgs {
  FlashMLAAttrs attrs;
  int64_t num_tokens;            // T
  int64_t hidden_size;
  Storage hidden;                // [T, hidden]
  PagedCache cache;              // h_kv = 1, d = kv_lora_rank + qk_rope_head_dim
  Batch batch;
  const float *rope_table;       // [rope_positions, rope_dim], row = [cos | sin]
  int64_t rope_positions;
  // packed, as groups of [n, k]; d_q = qk_nope_head_dim + qk_rope_head_dim, r = kv_lora_rank
  Storage w_q;                   // [h_q][d_q, q_lora_rank], or [h_q][d_q, hidden] without low-rank q
  Storage w_kv_a;                // [r + qk_rope_head_dim, hidden]
  Storage w_uk;                  // [h_q][r, qk_nope_head_dim]
  Storage w_uv;                  // [h_q][v_head_dim, r]
  Storage w_o;                   // [hidden, h_q * v_head_dim]
  Storage w_q_a;                 // [q_lora_rank, hidden] or absent
  Storage kv_norm;               // [r]
  Storage q_norm, b_q_a;         // [q_lora_rank] or absent
  Storage b_kv_a;                // [r + qk_rope_head_dim] or absent
  Storage b_o;                   // [hidden] or absent
  Storage residual;              // [T, hidden] or absent
  Storage out;                   // [T, hidden]
  Problem problem;
  TilingData tiling;
};

struct AttendArgs {              // flash_mla_with_kvcache
  Storage q;                     // [B, s_q, h_q, d]
  PagedCache cache;
  int64_t batch, s_q, h_q;
  int64_t max_blocks;
  const int32_t *block_table;    // [B, max_blocks]
  const int32_t *cache_seqlens;  // [B]
  int64_t head_dim_v;
  SoftmaxRule softmax;
  bool causal;
  Storage out;                   // [B, s_q, h_q, head_dim_v]
  float *lse;                    // [B, h_q, s_q]
  Problem problem;
  TilingData tiling;
};

struct MergeArgs {
  int64_t batch, s_q, heads, d;
  Storage out_a, out_b, out;     // [B, s_q, h, d]
  const float *lse_a, *lse_b;    // [B, h, s_q]
  float *lse;                    // [B, h, s_q]
};

// One product with a packed weight, for measuring: C = A W.
struct GemmArgs {
  int64_t rows, groups, n, k;
  const float *a;                // [rows, k]
  ConstStorage w;                // packed [groups][n, k]
  float *c;                      // [rows, groups * round_up(n, kPanelAlign)]
  TilingData tiling;
};

}  // namespace flashmla
