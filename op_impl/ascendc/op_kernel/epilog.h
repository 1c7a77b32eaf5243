// epilog: value up-projection, output projection, bias and residual added before the single write.
#pragma once

#include "split.h"

namespace flashmla {

// o [T, heads * d_v] = o_latent W_UV, head by head.
template <typename T>
__aicore__ inline Products<T> up_product(const Call<T> &call) {
  const KernelData &d = call.d;
  const bool padded = d.d_v % kFractal != 0;
  const int64_t width = padded ? call.ld_v() : d.d_v;
  GemmJob<T> job = {{}, d.parts, d.rank, d.parts * d.num_tokens * d.rank, d.num_tokens, call.template input<T>(FlashMLAIn::w_uv), d.heads, d.d_v, d.rank,
                    call.workspace + (padded ? d.workspace.o_padded : d.workspace.o), d.heads * width, width, true};
  call.set_parts(job.a, d.workspace.o_latent);
  return Products<T>(call, &job, 1, d.products.up, false);
}

// Heads of d_v columns that are no whole fractals: the cube left them padded, W_o takes them side by side.
template <typename T>
__aicore__ inline void compact_outputs(const Call<T> &call) {
  const KernelData &d = call.d;
  const int64_t ld = call.ld_v(), rows = clamp(kUbBytes / (ld * int64_t(sizeof(T))), 1, 1024), all = d.num_tokens * d.heads;
  LocalTensor<T> heads(TPosition::VECCALC, 0, static_cast<uint32_t>(rows * ld));
  const Share share(ceil_div(all, rows), d.cores);
  for (int64_t i = share.begin; i < share.end; ++i) {
    const int64_t row = i * rows, count = smaller(rows, all - row);
    load_runs(heads, call.template buffer<T>(d.workspace.o_padded)[row * ld], 1, count * ld, 0);
    hand_over<HardEvent::MTE2_MTE3>();
    store_runs(call.template buffer<T>(d.workspace.o)[row * d.d_v], heads, count, d.d_v, 0);
    hand_over<HardEvent::MTE3_MTE2>();
  }
}

// The vector units' side: half of the rows of each block.
template <typename T>
class OutputVec {
 public:
  __aicore__ inline OutputVec(const Call<T> &call, const LocalTensor<float> (&result)[2], Region &ub) : call_(call), result_(result) {
    const ProductBlocks &blocks = call.d.products.output;
    const int64_t elements = blocks.rows / 2 * blocks.piece;
    rounded_ = ub.take<T>(elements);
    wide_ = ub.take<float>(elements);
    bias16_ = ub.take<T>(blocks.piece);
    bias_ = ub.take<float>(blocks.piece);
    for (int32_t i = 0; i < 2; ++i) AscendC::CrossCoreSetFlag<kCoreMode, PIPE_V>(V_FIX_RESULT_FREE);
    AscendC::SetFlag<HardEvent::V_MTE2>(0);
    AscendC::SetFlag<HardEvent::MTE3_MTE2>(0);
  }
  __aicore__ inline void finish() {
    AscendC::WaitFlag<HardEvent::V_MTE2>(0);
    AscendC::WaitFlag<HardEvent::MTE3_MTE2>(0);
  }

  __aicore__ inline void run(const GemmItem &item) {
    const KernelData &d = call_.d;
    const int64_t half = rows_of_half(item), row = item.m0 + AscendC::GetSubBlockIdx() * half;
    const int64_t rows = clamp(item.m0 + item.m - row, 0, half), columns = smaller(item.n, d.hidden - item.n0);
    const int64_t offset = row * d.hidden + item.n0;
    const int32_t count = static_cast<int32_t>(rows * item.n);
    const LocalTensor<float> &y = result_[next_];
    AscendC::WaitFlag<HardEvent::V_MTE2>(0);
    AscendC::WaitFlag<HardEvent::MTE3_MTE2>(0);
    if (rows > 0 && d.has_residual) load_runs(rounded_, call_.template input<T>(FlashMLAIn::residual)[offset], rows, columns, d.hidden - columns);
    if (d.has_b_o) load_runs(bias16_, call_.template input<T>(FlashMLAIn::b_o)[item.n0], 1, columns, 0);
    hand_over<HardEvent::MTE2_V>();
    AscendC::CrossCoreWaitFlag<kCoreMode, PIPE_V>(FIX_V_RESULT);
    if (rows > 0) {
      if (d.has_residual) widen(wide_, rounded_, count);
      if (d.has_b_o) widen(bias_, bias16_, item.n);
      v_barrier();
      if (d.has_residual) AscendC::Add(y, y, wide_, count);
      v_barrier();
      if (d.has_b_o) add_row(y, bias_, rows, item.n, item.n);
      v_barrier();
      narrow(rounded_, y, count);
    }
    AscendC::CrossCoreSetFlag<kCoreMode, PIPE_V>(V_FIX_RESULT_FREE);
    AscendC::SetFlag<HardEvent::V_MTE2>(0);
    hand_over<HardEvent::V_MTE3>();
    if (rows > 0) store_runs(global<T>(call_.out)[offset], rounded_, rows, columns, d.hidden - columns);
    AscendC::SetFlag<HardEvent::MTE3_MTE2>(0);
    next_ ^= 1;
  }

 private:
  const Call<T> &call_;
  const LocalTensor<float> (&result_)[2];
  LocalTensor<T> rounded_, bias16_;
  LocalTensor<float> wide_, bias_;
  int32_t next_ = 0;
};

// out = residual + o W_o.
template <typename T>
class OutputProduct {
 public:
  __aicore__ inline explicit OutputProduct(const Call<T> &call)
      : call_(call), job_(job(call)), products_(call, &job_, 1, call.d.products.output, true) {}

  __aicore__ inline void prefetch() { products_.prefetch(); }
  __aicore__ inline void run() {
    Region ub(TPosition::VECCALC);
    const int64_t elements = call_.d.products.output.rows / 2 * call_.d.products.output.piece;
    const LocalTensor<float> result[2] = {ub.take<float>(elements), ub.take<float>(elements)};
    if ASCEND_IS_AIC {
      int32_t next = 0;
      products_.run(VectorSink{result, &next});
      for (int32_t i = 0; i < 2; ++i) AscendC::CrossCoreWaitFlag<kCoreMode, PIPE_FIX>(V_FIX_RESULT_FREE);
    }
    if ASCEND_IS_AIV {
      OutputVec<T> output(call_, result, ub);
      products_.for_results([&](const GemmItem &piece) { output.run(piece); });
      output.finish();
    }
  }

 private:
  static __aicore__ inline GemmJob<T> job(const Call<T> &call) {
    const KernelData &d = call.d;
    const int64_t k = int64_t(d.heads) * d.d_v;
    const GlobalTensor<T> o = call.template buffer<T>(d.workspace.o);
    return {{o, o}, 1, k, 0, d.num_tokens, call.template input<T>(FlashMLAIn::w_o), 1, d.hidden, k, nullptr, 0, 0, false};
  }

  const Call<T> &call_;
  const GemmJob<T> job_;
  Products<T> products_;
};

}  // namespace flashmla
