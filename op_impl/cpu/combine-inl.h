// Attention over the paged cache with KV splits, and the merge of what the splits found.
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

// Tiles of a paged cache whose rows are keys and, in their first d_v elements, values.
struct CacheTiles {
  const PagedCache &cache;
  int64_t d_v, kv_tile, ld, buffer_floats;
  float *buffers;  // [threads][kv_tile, ld]

  CacheTiles(Workers &workers, const PagedCache &paged, int64_t value_dim, const TilingData &t)
      : cache(paged), d_v(value_dim), kv_tile(t.kv_tile), ld(round_up(paged.d, kPanelAlign)), buffer_floats(kv_tile * ld + kPanelAlign),
        buffers(workers.scratch().alloc<float>(workers.threads() * buffer_floats)) {}

  // Keys [first, first + n) of a range that ends at `end`.
  KvTile operator()(const AttentionRequest &r, int64_t first, int64_t n, int64_t end, int thread) const {
    KvTile tile = {};
    tile.k = gather_rows(cache, r.blocks, r.kv_head, first, n, round_up(d_v, kPanelAlign), buffers + thread * buffer_floats, ld, &tile.ldk);
    tile.v = tile.k;
    tile.ldv = tile.ldk;
    const int64_t left = end - first - n;
    look_ahead(tile, cache, r.blocks, first + n, left < kv_tile ? left : kv_tile);
    return tile;
  }
};

// Runs all (request, row chunk, split) items. load_tile(request, first, n, end, thread) gives keys as float32 rows,
// load_query(request, row, buffer) a pointer to the row's [d_qk] float32 query, limit(request, row) the number of keys it sees.
template <typename LoadTile, typename LoadQuery, typename Limit>
static void attend_requests(Workers &workers, AttentionRequest *requests, int64_t count, int64_t d_qk, int64_t d_v, float scale,
                            const TilingData &t, const LoadTile &load_tile, const LoadQuery &load_query, const Limit &limit) {
  const int64_t ldo = round_up(d_v, kPanelAlign);
  int64_t items = 0, rows_max = 1;
  for (int64_t i = 0; i < count; ++i) {
    AttentionRequest &r = requests[i];
    r.chunks = (r.rows + t.absorbed_rows - 1) / t.absorbed_rows;
    r.first_item = items;
    items += r.s_kv > 0 ? r.chunks * r.seq.num_splits : 0;
    const int64_t rows = r.rows < t.absorbed_rows ? r.rows : t.absorbed_rows;
    if (rows > rows_max) rows_max = rows;
  }
  struct PerThread { RowChunk chunk; float *query; int64_t packed; };
  Scratch &scratch = workers.scratch();
  PerThread *threads = scratch.alloc<PerThread>(workers.threads());
  for (int i = 0; i < workers.threads(); ++i) {
    threads[i].chunk = make_row_chunk(scratch, rows_max, d_qk, d_v, t);
    threads[i].query = scratch.alloc<float>(d_qk);
    threads[i].packed = -1;
  }
  workers.run(items, [&](int64_t item, int thread) {
    int64_t lo = 0, hi = count - 1;  // the last request that starts at or before the item and has items
    while (lo < hi) {
      const int64_t mid = (lo + hi + 1) / 2;
      if (requests[mid].first_item <= item) lo = mid; else hi = mid - 1;
    }
    const AttentionRequest &r = requests[lo];
    const int64_t split = (item - r.first_item) % r.seq.num_splits;
    const int64_t first_row = (item - r.first_item) / r.seq.num_splits * t.absorbed_rows;
    const int64_t rows = r.rows - first_row < t.absorbed_rows ? r.rows - first_row : t.absorbed_rows;
    const int64_t state = split * r.rows + first_row;
    PerThread &own = threads[thread];
    RowChunk &chunk = own.chunk;
    set_rows(chunk, rows, r.o + state * ldo, ldo, false);
    const int64_t packed = item - split;  // queries stay packed over the splits of one chunk
    for (int64_t i = 0; i < rows; ++i) set_state(chunk, i, limit(r, first_row + i), kMinusInf, 0.0f);
    if (own.packed != packed) set_queries(chunk, scale, [&](int64_t i) { return load_query(r, first_row + i, own.query); });
    own.packed = packed;
    const Tile keys = split_at(r.seq, r.s_kv, int32_t(split));
    const int64_t end = keys.start + keys.length;
    attend(chunk, keys.start, end, t.kv_tile, [&](int64_t first, int64_t n) { return load_tile(r, first, n, end, thread); });
    if (!chunk.started)
      for (int64_t i = 0; i < rows; ++i) zero_row(chunk.o + i * ldo, ldo);
    for (int64_t i = 0; i < rows; ++i) {
      r.m[state + i] = chunk.m[i];
      r.l[state + i] = chunk.l[i];
    }
  });
}

// out = sum_s w_s O_s / sum_s w_s l_s with w_s = exp(m_s - max m): the splits of one row become its output. Returns the
// natural-log sum of exponentials; a row without keys gives 0 and +inf.
static float combine(const AttentionRequest &r, int64_t row, float *out /* [ldo] */, int64_t ldo) {
  float top = kMinusInf;
  for (int64_t s = 0; s < r.seq.num_splits; ++s)
    if (r.l[s * r.rows + row] > 0.0f || r.l[s * r.rows + row] != r.l[s * r.rows + row])
      top = r.m[s * r.rows + row] > top ? r.m[s * r.rows + row] : top;
  float sum = 0.0f;
  bool any = false;
  for (int64_t s = 0; s < r.seq.num_splits; ++s) {
    const float l = r.l[s * r.rows + row];
    if (l == 0.0f) continue;
    const float weight = __builtin_expf(r.m[s * r.rows + row] - top);
    const float *o = r.o + (s * r.rows + row) * ldo;
    const VF w = set1(weight);
    for (int64_t i = 0; i < ldo; i += kLanes) store(out + i, any ? fma(w, load(o + i), load(out + i)) : mul(w, load(o + i)));
    sum += weight * l;
    any = true;
  }
  if (!any) {
    zero_row(out, ldo);
    return __builtin_inff();
  }
  const VF inverse = set1(1.0f / sum);
  for (int64_t i = 0; i < ldo; i += kLanes) store(out + i, mul(load(out + i), inverse));
  return top + __builtin_logf(sum);
}

}  // namespace FLASHMLA_NS
}  // namespace flashmla
