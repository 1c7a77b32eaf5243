// Attention over the paged cache: every worker takes item after item and leaves each row's output by split.
#pragma once

#include "op_impl/cpu/attend-inl.h"
#include "op_impl/cpu/work_items-inl.h"

namespace flashmla {
namespace FLASHMLA_NS {

struct AttentionJob {
  AttentionRequest *requests;  // [count]
  int64_t count;
  int64_t d_qk, d_v;
  SoftmaxRule rule;
};

// Calls f with what makes a worker's TileStream, its memory taken from the scratch.
// kAsStored: the tiles as the cache stores them, else as float32.
template <bool kAsStored, typename F>
static void with_tile_streams(Workers &workers, const PagedCache &cache, int64_t d_v, const TilingData &t, const F &f) {
  const int64_t floats = TileStream<float, false>::floats(cache, t.kv_tile);
  float *memory = workers.scratch().alloc<float>(workers.threads() * floats);  // [threads, floats]
  with_dtype(cache.data.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr bool kWiden = !kAsStored && sizeof(T) < sizeof(float);
    f([&](int thread) { return TileStream<T, kWiden>(cache, d_v, t, memory + thread * floats); });
  });
}

// Rows of one request whose queries a chunk holds: the KV splits of a row chunk follow each other and need them packed once.
struct PackedRows {
  const AttentionRequest *request = nullptr;
  int64_t first = 0, rows = 0;
  bool operator==(const PackedRows &o) const { return request == o.request && first == o.first && rows == o.rows; }
};

// One worker's pass over its items.
template <typename Tiles, typename LoadQuery, typename Limit>
class ItemRunner {
 public:
  ItemRunner(const AttentionJob &job, const TilingData &t, RowChunk &chunk, float *query /* [d_qk] */, Tiles &tiles, const LoadQuery &load_query,
             const Limit &limit)
      : job_(job), t_(t), chunk_(chunk), query_(query), tiles_(tiles), load_query_(load_query), limit_(limit) {}

  void run(const WorkItem &item) {
    const AttentionRequest &r = *item.request;
    attend_rows(item, 0, item.rows, job_.rule.unified);
    const float *l = r.l + item.split * r.rows + item.first_row;  // [item.rows]
    for (int64_t i = 0; job_.rule.unified && i < item.rows; ++i)  // a row that left the window, and that row alone
      if (l[i] == kLeftWindow) attend_rows(item, i, 1, false);
  }

 private:
  static constexpr float kLeftWindow = -1.0f;  // in the place of a sum of exponentials, which is never negative

  // Rows [first, first + rows) of the item.
  void attend_rows(const WorkItem &item, int64_t first, int64_t rows, bool unified) {
    const AttentionRequest &r = *item.request;
    const int64_t row = item.first_row + first, state = item.split * r.rows + row, ldo = round_up(job_.d_v, kPanelAlign);
    chunk_.pack = r.seq.qk_dim_pack;
    set_rows(chunk_, rows, r.o + state * ldo, ldo, false);
    chunk_.unified = unified;
    chunk_.phi = job_.rule.phi;
    for (int64_t i = 0; i < rows; ++i) set_state(chunk_, i, limit_(r, row + i), kMinusInf, 0.0f);
    const PackedRows wanted = {&r, row, rows};
    if (!(packed_ == wanted)) set_queries(chunk_, job_.rule.scale, [&](int64_t i) { return load_query_(r, row + i, query_); });
    packed_ = wanted;
    attend(chunk_, item.begin, item.end, t_.kv_tile, tiles_);
    if (!chunk_.started)
      for (int64_t i = 0; i < rows; ++i) zero_row(chunk_.o + i * ldo, ldo);
    for (int64_t i = 0; i < rows; ++i) {
      r.m[state + i] = unified && in_window(chunk_, i) ? job_.rule.phi : chunk_.m[i];
      r.l[state + i] = unified && !in_window(chunk_, i) ? kLeftWindow : chunk_.l[i];
    }
  }

  const AttentionJob &job_;
  const TilingData &t_;
  RowChunk &chunk_;
  float *const query_;  // [d_qk]
  Tiles &tiles_;
  const LoadQuery &load_query_;
  const Limit &limit_;
  PackedRows packed_;
};

// Runs all items. make_stream(thread) gives a worker's tiles, load_query(request, row, buffer) a pointer to the row's [d_qk]
// float32 query, limit(request, row) the number of keys it sees.
template <typename MakeStream, typename LoadQuery, typename Limit>
static void attend_requests(Workers &workers, const AttentionJob &job, const TilingData &t, const MakeStream &make_stream,
                            const LoadQuery &load_query, const Limit &limit) {
  WorkList list(job.requests, job.count, t);
  Scratch &scratch = workers.scratch();
  RowChunk *chunks = scratch.alloc<RowChunk>(workers.threads());                // [threads]
  float *queries = scratch.alloc<float>(workers.threads() * job.d_qk);          // [threads, d_qk]
  for (int i = 0; i < workers.threads(); ++i) chunks[i] = make_row_chunk(scratch, list.rows_max(), job.d_qk, job.d_v, t);
  workers.run(workers.threads(), [&](int64_t, int thread) {
    ItemTiles<decltype(make_stream(thread))> tiles(list, make_stream(thread), t.kv_tile);
    ItemRunner runner(job, t, chunks[thread], queries + thread * job.d_qk, tiles, load_query, limit);
    for (WorkItem item = tiles.advance(); item.request != nullptr; item = tiles.advance()) {
      runner.run(item);
      tiles.leave();
    }
  });
}

// Whether all requests have so few rows that a tile of 16 bits is not worth widening. No bit depends on it. A request of a few rows may be
// cut from a sequence of more, whose queries are packed for float32 tiles: only what has all lanes on one row reads a tile as stored.
static bool rows_are_few(const AttentionJob &job, const TilingData &t) {
  for (int64_t i = 0; i < job.count; ++i)
    if (job.requests[i].rows > t.few_rows || job.requests[i].seq.qk_dim_pack != kLanes) return false;
  return true;
}

// attend_requests on the cached rows themselves: K, and the first d_v columns of it V.
template <typename LoadQuery, typename Limit>
static void attend_cache(Workers &workers, const PagedCache &cache, const AttentionJob &job, const TilingData &t, const LoadQuery &load_query,
                         const Limit &limit) {
  const auto run = [&](const auto &make_stream) { attend_requests(workers, job, t, make_stream, load_query, limit); };
  if (rows_are_few(job, t)) with_tile_streams<true>(workers, cache, job.d_v, t, run);
  else with_tile_streams<false>(workers, cache, job.d_v, t, run);
}

}  // namespace FLASHMLA_NS
}  // namespace flashmla
