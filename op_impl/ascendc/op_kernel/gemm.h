// Products with packed weights on the cube: C [m, n] = A [m, k] W [k, n], block by block, with several buffers in L1, L0 and L0C.
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

// Weights of a block come, and its result leaves L0C, in pieces that end at multiples of so many columns; f(piece).
template <typename F>
__aicore__ inline void for_pieces(const GemmItem &item, int64_t columns, const F &f) {
  for (int64_t n0 = item.n0, n = 0; n0 < item.n0 + item.n; n0 += n) {
    n = smaller(columns - n0 % columns, item.n0 + item.n - n0);
    f(GemmItem{item.group, item.m0, item.m, n0, n});
  }
}

// The cube's side. A source loads tiles of A and B to L1; a sink takes the pieces of a finished block out of L0C.
template <typename T>
class GemmCube {
 public:
  __aicore__ inline GemmCube(const ProductBlocks &blocks, int64_t parts) : parts_(parts), piece_(blocks.piece), step_k_(blocks.step) {
    const int64_t a_elements = parts * blocks.rows * step_k_, b_elements = piece_ * step_k_;
    first_step_k_ = larger(kVectorFloats, align_down(step_k_ * (1 + phase()) / kStepPhases, kFractal));
    weights_ = static_cast<int32_t>(clamp((kL1Bytes / int64_t(sizeof(T)) - 2 * a_elements) / b_elements, 1, kMostWeights));
    results_ = static_cast<int32_t>(clamp(kL0CBytes / (blocks.rows * piece_ * int64_t(sizeof(float))), 1, kMostResults));
    Region l1(TPosition::A1), l0a(TPosition::A2), l0b(TPosition::B2), l0c(TPosition::CO1);
    for (int32_t i = 0; i < 2; ++i) {
      a_[i] = l1.take<T>(a_elements);
      l0a_[i] = l0a.take<T>(kL0HalfBytes / sizeof(T));
      l0b_[i] = l0b.take<T>(kL0HalfBytes / sizeof(T));
    }
    for (int32_t i = 0; i < weights_; ++i) b_[i] = l1.take<T>(b_elements);
    for (int32_t i = 0; i < results_; ++i) c_[i] = l0c.take<float>(blocks.rows * piece_, 1024);
  }

  __aicore__ inline void begin() {
    for (int32_t i = 0; i < kWeights + weights_; ++i) AscendC::SetFlag<HardEvent::MTE1_MTE2>(i);
    for (int32_t i = 0; i < 2; ++i) AscendC::SetFlag<HardEvent::M_MTE1>(i);
    for (int32_t i = 0; i < results_; ++i) AscendC::SetFlag<HardEvent::FIX_M>(i);
  }
  __aicore__ inline void finish() {
    for (int32_t i = 0; i < kWeights + weights_; ++i) AscendC::WaitFlag<HardEvent::MTE1_MTE2>(i);
    for (int32_t i = 0; i < 2; ++i) AscendC::WaitFlag<HardEvent::M_MTE1>(i);
    for (int32_t i = 0; i < results_; ++i) AscendC::WaitFlag<HardEvent::FIX_M>(i);
  }

  // Loads the first weights of the first block, before its A exists.
  template <typename Source>
  __aicore__ inline void prefetch(const Source &source, const GemmItem &item, int64_t k) {
    for (int64_t k0 = 0; fetched_ < weights_ && k0 < k; k0 += step_k_)
      for_pieces(item, piece_, [&](const GemmItem &piece) {
        if (fetched_ == weights_) return;
        AscendC::WaitFlag<HardEvent::MTE1_MTE2>(kWeights + fetched_);
        source.load_b(b_[fetched_++], piece, k0, smaller(step_k_, k - k0));
      });
  }

  // One block of a result: k elements of A and B pass through L1 in steps, each step through L0 in smaller ones. A step of A serves all columns.
  template <typename Source, typename Sink>
  __aicore__ inline void run(const Source &source, const Sink &sink, const GemmItem &item, int64_t k) {
    const int64_t rows = source.rows(item), m16 = align_up(rows, kFractal);
    int32_t out = out_;
    for (int64_t k0 = 0, width; k0 < k; k0 += width) {
      width = smaller(fetched_ > 0 ? step_k_ : first_step_k_, k - k0);
      if (fetched_ == 0) first_step_k_ = step_k_;
      const int64_t width16 = align_up(width, kFractal);
      AscendC::WaitFlag<HardEvent::MTE1_MTE2>(step_);
      const bool together = source.load_a(a_[step_], item, k0, width, m16);
      out = out_;
      for_pieces(item, piece_, [&](const GemmItem &piece) {
        if (fetched_ == 0) {
          AscendC::WaitFlag<HardEvent::MTE1_MTE2>(kWeights + weight_);
          source.load_b(b_[weight_], piece, k0, width);
        }
        fetched_ = larger(fetched_ - 1, 0);
        hand_over<HardEvent::MTE2_MTE1>(kWeights + weight_);  // A came before them
        if (k0 == 0) AscendC::WaitFlag<HardEvent::FIX_M>(out);
        multiply_step<Source>(c_[out], piece, rows, width16, together, k0 == 0);
        AscendC::SetFlag<HardEvent::MTE1_MTE2>(kWeights + weight_);
        weight_ = weight_ + 1 == weights_ ? 0 : weight_ + 1;
        if (k0 + width >= k) {
          hand_over<HardEvent::M_FIX>(out);
          sink.store(c_[out], piece);
          AscendC::SetFlag<HardEvent::FIX_M>(out);
        }
        out = out + 1 == results_ ? 0 : out + 1;
      });
      AscendC::SetFlag<HardEvent::MTE1_MTE2>(step_);
      step_ ^= 1;
    }
    out_ = out;
  }

 private:
  static constexpr int32_t kWeights = 2;      // events of the weights' pieces stand behind those of A
  static constexpr int32_t kMostWeights = 6;  // pieces of weights in L1
  static constexpr int32_t kMostResults = 8;  // pieces of results in L0C

  static __aicore__ inline int64_t phase() { return AscendC::GetBlockIdx() % kStepPhases; }

  // A step of one piece. Parts of A stand one below the other when they came together.
  template <typename Source>
  __aicore__ inline void multiply_step(const LocalTensor<float> &c, const GemmItem &piece, int64_t rows, int64_t width16, bool together, bool first) {
    const int64_t m16 = align_up(rows, kFractal), l0_elements = kL0HalfBytes / sizeof(T);
    const int64_t l0_k = clamp(align_down(smaller(l0_elements / (parts_ * m16), l0_elements / piece.n), kFractal), kFractal, 255 * kFractal);
    const int64_t a_rows = together ? parts_ * m16 : m16, to_part = together ? m16 * kFractal : width16 * m16;
    for (int64_t at = 0; at < width16; at += l0_k) {
      const int64_t depth = smaller(l0_k, width16 - at);
      AscendC::WaitFlag<HardEvent::M_MTE1>(l0_);
      for (int64_t part = 0; part < parts_; ++part)
        load_l0(l0a_[l0_][part * m16 * depth], a_[step_][part * to_part + at * a_rows], m16, depth, a_rows);
      if (Source::kRowsAreColumns) load_l0(l0b_[l0_], b_[weight_][at * piece.n], piece.n, depth, piece.n);
      else load_l0_transposed(l0b_[l0_], b_[weight_][at * kFractal], depth, piece.n, width16);
      hand_over<HardEvent::MTE1_M>(l0_);
      for (int64_t part = 0; part < parts_; ++part)
        multiply(c, l0a_[l0_][part * m16 * depth], l0b_[l0_], rows, piece.n, depth, first && at + part == 0);
      AscendC::SetFlag<HardEvent::M_MTE1>(l0_);
      l0_ ^= 1;
    }
  }

  int64_t parts_, piece_, step_k_, first_step_k_, fetched_ = 0;
  LocalTensor<T> a_[2], b_[kMostWeights], l0a_[2], l0b_[2];
  LocalTensor<float> c_[kMostResults];
  int32_t weights_, results_, step_ = 0, weight_ = 0, l0_ = 0, out_ = 0;
};

}  // namespace flashmla
