// Where the tiles of a range begin and end. Every kernel takes its tails from here, so no inner loop decides them.
#pragma once

#include <cstdint>

#include "tiling/tiling_data.h"

namespace flashmla {

// How one sequence of s_q new tokens and s_kv keys (the new ones included) is cut; a function of its own lengths alone:
// neither the batch nor the number of threads or cores enters. hidden_size 0 (the bare attention operator: no
// projections) and s_q or s_kv 0 are legal; the bare operator always takes the absorbed path.
SeqTiling make_seq_tiling(const Problem& problem, const TilingData& tiling, int64_t s_q, int64_t s_kv);

struct Tile {
  int64_t start;
  int64_t length;
};

// Tiles that cover [start, start + length): all of `tile` elements, the last one of what is left.
inline int64_t tile_count(int64_t length, int64_t tile) { return length <= 0 ? 0 : (length + tile - 1) / tile; }

inline Tile tile_at(int64_t start, int64_t length, int64_t tile, int64_t index) {
  int64_t left = length - index * tile;
  return {start + index * tile, left < tile ? left : tile};
}

// Keys of KV split `split` of a sequence of s_kv keys; never empty when s_kv > 0 and split < num_splits.
inline Tile split_at(const SeqTiling& seq, int64_t s_kv, int32_t split) {
  return tile_at(0, s_kv, seq.split_len, split);
}

// Causal cut of a range of keys for rows whose tokens stand at positions first_pos..last_pos: keys
// [start, unmasked_end) are seen by every row, [unmasked_end, end) by some (the diagonal), those from end on by none.
struct CausalRange {
  int64_t start;
  int64_t unmasked_end;
  int64_t end;
};

inline CausalRange causal_range(Tile keys, int64_t first_pos, int64_t last_pos) {
  int64_t limit = keys.start + keys.length;
  int64_t end = last_pos + 1 < limit ? last_pos + 1 : limit;
  if (end < keys.start) end = keys.start;
  int64_t unmasked = first_pos + 1 < end ? first_pos + 1 : end;
  if (unmasked < keys.start) unmasked = keys.start;
  return {keys.start, unmasked, end};
}

}  // namespace flashmla
