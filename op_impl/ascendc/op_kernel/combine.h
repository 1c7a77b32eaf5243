// combine: the splits of a pass become its output, out = sum_s w_s O_s / sum_s w_s l_s with w_s = exp(m_s - max m).
#pragma once

#include "attention.h"

namespace flashmla {

constexpr int64_t kCombineRows = 32;

template <typename T>
class Combine {
 public:
  __aicore__ inline explicit Combine(const Call<T> &call) : call_(call), s_(call) {
    Region ub(TPosition::VECCALC);
    columns_ = smaller(s_.d_v16, 512);
    sum_ = ub.take<float>(kCombineRows * columns_);
    part_ = ub.take<float>(kCombineRows * columns_);
    rounded_ = ub.take<T>(kCombineRows * columns_);
    top_ = ub.take<float>(kCombineRows);
    total_ = ub.take<float>(kCombineRows);
    state_top_ = ub.take<float>(kCombineRows);
    state_sum_ = ub.take<float>(kCombineRows);
    weight_ = ub.take<float>(kCombineRows);
    blocks_ = ub.take<float>(kCombineRows * kFloatsOfBlock);
  }

  // Rows [row, row + rows) of a pass whose first tile stands at `line`.
  __aicore__ inline void run(const Schedule<T> &schedule, const Pass &pass, int64_t line, int64_t row, int64_t rows) {
    const int64_t first = schedule.first_core(line), last = schedule.last_core(line, pass.tiles);
    const int32_t n = static_cast<int32_t>(kCombineRows);
    const GlobalTensor<float> state = call_.template buffer<float>(call_.d.workspace.partial_state);
    const GlobalTensor<float> partial = call_.template buffer<float>(call_.d.workspace.partial_o);
    AscendC::Duplicate(top_, kLowest, n);
    AscendC::Duplicate(total_, 0.0f, n);
    v_barrier();
    for (int64_t core = first; core <= last; ++core) {
      load_runs(state_top_, state[schedule.partial_slot(core, line) * 2 * s_.b.rows + row], 1, rows, 0);
      hand_over<HardEvent::MTE2_V>();
      AscendC::Max(top_, top_, state_top_, n);
      v_barrier();
      hand_over<HardEvent::V_MTE2>();
    }
    for (int64_t c = 0; c < s_.d_v16; c += columns_) {
      const int64_t columns = smaller(columns_, s_.d_v16 - c);
      AscendC::Duplicate(sum_, 0.0f, static_cast<int32_t>(kCombineRows * columns_));
      AscendC::Duplicate(total_, 0.0f, n);
      v_barrier();
      for (int64_t core = first; core <= last; ++core) {
        const int64_t slot = schedule.partial_slot(core, line);
        load_runs(state_top_, state[slot * 2 * s_.b.rows + row], 1, rows, 0);
        load_runs(state_sum_, state[(slot * 2 + 1) * s_.b.rows + row], 1, rows, 0);
        load_runs(part_, partial[(slot * s_.b.rows + row) * s_.d_v16 + c], rows, columns, s_.d_v16 - columns, (columns_ - columns) / kFloatsOfBlock);
        hand_over<HardEvent::MTE2_V>();
        AscendC::Sub(weight_, state_top_, top_, n);
        v_barrier();
        AscendC::Exp(weight_, weight_, n);
        v_barrier();
        AscendC::Mul(state_sum_, state_sum_, weight_, n);
        spread(blocks_, weight_, kCombineRows);
        v_barrier();
        AscendC::Add(total_, total_, state_sum_, n);
        scale_rows(part_, blocks_, kCombineRows, columns, columns_);
        v_barrier();
        AscendC::Add(sum_, sum_, part_, static_cast<int32_t>(kCombineRows * columns_));
        v_barrier();
        hand_over<HardEvent::V_MTE2>();
      }
      invert(total_, weight_, kCombineRows);
      spread(blocks_, total_, kCombineRows);
      v_barrier();
      scale_rows(sum_, blocks_, kCombineRows, columns, columns_);
      v_barrier();
      for (int32_t part = 0; part < call_.d.parts; ++part) {
        narrow(rounded_, sum_, kCombineRows * columns_);
        hand_over<HardEvent::V_MTE3>();
        if (c < s_.d_out) store(pass, row, rows, c, smaller(columns, s_.d_out - c), part);
        if (part + 1 < call_.d.parts) take_away(sum_, rounded_, part_, kCombineRows * columns_);
        hand_over<HardEvent::MTE3_V>();
      }
      hand_over<HardEvent::V_MTE2>(1);
    }
  }

 private:
  __aicore__ inline void store(const Pass &pass, int64_t row, int64_t rows, int64_t c, int64_t columns, int32_t part) {
    const KernelData &d = call_.d;
    const int64_t gap_blocks = (columns_ - align_up(columns, kFractal)) / kFractal, row0 = pass.row0 + row;
    if (!call_.absorbed()) {
      const int64_t ld = d.heads * d.d_v, offset = (pass.first_token + row0) * ld + pass.head * d.d_v + c;
      store_runs(call_.template buffer<T>(d.workspace.o[part])[offset], rounded_, rows, columns, ld - columns, gap_blocks);
      return;
    }
    const int64_t head_elements = d.num_tokens * d.rank;
    for (int64_t at = 0; at < rows;) {  // rows of one token are heads that follow each other
      const int64_t head = (row0 + at) % d.heads, token = pass.first_token + (row0 + at) / d.heads, run = smaller(rows - at, d.heads - head);
      const GlobalTensor<T> dst = call_.template buffer<T>(d.workspace.o_latent[part])[head * head_elements + token * d.rank + c];
      store_runs(dst, rounded_[at * columns_], run, columns, head_elements - columns, gap_blocks);
      at += run;
    }
  }

  const Call<T> &call_;
  const AttentionShape<T> s_;
  int64_t columns_;
  LocalTensor<float> sum_, part_, top_, total_, state_top_, state_sum_, weight_, blocks_;
  LocalTensor<T> rounded_;
};

template <typename T>
__aicore__ inline void combine(const Call<T> &call, const Schedule<T> &schedule) {
  Combine<T> combine(call);
  const int64_t parts = 2 * call.d.cores, own = AscendC::GetBlockIdx();
  int64_t item = 0;
  schedule.for_split([&](const Pass &pass, int64_t line) {
    for (int64_t row = 0; row < pass.rows; row += kCombineRows, ++item)
      if (item % parts == own) combine.run(schedule, pass, line, row, smaller(kCombineRows, pass.rows - row));
  });
}

}  // namespace flashmla
