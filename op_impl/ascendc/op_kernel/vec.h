// Vector work on rows in UB: broadcasts, norms, RoPE. A row is padded to whole data blocks; few long instructions instead of many short ones.
#pragma once

#include "common.h"

namespace flashmla {

template <typename T>
__aicore__ inline void widen(const LocalTensor<float> &dst, const LocalTensor<T> &src, int64_t count) {
  AscendC::Cast(dst, src, AscendC::RoundMode::CAST_NONE, static_cast<uint32_t>(count));
}

template <typename T>
__aicore__ inline void narrow(const LocalTensor<T> &dst, const LocalTensor<float> &src, int64_t count) {
  AscendC::Cast(dst, src, AscendC::RoundMode::CAST_RINT, static_cast<uint32_t>(count));
}

// x -= rounded: what the rounding left off. wide is scratch.
template <typename T>
__aicore__ inline void take_away(const LocalTensor<float> &x, const LocalTensor<T> &rounded, const LocalTensor<float> &wide, int64_t count) {
  v_barrier();
  widen(wide, rounded, count);
  v_barrier();
  AscendC::Sub(x, x, wide, static_cast<int32_t>(count));
  v_barrier();
}

// Calls f(first column, columns) for the pieces of a row that one repeat holds.
template <typename F>
__aicore__ inline void for_columns(int64_t columns, const F &f) {
  for (int64_t c = 0; c < columns; c += kVectorFloats) f(c, smaller(kVectorFloats, columns - c));
}

__aicore__ inline AscendC::BinaryRepeatParams row_params(int64_t src1_block, int64_t dst_ld, int64_t src0_ld, int64_t src1_rep) {
  return AscendC::BinaryRepeatParams(1, 1, static_cast<uint8_t>(src1_block), static_cast<uint8_t>(dst_ld / kFloatsOfBlock),
                                     static_cast<uint8_t>(src0_ld / kFloatsOfBlock), static_cast<uint8_t>(src1_rep));
}

// factors [rows] become one data block a row, which the following take: [rows, 8], rows rounded up to 8.
__aicore__ inline void spread(const LocalTensor<float> &blocks, const LocalTensor<float> &factors, int64_t rows) {
  AscendC::Brcb(blocks, factors, static_cast<uint8_t>(ceil_div(rows, kFloatsOfBlock)), AscendC::BrcbRepeatParams(1, kFloatsOfBlock));
}

// x [rows, columns] times a factor a row.
__aicore__ inline void scale_rows(const LocalTensor<float> &x, const LocalTensor<float> &blocks, int64_t rows, int64_t columns, int64_t ld) {
  for_columns(columns, [&](int64_t c, int64_t n) {
    AscendC::Mul(x[c], x[c], blocks, static_cast<uint64_t>(n), static_cast<uint8_t>(rows), row_params(0, ld, ld, 1));
  });
}

// x [rows, columns] minus a value a row.
__aicore__ inline void subtract_rows(const LocalTensor<float> &x, const LocalTensor<float> &blocks, int64_t rows, int64_t columns, int64_t ld) {
  for_columns(columns, [&](int64_t c, int64_t n) {
    AscendC::Sub(x[c], x[c], blocks, static_cast<uint64_t>(n), static_cast<uint8_t>(rows), row_params(0, ld, ld, 1));
  });
}

// x [rows, columns] times, or plus, one row for all.
__aicore__ inline void multiply_by_row(const LocalTensor<float> &dst, const LocalTensor<float> &x, const LocalTensor<float> &row, int64_t rows,
                                       int64_t columns, int64_t ld) {
  for_columns(columns, [&](int64_t c, int64_t n) {
    AscendC::Mul(dst[c], x[c], row[c], static_cast<uint64_t>(n), static_cast<uint8_t>(rows), row_params(1, ld, ld, 0));
  });
}

__aicore__ inline void add_row(const LocalTensor<float> &x, const LocalTensor<float> &row, int64_t rows, int64_t columns, int64_t ld) {
  for_columns(columns, [&](int64_t c, int64_t n) {
    AscendC::Add(x[c], x[c], row[c], static_cast<uint64_t>(n), static_cast<uint8_t>(rows), row_params(1, ld, ld, 0));
  });
}

// Sum or maximum of every row: result [rows], part [rows] is scratch.
template <AscendC::ReduceType kind>
__aicore__ inline void reduce_rows(const LocalTensor<float> &result, const LocalTensor<float> &part, const LocalTensor<float> &x, int64_t rows,
                                   int64_t columns, int64_t ld) {
  const int64_t row_blocks = rows > 1 ? ld / kFloatsOfBlock : 1;  // a single row may be longer than the longest stride
  for_columns(columns, [&](int64_t c, int64_t n) {
    const bool first = c == 0;
    AscendC::ReduceRepeat<kind, float, float>(first ? result : part, x[c], static_cast<int32_t>(n), static_cast<int32_t>(rows), 1, 1,
                                              static_cast<int32_t>(row_blocks), AscendC::ReduceOrder::ORDER_ONLY_VALUE);
    v_barrier();
    if (first) return;
    if (kind == AscendC::ReduceType::SUM) AscendC::Add(result, result, part, static_cast<int32_t>(rows));
    else AscendC::Max(result, result, part, static_cast<int32_t>(rows));
    v_barrier();
  });
}

// 1 / x in place, ones [rows] is scratch.
__aicore__ inline void invert(const LocalTensor<float> &x, const LocalTensor<float> &ones, int64_t rows) {
  AscendC::Duplicate(ones, 1.0f, static_cast<int32_t>(rows));
  v_barrier();
  AscendC::Div(x, ones, x, static_cast<int32_t>(rows));
  v_barrier();
}

struct NormScratch {
  LocalTensor<float> squares;  // [rows, ld]
  LocalTensor<float> sums, part;  // [rows]
  LocalTensor<float> blocks;   // [rows, 8]
};

// x = x / sqrt(mean(x^2) + eps) * weight * scale for every row of n elements.
__aicore__ inline void rms_norm_rows(const LocalTensor<float> &x, const LocalTensor<float> &weight, int64_t rows, int64_t n, int64_t ld, float eps,
                                     float scale, const NormScratch &s) {
  AscendC::Mul(s.squares, x, x, static_cast<int32_t>(rows * ld));
  v_barrier();
  reduce_rows<AscendC::ReduceType::SUM>(s.sums, s.part, s.squares, rows, n, ld);
  AscendC::Muls(s.sums, s.sums, 1.0f / static_cast<float>(n), static_cast<int32_t>(rows));
  v_barrier();
  AscendC::Adds(s.sums, s.sums, eps, static_cast<int32_t>(rows));
  v_barrier();
  AscendC::Sqrt(s.sums, s.sums, static_cast<int32_t>(rows));
  v_barrier();
  invert(s.sums, s.part, rows);
  spread(s.blocks, s.sums, rows);
  v_barrier();
  scale_rows(x, s.blocks, rows, n, ld);
  v_barrier();
  multiply_by_row(x, x, weight, rows, n, ld);
  v_barrier();
  if (scale != 1.0f) {
    AscendC::Muls(x, x, scale, static_cast<int32_t>(rows * ld));
    v_barrier();
  }
}

// The two halves that RoPE turns against each other lie apart, each row padded to whole blocks of 16-bit elements: a half may be of any length.
struct RopeScratch {
  LocalTensor<float> first, second;      // [rows, pitch] x, in and out
  LocalTensor<float> cosine, sine;       // [rows, pitch], or one row for all
  LocalTensor<float> product, rotated;   // [rows, pitch]

  __aicore__ inline void take(Region &ub, int64_t rows, int64_t table_rows, int64_t pitch) {
    first = ub.take<float>(rows * pitch);
    second = ub.take<float>(rows * pitch);
    product = ub.take<float>(rows * pitch);
    rotated = ub.take<float>(rows * pitch);
    cosine = ub.take<float>(table_rows * pitch);
    sine = ub.take<float>(table_rows * pitch);
  }
};

__aicore__ inline int64_t rope_pitch(int64_t half) { return align_up(half, kFractal); }

// dst = x * table, by rows of their own or by one row for all.
__aicore__ inline void rope_product(const LocalTensor<float> &dst, const LocalTensor<float> &x, const LocalTensor<float> &table, int64_t rows,
                                    int64_t pitch, bool one_row) {
  if (one_row) multiply_by_row(dst, x, table, rows, pitch, pitch);
  else AscendC::Mul(dst, x, table, static_cast<int32_t>(rows * pitch));
}

// (a, b) -> (a cos - b sin, b cos + a sin); the results stand in first and second.
__aicore__ inline void rotate_rows(RopeScratch &s, int64_t rows, int64_t pitch, bool one_row) {
  const int32_t count = static_cast<int32_t>(rows * pitch);
  rope_product(s.product, s.second, s.sine, rows, pitch, one_row);
  rope_product(s.rotated, s.first, s.cosine, rows, pitch, one_row);
  v_barrier();
  AscendC::Sub(s.rotated, s.rotated, s.product, count);
  rope_product(s.second, s.second, s.cosine, rows, pitch, one_row);
  v_barrier();
  rope_product(s.product, s.first, s.sine, rows, pitch, one_row);
  v_barrier();
  AscendC::Add(s.second, s.second, s.product, count);
  AscendC::Muls(s.first, s.rotated, 1.0f, count);
  v_barrier();
}

// `rows` rows of the rope table from `position` on, [cos | sin], to row `at` of the scratch.
template <typename T>
__aicore__ inline void load_rope_rows(const Call<T> &call, const RopeScratch &s, int64_t position, int64_t rows, int64_t at) {
  const int64_t dim = call.rope_dim(), half = dim / 2, pitch = rope_pitch(half);
  const GlobalTensor<float> table = call.template input<float>(FlashMLAIn::rope_table);
  const int64_t gap_blocks = (pitch - align_up(half, kFloatsOfBlock)) / kFloatsOfBlock;
  load_runs(s.cosine[at * pitch], table[position * dim], rows, half, dim - half, gap_blocks);
  load_runs(s.sine[at * pitch], table[position * dim + half], rows, half, dim - half, gap_blocks);
}

// Which sequence a token belongs to and where it stands; moves forward only.
template <typename T>
class TokenCursor {
 public:
  __aicore__ inline explicit TokenCursor(const Call<T> &call) : call_(call), tokens_(call.d.batch > 0 ? call.q_len(0) : 0) {}

  __aicore__ inline void seek(int64_t token) {
    while (token >= first_ + tokens_) {
      first_ += tokens_;
      ++sequence_;
      tokens_ = call_.q_len(sequence_);
    }
    position_ = call_.context(sequence_) + token - first_;
    left_ = first_ + tokens_ - token;
  }
  __aicore__ inline int64_t sequence() const { return sequence_; }
  __aicore__ inline int64_t position() const { return position_; }
  __aicore__ inline int64_t left() const { return left_; }  // tokens of the sequence from here on

 private:
  const Call<T> &call_;
  int64_t sequence_ = 0, first_ = 0, tokens_, position_ = 0, left_ = 0;
};

// Share of this AIV in `count` things that lie in order.
struct Share {
  int64_t begin, end;
  __aicore__ inline Share(int64_t count, int64_t cores) {
    const int64_t parts = 2 * cores, own = AscendC::GetBlockIdx();
    begin = count * own / parts;
    end = count * (own + 1) / parts;
  }
  // .. where one AIV of every core takes part.
  static __aicore__ inline Share of_core(int64_t count, int64_t cores) {
    Share share(0, cores);
    const int64_t core = AscendC::GetBlockIdx() / 2;
    share.begin = count * core / cores;
    share.end = count * (core + 1) / cores;
    return share;
  }
};

}  // namespace flashmla
