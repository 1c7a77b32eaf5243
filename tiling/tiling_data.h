// What the tiling decides, as plain data: the CPU kernel, the AscendC kernel and the host tiling read this very struct.
#pragma once

#include <cstdint>

#include "op_proto/op_types.h"

namespace flashmla {

// Absorbed: attention on the latent itself. Expanded: K and V of a head decompressed. Value-absorbed, where RoPE turns the
// whole decompressed key and stands between W_UK and the latent: K of a head decompressed, V the latent.
enum AttentionPath : int32_t { kAbsorbed = 0, kExpanded = 1, kValueAbsorbed = 2 };

// Dimensions of the layer and of one call; lengths are those of the longest sequence.
struct Problem {
  int32_t hidden_size;
  int32_t num_heads;         // h_q
  int32_t num_kv_heads;      // h_kv, 1 for MLA
  int32_t q_lora_rank;       // 0: no low-rank q
  int32_t kv_lora_rank;
  int32_t qk_nope_head_dim;
  int32_t qk_rope_head_dim;
  int32_t v_head_dim;
  int32_t rope_mode;         // RopeMode
  int32_t act_dtype;         // DType of hidden states and output
  int32_t weight_dtype;
  int32_t cache_dtype;
  int32_t block_size;        // tokens a page of the cache holds
  int64_t batch;
  int64_t s_q;               // new tokens of a sequence
  int64_t s_kv;              // keys of a sequence, the new ones included
};

// Where the rows of a KV cache lie, in elements. Key `position` of a sequence is row position % page of its block position / page; the block
// table says which block that is, or, without a table, a sequence is one block: block b is sequence b.
struct CacheLayout {
  int64_t page;              // keys of a block; without a table those that a sequence has room for
  int64_t block_stride;      // from block to block: without a table the sequence stride
  int64_t row_stride;        // from key to key
  int32_t paged;             // 1: blocks come from the table
};

// One attention path on an AI core of an Ascend. rows x kv_tile scores lie in L0C; both AIVs take half of the rows each.
struct AscendBlocks {
  int32_t rows;              // query rows that share a pass over the KV tiles; a multiple of 16
  int32_t kv_tile;           // keys a tile holds; a multiple of 16
  int32_t kv_buffers;        // KV tiles in L1: 2 to 4
  int32_t p_in_rope;         // 1: P takes the place of the rope columns of its KV tile, which QK has used up
  int32_t qk_k_block;        // columns of q and K that one step of QK holds in L0A, L0B
  int32_t pv_k_block;        // keys of P and V that one step of PV holds in L0A, L0B
  int32_t pv_n_block;        // columns of V of that step
  int32_t pv_columns;        // columns of P V that are in L0C at a time
  int32_t ub_columns;        // .. of which so many go to UB at a time
  int32_t l0c_out_buffers;   // copies of them in L0C
  int32_t ub_out_buffers;    // copies of them in UB
  int32_t score_buffers;     // copies of the scores in L0C and UB
  int32_t p_buffers;         // copies of P in UB, and in L1 where it has a place of its own
};

// Which loop a product with a packed weight takes, by its rows M (CPU). Every loop adds the terms of K in one order, so no bit
// depends on it.
struct GemmChoice {
  int32_t n, k;              // of a group of the weight
  int32_t gemv_rows;         // M up to which one register block holds all rows while the weights stream past
  int32_t flat_rows;         // M up to which sums stay in registers over all of K, row block after row block; beyond, K is cut into blocks
};
inline constexpr int32_t kProjections = 6;  // W_q, W_kva, W_qa, W_uk, W_uv, W_o

// Measured choice of the attention path: with at least `context` tokens in the cache, the latent path serves fewer new tokens
// than `expanded_from`.
struct PathPoint {
  int64_t context;
  int64_t expanded_from;
};
inline constexpr int32_t kMostPathPoints = 12;

// Blocks chosen for a layer on a machine. On a CPU the same for every call, so that a sequence's bits never depend on its
// batch; on Ascend the configuration follows the shape of the call.
struct TilingData {
  // attention, all paths
  int32_t kv_tile;           // keys a tile holds
  int32_t qk_row_pack;       // rows (head, token) of a vector or fractal of QK, which pads the rows to a multiple of it
  int32_t qk_dim_pack;       // elements of the head dimension that each of them has there; QK pads to a multiple of it
  int32_t qk_row_group;      // CPU: rows that QK holds in registers together, at the most
  int32_t pv_row_pack;       // rows that PV pads to a multiple of
  int32_t next_tile;         // CPU: 1: the next tile is fetched or widened inside the loops of the one at work
  int32_t few_rows;          // CPU: rows up to which QK has all its lanes on the head dimension of one, and a 16-bit tile is read as it is stored
  // absorbed paths: rows are (token, head) pairs that share the latent, or tokens of one head when only V is absorbed
  int32_t absorbed_rows;     // rows that share one pass over the KV tiles
  int32_t split_min;         // keys a KV split holds at least
  int32_t max_splits;        // splits of one sequence at the most
  int32_t absorbed_tokens;   // tokens whose latent outputs are held between attention and epilog
  int32_t value_absorbed;    // 1: few tokens may take the value-absorbed path (rope_mode full, on a CPU)
  int32_t up_tokens;         // tokens of a head that pass through W_UV together
  int64_t partial_bytes;     // outputs by split that end a group of tokens; one token may take more
  // expanded path: K and V of one head are decompressed chunk by chunk
  int32_t q_tile;            // query tokens of a tile
  int32_t kv_chunk;          // keys of one head that are held decompressed
  int32_t decompress_rows;   // keys of them that a work item decompresses, a multiple of kv_tile
  int32_t token_group;       // query tokens whose softmax state is held at a time
  int32_t head_group;        // heads whose outputs enter W_o together
  // projections
  int32_t gemm_k_block;      // K elements a weight panel block holds
  int32_t gemm_rows;         // activation rows of one work item
  int32_t gemm_panels;       // weight panels of one work item where there are rows enough for all cores
  GemmChoice gemm[kProjections];
  // what a call that need not be deterministic may use; 0 threads: it must be
  int32_t split_threads;     // threads that share a sequence's KV splits
  int32_t path_points;
  PathPoint path[kMostPathPoints];  // by ascending context
  // Ascend; 0 on a CPU. kv_tile, absorbed_rows and q_tile above repeat what the blocks below say.
  int32_t num_cores;         // AICs, each with two AIVs
  int32_t expanded_splits;   // KV splits of a sequence on the expanded path at the most; 1 on a CPU
  AscendBlocks absorbed;
  AscendBlocks expanded;     // rows are tokens of one head
  int32_t workspace_heads;   // expanded: heads whose K and V the workspace holds; the next ones are decompressed meanwhile
  int32_t gemm_base_m;       // projections: block of the result in L0C ..
  int32_t gemm_base_n;
  int32_t gemm_base_k;       // .. and of K in L0A, L0B
  int32_t gemm_step_k;       // K elements in L1 at a time
  int32_t two_part_tokens;   // tokens of a call up to which what stands between two products is kept in two 16-bit parts, and the latent path taken
};

// How one sequence is cut; a pure function of its own lengths.
struct SeqTiling {
  int32_t path;              // AttentionPath
  int32_t num_splits;        // KV splits
  int64_t split_len;         // keys a split holds, a multiple of kv_tile; the last one may hold less
  int32_t qk_dim_pack;       // TilingData's, or on a CPU all lanes where the sequence has hardly any rows
};

}  // namespace flashmla
