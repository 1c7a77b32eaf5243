// What only the data can tell: block ids, lengths, rows written twice. Run before a kernel writes a byte.
#pragma once

#include <cstdint>
#include <string>

#include "op_impl/cpu/kernel_args.h"

namespace flashmla {

struct CacheGeometry {
  int64_t num_blocks;
  int64_t block_size;
};

struct BatchLimits {
  int64_t num_tokens = -1;      // rows of hidden_states, -1: not checked
  int64_t tokens_per_seq = -1;  // S of [B, S, hidden], -1: packed tokens
  int64_t max_positions = -1;   // rows of the rope table, -1: not checked
  int64_t index_topk = 0;       // keys up to which a sparse indexer selects all, 0: no indexer
};

// "" when the call is legal, else the text of the error.
std::string check_batch(const CacheGeometry &cache, const Batch &batch, const BatchLimits &limits);

// The same for flash_mla_with_kvcache.
std::string check_cache_seqlens(const CacheGeometry &cache, int64_t batch, int64_t max_blocks,
                                const int32_t *block_table /* [batch, max_blocks] */, const int32_t *cache_seqlens /* [batch] */);

// The text of the last failure in the process, "" before any.
const char *last_error();
void set_last_error(const std::string &text);

}  // namespace flashmla
