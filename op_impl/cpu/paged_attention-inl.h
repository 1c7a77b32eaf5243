// Attention over the paged cache: which rows attend to which keys, and the work items they are cut into.
#pragma once

#include "op_impl/cpu/attend-inl.h"
#include "tiling/tiles.h"

namespace flashmla {
namespace FLASHMLA_NS {

// Rows that attend to one sequence: (token, head) pairs of one kv head. Split s of row i leaves its unnormalised output at
// o[(s * rows + i) * ldo], its maximum and sum at m[s * rows + i] and l[...].
struct AttentionRequest {
  const int32_t *blocks;
  int64_t sequence, kv_head;
  int64_t rows, s_kv;
  SeqTiling seq;
  int64_t first_item, chunks;
  float *o, *m, *l;
};

static inline int64_t split_rows(const AttentionRequest &r) { return r.rows * (r.seq.num_splits > 0 ? r.seq.num_splits : 1); }

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
  WorkList(AttentionRequest *requests, int64_t count, const TilingData &t) : requests_(requests), count_(count), t_(t) {
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
  const AttentionRequest *requests_;
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
  KvTile load(int64_t first, int64_t n) {
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

// Runs all items. make_stream(thread) gives a worker's tiles, load_query(request, row, buffer) a pointer to the row's [d_qk]
// float32 query, limit(request, row) the number of keys it sees.
template <typename MakeStream, typename LoadQuery, typename Limit>
static void attend_requests(Workers &workers, AttentionRequest *requests, int64_t count, int64_t d_qk, int64_t d_v, const SoftmaxRule &rule,
                            const TilingData &t, const MakeStream &make_stream, const LoadQuery &load_query, const Limit &limit) {
  const int64_t ldo = round_up(d_v, kPanelAlign);
  WorkList list(requests, count, t);
  Scratch &scratch = workers.scratch();
  RowChunk *chunks = scratch.alloc<RowChunk>(workers.threads());
  float *queries = scratch.alloc<float>(workers.threads() * d_qk);
  for (int i = 0; i < workers.threads(); ++i) chunks[i] = make_row_chunk(scratch, list.rows_max(), d_qk, d_v, t);
  workers.run(workers.threads(), [&](int64_t, int thread) {
    RowChunk &chunk = chunks[thread];
    ItemTiles<decltype(make_stream(thread))> tiles(list, make_stream(thread), t.kv_tile);
    const AttentionRequest *packed = nullptr;  // whose queries the chunk holds, from which row on
    int64_t packed_row = 0, packed_rows = 0;
    for (WorkItem item = tiles.advance(); item.request != nullptr; item = tiles.advance()) {
      const AttentionRequest &r = *item.request;
      const int64_t state = item.split * r.rows + item.first_row;
      const auto run_rows = [&](int64_t first, int64_t rows, bool unified) {
        chunk.pack = r.seq.qk_dim_pack;
        set_rows(chunk, rows, r.o + (state + first) * ldo, ldo, false);
        chunk.unified = unified;
        chunk.phi = rule.phi;
        for (int64_t i = 0; i < rows; ++i) set_state(chunk, i, limit(r, item.first_row + first + i), kMinusInf, 0.0f);
        if (packed != &r || packed_row != item.first_row + first || packed_rows != rows)
          set_queries(chunk, rule.scale, [&](int64_t i) { return load_query(r, item.first_row + first + i, queries + thread * d_qk); });
        packed = &r;
        packed_row = item.first_row + first;
        packed_rows = rows;
        attend(chunk, item.begin, item.end, t.kv_tile, tiles);
        if (!chunk.started)
          for (int64_t i = 0; i < rows; ++i) zero_row(chunk.o + i * ldo, ldo);
        for (int64_t i = 0; i < rows; ++i) {
          r.m[state + first + i] = unified && in_window(chunk, i) ? rule.phi : chunk.m[i];
          r.l[state + first + i] = unified && !in_window(chunk, i) ? -1.0f : chunk.l[i];
        }
      };
      run_rows(0, item.rows, rule.unified);
      for (int64_t i = 0; rule.unified && i < item.rows; ++i)  // a row that left the window, and that row alone
        if (r.l[state + i] == -1.0f) run_rows(i, 1, false);
      tiles.leave();
    }
  });
}

}  // namespace FLASHMLA_NS
}  // namespace flashmla
