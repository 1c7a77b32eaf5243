// Products with packed weights on the cube: C [m, n] = A [m, k] W [k, n], block by block, with double buffers in L1 and L0.
#pragma once

#include "common.h"

namespace flashmla {

// C [groups, m, n] = A [groups, m, k] W [groups, k, n], W packed in panels as op_list.h says.
template <typename T>
struct GemmJob {
  GlobalTensor<T> a[2];   // A, and what its rounding left off, which lies m rows behind it
  int32_t parts;          // 1: the first alone
  int64_t lda, a_stride;  // elements from row to row, from group to group
  int64_t m;
  GlobalTensor<T> w;
  int64_t groups, n, k;
  GM_ADDR c;              // of T when rounded, else float32; null: the result goes to the AIVs
  int64_t ldc, c_stride;
  bool rounded;
};

// A block of a result, and the item of work that it is.
struct GemmItem {
  int64_t group;
  int64_t m0, m;  // rows
  int64_t n0, n;  // columns of the group, padded to a multiple of 16
};

// How a job is cut: blocks of columns first, so that the cores of one moment share weights.
struct GemmCut {
  int64_t m_block, n_block, m_blocks, n_blocks, items;

  __aicore__ inline GemmCut(int64_t m, int64_t n, int64_t groups, int64_t base_m, int64_t width)
      : m_block(smaller(base_m, align_up(m, kFractal))), n_block(smaller(width, align_up(n, kFractal))), m_blocks(ceil_div(m, m_block)),
        n_blocks(ceil_div(align_up(n, kFractal), n_block)), items(groups * m_blocks * n_blocks) {}

  __aicore__ inline GemmItem item(int64_t index, int64_t m, int64_t n) const {
    const int64_t m0 = index % m_blocks * m_block, column = index / m_blocks;
    const int64_t n0 = column % n_blocks * n_block;
    return {column / n_blocks, m0, smaller(m_block, m - m0), n0, smaller(n_block, align_up(n, kFractal) - n0)};
  }
};

// The result of a block leaves L0C in pieces of so many columns; f(piece, its first column in the block).
constexpr int64_t kPieceColumns = 256;
template <typename F>
__aicore__ inline void for_pieces(const GemmItem &item, const F &f) {
  for (int64_t n0 = 0; n0 < item.n; n0 += kPieceColumns)
    f(GemmItem{item.group, item.m0, item.m, item.n0 + n0, smaller(kPieceColumns, item.n - n0)}, n0);
}

// The cube's side. A source loads tiles of A and B to L1; a sink takes the pieces of a finished block out of L0C.
template <typename T>
class GemmCube {
 public:
  // Blocks of at most base_m x base_n, A in so many parts.
  __aicore__ inline GemmCube(int64_t base_m, int64_t base_n, int64_t parts) : parts_(parts) {
    step_k_ = clamp(align_down(kL1Bytes / (2 * int64_t(sizeof(T)) * (parts * base_m + base_n)), kVectorFloats), kVectorFloats, kZeroColumns);
    first_step_k_ = larger(kVectorFloats, align_down(step_k_ * (1 + phase()) / kStepPhases, kFractal));
    results_ = 2 * base_m * base_n * int64_t(sizeof(float)) <= kL0CBytes ? 2 : 1;
    Region l1(TPosition::A1), l0a(TPosition::A2), l0b(TPosition::B2), l0c(TPosition::CO1);
    for (int32_t i = 0; i < 2; ++i) {
      a_[i] = l1.take<T>(parts * base_m * step_k_);
      b_[i] = l1.take<T>(base_n * step_k_);
      l0a_[i] = l0a.take<T>(kL0HalfBytes / sizeof(T));
      l0b_[i] = l0b.take<T>(kL0HalfBytes / sizeof(T));
    }
    for (int32_t i = 0; i < results_; ++i) c_[i] = l0c.take<float>(base_m * base_n, 1024);
  }

  __aicore__ inline void begin() {
    for (int32_t i = 0; i < 2; ++i) {
      AscendC::SetFlag<HardEvent::MTE1_MTE2>(i);
      AscendC::SetFlag<HardEvent::M_MTE1>(i);
    }
    for (int32_t i = 0; i < results_; ++i) AscendC::SetFlag<HardEvent::FIX_M>(i);
  }
  __aicore__ inline void finish() {
    for (int32_t i = 0; i < 2; ++i) {
      AscendC::WaitFlag<HardEvent::MTE1_MTE2>(i);
      AscendC::WaitFlag<HardEvent::M_MTE1>(i);
    }
    for (int32_t i = 0; i < results_; ++i) AscendC::WaitFlag<HardEvent::FIX_M>(i);
  }

  // Loads what the first steps of the first block take of B, before its A exists.
  template <typename Source>
  __aicore__ inline void prefetch(const Source &source, const GemmItem &item, int64_t k) {
    for (int64_t k0 = 0; fetched_ < 2 && k0 < k; ++fetched_, k0 += step_k_) {
      AscendC::WaitFlag<HardEvent::MTE1_MTE2>(fetched_);
      source.load_b(b_[fetched_], item, k0, smaller(step_k_, k - k0));
    }
  }

  // One block of a result: k elements of A and B pass through L1 in steps, each step through L0 in smaller ones. A step of A serves all columns.
  template <typename Source, typename Sink>
  __aicore__ inline void run(const Source &source, const Sink &sink, const GemmItem &item, int64_t k) {
    const int64_t rows = source.rows(item), m16 = align_up(rows, kFractal);
    AscendC::WaitFlag<HardEvent::FIX_M>(out_);
    for (int64_t k0 = 0, width; k0 < k; k0 += width) {
      width = smaller(fetched_ > 0 ? step_k_ : first_step_k_, k - k0);
      if (fetched_ == 0) first_step_k_ = step_k_;
      const int64_t width16 = align_up(width, kFractal);
      if (fetched_ == 0) AscendC::WaitFlag<HardEvent::MTE1_MTE2>(step_);
      const bool together = source.load_a(a_[step_], item, k0, width, m16);
      if (fetched_ == 0) source.load_b(b_[step_], item, k0, width);
      fetched_ = larger(fetched_ - 1, 0);
      hand_over<HardEvent::MTE2_MTE1>(step_);
      for_pieces(item, [&](const GemmItem &piece, int64_t n0) {
        multiply_step<Source>(piece, n0, item.n, rows, width16, together, k0 == 0);
        if (k0 + width < k) return;
        hand_over<HardEvent::M_FIX>(static_cast<int32_t>(n0 / kPieceColumns * 2 + out_));
        sink.store(c_[out_][n0 * m16], piece);
      });
      AscendC::SetFlag<HardEvent::MTE1_MTE2>(step_);
      step_ ^= 1;
    }
    AscendC::SetFlag<HardEvent::FIX_M>(out_);
    out_ = out_ + 1 == results_ ? 0 : out_ + 1;
  }

 private:
  static __aicore__ inline int64_t phase() { return AscendC::GetBlockIdx() % kStepPhases; }

  // A step of one piece: columns [n0, n0 + piece.n) of the block's n. Parts of A stand one below the other when they came together.
  template <typename Source>
  __aicore__ inline void multiply_step(const GemmItem &piece, int64_t n0, int64_t n, int64_t rows, int64_t width16, bool together, bool first) {
    const int64_t m16 = align_up(rows, kFractal), l0_elements = kL0HalfBytes / sizeof(T);
    const int64_t l0_k = clamp(align_down(smaller(l0_elements / (parts_ * m16), l0_elements / piece.n), kFractal), kFractal, 255 * kFractal);
    const int64_t a_rows = together ? parts_ * m16 : m16, to_part = together ? m16 * kFractal : width16 * m16;
    for (int64_t at = 0; at < width16; at += l0_k) {
      const int64_t depth = smaller(l0_k, width16 - at);
      AscendC::WaitFlag<HardEvent::M_MTE1>(l0_);
      for (int64_t part = 0; part < parts_; ++part)
        load_l0(l0a_[l0_][part * m16 * depth], a_[step_][part * to_part + at * a_rows], m16, depth, a_rows);
      if (Source::kRowsAreColumns) load_l0(l0b_[l0_], b_[step_][at * n + n0 * kFractal], piece.n, depth, n);
      else load_l0_transposed(l0b_[l0_], b_[step_][n0 * width16 + at * kFractal], depth, piece.n, width16);
      hand_over<HardEvent::MTE1_M>(l0_);
      for (int64_t part = 0; part < parts_; ++part)
        multiply(c_[out_][n0 * m16], l0a_[l0_][part * m16 * depth], l0b_[l0_], rows, piece.n, depth, first && at + part == 0);
      AscendC::SetFlag<HardEvent::M_MTE1>(l0_);
      l0_ ^= 1;
    }
  }

  int64_t parts_, step_k_, first_step_k_, fetched_ = 0;
  LocalTensor<T> a_[2], b_[2], l0a_[2], l0b_[2];
  LocalTensor<float> c_[2];
  int32_t results_, step_ = 0, l0_ = 0, out_ = 0;
};

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
  const int64_t tile_rows = align_up(k, kFractal);
  const int64_t whole = n0 % kPanel == 0 ? n / kPanel : 0;  // panels that one copy brings, where their distances are in its range
  const bool together = whole > 1 && kPanelPairs * k_all <= kMostMatrixStride && kPanelPairs * tile_rows <= kMostTileStride;
  if (together)
    load_matrices(tile.template ReinterpretCast<float>(), in_pairs(group[n0 * k_all + k0 * kPanel]), whole, kPanelPairs * k_all, k, kPanelPairs, kPanelPairs,
                  tile_rows);
  for (int64_t at = together ? n0 + whole * kPanel : n0; at < n0 + n;) {
    const int64_t panel = at / kPanel * kPanel, width = smaller(kPanel, n_padded - panel);
    const int64_t end = smaller(panel + width, n0 + n);
    load_fractals(tile[(at - n0) * tile_rows], group[panel * k_all + k0 * width + (at - panel)], k, end - at, width, tile_rows);
    at = end;
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
  __aicore__ inline Products(const Call<T> &call, const GemmJob<T> *jobs, int32_t count, int64_t width, bool whole_fractals)
      : call_(call), count_(count), width_(width), whole_fractals_(whole_fractals), zeros_(call.template buffer<T>(call.d.workspace.zeros)),
        cube_(rows_of_block(call, jobs, count), columns_of_block(jobs, count, width), jobs[0].parts) {
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
      const GemmCut cut(job.m, job.n, job.groups, call_.d.gemm_base_m, width_);
      for (; first < cut.items; first += call_.d.cores) f(job, cut.item(first, job.m, job.n));
      first -= cut.items;
    }
  }

 private:
  static __aicore__ inline int64_t rows_of_block(const Call<T> &call, const GemmJob<T> *jobs, int32_t count) {
    int64_t rows = kFractal;
    for (int32_t i = 0; i < count; ++i) rows = larger(rows, smaller(call.d.gemm_base_m, align_up(jobs[i].m, kFractal)));
    return rows;
  }
  static __aicore__ inline int64_t columns_of_block(const GemmJob<T> *jobs, int32_t count, int64_t width) {
    int64_t columns = kFractal;
    for (int32_t i = 0; i < count; ++i) columns = larger(columns, smaller(width, align_up(jobs[i].n, kFractal)));
    return columns;
  }

  const Call<T> &call_;
  GemmJob<T> jobs_[2];
  int32_t count_;
  int64_t width_;
  bool whole_fractals_;
  GlobalTensor<T> zeros_;
  GemmCube<T> cube_;
};

}  // namespace flashmla
