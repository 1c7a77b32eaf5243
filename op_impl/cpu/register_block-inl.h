// The register block that the products with weights and attention's P V share, and its loop over rows and columns. The k terms of
// an element are added in ascending order into one accumulator, so its bits do not depend on how many rows stand beside it.
#pragma once

#include "op_impl/cpu/side_work-inl.h"

namespace flashmla {
namespace FLASHMLA_NS {

// Weights read once from memory are prefetched this far ahead: at the 13.4 GB/s that a core streams (docs/performance.md) 300 ns, longer
// than a read from memory takes. A prefetch never faults: it may point past the weight's end.
constexpr int64_t kStreamAheadBytes = 4096;

template <int N>
struct Count { static constexpr int value = N; };

// What a register block does with what stands in C: writes over it, goes on summing from it, or adds it to a sum of its own, multiplied
// by its row's factor where there are factors: the rescale of online softmax. Sums of their own keep rounding small over many tiles.
enum class Start { kZero, kKeep, kAdd };

// C[MR][NV lanes] = sum_k A[m, k] B[k][NV lanes], with C as `start` says; A[m, k] at a[m * a_row + k * a_k].
template <int MR, int NV, bool kStream, typename TB, typename TS>
FM_INLINE void register_block(const float *a /* [MR][k], strides a_row and a_k */, int64_t a_row, int64_t a_k, const TB *b /* [k, ldb] */, int64_t ldb,
                              int64_t k, float *c /* [MR, ldc] */, int64_t ldc, Start start, const float *factor /* [MR] or nullptr */,
                              const Slice<TS> &side) {
  VF acc[MR][NV];
  FM_UNROLL
  for (int m = 0; m < MR; ++m)
    FM_UNROLL
    for (int v = 0; v < NV; ++v) acc[m][v] = start == Start::kKeep ? load(c + m * ldc + v * kLanes) : zero();
  Pace<TS> pace(side, k);
  for (int64_t i = 0; i < k; ++i, a += a_k, b += ldb) {
    VF row[NV];
    FM_UNROLL
    for (int v = 0; v < NV; ++v) row[v] = load(b + v * kLanes);
    pace.round();
    if (kStream)
      FM_UNROLL
      for (int64_t byte = 0; byte < int64_t(NV * kLanes * sizeof(TB)); byte += kLineBytes)
        __builtin_prefetch(reinterpret_cast<const char *>(b) + kStreamAheadBytes + byte);
    FM_UNROLL
    for (int m = 0; m < MR; ++m) {
      const VF x = set1(a[m * a_row]);
      FM_UNROLL
      for (int v = 0; v < NV; ++v) acc[m][v] = fma(x, row[v], acc[m][v]);
    }
  }
  pace.finish();
  if (start == Start::kAdd)
    FM_UNROLL
    for (int m = 0; m < MR; ++m) {
      const VF x = set1(factor != nullptr ? factor[m] : 1.0f);
      FM_UNROLL
      for (int v = 0; v < NV; ++v) acc[m][v] = fma(load(c + m * ldc + v * kLanes), x, acc[m][v]);
    }
  FM_UNROLL
  for (int m = 0; m < MR; ++m)
    FM_UNROLL
    for (int v = 0; v < NV; ++v) store(c + m * ldc + v * kLanes, acc[m][v]);
}

template <int NV, bool kStream, typename TB, typename TS>
static void register_rows(int rows, const float *a /* [rows][k] */, int64_t a_row, int64_t a_k, const TB *b /* [k, ldb] */, int64_t ldb, int64_t k,
                          float *c /* [rows, ldc] */, int64_t ldc, Start start, const float *factor /* [rows] or nullptr */, const Slice<TS> &side) {
  static_assert(kGemmRows == 6, "one case a row count");
  switch (rows) {
    case 1: return register_block<1, NV, kStream>(a, a_row, a_k, b, ldb, k, c, ldc, start, factor, side);
    case 2: return register_block<2, NV, kStream>(a, a_row, a_k, b, ldb, k, c, ldc, start, factor, side);
    case 3: return register_block<3, NV, kStream>(a, a_row, a_k, b, ldb, k, c, ldc, start, factor, side);
    case 4: return register_block<4, NV, kStream>(a, a_row, a_k, b, ldb, k, c, ldc, start, factor, side);
    case 5: return register_block<5, NV, kStream>(a, a_row, a_k, b, ldb, k, c, ldc, start, factor, side);
    default: return register_block<6, NV, kStream>(a, a_row, a_k, b, ldb, k, c, ldc, start, factor, side);
  }
}

// The same for any number of rows and n a multiple of 16: columns outside, so that the n-wide strip of B stays in L1
// while the row blocks pass over it; rows in even blocks of at most kGemmRows.
template <bool kStream, typename TB, typename Side>
static void block_product(int64_t rows, int64_t n, const float *a /* [rows][k] */, int64_t a_row, int64_t a_k, const TB *b /* [k, ldb] */, int64_t ldb,
                          int64_t k, float *c /* [rows, ldc] */, int64_t ldc, Start start, const float *factor /* [rows] or nullptr */, Side &side) {
  const int64_t blocks = (rows + kGemmRows - 1) / kGemmRows;
  int64_t parts = blocks * ((n + kGemmVecs * kLanes - 1) / (kGemmVecs * kLanes));  // register blocks to come
  for (int64_t col = 0; col < n;) {
    const int64_t vecs = (n - col) / kLanes < kGemmVecs ? (n - col) / kLanes : kGemmVecs;
    for (int64_t m = 0, left = blocks; m < rows; --left) {
      const int count = int((rows - m + left - 1) / left);
      const auto part = side.take(parts--);
      const float *am = a + m * a_row;                  // [count][k]
      const float *fm = factor ? factor + m : nullptr;  // [count]
      float *cm = c + m * ldc + col;                    // [count, ldc]
      if (vecs == kGemmVecs) register_rows<kGemmVecs, kStream>(count, am, a_row, a_k, b + col, ldb, k, cm, ldc, start, fm, part);
      else if (vecs == 3) register_rows<3, kStream>(count, am, a_row, a_k, b + col, ldb, k, cm, ldc, start, fm, part);
      else if (vecs == 2) register_rows<2, kStream>(count, am, a_row, a_k, b + col, ldb, k, cm, ldc, start, fm, part);
      else register_rows<1, kStream>(count, am, a_row, a_k, b + col, ldb, k, cm, ldc, start, fm, part);
      m += count;
    }
    col += vecs * kLanes;
  }
}

}  // namespace FLASHMLA_NS
}  // namespace flashmla
