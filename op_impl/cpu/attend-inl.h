// The loop over KV tiles for one row chunk: qk -> online_softmax -> pv.
//
// Rows are (token, head) pairs that see the same keys; they stand side by side in the vector lanes of QK, so a key's
// element is loaded once for all rows and the softmax of a row needs no sum across lanes. Rows never mix: a row's bits
// do not depend on what stands beside it.
#pragma once

#include "op_impl/cpu/gemm-inl.h"
#include "op_impl/cpu/kv_tile-inl.h"

namespace flashmla {
namespace FLASHMLA_NS {

constexpr float kMinusInf = -__builtin_inff();

// Queries and running state of up to rows_max rows; memory laid out once by row_chunk_floats.
struct RowChunk {
  int64_t rows;         // rows in use
  int64_t d_qk, d_v;
  int64_t wide;         // lanes of a full group: kLanes or kQkVecs * kLanes
  float *qt;            // groups of [d_qk][lanes]: scaled queries, transposed
  int64_t *limit;       // [rows padded]: keys that the row sees
  float *m, *l;         // [rows padded]: running maximum and sum
  float *o;             // [rows, ldo]: running output, not yet divided by l
  int64_t ldo;
  float *s;             // [kv_tile][wide]: scores, then probabilities, of one group
  int64_t min_limit, max_limit;
  bool started;

  int64_t lanes_at(int64_t row) const { return rows - row > kLanes ? wide : kLanes; }
};

static inline int64_t padded_rows(int64_t rows) { return round_up(rows, kQkVecs * kLanes); }
static inline int64_t row_chunk_floats(int64_t rows, int64_t d_qk, int64_t kv_tile) {
  return padded_rows(rows) * (d_qk + 2 + 2) + kv_tile * kQkVecs * kLanes;
}

static RowChunk make_row_chunk(float *memory, int64_t rows_max, int64_t d_qk, int64_t d_v, const TilingData &t) {
  RowChunk c = {};
  c.d_qk = d_qk;
  c.d_v = d_v;
  c.wide = t.row_lanes >= kQkVecs * kLanes ? kQkVecs * kLanes : kLanes;
  c.limit = reinterpret_cast<int64_t *>(memory);
  c.m = memory + 2 * padded_rows(rows_max);
  c.l = c.m + padded_rows(rows_max);
  c.qt = c.l + padded_rows(rows_max);
  c.s = c.qt + padded_rows(rows_max) * d_qk;
  return c;
}

// Starts a key range for rows whose output so far stands in o; started: o holds something already.
static void set_rows(RowChunk &c, int64_t rows, float *o, int64_t ldo, bool started) {
  c.rows = rows;
  c.o = o;
  c.ldo = ldo;
  c.started = started;
  c.min_limit = INT64_MAX;
  c.max_limit = 0;
  // The lanes of the last group that hold no row: they see nothing.
  for (int64_t row = rows; row < padded_rows(rows); ++row) {
    c.limit[row] = 0;
    c.m[row] = kMinusInf;
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

// Writes a row's query into its lane, the softmax scale folded in; rows must be set before, since they fix the groups.
static void set_query(RowChunk &c, int64_t row, const float *q /* [d_qk] */, float scale) {
  const int64_t group = row / c.wide * c.wide;
  const int64_t lanes = c.lanes_at(group);
  float *qt = c.qt + group * c.d_qk + (row - group);
  for (int64_t d = 0; d < c.d_qk; ++d) qt[d * lanes] = q[d] * scale;
}

static void clear_unused_lanes(RowChunk &c) {
  const int64_t group = (c.rows - 1) / c.wide * c.wide;
  const int64_t lanes = c.lanes_at(group);
  for (int64_t row = c.rows; row < group + lanes; ++row) {
    float *qt = c.qt + group * c.d_qk + (row - group);
    for (int64_t d = 0; d < c.d_qk; ++d) qt[d * lanes] = 0.0f;
  }
}

// Rows of K by address arithmetic alone: row 8 b + j stands at base[b] plus one of these strides, scaled by the address unit.
// Without them the compiler keeps a pointer a row, 13 of 24 of them on the stack, and reloading those costs more loads than
// the two a cycle that feed the FMAs (52 % of the FMA peak instead of 72 %).
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

// S[KEYS][NV lanes] = K Q^T for KEYS keys.
template <int KEYS, int NV>
struct QkBlock {
  VF acc[KEYS][NV];
  const char *base[3];

  template <int J>
  FM_INLINE_MEMBER void step(const VF *q, const RowStrides &s) {
    if constexpr (J < KEYS) {
      const VF x = set1(*k_row<J>(base[J / 8], s));
      FM_UNROLL
      for (int v = 0; v < NV; ++v) acc[J][v] = fma(x, q[v], acc[J][v]);
      step<J + 1>(q, s);
    }
  }
};

template <int KEYS, int NV>
FM_INLINE void qk_block(const float *qt /* [d][NV lanes] */, const float *k /* [KEYS, ldk] */, int64_t ldk, const RowStrides &strides, int64_t d, float *s) {
  QkBlock<KEYS, NV> block;
  FM_UNROLL
  for (int j = 0; j < KEYS; ++j)
    FM_UNROLL
    for (int v = 0; v < NV; ++v) block.acc[j][v] = zero();
  FM_UNROLL
  for (int b = 0; b < 3; ++b) block.base[b] = reinterpret_cast<const char *>(k + b * 8 * ldk);
  for (int64_t i = 0; i < d; ++i, qt += NV * kLanes) {
    VF q[NV];
    FM_UNROLL
    for (int v = 0; v < NV; ++v) q[v] = load(qt + v * kLanes);
    block.template step<0>(q, strides);
    FM_UNROLL
    for (int b = 0; b < 3; ++b) block.base[b] += sizeof(float);
  }
  FM_UNROLL
  for (int j = 0; j < KEYS; ++j)
    FM_UNROLL
    for (int v = 0; v < NV; ++v) store(s + (j * NV + v) * kLanes, block.acc[j][v]);
}

template <int KEYS, int NV>
static void qk(const float *qt, const KvTile &tile, int64_t n, int64_t d, float *s /* [n][NV lanes] */) {
  const RowStrides strides(tile.ldk);
  constexpr int kHalf = KEYS / 2, kQuarter = KEYS / 4 > 1 ? KEYS / 4 : 2;
  for (int64_t j = 0; j < n;) {
    const float *k = tile.k + j * tile.ldk;
    float *to = s + j * NV * kLanes;
    if (n - j >= KEYS) { qk_block<KEYS, NV>(qt, k, tile.ldk, strides, d, to); j += KEYS; }
    else if (n - j >= kHalf) { qk_block<kHalf, NV>(qt, k, tile.ldk, strides, d, to); j += kHalf; }
    else if (n - j >= kQuarter) { qk_block<kQuarter, NV>(qt, k, tile.ldk, strides, d, to); j += kQuarter; }
    else { qk_block<1, NV>(qt, k, tile.ldk, strides, d, to); ++j; }
  }
}

// Masked scores become -inf, whose exponential is exactly 0: a finite mask value would tie with valid very negative logits.
static void mask_scores(float *s /* [n][lanes] */, int64_t lanes, int64_t first, int64_t n, const int64_t *limit /* [lanes] */) {
  for (int64_t lane = 0; lane < lanes; ++lane)
    for (int64_t j = limit[lane] > first ? limit[lane] - first : 0; j < n; ++j) s[j * lanes + lane] = kMinusInf;
}

// S -> P = exp(S - max), updates m and l, and gives the factor by which the output so far is to be rescaled.
static void online_softmax(float *s /* [n][lanes] */, int64_t lanes, int64_t n, float *m, float *l, float *rescale) {
  for (int64_t v = 0; v < lanes; v += kLanes) {
    const VF before = load(m + v);
    VF now = before;
    for (int64_t j = 0; j < n; ++j) now = max(now, load(s + j * lanes + v));
    // A row that has seen no key yet keeps -inf; prevent (-inf) - (-inf) = nan.
    const VF base = select_less(now, set1(-__FLT_MAX__), zero(), now);
    const VF factor = exp_nonpositive(sub(before, base));
    VF sum = mul(load(l + v), factor);
    for (int64_t j = 0; j < n; ++j) {
      const VF p = exp_nonpositive(sub(load(s + j * lanes + v), base));
      sum = add(sum, p);
      store(s + j * lanes + v, p);
    }
    store(m + v, now);
    store(l + v, sum);
    store(rescale + v, factor);
  }
}

// Attends the chunk's rows to keys [begin, end). load_tile(first, n) gives the tile as float32 rows.
template <typename LoadTile>
static void attend(RowChunk &c, int64_t begin, int64_t end, int64_t kv_tile, const LoadTile &load_tile) {
  alignas(64) float rescale[kQkVecs * kLanes];
  if (end > c.max_limit) end = c.max_limit;
  for (int64_t first = begin; first < end; first += kv_tile) {
    const int64_t n = end - first < kv_tile ? end - first : kv_tile;
    const KvTile tile = load_tile(first, n);
    const bool masked = first + n > c.min_limit;
    for (int64_t row = 0; row < c.rows; row += c.wide) {
      const int64_t lanes = c.lanes_at(row);
      const int64_t rows = c.rows - row < lanes ? c.rows - row : lanes;
      const float *qt = c.qt + row * c.d_qk;
      if (lanes == kLanes) qk<kQkKeysNarrow, 1>(qt, tile, n, c.d_qk, c.s);
      else qk<kQkKeysWide, kQkVecs>(qt, tile, n, c.d_qk, c.s);
      if (masked) mask_scores(c.s, lanes, first, n, c.limit + row);
      online_softmax(c.s, lanes, n, c.m + row, c.l + row, rescale);
      // pv: O = O * rescale + P V, the rescale on the way of O into the registers.
      block_product<false>(rows, round_up(c.d_v, kPanelAlign), c.s, 1, lanes, tile.v, tile.ldv, n, c.o + row * c.ldo, c.ldo,
                           c.started ? Start::kRescale : Start::kZero, rescale);
    }
    c.started = true;
  }
}

}  // namespace FLASHMLA_NS
}  // namespace flashmla
