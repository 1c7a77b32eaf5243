// The rows that attend together: (token, head) pairs that see the same keys, their queries as QK reads them, their softmax state.
// Rows never mix: a row's bits do not depend on what stands beside it.
//
// In QK a vector holds kLanes / pack rows by `pack` elements of the head dimension: 4, so that one load of 4 elements of a key
// serves all its rows and head counts need only be multiples of kLanes / 4 to fill the lanes; or kLanes, the whole vector for one
// row, where there are hardly any rows. In the softmax a vector holds as many rows as it has lanes, and no row needs a sum
// across lanes.
#pragma once

#include "op_impl/cpu/parallel-inl.h"
#include "op_impl/cpu/simd-inl.h"

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
static void set_rows(RowChunk &c, int64_t rows, float *o /* [rows, ldo] */, int64_t ldo, bool started) {
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
        float *to = c.qt + (group * depth + v) * kLanes + i * pack;  // [depth][vecs][kLanes], pack of them
        const int64_t d_q = row < c.rows ? c.d_qk : 0;
        const float *q = d_q > 0 ? load_query(row) : nullptr;        // [d_q]
        for (int64_t d = 0; d < depth * pack; d += pack, to += vecs * kLanes) {
          if (pack == 4 && d + 4 <= d_q) {
            scale_quad(to, q + d, scale);
          } else {
            for (int64_t e = 0; e < pack; ++e) to[e] = d + e < d_q ? q[d + e] * scale : 0.0f;
          }
        }
      }
    }
    group += vecs;
  }
}

}  // namespace FLASHMLA_NS
}  // namespace flashmla
