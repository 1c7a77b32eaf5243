// The operators' arguments as plain lists: no framework and no standard library, so that kernels of every ISA and the
// AscendC side read them too.
#pragma once

#include <cstdint>

#include "op_proto/op_types.h"

namespace flashmla {

// X(name, required): the order is the order of the arguments. Required ones stand first, because MindSpore's shape
// inference is handed the list with the absent ones removed.
#define FLASH_MLA_INPUTS(X)                                                                                        \
  X(hidden_states, 1) X(kv_cache, 1) X(block_table, 1) X(q_seq_lens, 1) X(context_lens, 1) X(rope_table, 1)        \
  X(w_q, 1) X(w_kv_a, 1) X(kv_norm, 1) X(w_uk, 1) X(w_uv, 1) X(w_o, 1)                                             \
  X(w_q_a, 0) X(q_norm, 0) X(b_q_a, 0) X(b_kv_a, 0) X(b_o, 0) X(residual, 0)
#define FLASH_MLA_OUTPUTS(X) X(out, 1)
// X(name, type): int is int64, float is float32.
#define FLASH_MLA_ATTRS(X)                                                                                         \
  X(num_heads, int) X(kv_lora_rank, int) X(qk_nope_head_dim, int) X(qk_rope_head_dim, int) X(v_head_dim, int)      \
  X(q_lora_rank, int) X(rope_mode, int) X(q_norm_eps, float) X(kv_norm_eps, float) X(q_lora_scale, float)          \
  X(kv_lora_scale, float) X(softmax_scale, float) X(index_topk, int) X(unified_max, int) X(phi, float)            \
  X(deterministic, int)

#define FLASH_MLA_WITH_KVCACHE_INPUTS(X) X(q, 1) X(k_cache, 1) X(block_table, 1) X(cache_seqlens, 1)
#define FLASH_MLA_WITH_KVCACHE_OUTPUTS(X) X(out, 1) X(lse, 1)
#define FLASH_MLA_WITH_KVCACHE_ATTRS(X) X(head_dim_v, int) X(softmax_scale, float) X(default_scale, int) X(causal, int) X(unified_max, int) X(phi, float)

#define MERGE_ATTENTION_STATES_INPUTS(X) X(out_a, 1) X(lse_a, 1) X(out_b, 1) X(lse_b, 1)
#define MERGE_ATTENTION_STATES_OUTPUTS(X) X(out, 1) X(lse, 1)
#define MERGE_ATTENTION_STATES_ATTRS(X)

#define FLASHMLA_INPUT_INDEX(name, required) name,
struct FlashMLAIn { enum : int { FLASH_MLA_INPUTS(FLASHMLA_INPUT_INDEX) count, first_optional = w_q_a }; };
struct FlashMLAWithKVCacheIn { enum : int { FLASH_MLA_WITH_KVCACHE_INPUTS(FLASHMLA_INPUT_INDEX) count }; };
struct MergeAttentionStatesIn { enum : int { MERGE_ATTENTION_STATES_INPUTS(FLASHMLA_INPUT_INDEX) count }; };
#undef FLASHMLA_INPUT_INDEX

#define FLASHMLA_ATTR_TYPE_int int64_t
#define FLASHMLA_ATTR_TYPE_float float
#define FLASHMLA_ATTR_FIELD(name, type) FLASHMLA_ATTR_TYPE_##type name;
struct FlashMLAAttrs { FLASH_MLA_ATTRS(FLASHMLA_ATTR_FIELD) };
struct FlashMLAWithKVCacheAttrs { FLASH_MLA_WITH_KVCACHE_ATTRS(FLASHMLA_ATTR_FIELD) };
#undef FLASHMLA_ATTR_FIELD

// Weights are packed by panels of this many outputs, [K][panel]; the last panel of a group is narrower, a multiple of
// kPanelAlign. The layout belongs to the contract and not to an ISA.
inline constexpr int64_t kPanel = 64;
inline constexpr int64_t kPanelAlign = 16;
inline constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
inline constexpr int64_t packed_size(int64_t groups, int64_t n, int64_t k) { return groups * round_up(n, kPanelAlign) * k; }

}  // namespace flashmla
