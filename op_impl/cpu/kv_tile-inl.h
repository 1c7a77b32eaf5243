// A KV tile: consecutive keys of one sequence as float32 rows, gathered from the pages of the cache.
#pragma once

#include "op_impl/cpu/rows-inl.h"

namespace flashmla {
namespace FLASHMLA_NS {

struct KvTile {
  const float *k;  // [n, ldk]
  int64_t ldk;
  const float *v;  // [n, ldv], readable up to the next multiple of 16 columns
  int64_t ldv;
  // What the next tile will be read from, fetched into L2 while this one is at work: by qk, and by pv where V stands apart.
  const char *ahead = nullptr;
  int64_t ahead_lines = 0;
  const float *v_ahead = nullptr;  // [v_ahead_rows, ldv]
  int64_t v_ahead_rows = 0;
};

// Only rows of the n keys asked for are read: what stands in the rest of a page never reaches a register.
// buffer: [n, ld], used unless the rows already stand in memory as float32, one behind the other.
static const float *gather_rows(const PagedCache &cache, const int32_t *blocks, int64_t head, int64_t first, int64_t n,
                                int64_t readable /* columns */, float *buffer, int64_t ld, int64_t *ld_out) {
  const int64_t row_elements = cache.h_kv * cache.d;
  const int64_t offset = first % cache.block_size;
  if (cache.data.dtype == kFloat32 && offset + n <= cache.block_size && readable <= cache.d) {
    *ld_out = row_elements;
    const int64_t slot = int64_t(blocks[first / cache.block_size]) * cache.block_size + offset;
    return element<float>(cache.data, slot * row_elements + head * cache.d);
  }
  *ld_out = ld;
  for (int64_t i = 0; i < n;) {
    const int64_t position = first + i;
    const int64_t in_page = position % cache.block_size;
    const int64_t run = cache.block_size - in_page < n - i ? cache.block_size - in_page : n - i;
    const int64_t slot = int64_t(blocks[position / cache.block_size]) * cache.block_size + in_page;
    for (int64_t r = 0; r < run; ++r)
      widen_any(buffer + (i + r) * ld, cache.data, (slot + r) * row_elements + head * cache.d, cache.d);
    i += run;
  }
  return buffer;
}

// Names the lines of the page that holds key `first` and up to n keys behind it, for a cache whose rows are of one head.
static void look_ahead(KvTile &tile, const PagedCache &cache, const int32_t *blocks, int64_t first, int64_t n) {
  tile.ahead = nullptr;
  tile.ahead_lines = 0;
  if (n <= 0 || cache.h_kv != 1) return;
  const int64_t offset = first % cache.block_size;
  const int64_t run = cache.block_size - offset < n ? cache.block_size - offset : n;
  const int64_t bytes = dtype_bytes(cache.data.dtype) * cache.d;
  tile.ahead = static_cast<const char *>(cache.data.data) + (int64_t(blocks[first / cache.block_size]) * cache.block_size + offset) * bytes;
  tile.ahead_lines = run * bytes / 64;
}

}  // namespace FLASHMLA_NS
}  // namespace flashmla
