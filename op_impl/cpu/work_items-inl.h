// The rows that attend to one sequence, and the work items that they are cut into: a row chunk against a KV split.
#pragma once

#include "op_impl/cpu/kv_tile-inl.h"
#include "tiling/tiles.h"

namespace flashmla {
namespace FLASHMLA_NS {

// Rows that attend to one sequence: (token, head) pairs of one kv head. Split s of row i leaves its unnormalised output at
// o[s * rows + i], its maximum and sum at m[s * rows + i] and l[s * rows + i].
struct AttentionRequest {
  const int32_t *blocks;        // [max_blocks]: the sequence's row of the block table
  int64_t part, kv_head;        // part: which of the caller's ranges of tokens
  int64_t rows, s_kv;
  SeqTiling seq;
  int64_t first_item, chunks;   // set by WorkList
  float *o;                     // [num_splits, rows, round_up(d_v, kPanelAlign)]
  float *m, *l;                 // [num_splits, rows]
};

// Room for what the request's splits leave; for one split where there are no keys and nothing is left.
static void alloc_outputs(Scratch &scratch, AttentionRequest &r, int64_t ldo) {
  const int64_t split_rows = r.rows * (r.seq.num_splits > 0 ? r.seq.num_splits : 1);
  r.o = scratch.alloc<float>(split_rows * ldo);
  r.m = scratch.alloc<float>(split_rows);
  r.l = scratch.alloc<float>(split_rows);
}

// One row chunk of a request against one KV split.
struct WorkItem {
  const AttentionRequest *request = nullptr;  // nullptr: no more work
  int64_t split, first_row, rows;
  int64_t begin, end;                         // keys
  TileKeys tile(int64_t first, int64_t kv_tile) const {
    if (request == nullptr || first >= end) return {};
    return {request->blocks, request->kv_head, first, tile_at(first, end - first, kv_tile, 0).length};
  }
};

// Hands out the items of all requests. A worker knows its next item before it is done with the one at hand.
class WorkList {
 public:
  WorkList(AttentionRequest *requests /* [count] */, int64_t count, const TilingData &t) : requests_(requests), count_(count), t_(t) {
    for (int64_t i = 0; i < count; ++i) {
      AttentionRequest &r = requests[i];
      r.chunks = (r.rows + t.absorbed_rows - 1) / t.absorbed_rows;
      r.first_item = items_;
      items_ += r.s_kv > 0 ? r.chunks * r.seq.num_splits : 0;
      const int64_t rows = r.rows < t.absorbed_rows ? r.rows : t.absorbed_rows;
      if (rows > rows_max_) rows_max_ = rows;
    }
  }
  int64_t rows_max() const { return rows_max_; }

  WorkItem claim() {
    const int64_t item = __atomic_fetch_add(&next_, 1, __ATOMIC_RELAXED);
    if (item >= items_) return {};
    int64_t lo = 0, hi = count_ - 1;  // the last request that starts at or before the item
    while (lo < hi) {
      const int64_t mid = (lo + hi + 1) / 2;
      if (requests_[mid].first_item <= item) lo = mid; else hi = mid - 1;
    }
    const AttentionRequest &r = requests_[lo];
    const int64_t split = (item - r.first_item) % r.seq.num_splits, row = (item - r.first_item) / r.seq.num_splits * t_.absorbed_rows;
    const Tile keys = split_at(r.seq, r.s_kv, int32_t(split));
    return {&r, split, row, r.rows - row < t_.absorbed_rows ? r.rows - row : t_.absorbed_rows, keys.start, keys.start + keys.length};
  }

 private:
  const AttentionRequest *requests_;  // [count]
  int64_t count_;
  const TilingData &t_;
  int64_t items_ = 0, rows_max_ = 1, next_ = 0;
};

// The tiles of an item, and behind them those of the worker's next item, which is claimed when it comes into sight.
template <typename Stream>
class ItemTiles {
 public:
  ItemTiles(WorkList &list, Stream stream, int64_t kv_tile) : list_(list), stream_(stream), kv_tile_(kv_tile), next_(list.claim()) {}

  // The next item, or one without a request.
  const WorkItem &advance() {
    item_ = next_;
    claimed_ = false;
    return item_;
  }
  auto load(int64_t first, int64_t n) {
    const TileKeys now = {item_.request->blocks, item_.request->kv_head, first, n};
    if (!claimed_ && first + n + kv_tile_ >= item_.end) claim();
    const TileKeys one = first + n < item_.end ? item_.tile(first + n, kv_tile_) : next_.tile(next_.begin, kv_tile_);
    const TileKeys two = first + n + kv_tile_ < item_.end ? item_.tile(first + n + kv_tile_, kv_tile_)
                         : first + n < item_.end          ? next_.tile(next_.begin, kv_tile_)
                                                          : next_.tile(next_.begin + kv_tile_, kv_tile_);
    return stream_.load(now, one, two);
  }
  void leave() {  // the item may have ended before its last tile, or had none
    if (!claimed_) claim();
  }
  decltype(auto) in_qk() { return stream_.in_qk(); }
  decltype(auto) in_pv() { return stream_.in_pv(); }
  void finish() { stream_.finish(); }

 private:
  void claim() {
    next_ = list_.claim();
    claimed_ = true;
  }
  WorkList &list_;
  Stream stream_;
  const int64_t kv_tile_;
  WorkItem item_, next_;
  bool claimed_ = false;
};

}  // namespace FLASHMLA_NS
}  // namespace flashmla
