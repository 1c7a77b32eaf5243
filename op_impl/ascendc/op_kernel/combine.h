// combine: the splits of a pass become its output, out = sum_s w_s O_s / sum_s w_s l_s with w_s = exp(m_s - max m).
#pragma once

#include "attention.h"

namespace flashmla {

constexpr int64_t kCombineRows = 32;      // at the most, of an item of work
constexpr int64_t kMostSplits = 64;       // of a pass: one a core

template <typename T>
class Combine {
 public:
  __aicore__ inline explicit Combine(const Call<T> &call) : call_(call), s_(call) {
    Region ub(TPosition::VECCALC);
    columns_ = smaller(s_.d_v16, 512);
    sum_ = ub.take<float>(kCombineRows * columns_);
    for (int32_t i = 0; i < 2; ++i) part_[i] = ub.take<float>(kCombineRows * columns_);
    rounded_ = ub.take<T>(kCombineRows * columns_);
    states_ = ub.take<float>(kMostSplits * 2 * kCombineRows);
    top_ = ub.take<float>(kCombineRows);
    total_ = ub.take<float>(kCombineRows);
    weight_ = ub.take<float>(kCombineRows);
    blocks_ = ub.take<float>(kCombineRows * kFloatsOfBlock);
    for (int32_t i = 0; i < 3; ++i) AscendC::SetFlag<HardEvent::V_MTE2>(i);
    AscendC::SetFlag<HardEvent::MTE3_V>(0);
  }
  __aicore__ inline void finish() {
    for (int32_t i = 0; i < 3; ++i) AscendC::WaitFlag<HardEvent::V_MTE2>(i);
    AscendC::WaitFlag<HardEvent::MTE3_V>(0);
  }

  // Rows [row, row + rows) of a pass whose first tile stands at `line`. Copies run ahead of the sums: a split's outputs come while those of the
  // one before it are weighted, the first ones of an item while the item before it leaves.
  __aicore__ inline void run(const Schedule<T> &schedule, const Pass &pass, int64_t line, int64_t row, int64_t rows) {
    const int64_t splits = schedule.splits(pass, line);
    rows_ = align_up(rows, kFloatsOfBlock);
    const int32_t n = static_cast<int32_t>(rows_);
    const GlobalTensor<float> state = call_.template buffer<float>(call_.d.workspace.partial_state);
    const GlobalTensor<float> partial = call_.template buffer<float>(call_.d.workspace.partial_o);
    AscendC::WaitFlag<HardEvent::V_MTE2>(kStates);
    for (int64_t i = 0; i < splits; ++i)  // maxima, then sums
      load_runs(states_[i * 2 * kCombineRows], state[schedule.partial_slot(pass, line, i) * 2 * s_.b.rows + row], 2, rows, s_.b.rows - rows,
                (kCombineRows - rows_) / kFloatsOfBlock);
    hand_over<HardEvent::MTE2_V>(kStates);
    AscendC::Muls(top_, states_, 1.0f, n);
    v_barrier();
    for (int64_t i = 1; i < splits; ++i) {
      AscendC::Max(top_, top_, states_[i * 2 * kCombineRows], n);
      v_barrier();
    }
    for (int64_t c = 0; c < s_.d_v16; c += columns_) {
      const int64_t columns = smaller(columns_, s_.d_v16 - c);
      for (int64_t i = 0; i < splits; ++i) {
        const LocalTensor<float> &part = part_[next_];
        AscendC::WaitFlag<HardEvent::V_MTE2>(next_);
        load_runs(part, partial[(schedule.partial_slot(pass, line, i) * s_.b.rows + row) * s_.d_v16 + c], rows, columns, s_.d_v16 - columns,
                  (columns_ - columns) / kFloatsOfBlock);
        hand_over<HardEvent::MTE2_V>(next_);
        add(part, i, columns);
        if (i + 1 < splits) AscendC::SetFlag<HardEvent::V_MTE2>(next_);
        if (i + 1 < splits) next_ ^= 1;
      }
      invert(total_, weight_, rows_);
      spread(blocks_, total_, rows_);
      v_barrier();
      scale_rows(sum_, blocks_, rows_, columns, columns_);
      v_barrier();
      for (int32_t part = 0; part < output_parts(call_); ++part) {
        AscendC::WaitFlag<HardEvent::MTE3_V>(0);
        narrow(rounded_, sum_, rows_ * columns_);
        hand_over<HardEvent::V_MTE3>();
        if (c < s_.d_out) store(pass, row, rows, c, smaller(columns, s_.d_out - c), part);
        AscendC::SetFlag<HardEvent::MTE3_V>(0);
        if (part + 1 < output_parts(call_)) take_away(sum_, rounded_, part_[next_], rows_ * columns_);
      }
      AscendC::SetFlag<HardEvent::V_MTE2>(next_);
      next_ ^= 1;
    }
    AscendC::SetFlag<HardEvent::V_MTE2>(kStates);
  }

 private:
  // Split i joins the sums.
  __aicore__ inline void add(const LocalTensor<float> &part, int64_t i, int64_t columns) {
    const int32_t n = static_cast<int32_t>(rows_), all = static_cast<int32_t>(rows_ * columns_);
    const LocalTensor<float> top = states_[i * 2 * kCombineRows], sum = top[kCombineRows];
    AscendC::Sub(weight_, top, top_, n);
    v_barrier();
    AscendC::Exp(weight_, weight_, n);
    v_barrier();
    spread(blocks_, weight_, rows_);
    AscendC::Mul(weight_, weight_, sum, n);
    v_barrier();
    if (i == 0) AscendC::Muls(total_, weight_, 1.0f, n);
    else AscendC::Add(total_, total_, weight_, n);
    scale_rows(part, blocks_, rows_, columns, columns_);
    v_barrier();
    if (i == 0) AscendC::Muls(sum_, part, 1.0f, all);
    else AscendC::Add(sum_, sum_, part, all);
    v_barrier();
  }

  __aicore__ inline void store(const Pass &pass, int64_t row, int64_t rows, int64_t c, int64_t columns, int32_t part) {
    const KernelData &d = call_.d;
    const int64_t gap_blocks = (columns_ - align_up(columns, kFractal)) / kFractal, row0 = pass.row0 + row;
    if (!call_.absorbed()) {
      const int64_t ld = d.heads * d.d_v, offset = (pass.first_token + row0) * ld + pass.head * d.d_v + c;
      store_runs(call_.template buffer<T>(d.workspace.o)[offset], rounded_, rows, columns, ld - columns, gap_blocks);
      return;
    }
    const int64_t head_elements = d.parts * d.num_tokens * d.rank;
    for (int64_t at = 0; at < rows;) {  // rows of one token are heads that follow each other
      const int64_t head = (row0 + at) % d.heads, token = pass.first_token + (row0 + at) / d.heads, run = smaller(rows - at, d.heads - head);
      const GlobalTensor<T> dst = call_.template buffer<T>(d.workspace.o_latent[part])[head * head_elements + token * d.rank + c];
      store_runs(dst, rounded_[at * columns_], run, columns, head_elements - columns, gap_blocks);
      at += run;
    }
  }

  static constexpr int32_t kStates = 2;  // event: the two buffers of outputs come first

  const Call<T> &call_;
  const AttentionShape<T> s_;
  int64_t columns_, rows_ = 0;  // rows of the item, whole data blocks of their states
  LocalTensor<float> sum_, part_[2], states_, top_, total_, weight_, blocks_;
  LocalTensor<T> rounded_;
  int32_t next_ = 0;
};

// Rows of an item: few enough to keep all AIVs busy.
template <typename T>
__aicore__ inline void combine(const Call<T> &call, const Schedule<T> &schedule) {
  const int64_t parts = 2 * call.d.cores, own = AscendC::GetBlockIdx();
  int64_t all = 0;
  schedule.for_split([&](const Pass &pass, int64_t) { all += pass.rows; });
  if (all == 0) return;
  const int64_t most = clamp(align_up(ceil_div(all, parts), kFloatsOfBlock), kFloatsOfBlock, kCombineRows);
  Combine<T> combine(call);
  int64_t item = 0;
  schedule.for_split([&](const Pass &pass, int64_t line) {
    for (int64_t row = 0; row < pass.rows; row += most, ++item)
      if (item % parts == own) combine.run(schedule, pass, line, row, smaller(most, pass.rows - row));
  });
  combine.finish();
}

}  // namespace flashmla
