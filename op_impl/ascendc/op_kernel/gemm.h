// Products with packed weights on the cube: C [m, n] = A [m, k] W [k, n], block by block, with double buffers in L1, L0 and L0C.
#pragma once

#include "common.h"

namespace flashmla {

// C [groups, m, n] = A [groups, m, k] W [groups, k, n], W packed in panels as op_list.h says.
template <typename T>
struct GemmJob {
  GlobalTensor<T> a[2];   // A, and what its rounding left off
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

// Columns of a block: as many as keep all cores busy to the end. A block reads its rows of A from L2, which is about four times as fast as
// a core's share of HBM, where the weights come from.
template <typename T>
__aicore__ inline int64_t block_columns(const GemmJob<T> *jobs, int32_t count, int64_t base_m, int64_t base_n, int64_t cores) {
  int64_t best = base_n, best_cost = -1;
  for (int64_t width = base_n; width >= kFractal; width -= kFractal) {
    int64_t items = 0, rows = kFractal;
    for (int32_t i = 0; i < count; ++i) {
      const GemmCut cut(jobs[i].m, jobs[i].n, jobs[i].groups, base_m, width);
      items += cut.items;
      rows = larger(rows, cut.m_block);
    }
    const int64_t cost = ceil_div(items, cores) * (4 * width + rows);
    if (best_cost < 0 || cost < best_cost) {
      best = width;
      best_cost = cost;
    }
  }
  return best;
}

// The cube's side. A source loads tiles of A and B to L1; a sink takes the finished block out of L0C.
template <typename T>
class GemmCube {
 public:
  // Blocks of at most base_m x base_n, A in so many parts.
  __aicore__ inline GemmCube(int64_t base_m, int64_t base_n, int64_t parts) : parts_(parts) {
    step_k_ = clamp(align_down(kL1Bytes / (2 * int64_t(sizeof(T)) * (parts * base_m + base_n)), kVectorFloats), kVectorFloats, kZeroColumns);
    first_step_k_ = larger(kVectorFloats, align_down(step_k_ * (1 + AscendC::GetBlockIdx() % kPhases) / kPhases, kFractal));
    Region l1(TPosition::A1), l0a(TPosition::A2), l0b(TPosition::B2), l0c(TPosition::CO1);
    for (int32_t i = 0; i < 2; ++i) {
      a_[i] = l1.take<T>(parts * base_m * step_k_);
      b_[i] = l1.take<T>(base_n * step_k_);
      l0a_[i] = l0a.take<T>(kL0HalfBytes / sizeof(T));
      l0b_[i] = l0b.take<T>(kL0HalfBytes / sizeof(T));
      c_[i] = l0c.take<float>(base_m * base_n, 1024);
    }
    for (int32_t i = 0; i < 2; ++i) {
      AscendC::SetFlag<HardEvent::MTE1_MTE2>(i);
      AscendC::SetFlag<HardEvent::M_MTE1>(i);
      AscendC::SetFlag<HardEvent::FIX_M>(i);
    }
  }

  __aicore__ inline void finish() {
    for (int32_t i = 0; i < 2; ++i) {
      AscendC::WaitFlag<HardEvent::MTE1_MTE2>(i);
      AscendC::WaitFlag<HardEvent::M_MTE1>(i);
      AscendC::WaitFlag<HardEvent::FIX_M>(i);
    }
  }

  // One block of a result: k elements of A and B pass through L1 in steps, each step through L0 in smaller ones.
  template <typename Source, typename Sink>
  __aicore__ inline void run(const Source &source, const Sink &sink, const GemmItem &item, int64_t k) {
    const int64_t rows = source.rows(item), m16 = align_up(rows, kFractal);
    const int64_t l0_elements = kL0HalfBytes / sizeof(T);
    const int64_t l0_k = clamp(align_down(smaller(l0_elements / (parts_ * m16), l0_elements / item.n), kFractal), kFractal, 255 * kFractal);
    AscendC::WaitFlag<HardEvent::FIX_M>(out_);
    for (int64_t k0 = 0, width; k0 < k; k0 += width) {
      width = smaller(first_step_k_, k - k0);
      first_step_k_ = step_k_;
      const int64_t width16 = align_up(width, kFractal);
      AscendC::WaitFlag<HardEvent::MTE1_MTE2>(step_);
      for (int64_t part = 0; part < parts_; ++part) source.load_a(a_[step_][part * m16 * width16], part, item, k0, width, m16);
      source.load_b(b_[step_], item, k0, width);
      hand_over<HardEvent::MTE2_MTE1>(step_);
      for (int64_t at = 0; at < width16; at += l0_k) {
        const int64_t depth = smaller(l0_k, width16 - at);
        AscendC::WaitFlag<HardEvent::M_MTE1>(l0_);
        for (int64_t part = 0; part < parts_; ++part)
          load_l0(l0a_[l0_][part * m16 * depth], a_[step_][(part * width16 + at) * m16], m16, depth, m16);
        if (Source::kRowsAreColumns) load_l0(l0b_[l0_], b_[step_][at * item.n], item.n, depth, item.n);
        else load_l0_transposed(l0b_[l0_], b_[step_][at * kFractal], depth, item.n, width16);
        hand_over<HardEvent::MTE1_M>(l0_);
        for (int64_t part = 0; part < parts_; ++part)
          multiply(c_[out_], l0a_[l0_][part * m16 * depth], l0b_[l0_], rows, item.n, depth, k0 + at + part == 0);
        AscendC::SetFlag<HardEvent::M_MTE1>(l0_);
        l0_ ^= 1;
      }
      AscendC::SetFlag<HardEvent::MTE1_MTE2>(step_);
      step_ ^= 1;
    }
    hand_over<HardEvent::M_FIX>(out_);
    sink.store(c_[out_], item);
    AscendC::SetFlag<HardEvent::FIX_M>(out_);
    out_ ^= 1;
  }

 private:
  int64_t parts_, step_k_, first_step_k_;
  LocalTensor<T> a_[2], b_[2], l0a_[2], l0b_[2];
  LocalTensor<float> c_[2];
  int32_t step_ = 0, l0_ = 0, out_ = 0;
};

// Columns [n0, n0 + n) and rows [k0, k0 + k) of a packed group to an L1 tile whose rows are k.
template <typename T>
__aicore__ inline void load_packed(const LocalTensor<T> &tile, const GlobalTensor<T> &group, const GlobalTensor<T> &zeros, int64_t n_padded, int64_t k_all,
                                   int64_t n0, int64_t n, int64_t k0, int64_t k) {
  const int64_t tile_rows = align_up(k, kFractal);
  const int64_t whole = n0 % kPanel == 0 ? n / kPanel : 0;  // panels that one copy brings, where their distances are in its range
  const bool together = whole > 1 && kPanel * k_all <= kMostMatrixStride && kPanel * tile_rows <= kMostTileStride;
  if (together) load_matrices(tile, group[n0 * k_all + k0 * kPanel], whole, kPanel * k_all, k, kPanel, kPanel, tile_rows);
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
  __aicore__ inline void load_a(const LocalTensor<T> &tile, int64_t part, const GemmItem &item, int64_t k0, int64_t k, int64_t tile_rows) const {
    load_fractals(tile, job.a[part][item.group * job.a_stride + item.m0 * job.lda + k0], item.m, k, job.lda, tile_rows);
    if (whole_fractals) zero_last_rows(tile, zeros, item.m, k, tile_rows);
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

// Products whose results go to global memory; all of them share one round over the cores.
template <typename T>
__aicore__ inline void project(const Call<T> &call, const GemmJob<T> *jobs, int32_t count) {
  if ASCEND_IS_AIV { return; }
  const KernelData &d = call.d;
  const GlobalTensor<T> zeros = call.template buffer<T>(d.workspace.zeros);
  const int64_t width = block_columns(jobs, count, d.gemm_base_m, d.gemm_base_n, d.cores);
  int64_t m_block = kFractal;
  for (int32_t i = 0; i < count; ++i) m_block = larger(m_block, smaller(d.gemm_base_m, align_up(jobs[i].m, kFractal)));
  GemmCube<T> cube(m_block, width, jobs[0].parts);
  int64_t first = AscendC::GetBlockIdx();
  for (int32_t i = 0; i < count; ++i) {
    const GemmJob<T> &job = jobs[i];
    const GemmCut cut(job.m, job.n, job.groups, d.gemm_base_m, width);
    for (; first < cut.items; first += d.cores)
      cube.run(PackedSource<T>{job, zeros, false}, GlobalSink<T>{job}, cut.item(first, job.m, job.n), job.k);
    first -= cut.items;
  }
  cube.finish();
}

}  // namespace flashmla
