// A KV tile: consecutive keys of one sequence, gathered from the pages of the cache: as float32 rows, or as the cache stores them.
#pragma once

#include <type_traits>

#include "op_impl/cpu/rows-inl.h"
#include "op_impl/cpu/side_work-inl.h"

namespace flashmla {
namespace FLASHMLA_NS {

// E: float, or where rows are few the cache's own dtype, which every loop then widens on its way into a register: once for QK
// and once for each register block of PV, which takes less than writing a float32 tile and reading it twice.
template <typename E>
struct KvTile {
  const E *k;  // [n, ldk], d_qk columns of it
  int64_t ldk;
  const E *v;  // [n, ldv], d_v columns, readable up to the next multiple of 16 columns
  int64_t ldv;
};

// Which keys a tile holds.
struct TileKeys {
  const int32_t *blocks = nullptr;  // [max_blocks]: the sequence's row of the block table; nullptr: no tile
  int64_t kv_head = 0, first = 0, n = 0;
  bool holds(const TileKeys &other) const {
    return blocks == other.blocks && kv_head == other.kv_head && first == other.first && n >= other.n;
  }
};

static inline int64_t cache_slot(const PagedCache &cache, const TileKeys &keys, int64_t i) {
  const int64_t position = keys.first + i;
  return int64_t(keys.blocks[position / cache.block_size]) * cache.block_size + position % cache.block_size;
}

// Only rows of the n keys asked for are read: what stands in the rest of a page never reaches a register.
template <typename E>
static bool rows_in_place(const PagedCache &cache, const TileKeys &keys, int64_t readable /* columns */) {
  return holds<E>(cache.data) && keys.first % cache.block_size + keys.n <= cache.block_size && readable <= cache.d;
}
// Gives [n, *ld_out]: the buffer, or the cache itself where the rows stand in it as E, one behind the other.
template <typename E>
static const E *gather_rows(const PagedCache &cache, const TileKeys &keys, int64_t readable, E *buffer /* [n, ld] */, int64_t ld, int64_t *ld_out) {
  const int64_t row_elements = cache.h_kv * cache.d, head = keys.kv_head * cache.d;
  if (rows_in_place<E>(cache, keys, readable)) {
    *ld_out = row_elements;
    return element<E>(cache.data, cache_slot(cache, keys, 0) * row_elements + head);
  }
  *ld_out = ld;
  for (int64_t i = 0; i < keys.n; ++i) take_row(buffer + i * ld, cache.data, cache_slot(cache, keys, i) * row_elements + head, cache.d);
  return buffer;
}

// A tile that is made ready while another is at work, page by page: fetched, or widened into dst. For caches of one kv head whose
// rows are whole pieces.
template <typename T, bool kWiden>
struct NextTile {
  using Side = Slice<std::conditional_t<kWiden, T, float>>;
  static constexpr int64_t kStep = kWiden ? kPiece : kLineBytes / int64_t(sizeof(T));  // elements of a piece
  const PagedCache *cache = nullptr;
  TileKeys keys;
  float *dst = nullptr;   // [n, d], widened: where the tile goes
  TileKeys later;         // the tile after it
  int64_t pieces = 0, goal = 0, done = 0;

  NextTile() = default;
  NextTile(const PagedCache &paged, const TileKeys &tile, float *to /* [n, d] */, const TileKeys &after)
      : cache(&paged), keys(tile), dst(to), later(after), pieces(tile.blocks ? tile.n * paged.d / kStep : 0) {}

  // The next of as many equal parts up to the goal, as far as the page goes; what is left over falls to the parts after it.
  Side take(int64_t parts) {
    if (done >= goal) return {};
    const int64_t row = done * kStep / cache->d, in_row = done * kStep % cache->d;
    const int64_t rows_left = cache->block_size - (keys.first + row) % cache->block_size;
    const int64_t page_left = ((rows_left < keys.n - row ? rows_left : keys.n - row) * cache->d - in_row) / kStep;
    const int64_t share = (goal - done + parts - 1) / parts;
    const int64_t count = share < page_left ? share : page_left;
    const T *src = element<T>(cache->data, cache_slot(*cache, keys, row) * cache->d + in_row);
    done += count;
    if constexpr (kWiden) {
      const T *after = row < later.n ? element<T>(cache->data, cache_slot(*cache, later, row) * cache->d + in_row) : nullptr;
      return {src, dst + (done - count) * kStep, after, count};
    } else {
      const bool one_page = keys.first % cache->block_size + keys.n <= cache->block_size;
      if (!one_page || pieces % kStreams != 0) return {reinterpret_cast<const char *>(src), count};
      return {reinterpret_cast<const char *>(element<T>(cache->data, cache_slot(*cache, keys, 0) * cache->d)), count, done - count, pieces / kStreams};
    }
  }
  void finish() {
    for (goal = pieces; done < pieces;) Pace(take(1), 0).finish();
  }
};

// The tiles of one worker, in the order in which it attends to them, range after range; the next one is always on its way, into
// the next range too, whose first tile would otherwise come from memory with nothing beside it.
template <typename T, bool kWiden>
class TileStream {
 public:
  using Element = std::conditional_t<kWiden, float, T>;
  // Rows are read up to round_up(d_v, kPanelAlign) columns.
  TileStream(const PagedCache &cache, int64_t d_v, const TilingData &t, float *memory /* [floats(cache, kv_tile)] */)
      : cache_(cache), d_v_(d_v), ld_(round_up(cache.d, kPanelAlign)),
        ahead_(t.next_tile != 0 && cache.h_kv == 1 && cache.d % NextTile<T, kWiden>::kStep == 0),
        buffers_{reinterpret_cast<Element *>(memory), reinterpret_cast<Element *>(memory + tile_floats(cache, t.kv_tile))} {}
  static int64_t tile_floats(const PagedCache &cache, int64_t kv_tile) { return kv_tile * round_up(cache.d, kPanelAlign) + kPanelAlign; }
  static int64_t floats(const PagedCache &cache, int64_t kv_tile) { return 2 * tile_floats(cache, kv_tile); }

  // Keys `now`; `next` and the one after it follow.
  KvTile<Element> load(const TileKeys &now, const TileKeys &next, const TileKeys &after) {
    KvTile<Element> tile = {};
    if (kWiden && ahead_ && next_.keys.holds(now) && now.blocks != nullptr) {
      current_ ^= 1;
      tile.k = buffers_[current_];
      tile.ldk = ld_;
    } else {
      tile.k = gather_rows(cache_, now, round_up(d_v_, kPanelAlign), buffers_[current_], ld_, &tile.ldk);
    }
    tile.v = tile.k;
    tile.ldv = tile.ldk;
    next_ = ahead_ ? Next(cache_, next, kWiden ? reinterpret_cast<float *>(buffers_[current_ ^ 1]) : nullptr, after) : Next();
    return tile;
  }
  // Split between qk and pv as their multiply-adds are.
  NextTile<T, kWiden> &in_qk() {
    next_.goal = next_.pieces * cache_.d / (cache_.d + d_v_);
    return next_;
  }
  NextTile<T, kWiden> &in_pv() {
    next_.goal = next_.pieces;
    return next_;
  }
  void finish() {
    if (kWiden) next_.finish();
  }

 private:
  using Next = NextTile<T, kWiden>;
  const PagedCache &cache_;
  const int64_t d_v_, ld_;
  const bool ahead_;
  Element *const buffers_[2];  // [kv_tile, ld_] each
  int current_ = 0;
  Next next_;
};

}  // namespace FLASHMLA_NS
}  // namespace flashmla
