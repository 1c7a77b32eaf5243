#include "op_impl/cpu/check.h"

#include <algorithm>
#include <mutex>
#include <vector>

namespace flashmla {
namespace {

std::string text(int64_t n) { return std::to_string(n); }

// The blocks that hold a sequence's first `keys` rows must be named by its table and lie inside the cache.
std::string check_blocks(const CacheGeometry &cache, int64_t seq, const int32_t *blocks, int64_t max_blocks, int64_t keys) {
  const int64_t needed = (keys + cache.block_size - 1) / cache.block_size;
  if (needed > max_blocks)
    return "sequence " + text(seq) + " needs " + text(needed) + " blocks for " + text(keys) + " tokens, its block_table row has " +
           text(max_blocks);
  for (int64_t i = 0; i < needed; ++i)
    if (blocks[i] < 0 || blocks[i] >= cache.num_blocks)
      return "block_table[" + text(seq) + ", " + text(i) + "] is " + text(blocks[i]) + ", needed for " + text(keys) +
             " tokens; the cache has blocks 0 to " + text(cache.num_blocks - 1);
  return "";
}

// Rows [begin, end) of a block that a sequence writes.
struct Written {
  int32_t block;
  int64_t begin, end;
  int64_t seq;
};

std::string shared_row(const Written &w, int64_t row, int64_t other, const char *what) {
  return "sequence " + text(w.seq) + " writes row " + text(row) + " of block " + text(w.block) + ", which sequence " + text(other) +
         " " + what + " in the same call; blocks may be shared only as long as they are read";
}

// No cache row may be written twice, nor be written for one token and read as another's.
std::string check_shared_rows(const CacheGeometry &cache, const Batch &batch) {
  std::vector<Written> written;
  for (int64_t b = 0; b < batch.size; ++b) {
    const int64_t begin = batch.context_lens[b], end = begin + batch.q_seq_lens[b];
    for (int64_t p = begin; p < end;) {
      const int64_t offset = p % cache.block_size, count = std::min(cache.block_size - offset, end - p);
      written.push_back({batch.block_table[b * batch.max_blocks + p / cache.block_size], offset, offset + count, b});
      p += count;
    }
  }
  std::sort(written.begin(), written.end(), [](const Written &a, const Written &b) {
    return a.block != b.block ? a.block < b.block : a.begin != b.begin ? a.begin < b.begin : a.seq < b.seq;
  });
  for (size_t i = 1; i < written.size(); ++i) {
    const Written &a = written[i - 1], &b = written[i];
    if (a.block == b.block && b.begin < a.end) return shared_row(b, b.begin, a.seq, "writes too");
  }
  // A block that is written may also be read below its written rows. One byte a block keeps the common case, that no
  // other table names it, at one look-up a block.
  std::vector<char> is_written(cache.num_blocks, 0);
  for (const Written &w : written) is_written[w.block] = 1;
  for (int64_t b = 0; b < batch.size; ++b) {
    if (batch.q_seq_lens[b] == 0) continue;
    const int64_t context = batch.context_lens[b];
    for (int64_t i = 0; i * cache.block_size < context; ++i) {
      const int32_t block = batch.block_table[b * batch.max_blocks + i];
      if (!is_written[block]) continue;
      const int64_t read_end = std::min(cache.block_size, context - i * cache.block_size);
      auto w = std::lower_bound(written.begin(), written.end(), block, [](const Written &x, int32_t id) { return x.block < id; });
      if (w != written.end() && w->block == block && w->begin < read_end) return shared_row(*w, w->begin, b, "reads");
    }
  }
  return "";
}

std::string check_geometry(const CacheGeometry &cache, int64_t batch, int64_t max_blocks) {
  if (cache.num_blocks < 0 || cache.block_size < 1)
    return "the cache has " + text(cache.num_blocks) + " blocks of " + text(cache.block_size) + " tokens, expected blocks of 1 token or more";
  if (batch < 0 || max_blocks < 0) return "block_table has shape [" + text(batch) + ", " + text(max_blocks) + "]";
  return "";
}

std::mutex error_mutex;
std::string &error_text() {
  static std::string *text = new std::string;
  return *text;
}

}  // namespace

std::string check_batch(const CacheGeometry &cache, const Batch &batch, const BatchLimits &limits) {
  const std::string geometry = check_geometry(cache, batch.size, batch.max_blocks);
  if (!geometry.empty()) return geometry;
  int64_t tokens = 0;
  for (int64_t b = 0; b < batch.size; ++b) {
    const int64_t s_q = batch.q_seq_lens[b], context = batch.context_lens[b];
    if (s_q < 0) return "q_seq_lens[" + text(b) + "] is " + text(s_q) + ", expected 0 or more";
    if (context < 0) return "context_lens[" + text(b) + "] is " + text(context) + ", expected 0 or more";
    if (limits.tokens_per_seq >= 0 && s_q != limits.tokens_per_seq)
      return "q_seq_lens[" + text(b) + "] is " + text(s_q) + ", but hidden_states [B, S, hidden] has S = " + text(limits.tokens_per_seq) +
             "; sequences of different lengths go packed, as [T, hidden]";
    tokens += s_q;
  }
  if (limits.num_tokens >= 0 && tokens != limits.num_tokens)
    return "q_seq_lens sum to " + text(tokens) + ", but hidden_states holds " + text(limits.num_tokens) + " tokens";
  for (int64_t b = 0; b < batch.size; ++b) {
    if (batch.q_seq_lens[b] == 0) continue;
    const int64_t keys = int64_t{batch.context_lens[b]} + batch.q_seq_lens[b];
    if (limits.max_positions >= 0 && keys > limits.max_positions)
      return "sequence " + text(b) + " reaches position " + text(keys - 1) + ", the RoPE table ends at " + text(limits.max_positions - 1) +
             "; raise max_position_embeddings (longrope: set use_long_factors)";
    if (limits.index_topk > 0 && keys > limits.index_topk)
      return "sequence " + text(b) + " has " + text(keys) + " keys, more than index_topk = " + text(limits.index_topk) +
             "; beyond that the sparse indexer selects keys, which is not supported";
    const std::string error = check_blocks(cache, b, batch.block_table + b * batch.max_blocks, batch.max_blocks, keys);
    if (!error.empty()) return error;
  }
  return check_shared_rows(cache, batch);
}

std::string check_cache_seqlens(const CacheGeometry &cache, int64_t batch, int64_t max_blocks, const int32_t *block_table,
                                const int32_t *cache_seqlens) {
  const std::string geometry = check_geometry(cache, batch, max_blocks);
  if (!geometry.empty()) return geometry;
  for (int64_t b = 0; b < batch; ++b) {
    if (cache_seqlens[b] < 0) return "cache_seqlens[" + text(b) + "] is " + text(cache_seqlens[b]) + ", expected 0 or more";
    const std::string error = check_blocks(cache, b, block_table + b * max_blocks, max_blocks, cache_seqlens[b]);
    if (!error.empty()) return error;
  }
  return "";
}

// Copied character by character: under the framework's ABI a std::string shares its buffer with its copies, and would be
// read beyond the lock.
const char *last_error() {
  thread_local std::string copy;  // the caller's own: another thread may fail while it is read
  std::lock_guard<std::mutex> lock(error_mutex);
  copy.assign(error_text().data(), error_text().size());
  return copy.c_str();
}

void set_last_error(const std::string &text) {
  std::lock_guard<std::mutex> lock(error_mutex);
  error_text().assign(text.data(), text.size());
}

}  // namespace flashmla
