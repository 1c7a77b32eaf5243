// Products of the layer: packed weights into the cube, its results to memory or to the vector units, work shared by the cores.
#pragma once

#include "gemm.h"

namespace flashmla {

// A copy counts elements: in pairs of them panels may lie twice as far apart. A fractal's row is 32 bytes whatever it holds.
constexpr int64_t kPanelPairs = kPanel / 2;
template <typename T>
__aicore__ inline GlobalTensor<float> in_pairs(const GlobalTensor<T> &source) {
  GlobalTensor<float> pairs;
  pairs.SetGlobalBuffer(reinterpret_cast<__gm__ float *>(const_cast<__gm__ T *>(source.GetPhyAddr())));
  return pairs;
}

// Columns [n0, n0 + n) and rows [k0, k0 + k) of a packed group to an L1 tile whose rows are k.
template <typename T>
__aicore__ inline void load_packed(const LocalTensor<T> &tile, const GlobalTensor<T> &group, const GlobalTensor<T> &zeros, int64_t n_padded, int64_t k_all,
                                   int64_t n0, int64_t n, int64_t k0, int64_t k) {
  const int64_t tile_rows = align_up(k, kFractal), end = n0 + n;
  const bool near = kPanelPairs * k_all <= kMostMatrixStride && kPanelPairs * tile_rows <= kMostTileStride;
  for (int64_t at = n0, to = 0; at < end; at = to) {
    const int64_t panel = at / kPanel * kPanel, width = smaller(kPanel, n_padded - panel), whole = at == panel ? (end - at) / kPanel : 0;
    if (near && whole > 1) {  // one copy brings the panels
      to = at + whole * kPanel;
      load_matrices(tile[(at - n0) * tile_rows].template ReinterpretCast<float>(), in_pairs(group[at * k_all + k0 * kPanel]), whole, kPanelPairs * k_all, k,
                    kPanelPairs, kPanelPairs, tile_rows);
    } else {
      to = smaller(panel + width, end);
      load_fractals(tile[(at - n0) * tile_rows], group[panel * k_all + k0 * width + (at - panel)], k, to - at, width, tile_rows);
    }
  }
  zero_last_rows(tile, zeros, k, n, tile_rows);
}

template <typename T>
struct PackedSource {
  static constexpr bool kRowsAreColumns = false;
  const GemmJob<T> &job;
  const GlobalTensor<T> &zeros;
  bool whole_fractals;  // both AIVs take half of the rows: there must be whole fractals of them

  __aicore__ inline int64_t rows(const GemmItem &item) const { return whole_fractals ? align_up(item.m, kFractal) : item.m; }
  // Returns whether both parts came in one copy, as rows of one tile.
  __aicore__ inline bool load_a(const LocalTensor<T> &tile, const GemmItem &item, int64_t k0, int64_t k, int64_t m16) const {
    const int64_t offset = item.group * job.a_stride + item.m0 * job.lda + k0;
    if (job.parts > 1 && item.m == job.m && item.m % kFractal == 0) {
      load_fractals(tile, job.a[0][offset], job.parts * item.m, k, job.lda, job.parts * item.m);
      return true;
    }
    for (int64_t part = 0; part < job.parts; ++part) {
      const LocalTensor<T> own = tile[part * m16 * align_up(k, kFractal)];
      load_fractals(own, job.a[part][offset], item.m, k, job.lda, m16);
      if (whole_fractals) zero_last_rows(own, zeros, item.m, k, m16);
    }
    return false;
  }
  __aicore__ inline void load_b(const LocalTensor<T> &tile, const GemmItem &item, int64_t k0, int64_t k) const {
    const int64_t n_padded = align_up(job.n, kFractal);
    load_packed(tile, job.w[item.group * n_padded * job.k], zeros, n_padded, job.k, item.n0, item.n, k0, k);
  }
};

template <typename T>
struct GlobalSink {
  const GemmJob<T> &job;
  __aicore__ inline void store(const LocalTensor<float> &c, const GemmItem &item) const {
    const int64_t offset = item.group * job.c_stride + item.m0 * job.ldc + item.n0;
    if (job.rounded) store_result(global<T>(job.c)[offset], c, item.m, item.n, job.ldc);
    else store_result(global<float>(job.c)[offset], c, item.m, item.n, job.ldc);
  }
};

// A finished block goes to the UBs of both AIVs, half of its rows each; rows_of_half() of a block are those of one AIV.
struct VectorSink {
  const LocalTensor<float> (&ub)[2];
  int32_t *next;
  __aicore__ inline void store(const LocalTensor<float> &c, const GemmItem &item) const {
    AscendC::CrossCoreWaitFlag<kCoreMode, PIPE_FIX>(V_FIX_RESULT_FREE);
    share_result(ub[*next], c, align_up(item.m, kFractal), item.n, item.n);
    AscendC::CrossCoreSetFlag<kCoreMode, PIPE_FIX>(FIX_V_RESULT);
    *next ^= 1;
  }
};

__aicore__ inline int64_t rows_of_half(const GemmItem &item) { return align_up(item.m, kFractal) / 2; }

// The products of a stage, which share one round over the cores: what falls to this core's cube. `whole_fractals`: for the vector units.
template <typename T>
class Products {
 public:
  __aicore__ inline Products(const Call<T> &call, const GemmJob<T> *jobs, int32_t count, const ProductBlocks &blocks, bool whole_fractals)
      : call_(call), count_(count), blocks_(blocks), whole_fractals_(whole_fractals), zeros_(call.template buffer<T>(call.d.workspace.zeros)),
        cube_(blocks, jobs[0].parts) {
    for (int32_t i = 0; i < count; ++i) jobs_[i] = jobs[i];
    if ASCEND_IS_AIC { cube_.begin(); }
  }

  // Before a barrier: the weights do not wait for what other cores still write.
  __aicore__ inline void prefetch() {
    if ASCEND_IS_AIV { return; }
    bool first = true;
    for_items([&](const GemmJob<T> &job, const GemmItem &item) {
      if (first && job.k % kFractal == 0) cube_.prefetch(PackedSource<T>{job, zeros_, whole_fractals_}, item, job.k);
      first = false;
    });
  }
  template <typename Sink>
  __aicore__ inline void run(const Sink &sink) {
    for_items([&](const GemmJob<T> &job, const GemmItem &item) { cube_.run(PackedSource<T>{job, zeros_, whole_fractals_}, sink, item, job.k); });
    cube_.finish();
    AscendC::PipeBarrier<PIPE_ALL>();  // the next products take the same events
  }
  __aicore__ inline void run() {
    if ASCEND_IS_AIV { return; }
    for_items([&](const GemmJob<T> &job, const GemmItem &item) { cube_.run(PackedSource<T>{job, zeros_, whole_fractals_}, GlobalSink<T>{job}, item, job.k); });
    cube_.finish();
    AscendC::PipeBarrier<PIPE_ALL>();
  }

  // f(job, item) for the blocks of this core, in order; AIVs see those of their AIC.
  template <typename F>
  __aicore__ inline void for_items(const F &f) const {
    int64_t first = AscendC::GetBlockIdx();
    if ASCEND_IS_AIV { first /= 2; }
    for (int32_t i = 0; i < count_; ++i) {
      const GemmJob<T> &job = jobs_[i];
      const GemmCut cut(job.m, job.n, job.groups, blocks_.rows, blocks_.columns);
      for (; first < cut.items; first += call_.d.cores) f(job, cut.item(first, job.m, job.n));
      first -= cut.items;
    }
  }
  // f(piece) for what a VectorSink hands over, in order.
  template <typename F>
  __aicore__ inline void for_results(const F &f) const {
    for_items([&](const GemmJob<T> &, const GemmItem &item) { for_pieces(item, blocks_.piece, f); });
  }

 private:
  const Call<T> &call_;
  GemmJob<T> jobs_[2];
  int32_t count_;
  const ProductBlocks &blocks_;
  bool whole_fractals_;
  GlobalTensor<T> zeros_;
  GemmCube<T> cube_;
};

}  // namespace flashmla
