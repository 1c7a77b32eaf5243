// The queries that attention takes: absorbed, q~ = [q_nope W_UK | rope(q_pe)]; expanded, q with its rotated part in place.
#pragma once

#include "split.h"

namespace flashmla {

// Rows that need no scale leave the cube as attention takes them.
template <typename T>
__aicore__ inline bool queries_leave_finished(const Call<T> &call) { return !(QueryRange<T>::most > 0.0f) && call.d.rank % kFractal == 0; }

// q_nope W_UK: the latent part of query, or q_latent [T, heads, ld_latent] in float32.
template <typename T>
__aicore__ inline Products<T> absorb_product(const Call<T> &call) {
  const KernelData &d = call.d;
  const bool finished = queries_leave_finished(call);
  const int64_t ld = finished ? call.ld_query() : call.ld_latent();
  GemmJob<T> job = {{}, d.parts, d.heads * call.ld_q(), call.ld_q(), d.num_tokens,
                          call.template input<T>(FlashMLAIn::w_uk), d.heads, d.rank, d.d_n,
                          call.workspace + (finished ? d.workspace.query : d.workspace.q_latent), d.heads * ld, ld, finished};
  call.set_parts(job.a, d.workspace.q);
  return Products<T>(call, &job, 1, d.products.absorb, false);
}

// The rotated halves of q of heads [h, h + rows) of one token, as float32.
template <typename T>
class QueryRope {
 public:
  __aicore__ inline QueryRope(const Call<T> &call, Region &ub, int64_t rows)
      : call_(call), half_(call.rope_dim() / 2), pitch_(rope_pitch(half_)), offset_(call.d.rope_mode == kRopeFull ? 0 : call.d.d_n) {
    scratch_.take(ub, rows, 1, pitch_);
    first_ = ub.take<T>(rows * pitch_);
    second_ = ub.take<T>(rows * pitch_);
    first_low_ = ub.take<T>(rows * pitch_);
    second_low_ = ub.take<T>(rows * pitch_);
  }
  __aicore__ inline void load(int64_t token, int64_t position, int64_t h, int64_t rows) {
    const int64_t ld = call_.ld_q();
    for (int32_t part = 0; part < call_.d.parts; ++part) {
      const GlobalTensor<T> q = call_.template buffer<T>(call_.d.workspace.q[part])[(token * call_.d.heads + h) * ld + offset_];
      load_runs(part == 0 ? first_ : first_low_, q, rows, half_, ld - half_);
      load_runs(part == 0 ? second_ : second_low_, q[half_], rows, half_, ld - half_);
    }
    load_rope_rows(call_, scratch_, position, 1, 0);
  }
  __aicore__ inline void rotate(int64_t rows) {
    widen(scratch_.first, first_, rows * pitch_);
    widen(scratch_.second, second_, rows * pitch_);
    v_barrier();
    if (call_.d.parts > 1) {
      add_part(scratch_.first, first_low_, rows * pitch_);
      add_part(scratch_.second, second_low_, rows * pitch_);
    }
    rotate_rows(scratch_, rows, pitch_, true);
  }
  __aicore__ inline void round(int64_t rows) {
    narrow(first_, scratch_.first, rows * pitch_);
    narrow(second_, scratch_.second, rows * pitch_);
  }
  // What round() left off.
  __aicore__ inline void keep_rest(int64_t rows) {
    take_away(scratch_.first, first_, scratch_.product, rows * pitch_);
    take_away(scratch_.second, second_, scratch_.product, rows * pitch_);
  }
  __aicore__ inline void store(const GlobalTensor<T> &row, int64_t ld, int64_t rows) {
    store_runs(row, first_, rows, half_, ld - half_);
    store_runs(row[half_], second_, rows, half_, ld - half_);
  }
  __aicore__ inline const LocalTensor<float> &first() const { return scratch_.first; }
  __aicore__ inline const LocalTensor<float> &second() const { return scratch_.second; }
  __aicore__ inline int64_t half() const { return half_; }
  __aicore__ inline int64_t pitch() const { return pitch_; }
  __aicore__ inline int64_t offset() const { return offset_; }

 private:
  __aicore__ inline void add_part(const LocalTensor<float> &x, const LocalTensor<T> &low, int64_t count) {
    widen(scratch_.product, low, count);
    v_barrier();
    AscendC::Add(x, x, scratch_.product, static_cast<int32_t>(count));
    v_barrier();
  }

  const Call<T> &call_;
  int64_t half_, pitch_, offset_;
  RopeScratch scratch_;
  LocalTensor<T> first_, second_, first_low_, second_low_;
};

// (token, block of heads) pairs are shared evenly by the AIVs; f(token, first head, heads).
template <typename T, typename F>
__aicore__ inline void for_query_rows(const Call<T> &call, int64_t rows, const F &f) {
  const int64_t blocks = ceil_div(call.d.heads, rows);
  const Share share(call.d.num_tokens * blocks, call.d.cores);
  for (int64_t i = share.begin; i < share.end; ++i) {
    const int64_t h = i % blocks * rows;
    f(i / blocks, h, smaller(rows, call.d.heads - h));
  }
}

// Beside that product: RoPE of q_pe goes to the end of the query's row.
template <typename T>
__aicore__ inline void append_rope(const Call<T> &call) {
  const KernelData &d = call.d;
  const int64_t rows = 64;
  Region ub(TPosition::VECCALC);
  QueryRope<T> rope(call, ub, rows);
  TokenCursor<T> cursor(call);
  for_query_rows(call, rows, [&](int64_t token, int64_t h, int64_t heads) {
    cursor.seek(token);
    rope.load(token, cursor.position(), h, heads);
    hand_over<HardEvent::MTE2_V>();
    rope.rotate(heads);
    rope.round(heads);
    hand_over<HardEvent::V_MTE3>();
    rope.store(call.template buffer<T>(d.workspace.query)[(token * d.heads + h) * call.ld_query() + d.rank], call.ld_query(), heads);
    hand_over<HardEvent::MTE3_MTE2>();
    hand_over<HardEvent::V_MTE2>();
  });
}

template <typename T>
__aicore__ inline void rotate_queries(const Call<T> &call) {
  const int64_t rows = 32;
  Region ub(TPosition::VECCALC);
  QueryRope<T> rope(call, ub, rows);
  TokenCursor<T> cursor(call);
  for_query_rows(call, rows, [&](int64_t token, int64_t h, int64_t heads) {
    cursor.seek(token);
    rope.load(token, cursor.position(), h, heads);
    hand_over<HardEvent::MTE2_V>();
    rope.rotate(heads);
    for (int32_t part = 0; part < call.d.parts; ++part) {
      rope.round(heads);
      hand_over<HardEvent::V_MTE3>();
      rope.store(call.template buffer<T>(call.d.workspace.q[part])[(token * call.d.heads + h) * call.ld_q() + rope.offset()], call.ld_q(), heads);
      if (part + 1 < call.d.parts) rope.keep_rest(heads);
      hand_over<HardEvent::MTE3_V>();
    }
    hand_over<HardEvent::MTE3_MTE2>();
    hand_over<HardEvent::V_MTE2>();
  });
}

template <typename T>
__aicore__ inline void prepare_queries(const Call<T> &call) {
  const KernelData &d = call.d;
  const int64_t ld = call.ld_latent();
  const int64_t rows = clamp(align_down(16384 / ld, kFloatsOfBlock), kFloatsOfBlock, 32);
  Region ub(TPosition::VECCALC);
  QueryRope<T> rope(call, ub, rows);
  const LocalTensor<float> x = ub.take<float>(rows * ld), magnitude = ub.take<float>(rows * larger(ld, rope.pitch()));
  const LocalTensor<T> rounded = ub.take<T>(rows * ld);
  const LocalTensor<float> most = ub.take<float>(rows), other = ub.take<float>(rows), part = ub.take<float>(rows), scale = ub.take<float>(rows);
  const LocalTensor<float> blocks = ub.take<float>(rows * kFloatsOfBlock);
  const GlobalTensor<float> q_latent = call.template buffer<float>(d.workspace.q_latent), row_scale = call.template buffer<float>(d.workspace.row_scale);
  const GlobalTensor<T> query = call.template buffer<T>(d.workspace.query);
  constexpr bool kScaled = QueryRange<T>::most > 0.0f;
  TokenCursor<T> cursor(call);
  for_query_rows(call, rows, [&](int64_t token, int64_t h, int64_t heads) {
    const int64_t first_row = token * d.heads + h;
    cursor.seek(token);
    load_runs(x, q_latent[first_row * ld], 1, heads * ld, 0);
    rope.load(token, cursor.position(), h, heads);
    hand_over<HardEvent::MTE2_V>();
    rope.rotate(heads);
    if (kScaled) {
      const auto most_of = [&](const LocalTensor<float> &result, const LocalTensor<float> &values, int64_t columns, int64_t pitch) {
        AscendC::Abs(magnitude, values, static_cast<int32_t>(heads * pitch));
        v_barrier();
        reduce_rows<AscendC::ReduceType::MAX>(result, part, magnitude, heads, columns, pitch);
      };
      const int32_t n = static_cast<int32_t>(heads);
      most_of(most, x, d.rank, ld);
      for (int32_t side = 0; side < 2; ++side) {
        most_of(other, side == 0 ? rope.first() : rope.second(), rope.half(), rope.pitch());
        AscendC::Max(most, most, other, n);
        v_barrier();
      }
      AscendC::Muls(most, most, 1.0f / QueryRange<half>::most, n);
      v_barrier();
      AscendC::Maxs(scale, most, 1.0f, n);
      v_barrier();
      AscendC::Muls(most, scale, 1.0f, n);
      v_barrier();
      invert(most, part, heads);
      spread(blocks, most, heads);
      v_barrier();
      scale_rows(x, blocks, heads, d.rank, ld);
      scale_rows(rope.first(), blocks, heads, rope.pitch(), rope.pitch());
      scale_rows(rope.second(), blocks, heads, rope.pitch(), rope.pitch());
      v_barrier();
    } else {
      AscendC::Duplicate(scale, 1.0f, static_cast<int32_t>(heads));
    }
    narrow(rounded, x, heads * ld);
    rope.round(heads);
    hand_over<HardEvent::V_MTE3>();
    const GlobalTensor<T> row = query[first_row * call.ld_query()];
    store_runs(row, rounded, heads, d.rank, call.ld_query() - d.rank, (ld - align_up(d.rank, kFractal)) / kFractal);
    rope.store(row[d.rank], call.ld_query(), heads);
    store_runs(row_scale[first_row], scale, 1, heads, 0);
    hand_over<HardEvent::MTE3_V>();
    hand_over<HardEvent::V_MTE2>();
  });
}

}  // namespace flashmla
