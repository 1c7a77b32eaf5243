// The loop over KV tiles for one row chunk: qk -> online_softmax -> pv.
//
// Rows are (token, head) pairs that see the same keys. In QK a vector holds kLanes / pack rows by `pack` elements of the head
// dimension: 4, so that one load of 4 elements of a key serves all its rows and head counts need only be multiples of
// kLanes / 4 to fill the lanes; or kLanes, the whole vector for one row, where there are hardly any rows. In the softmax a
// vector holds as many rows as it has lanes, and no row needs a sum across lanes. Rows never mix: a row's bits do not depend on what stands beside it.
#pragma once

#include "op_impl/cpu/gemm-inl.h"
#include "op_impl/cpu/kv_tile-inl.h"

namespace flashmla {
namespace FLASHMLA_NS {

constexpr float kMinusInf = -__builtin_inff();
constexpr int kMostRowsPerVec = kLanes / 4;

// Queries and running state of up to rows_max rows.
struct RowChunk {
  int64_t rows;         // rows in use
  int64_t d_qk, d_v;
  int64_t pack;         // elements of a row that a vector of QK holds, 4 or kLanes
  float *qt;            // row groups behind each other, each [ceil(d_qk / pack)][vectors][kLanes]; scaled queries
  int64_t *limit;       // [rows]: keys that the row sees
  float *m, *l;         // [lds]: running maximum and sum
  float *rescale;       // [lds]
  float *o;             // [rows, ldo]: running output, not yet divided by l
  int64_t ldo;
  float *s;             // [kv_tile][lds]: scores, then probabilities
  int64_t lds;
  int64_t min_limit, max_limit;
  bool started;         // o holds something
  bool unified;         // exponentials against phi for all rows, not against each row's running maximum
  float phi;

  int64_t depth() const { return (d_qk + pack - 1) / pack; }  // vectors of a row group's rows
  int64_t rows_per_vec() const { return kLanes / pack; }
  int64_t vecs() const { return (rows + rows_per_vec() - 1) / rows_per_vec(); }
};

// Lanes of a row of S: the last row group's sums are stored by whole vectors.
static inline int64_t padded_rows(int64_t rows) { return round_up(rows, kLanes) + kLanes; }

static RowChunk make_row_chunk(Scratch &scratch, int64_t rows_max, int64_t d_qk, int64_t d_v, const TilingData &t) {
  RowChunk c = {};
  c.d_qk = d_qk;
  c.d_v = d_v;
  c.pack = t.qk_dim_pack;
  c.limit = scratch.alloc<int64_t>(rows_max);
  c.m = scratch.alloc<float>(padded_rows(rows_max));
  c.l = scratch.alloc<float>(padded_rows(rows_max));
  c.rescale = scratch.alloc<float>(padded_rows(rows_max));
  c.qt = scratch.alloc<float>(round_up(rows_max, kMostRowsPerVec) * round_up(d_qk, kLanes));
  c.s = scratch.alloc<float>(t.kv_tile * padded_rows(rows_max));
  return c;
}

// Row groups: vectors of rows that QK holds in registers together, in even parts.
static inline int64_t group_vecs(int64_t left) {
  const int64_t groups = (left + kQkVecs - 1) / kQkVecs;
  return (left + groups - 1) / groups;
}

// Starts a key range for rows whose output so far stands in o; started: o holds something already.
static void set_rows(RowChunk &c, int64_t rows, float *o, int64_t ldo, bool started) {
  c.rows = rows;
  c.o = o;
  c.ldo = ldo;
  c.started = started;
  c.min_limit = INT64_MAX;
  c.max_limit = 0;
  const int64_t last = c.vecs() - 1;
  int64_t group = 0;
  while (group + group_vecs(c.vecs() - group) <= last) group += group_vecs(c.vecs() - group);
  c.lds = round_up(group * c.rows_per_vec() + round_up((c.vecs() - group) * c.rows_per_vec(), kLanes), kLanes);
  for (int64_t row = rows; row < c.lds; ++row) {  // lanes without a row
    c.m[row] = 0.0f;
    c.l[row] = 0.0f;
  }
}

static void set_state(RowChunk &c, int64_t row, int64_t limit, float m, float l) {
  c.limit[row] = limit;
  c.m[row] = m;
  c.l[row] = l;
  if (limit < c.min_limit) c.min_limit = limit;
  if (limit > c.max_limit) c.max_limit = limit;
}

// Packs the queries of all rows, the softmax scale folded in; rows that fill up the last vector are zero.
// load_query(row) gives the row's [d_qk] float32 query.
template <typename LoadQuery>
static void set_queries(RowChunk &c, float scale, const LoadQuery &load_query) {
  const int64_t pack = c.pack, depth = c.depth();
  int64_t row = 0;
  for (int64_t group = 0; group < c.vecs();) {
    const int64_t vecs = group_vecs(c.vecs() - group);
    for (int64_t v = 0; v < vecs; ++v) {
      for (int64_t i = 0; i < c.rows_per_vec(); ++i, ++row) {
        float *to = c.qt + (group * depth + v) * kLanes + i * pack;
        const int64_t d_q = row < c.rows ? c.d_qk : 0;
        const float *q = d_q > 0 ? load_query(row) : nullptr;
        for (int64_t d = 0; d < depth * pack; d += pack, to += vecs * kLanes) {
          if (pack == 4 && d + 4 <= d_q) {
            for (int e = 0; e < 4; ++e) to[e] = q[d + e] * scale;
          } else {
            for (int64_t e = 0; e < pack; ++e) to[e] = d + e < d_q ? q[d + e] * scale : 0.0f;
          }
        }
      }
    }
    group += vecs;
  }
}

// Rows of K by address arithmetic alone: row 8 b + j stands at base[b] plus one of these strides, scaled by the address unit.
// Without them the compiler keeps a pointer a row, most of them on the stack, and reloading those takes the load slots that
// feed the FMAs.
struct RowStrides {
  int64_t one, three, five, seven;  // bytes; opaque to the compiler, which would turn the sums back into pointers
  explicit RowStrides(int64_t ldk) : one(ldk * 4), three(one * 3), five(one * 5), seven(one * 7) {
    __asm__("" : "+r"(one), "+r"(three), "+r"(five), "+r"(seven));
  }
};
template <int J>
FM_INLINE const float *k_row(const char *base, const RowStrides &s) {
  constexpr int j = J % 8;
  const int64_t offset = j == 1 ? s.one : j == 2 ? s.one * 2 : j == 3 ? s.three : j == 4 ? s.one * 4 : j == 5 ? s.five : j == 6 ? s.three * 2 : j == 7 ? s.seven : 0;
  return reinterpret_cast<const float *>(base + offset);
}

template <int PACK>
FM_INLINE VF load_pack(const float *k) {  // PACK elements of a key, for every row of a vector
  if constexpr (PACK == kLanes) return load(k); else return load_quad(k);
}

// Sums of KEYS keys by NV vectors of rows.
template <int KEYS, int NV, int PACK>
struct QkSums {
  VF acc[KEYS][NV];

  template <int J = 0>
  FM_INLINE_MEMBER void add_pack(const char *const *base, const RowStrides &strides, const VF *q) {
    if constexpr (J < KEYS) {
      const VF x = load_pack<PACK>(k_row<J>(base[J / 8], strides));
      FM_UNROLL
      for (int v = 0; v < NV; ++v) acc[J][v] = fma(x, q[v], acc[J][v]);
      add_pack<J + 1>(base, strides, q);
    }
  }
  // The sums over the elements of a row, one float a row.
  FM_INLINE_MEMBER void store_rows(float *s, int64_t lds) {
    const VF none = zero();
    FM_UNROLL
    for (int j = 0; j < KEYS; ++j) {
      const VF *a = acc[j];
      if constexpr (PACK == kLanes && kLanes != 4) {
        FM_UNROLL
        for (int v = 0; v < NV; ++v) s[j * lds + v] = reduce_add(a[v]);
      } else {
        FM_UNROLL
        for (int v = 0; v < NV; v += 4)
          store(s + j * lds + v * (kLanes / 4), sum_quads(a[v], v + 1 < NV ? a[v + 1] : none, v + 2 < NV ? a[v + 2] : none, v + 3 < NV ? a[v + 3] : none));
      }
    }
  }
};

// S[KEYS][NV vectors of rows] = K Q^T. Elements d, d + PACK, ... of a product are summed in ascending order, then those sums in
// one order, whatever KEYS and NV.
template <int KEYS, int NV, int PACK, typename TS>
FM_INLINE void qk_block(const float *qt /* [d / PACK][NV][kLanes] */, const float *k /* [KEYS, ldk] */, int64_t ldk, const RowStrides &strides,
                        int64_t d, float *s, int64_t lds, const Slice<TS> &side) {
  QkSums<KEYS, NV, PACK> sums;
  VF q[NV];
  FM_UNROLL
  for (int j = 0; j < KEYS; ++j)
    FM_UNROLL
    for (int v = 0; v < NV; ++v) sums.acc[j][v] = zero();
  const char *base[(KEYS + 7) / 8];
  FM_UNROLL
  for (int b = 0; b < (KEYS + 7) / 8; ++b) base[b] = reinterpret_cast<const char *>(k + b * 8 * ldk);
  Pace<TS> pace(side, d / PACK);
  for (int64_t i = 0; i < d / PACK; ++i, qt += NV * kLanes) {
    pace.round();
    FM_UNROLL
    for (int v = 0; v < NV; ++v) q[v] = load(qt + v * kLanes);
    sums.add_pack(base, strides, q);
    FM_UNROLL
    for (int b = 0; b < (KEYS + 7) / 8; ++b) base[b] += PACK * sizeof(float);
  }
  pace.finish();
  if (d % PACK != 0) {  // the last elements of a key, with nothing read behind them
    float rest[KEYS * PACK] = {};
    for (int j = 0; j < KEYS; ++j)
      for (int64_t e = 0; e < d % PACK; ++e) rest[j * PACK + e] = k[j * ldk + d / PACK * PACK + e];
    FM_UNROLL
    for (int v = 0; v < NV; ++v) q[v] = load(qt + v * kLanes);
    FM_UNROLL
    for (int j = 0; j < KEYS; ++j)
      FM_UNROLL
      for (int v = 0; v < NV; ++v) sums.acc[j][v] = fma(load_pack<PACK>(rest + j * PACK), q[v], sums.acc[j][v]);
  }
  sums.store_rows(s, lds);
}

// All keys of a tile for one row group.
template <int NV, int PACK, typename Side>
static void qk_group(const float *qt, const KvTile &tile, int64_t n, int64_t d, float *s, int64_t lds, Side &side, int64_t groups /* to come, this one included */) {
  constexpr int KEYS = kQkAccumulators / NV < 16 ? kQkAccumulators / NV : 16;
  const RowStrides strides(tile.ldk);
  for (int64_t j = 0; j < n;) {
    const float *k = tile.k + j * tile.ldk;
    float *to = s + j * lds;
    const int64_t left = n - j;
    const int64_t keys = left >= KEYS ? KEYS : left >= 4 ? (KEYS < 4 ? KEYS : 4) : 1;
    const auto part = side.take((left + keys - 1) / keys + (groups - 1) * ((n + KEYS - 1) / KEYS));
    if (keys == KEYS) qk_block<KEYS, NV, PACK>(qt, k, tile.ldk, strides, d, to, lds, part);
    else if (keys == 4) qk_block<4, NV, PACK>(qt, k, tile.ldk, strides, d, to, lds, part);
    else qk_block<1, NV, PACK>(qt, k, tile.ldk, strides, d, to, lds, part);
    j += keys;
  }
}

template <int PACK, typename Side>
static void qk_packed(const RowChunk &c, const KvTile &tile, int64_t n, Side &side) {
  for (int64_t group = 0; group < c.vecs();) {
    const int64_t vecs = group_vecs(c.vecs() - group);
    const float *qt = c.qt + group * c.depth() * kLanes;
    float *s = c.s + group * (kLanes / PACK);
    const int64_t groups = (c.vecs() - group + vecs - 1) / vecs;
    switch (vecs) {
      case 1: qk_group<1, PACK>(qt, tile, n, c.d_qk, s, c.lds, side, groups); break;
      case 2: qk_group<2, PACK>(qt, tile, n, c.d_qk, s, c.lds, side, groups); break;
      case 3: qk_group<3, PACK>(qt, tile, n, c.d_qk, s, c.lds, side, groups); break;
#if defined(__AVX512F__)
      case 4: qk_group<4, PACK>(qt, tile, n, c.d_qk, s, c.lds, side, groups); break;
      case 5: qk_group<5, PACK>(qt, tile, n, c.d_qk, s, c.lds, side, groups); break;
      case 6: qk_group<6, PACK>(qt, tile, n, c.d_qk, s, c.lds, side, groups); break;
#endif
    }
    group += vecs;
  }
}

// S = Q K^T, [n][rows] in c.s.
template <typename Side>
static void qk(const RowChunk &c, const KvTile &tile, int64_t n, Side &side) {
  if (c.pack == 4) qk_packed<4>(c, tile, n, side); else qk_packed<kLanes>(c, tile, n, side);
}

// Masked scores become -inf, whose exponential is exactly 0: a finite mask value would tie with valid very negative logits.
static void mask_scores(const RowChunk &c, int64_t first, int64_t n) {
  for (int64_t row = 0; row < c.rows; ++row)
    for (int64_t j = c.limit[row] > first ? c.limit[row] - first : 0; j < n; ++j) c.s[j * c.lds + row] = kMinusInf;
}

// S -> P = exp(S - max), updates m and l, and gives the factor by which the output so far is to be rescaled.
static void online_softmax(const RowChunk &c, int64_t n) {
  for (int64_t row = 0; row < c.rows; row += kLanes) {
    float *s = c.s + row;
    const VF before = load(c.m + row);
    VF now = before;
    for (int64_t j = 0; j < n; ++j) now = max(now, load(s + j * c.lds));
    // A row that has seen no key yet keeps -inf; prevent (-inf) - (-inf) = nan.
    const VF base = select_less(now, set1(-__FLT_MAX__), zero(), now);
    const VF factor = exp_float(sub(before, base));
    VF sum = mul(load(c.l + row), factor);
    for (int64_t j = 0; j < n; ++j) {
      const VF p = exp_float(sub(load(s + j * c.lds), base));
      sum = add(sum, p);
      store(s + j * c.lds, p);
    }
    store(c.m + row, now);
    store(c.l + row, sum);
    store(c.rescale + row, factor);
  }
}

// The window in which exponentials against phi lose nothing: e^60 times any number of keys stays finite, and beside a largest
// term of e^-40 those that vanish, below e^-87, are beyond float32.
constexpr float kPhiBelow = 40.0f, kPhiAbove = 60.0f;

// S -> P = exp(S - phi) with one phi for all rows (FlashDecoding++, arXiv 2311.01282): nothing is rescaled, neither from tile to
// tile nor between KV splits. m keeps the running maximum, by which a row that leaves the window is found.
static void unified_softmax(const RowChunk &c, int64_t n) {
  const VF base = set1(c.phi);
  for (int64_t row = 0; row < c.rows; row += kLanes) {
    float *s = c.s + row;
    VF now = load(c.m + row), sum = load(c.l + row);
    for (int64_t j = 0; j < n; ++j) {
      const VF score = load(s + j * c.lds);
      now = max(now, score);
      const VF p = exp_float(sub(score, base));
      sum = add(sum, p);
      store(s + j * c.lds, p);
    }
    store(c.m + row, now);
    store(c.l + row, sum);
  }
}

// Whether exponentials against phi stood for a row: false for NaN too. A row that saw no key has nothing to lose.
static inline bool in_window(const RowChunk &c, int64_t row) {
  return c.m[row] == kMinusInf || (c.m[row] >= c.phi - kPhiBelow && c.m[row] <= c.phi + kPhiAbove);
}

// O = O * rescale + P V for rows [row, row + rows): the rescale happens on the way of O into the registers.
template <typename Side>
static void pv(const RowChunk &c, const KvTile &tile, int64_t row, int64_t rows, int64_t n, Side &side) {
  block_product<false>(rows, round_up(c.d_v, kPanelAlign), c.s + row, 1, c.lds, tile.v, tile.ldv, n, c.o + row * c.ldo, c.ldo,
                       c.started ? Start::kKeep : Start::kZero, c.started && !c.unified ? c.rescale + row : nullptr, side);
}

// The diagonal: a row takes the values it may see and no others, so that a NaN in a later token's value, times a probability
// of 0, cannot reach it.
static void pv_masked(const RowChunk &c, const KvTile &tile, int64_t first, int64_t n) {
  Lines none;
  for (int64_t row = 0, end; row < c.rows; row = end) {
    for (end = row + 1; end < c.rows && c.limit[end] == c.limit[row];) ++end;
    const int64_t seen = c.limit[row] > first ? c.limit[row] - first : 0;
    pv(c, tile, row, end - row, seen < n ? seen : n, none);
  }
}

// Attends the chunk's rows to keys [begin, end). tiles.load(first, n) gives a tile as float32 rows; what tiles.in_qk() and
// tiles.in_pv() give rides along, and tiles.finish() does what is left of it.
template <typename Tiles>
static void attend(RowChunk &c, int64_t begin, int64_t end, int64_t kv_tile, Tiles &tiles) {
  if (end > c.max_limit) end = c.max_limit;
  for (int64_t first = begin; first < end; first += kv_tile) {
    const int64_t n = end - first < kv_tile ? end - first : kv_tile;
    const KvTile tile = tiles.load(first, n);
    qk(c, tile, n, tiles.in_qk());
    const bool masked = first + n > c.min_limit;
    if (masked) mask_scores(c, first, n);
    if (c.unified) unified_softmax(c, n); else online_softmax(c, n);
    if (masked) pv_masked(c, tile, first, n); else pv(c, tile, 0, c.rows, n, tiles.in_pv());
    tiles.finish();
    c.started = true;
  }
}

}  // namespace FLASHMLA_NS
}  // namespace flashmla
