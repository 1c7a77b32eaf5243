// The vector units' side of attention: online softmax of the scores, rescaling and adding up of P V, the output.
#pragma once

#include "attention.h"

namespace flashmla {

template <typename T>
class AttentionVec {
 public:
  __aicore__ inline AttentionVec(const Call<T> &call, const Schedule<T> &schedule)
      : call_(call), schedule_(schedule), s_(call), l1_(call, s_), ub_(s_), scaled_(call.absorbed() && QueryRange<T>::most > 0.0f) {
    for (int32_t i = 0; i < s_.b.score_buffers; ++i) AscendC::CrossCoreSetFlag<kCoreMode, PIPE_V>(V_FIX_SCORES_FREE);
    for (int32_t i = 0; i < s_.b.p_buffers; ++i) AscendC::SetFlag<HardEvent::MTE3_V>(i);
    if (scaled_) AscendC::SetFlag<HardEvent::V_MTE2>(pass_ ^ 1);
    for (int32_t i = 0; i < s_.b.ub_out_buffers; ++i) AscendC::CrossCoreSetFlag<kCoreMode, PIPE_V>(V_FIX_PV_FREE);
  }

  __aicore__ inline void finish() {
    add_all_outputs();
    if (scaled_) AscendC::SetFlag<HardEvent::V_MTE2>(pass_);
    for (int32_t i = 0; scaled_ && i < 2; ++i) AscendC::WaitFlag<HardEvent::V_MTE2>(i);
    for (int32_t i = 0; i < s_.b.p_buffers; ++i) AscendC::WaitFlag<HardEvent::MTE3_V>(i);
    for (int32_t i = 0; i < p_places(s_.b); ++i) AscendC::CrossCoreWaitFlag<kCoreMode, PIPE_MTE3>(MTE1_MTE3_P_FREE);
  }

  // A pass begins: its scales, no key seen yet.
  __aicore__ inline void begin(const Pass &pass) {
    if (scaled_) AscendC::SetFlag<HardEvent::V_MTE2>(pass_);  // no scores of the pass before are left to scale
    pass_ ^= 1;
    const int64_t half = half_of(pass);
    const LocalTensor<float> &scale = ub_.row_scale[pass_];
    if (scaled_) {
      AscendC::WaitFlag<HardEvent::V_MTE2>(pass_);
      const int64_t row = pass.first_token * call_.d.heads + pass.row0 + AscendC::GetSubBlockIdx() * half;
      const GlobalTensor<float> row_scale = call_.template buffer<float>(call_.d.workspace.row_scale);
      if (rows_of(pass) > 0) load_runs(scale, row_scale[row], 1, rows_of(pass), 0);
      hand_over<HardEvent::MTE2_V>(pass_);
      AscendC::Muls(scale, scale, call_.d.softmax_scale, static_cast<int32_t>(half));
    } else {
      AscendC::Duplicate(scale, call_.d.softmax_scale, static_cast<int32_t>(half));
    }
    AscendC::Duplicate(ub_.top[pass_], kLowest, static_cast<int32_t>(half));
    AscendC::Duplicate(ub_.sum[pass_], 0.0f, static_cast<int32_t>(half));
    v_barrier();
    spread(ub_.scale_blocks[pass_], scale, half);
    v_barrier();
  }

  // P = exp(S - max), the sums and what older outputs are to be multiplied with.
  __aicore__ inline TileInFlight softmax(const Segment &segment, int64_t t) {
    const Pass &pass = segment.pass;
    TileInFlight tile;
    tile.any = true;
    tile.last = t + 1 == segment.end;
    tile.rows16 = align_up(pass.rows, kFractal);
    tile.keys16 = align_up(smaller(s_.b.kv_tile, pass.keys - t * s_.b.kv_tile), kFractal);
    tile.pass = pass_;
    tile.tile = tile_;
    const int64_t half = tile.rows16 / 2, kv = s_.b.kv_tile;
    const LocalTensor<float> &s = ub_.scores[scores_], &top = ub_.top[pass_], &sum = ub_.sum[pass_];
    const int32_t n = static_cast<int32_t>(half);

    AscendC::CrossCoreWaitFlag<kCoreMode, PIPE_V>(FIX_V_SCORES);
    if (first_limit(pass, t) < kv) mask(pass, t, s);
    reduce_rows<AscendC::ReduceType::MAX>(ub_.tile_max, ub_.rescale, s, half, kv, kv);
    AscendC::Mul(ub_.tile_max, ub_.tile_max, ub_.row_scale[pass_], n);
    v_barrier();
    AscendC::Max(ub_.tile_max, ub_.tile_max, top, n);
    v_barrier();
    AscendC::Sub(ub_.rescale, top, ub_.tile_max, n);
    AscendC::Muls(top, ub_.tile_max, 1.0f, n);
    AscendC::Muls(ub_.tile_max, ub_.tile_max, -1.0f, n);
    v_barrier();
    AscendC::Exp(ub_.rescale, ub_.rescale, n);
    spread(ub_.blocks, ub_.tile_max, half);
    v_barrier();
    scale_and_shift(s, half);
    v_barrier();
    add_outputs(1);
    AscendC::Exp(s, s, static_cast<int32_t>(half * kv));
    spread(ub_.rescale_blocks[tile_], ub_.rescale, half);
    AscendC::Mul(sum, sum, ub_.rescale, n);
    v_barrier();
    add_outputs(2);
    reduce_rows<AscendC::ReduceType::SUM>(ub_.tile_max, ub_.rescale, s, half, kv, kv);
    AscendC::Add(sum, sum, ub_.tile_max, n);
    write_p(tile, s);
    AscendC::CrossCoreSetFlag<kCoreMode, PIPE_V>(V_FIX_SCORES_FREE);
    add_outputs(kOutputTurns);
    scores_ = next_of(scores_, s_.b.score_buffers);
    p_ = next_of(p_, s_.b.p_buffers);
    p_l1_ = next_of(p_l1_, p_places(s_.b));
    tile_ ^= 1;
    return tile;
  }

  // P V of this tile is what comes next; `first`: no output of its segment has come before.
  __aicore__ inline void expect_output(const Segment &segment, const TileInFlight &tile, bool first) {
    coming_segment_ = segment;
    coming_ = tile;
    column_ = 0;
    if (!first) return;
    AscendC::Duplicate(ub_.o, 0.0f, static_cast<int32_t>(tile.rows16 / 2 * s_.d_v16));
    v_barrier();
  }

  // O = O * rescale + P V, in turns between the steps of the next softmax: the cube never waits long for a buffer, nor the vector unit for a
  // column block. After the last tile of a segment the output leaves.
  __aicore__ inline void add_outputs(int64_t turn) {
    if (!coming_.any) return;
    const int64_t half = coming_.rows16 / 2, blocks = ceil_div(s_.d_v16, s_.b.ub_columns), until = blocks * turn / kOutputTurns;
    for (; column_ < until * s_.b.ub_columns && column_ < s_.d_v16; column_ += s_.b.ub_columns) {
      const int64_t columns = smaller(s_.b.ub_columns, s_.d_v16 - column_);
      const LocalTensor<float> &pv = ub_.pv[out_];
      AscendC::CrossCoreWaitFlag<kCoreMode, PIPE_V>(FIX_V_PV);
      for_columns(columns, [&](int64_t at, int64_t n) {
        AscendC::FusedMulAdd(ub_.o[column_ + at], ub_.rescale_blocks[coming_.tile], pv[at], static_cast<uint64_t>(n), static_cast<uint8_t>(half),
                             AscendC::BinaryRepeatParams(1, 0, 1, static_cast<uint8_t>(s_.d_v16 / kFloatsOfBlock), 1,
                                                         static_cast<uint8_t>(s_.b.ub_columns / kFloatsOfBlock)));
      });
      v_barrier();
      if (coming_.last && column_ + columns == s_.d_v16) leave(coming_segment_, coming_);
      AscendC::CrossCoreSetFlag<kCoreMode, PIPE_V>(V_FIX_PV_FREE);
      out_ = next_of(out_, s_.b.ub_out_buffers);
    }
    if (turn == kOutputTurns) coming_.any = false;
  }

  __aicore__ inline void add_all_outputs() { add_outputs(kOutputTurns); }

 private:
  __aicore__ inline int64_t half_of(const Pass &pass) const { return align_up(pass.rows, kFractal) / 2; }
  __aicore__ inline int64_t row0_of(const Pass &pass) const { return pass.row0 + AscendC::GetSubBlockIdx() * half_of(pass); }
  // Rows of the pass that this AIV has; the second one may have none.
  __aicore__ inline int64_t rows_of(const Pass &pass) const {
    const int64_t half = half_of(pass);
    return clamp(pass.rows - AscendC::GetSubBlockIdx() * half, 0, half);
  }
  // Keys of tile t that token `row / row_heads` sees, from the tile's first key on.
  __aicore__ inline int64_t limit(const Pass &pass, int64_t row, int64_t t) const {
    return pass.context + row / schedule_.row_heads() + 1 - t * s_.b.kv_tile;
  }
  __aicore__ inline int64_t first_limit(const Pass &pass, int64_t t) const { return limit(pass, row0_of(pass), t); }

  // Scores of keys that a token does not see become -inf, token by token. Rows that only fill up take part with the last token.
  __aicore__ inline void mask(const Pass &pass, int64_t t, const LocalTensor<float> &s) {
    const int64_t half = half_of(pass), kv = s_.b.kv_tile, row0 = row0_of(pass), heads = schedule_.row_heads(), rows = larger(rows_of(pass), 1);
    for (int64_t at = 0; at < rows;) {
      const int64_t next = ((row0 + at) / heads + 1) * heads - row0;
      const int64_t end = next >= rows ? half : next;
      const int64_t seen = clamp(limit(pass, row0 + at, t), 0, kv);
      for (int64_t c = seen / kVectorFloats * kVectorFloats; c < kv; c += kVectorFloats) {
        const int64_t columns = smaller(kVectorFloats, kv - c), from = clamp(seen - c, 0, columns);
        const uint64_t all = columns == kVectorFloats ? ~uint64_t(0) : (uint64_t(1) << columns) - 1;
        uint64_t bits[2] = {from == kVectorFloats ? 0 : all & (~uint64_t(0) << from), 0};
        if (bits[0] != 0)
          AscendC::Duplicate(s[at * kv + c], -__builtin_inff(), bits, static_cast<uint8_t>(end - at), 1, static_cast<uint8_t>(kv / kFloatsOfBlock));
      }
      at = end;
    }
    v_barrier();
  }

  // The exponents: scale S - max, in one pass; `blocks` holds the negated maxima.
  __aicore__ inline void scale_and_shift(const LocalTensor<float> &s, int64_t half) {
    const uint8_t row_blocks = static_cast<uint8_t>(s_.b.kv_tile / kFloatsOfBlock);
    for_columns(s_.b.kv_tile, [&](int64_t c, int64_t n) {
      AscendC::FusedMulAdd(s[c], ub_.scale_blocks[pass_], ub_.blocks, static_cast<uint64_t>(n), static_cast<uint8_t>(half),
                           AscendC::BinaryRepeatParams(1, 0, 0, row_blocks, 1, 1));
    });
  }

  // P rounded, as fractals of the rows of both AIVs in L1.
  __aicore__ inline void write_p(const TileInFlight &tile, const LocalTensor<float> &s) {
    const int64_t half = tile.rows16 / 2, kv = s_.b.kv_tile;
    const LocalTensor<T> &p = ub_.p[p_];
    AscendC::WaitFlag<HardEvent::MTE3_V>(p_);
    for_columns(tile.keys16, [&](int64_t c, int64_t n) {
      AscendC::Cast(p[c * half], s[c], AscendC::RoundMode::CAST_RINT, static_cast<uint64_t>(n), static_cast<uint8_t>(half),
                    AscendC::UnaryRepeatParams(static_cast<uint16_t>(half), 1, 1, static_cast<uint8_t>(kv / kFloatsOfBlock)));
    });
    hand_over<HardEvent::V_MTE3>(p_);
    AscendC::CrossCoreWaitFlag<kCoreMode, PIPE_MTE3>(MTE1_MTE3_P_FREE);
    const AscendC::DataCopyParams columns(static_cast<uint16_t>(tile.keys16 / kFractal), static_cast<uint16_t>(half), 0,
                                          static_cast<uint16_t>(tile.rows16 - half));
    AscendC::DataCopy(l1_.p[p_l1_][AscendC::GetSubBlockIdx() * half * kFractal], p, columns);
    AscendC::CrossCoreSetFlag<kCoreMode, PIPE_MTE3>(MTE3_MTE1_P);
    AscendC::SetFlag<HardEvent::MTE3_V>(p_);
  }

  // The output of a segment: divided by its sum and rounded when the pass is whole, else as it is, with its maximum and sum.
  __aicore__ inline void leave(const Segment &segment, const TileInFlight &tile) {
    const Pass &pass = segment.pass;
    const int64_t half = tile.rows16 / 2, rows = rows_of(pass);
    if (!segment.whole()) {
      const int64_t slot = schedule_.slot_of_core(AscendC::GetBlockIdx() / 2, segment.line), row = AscendC::GetSubBlockIdx() * half;
      const GlobalTensor<float> o = call_.template buffer<float>(call_.d.workspace.partial_o);
      const GlobalTensor<float> state = call_.template buffer<float>(call_.d.workspace.partial_state);
      hand_over<HardEvent::V_MTE3>(kLeave);
      if (rows > 0) {
        store_runs(o[(slot * s_.b.rows + row) * s_.d_v16], ub_.o, 1, rows * s_.d_v16, 0);
        store_runs(state[slot * 2 * s_.b.rows + row], ub_.top[tile.pass], 1, rows, 0);
        store_runs(state[(slot * 2 + 1) * s_.b.rows + row], ub_.sum[tile.pass], 1, rows, 0);
      }
      hand_over<HardEvent::MTE3_V>(kLeave);
      return;
    }
    invert(ub_.sum[tile.pass], ub_.rescale, half);
    spread(ub_.blocks, ub_.sum[tile.pass], half);
    v_barrier();
    scale_rows(ub_.o, ub_.blocks, half, s_.d_v16, s_.d_v16);
    v_barrier();
    // The P V buffer that was read last is still ours: columns leave through it, rounded, then what the rounding left off.
    const int64_t width = smaller(align_down(larger(s_.b.ub_columns, kLeastPvColumns) / 2, kFractal), s_.d_v16);
    const LocalTensor<float> &wide = ub_.pv[out_];
    const LocalTensor<T> rounded = ub_.pv[out_][half * width].template ReinterpretCast<T>();
    const uint8_t n_half = static_cast<uint8_t>(half), o_rep = static_cast<uint8_t>(s_.d_v16 / kFloatsOfBlock);
    const uint8_t wide_rep = static_cast<uint8_t>(width / kFloatsOfBlock), rounded_rep = static_cast<uint8_t>(width / kFractal);
    for (int64_t c = 0; c < s_.d_out; c += width) {
      const int64_t columns = smaller(width, s_.d_v16 - c);
      for (int32_t part = 0; part < output_parts(call_); ++part) {
        for_columns(columns, [&](int64_t at, int64_t n) {
          AscendC::Cast(rounded[at], ub_.o[c + at], AscendC::RoundMode::CAST_RINT, static_cast<uint64_t>(n), n_half,
                        AscendC::UnaryRepeatParams(1, 1, rounded_rep, o_rep));
        });
        hand_over<HardEvent::V_MTE3>(kLeave);
        store_output(pass, rows, c, smaller(columns, s_.d_out - c), rounded, width, part);
        if (part + 1 < output_parts(call_)) {
          v_barrier();
          for_columns(columns, [&](int64_t at, int64_t n) {
            AscendC::Cast(wide[at], rounded[at], AscendC::RoundMode::CAST_NONE, static_cast<uint64_t>(n), n_half,
                          AscendC::UnaryRepeatParams(1, 1, wide_rep, rounded_rep));
          });
          v_barrier();
          for_columns(columns, [&](int64_t at, int64_t n) {
            AscendC::Sub(ub_.o[c + at], ub_.o[c + at], wide[at], static_cast<uint64_t>(n), n_half,
                         AscendC::BinaryRepeatParams(1, 1, 1, o_rep, o_rep, wide_rep));
          });
          v_barrier();
        }
        hand_over<HardEvent::MTE3_V>(kLeave);
      }
    }
  }

  __aicore__ inline void store_output(const Pass &pass, int64_t rows, int64_t c, int64_t columns, const LocalTensor<T> &rounded, int64_t width,
                                      int32_t part) {
    const KernelData &d = call_.d;
    const int64_t gap_blocks = (width - align_up(columns, kFractal)) / kFractal, row0 = row0_of(pass);
    if (rows <= 0) return;
    if (!call_.absorbed()) {  // o [T, heads, d_v]
      const int64_t ld = d.heads * d.d_v, row = pass.first_token + row0;
      store_runs(call_.template buffer<T>(d.workspace.o)[row * ld + pass.head * d.d_v + c], rounded, rows, columns, ld - columns, gap_blocks);
      return;
    }
    const GlobalTensor<T> o = call_.template buffer<T>(d.workspace.o_latent[part]);  // [heads, parts, T, rank]
    for (int64_t at = 0; at < rows;) {
      const int64_t head = (row0 + at) % d.heads, token = pass.first_token + (row0 + at) / d.heads;
      const int64_t run = smaller(rows - at, d.heads - head);
      store_runs(o[(head * d.parts * d.num_tokens + token) * d.rank + c], rounded[at * width], run, columns, d.parts * d.num_tokens * d.rank - columns,
                 gap_blocks);
      at += run;
    }
  }

  static constexpr int32_t kLeave = 2;  // events: copies of P come first
  static constexpr int64_t kOutputTurns = 4;

  const Call<T> &call_;
  const Schedule<T> &schedule_;
  const AttentionShape<T> s_;
  const AttentionL1<T> l1_;
  const AttentionUb<T> ub_;
  const bool scaled_;  // rows have scales of their own
  int32_t pass_ = 0, tile_ = 0, scores_ = 0, p_ = 0, p_l1_ = 0, out_ = 0;
  Segment coming_segment_;
  TileInFlight coming_;  // whose P V comes
  int64_t column_ = 0;   // of it, up to which it has been added
};

template <typename T>
__aicore__ inline void attend_vec(const Call<T> &call, const Schedule<T> &schedule) {
  AttentionVec<T> vec(call, schedule);
  schedule.for_core(AscendC::GetBlockIdx() / 2, [&](const Segment &segment) {
    vec.begin(segment.pass);
    for (int64_t t = segment.begin; t < segment.end; ++t) {
      const TileInFlight tile = vec.softmax(segment, t);
      vec.expect_output(segment, tile, t == segment.begin);
      if (call.d.blocks.kv_buffers == 1) vec.add_all_outputs();  // the cube waits with the next scores
    }
  });
  vec.finish();
}

}  // namespace flashmla
