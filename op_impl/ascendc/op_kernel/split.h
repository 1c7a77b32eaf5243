// Results that another product takes: the AIVs write them as one rounded part, or as two whose sum is as good as float32 here.
#pragma once

#include "products.h"
#include "vec.h"

namespace flashmla {

template <typename T>
class SplitVec {
 public:
  static constexpr int64_t kRows = 16;  // split together

  __aicore__ inline SplitVec(const LocalTensor<float> (&result)[2], Region &ub, const ProductBlocks &blocks, GM_ADDR first, GM_ADDR second,
                             int64_t ld, int64_t stride)
      : result_(result), first_(global<T>(first)), second_(global<T>(second)), ld_(ld), stride_(stride) {
    const int64_t elements = blocks.rows / 2 * blocks.piece;
    high_ = ub.take<T>(elements);
    low_ = ub.take<T>(elements);
    wide_ = ub.take<float>(kRows * blocks.piece);
    for (int32_t i = 0; i < 2; ++i) AscendC::CrossCoreSetFlag<kCoreMode, PIPE_V>(V_FIX_RESULT_FREE);
    AscendC::SetFlag<HardEvent::MTE3_V>(0);
  }
  __aicore__ inline void finish() { AscendC::WaitFlag<HardEvent::MTE3_V>(0); }

  // A piece of a block.
  __aicore__ inline void run(const GemmItem &item) {
    const int64_t half = rows_of_half(item), row = item.m0 + AscendC::GetSubBlockIdx() * half, rows = clamp(item.m0 + item.m - row, 0, half);
    const LocalTensor<float> &y = result_[next_];
    AscendC::WaitFlag<HardEvent::MTE3_V>(0);
    AscendC::CrossCoreWaitFlag<kCoreMode, PIPE_V>(FIX_V_RESULT);
    for (int64_t r = 0; r < rows; r += kRows) {
      const int64_t at = r * item.n, count = smaller(kRows, rows - r) * item.n;
      narrow(high_[at], y[at], count);
      v_barrier();
      widen(wide_, high_[at], count);
      v_barrier();
      AscendC::Sub(y[at], y[at], wide_, static_cast<int32_t>(count));
      v_barrier();
      narrow(low_[at], y[at], count);
    }
    AscendC::CrossCoreSetFlag<kCoreMode, PIPE_V>(V_FIX_RESULT_FREE);
    hand_over<HardEvent::V_MTE3>();
    if (rows > 0) {
      const int64_t offset = item.group * stride_ + row * ld_ + item.n0;
      store_runs(first_[offset], high_, rows, item.n, ld_ - item.n);
      store_runs(second_[offset], low_, rows, item.n, ld_ - item.n);
    }
    AscendC::SetFlag<HardEvent::MTE3_V>(0);
    next_ ^= 1;
  }

 private:
  const LocalTensor<float> (&result_)[2];
  GlobalTensor<T> first_, second_;
  int64_t ld_, stride_;
  LocalTensor<T> high_, low_;
  LocalTensor<float> wide_;
  int32_t next_ = 0;
};

// A product that feeds another one; `parts` are the workspace offsets of its result.
template <typename T>
class SplitProduct {
 public:
  __aicore__ inline SplitProduct(const Call<T> &call, GemmJob<T> job, const int64_t (&parts)[2], const ProductBlocks &blocks)
      : call_(call), job_(with_result(call, job, parts)), parts_{parts[0], parts[1]}, blocks_(blocks), products_(call, &job_, 1, blocks, call.d.parts > 1) {}

  __aicore__ inline void prefetch() { products_.prefetch(); }
  __aicore__ inline void run() {
    if (call_.d.parts == 1) return products_.run();
    Region ub(TPosition::VECCALC);
    const int64_t elements = blocks_.rows / 2 * blocks_.piece;
    const LocalTensor<float> result[2] = {ub.take<float>(elements), ub.take<float>(elements)};
    if ASCEND_IS_AIC {
      int32_t next = 0;
      products_.run(VectorSink{result, &next});
      for (int32_t i = 0; i < 2; ++i) AscendC::CrossCoreWaitFlag<kCoreMode, PIPE_FIX>(V_FIX_RESULT_FREE);
    }
    if ASCEND_IS_AIV {
      SplitVec<T> split(result, ub, blocks_, call_.workspace + parts_[0], call_.workspace + parts_[1], job_.ldc, job_.c_stride);
      products_.for_results([&](const GemmItem &piece) { split.run(piece); });
      split.finish();
    }
  }

 private:
  static __aicore__ inline GemmJob<T> with_result(const Call<T> &call, GemmJob<T> job, const int64_t (&parts)[2]) {
    job.c = call.workspace + parts[0];
    return job;
  }

  const Call<T> &call_;
  const GemmJob<T> job_;
  const int64_t parts_[2];
  const ProductBlocks &blocks_;
  Products<T> products_;
};

}  // namespace flashmla
