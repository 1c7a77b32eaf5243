// Results that another product takes: the AIVs write them as one rounded part, or as two whose sum is as good as float32 here.
#pragma once

#include "gemm.h"
#include "vec.h"

namespace flashmla {

template <typename T>
class SplitVec {
 public:
  static constexpr int64_t kRows = 16;  // split together

  __aicore__ inline SplitVec(const Call<T> &call, const LocalTensor<float> (&result)[2], Region &ub, GM_ADDR first, GM_ADDR second, int64_t ld, int64_t stride)
      : result_(result), first_(global<T>(first)), second_(global<T>(second)), ld_(ld), stride_(stride) {
    const int64_t elements = call.d.gemm_base_m / 2 * call.d.gemm_base_n;
    high_ = ub.take<T>(elements);
    low_ = ub.take<T>(elements);
    wide_ = ub.take<float>(kRows * call.d.gemm_base_n);
    for (int32_t i = 0; i < 2; ++i) AscendC::CrossCoreSetFlag<kCoreMode, PIPE_V>(V_FIX_RESULT_FREE);
    AscendC::SetFlag<HardEvent::MTE3_V>(0);
  }
  __aicore__ inline void finish() { AscendC::WaitFlag<HardEvent::MTE3_V>(0); }

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
__aicore__ inline void project_in_parts(const Call<T> &call, GemmJob<T> job, const int64_t (&parts)[2]) {
  const KernelData &d = call.d;
  if (d.parts == 1) {
    job.c = call.workspace + parts[0];
    project(call, &job, 1);
    return;
  }
  const GemmCut cut(job.m, job.n, job.groups, d.gemm_base_m, block_columns(&job, 1, d.gemm_base_m, d.gemm_base_n, d.cores));
  Region ub(TPosition::VECCALC);
  const int64_t elements = d.gemm_base_m / 2 * d.gemm_base_n;
  const LocalTensor<float> result[2] = {ub.take<float>(elements), ub.take<float>(elements)};
  if ASCEND_IS_AIC {
    const GlobalTensor<T> zeros = call.template buffer<T>(d.workspace.zeros);
    GemmCube<T> cube(cut.m_block, cut.n_block, job.parts);
    int32_t next = 0;
    for (int64_t i = AscendC::GetBlockIdx(); i < cut.items; i += d.cores)
      cube.run(PackedSource<T>{job, zeros, true}, VectorSink{result, &next}, cut.item(i, job.m, job.n), job.k);
    cube.finish();
    for (int32_t i = 0; i < 2; ++i) AscendC::CrossCoreWaitFlag<kCoreMode, PIPE_FIX>(V_FIX_RESULT_FREE);
  }
  if ASCEND_IS_AIV {
    SplitVec<T> split(call, result, ub, call.workspace + parts[0], call.workspace + parts[1], job.ldc, job.c_stride);
    for (int64_t i = AscendC::GetBlockIdx() / 2; i < cut.items; i += d.cores) split.run(cut.item(i, job.m, job.n));
    split.finish();
  }
}

}  // namespace flashmla
