// The loops of a product with a packed weight, by its rows: few (all in one register block), some more (flat), many (K in blocks).
// Every loop adds the k terms of an element in ascending order, so its bits do not depend on the rows beside it, on the K blocks
// or on the thread count.
#pragma once

#include "op_impl/cpu/gemm_job-inl.h"
#include "op_impl/cpu/register_block-inl.h"

namespace flashmla {
namespace FLASHMLA_NS {

// Few rows: the accumulators stay in registers over the whole of K, and the weights stream past once. Of 16-bit weights 7 and 8
// rows count as few too, by three vectors, then one: in two blocks of rows a weight would be widened twice (8 rows: 82
// against 68 GFLOP/s a core; float32 loses by it, 41 against 54, since the second pass reads the panel again).
template <typename T>
static void gemm_few_rows(const GemmJob &job, int64_t row, int64_t rows, int64_t p0, int64_t p1) {
  const float *a = job.a + row * job.lda;  // [rows, lda]
  const int64_t depth = job.k_end - job.k_begin;
  const Start start = job.accumulate ? Start::kKeep : Start::kZero;
  const Slice<float> nothing;
  Lines none;
  for (int64_t p = p0; p < p1; ++p) {
    const int64_t width = job.w.width(p);
    const T *b = element<T>(job.w.data, job.w.offset(p) + job.k_begin * width);  // [depth, width]
    float *c = job.c + row * job.ldc + job.w.column(p);                          // [rows, ldc]
    if (rows <= kGemmRows) {
      block_product<true>(rows, width, a, job.lda, 1, b, width, depth, c, job.ldc, start, nullptr, none);
      continue;
    }
    for (int64_t col = 0, vecs; col < width; col += vecs * kLanes) {
      vecs = (width - col) / kLanes < 3 ? 1 : 3;
      const auto tall = [&](auto count) {
        constexpr int kRows = decltype(count)::value;
        if (vecs == 3) register_block<kRows, 3, true>(a, job.lda, 1, b + col, width, depth, c + col, job.ldc, start, nullptr, nothing);
        else register_block<kRows, 1, false>(a, job.lda, 1, b + col, width, depth, c + col, job.ldc, start, nullptr, nothing);
      };
      if (rows == 7) tall(Count<7>{}); else tall(Count<8>{});
    }
  }
}

template <typename T>
constexpr int64_t few_rows() { return sizeof(T) < sizeof(float) ? kGemmTallRows : kGemmRows; }

// The same loop for some more rows: a panel's strip of weights stays in L2 while the row blocks pass over all of K.
template <typename T>
static void gemm_flat(const GemmJob &job, int64_t row, int64_t rows, int64_t p0, int64_t p1) {
  Lines none;
  for (int64_t p = p0; p < p1; ++p) {
    const int64_t width = job.w.width(p);
    const T *b = element<T>(job.w.data, job.w.offset(p) + job.k_begin * width);  // [depth, width]
    block_product<true>(rows, width, job.a + row * job.lda, job.lda, 1, b, width, job.k_end - job.k_begin, job.c + row * job.ldc + job.w.column(p),
                        job.ldc, job.accumulate ? Start::kKeep : Start::kZero, nullptr, none);
  }
}

// C (+)= A W for one panel and K block [k0, k1): the block of W stays in L1 while the row blocks pass over it, and the next
// one comes into L2 meanwhile.
template <typename T>
static void panel_product(const GemmJob &job, const float *a /* [rows, lda] */, int64_t lda, int64_t rows, int64_t panel, int64_t k0, int64_t k1,
                          float *c /* [rows, ldc] */, int64_t ldc, Start start, Lines ahead, const GemmScratch &scratch, int thread) {
  const int64_t width = job.w.width(panel);
  const T *b = element<T>(job.w.data, job.w.offset(panel) + k0 * width);  // [k1 - k0, width]
  const float *wide;                                                      // [k1 - k0, width]
  if constexpr (sizeof(T) == sizeof(float)) {
    wide = b;
  } else {  // widened once for all row blocks
    widen(scratch.wide(thread), b, (k1 - k0) * width);
    wide = scratch.wide(thread);
  }
  block_product<false>(rows, width, a, lda, 1, wide, width, k1 - k0, c, ldc, start, nullptr, ahead);
}

// Rows that lie a multiple of 1 KiB apart share sets of L1 and push each other out: 77 % of the FMA peak at hidden 2048 where
// copied ones reach 86 %.
static inline bool rows_collide(int64_t ld) { return ld * int64_t(sizeof(float)) % 1024 == 0; }

// Many rows: K blocks outside, so that a block of activations stays in L2 while the panels pass. Where rows of A or C collide
// they are copied side by side.
template <typename T>
static void gemm_many_rows(const GemmJob &job, int64_t row, int64_t rows, int64_t p0, int64_t p1, const GemmScratch &scratch, int thread) {
  const int64_t k_block = scratch.k_block;
  const bool copy_a = rows_collide(job.lda) && p1 - p0 > 1, copy_c = rows_collide(job.ldc) && p1 - p0 > 1;
  float *sums = scratch.sums(thread);          // [p1 - p0][rows, kPanel]
  float *block = scratch.activations(thread);  // [rows, k_block]
  const float *a = job.a + row * job.lda;  // [rows, lda]
  float *c = job.c + row * job.ldc;        // [rows, ldc]
  const auto each_sum = [&](auto copy) {
    for (int64_t m = 0; copy_c && m < rows; ++m)  // rows outside: C is read and written in its own order
      for (int64_t p = p0; p < p1; ++p) copy(sums + ((p - p0) * rows + m) * kPanel, c + m * job.ldc + job.w.column(p), job.w.width(p));
  };
  if (job.accumulate) each_sum([](float *sum, float *out, int64_t n) { copy_row(sum, out, n); });
  for (int64_t k0 = job.k_begin; k0 < job.k_end; k0 += k_block) {
    const int64_t k1 = k0 + k_block < job.k_end ? k0 + k_block : job.k_end;
    const float *a_block = a + k0 - job.k_begin;  // [rows, lda]
    if (copy_a)
      for (int64_t m = 0; m < rows; ++m) copy_row(block + m * k_block, a_block + m * job.lda, k1 - k0);
    const Start start = job.accumulate || k0 > job.k_begin ? Start::kKeep : Start::kZero;
    const int64_t next_lines = ((k1 + k_block < job.k_end ? k_block : job.k_end - k1) * int64_t(sizeof(float)) + kLineBytes - 1) / kLineBytes;
    for (int64_t p = p0; p < p1; ++p) {
      // Beside this panel the weights of the next one come in, before it a share of the next activations.
      const int64_t q = p + 1 < p1 ? p + 1 : p0, k_next = p + 1 < p1 ? k0 : k1;
      const int64_t weight_rows = k_next + k_block < job.k_end ? k_block : job.k_end - k_next;
      const Lines ahead = {reinterpret_cast<const char *>(element<T>(job.w.data, job.w.offset(q) + k_next * job.w.width(q))),
                           weight_rows * job.w.width(q) * int64_t(sizeof(T)) / kLineBytes};
      const int64_t part = (rows + p1 - p0 - 1) / (p1 - p0);
      for (int64_t m = (p - p0) * part; m < (p - p0 + 1) * part && m < rows; ++m)
        for (int64_t line = 0; line < next_lines; ++line) __builtin_prefetch(a_block + m * job.lda + k1 - k0 + kLineFloats * line, 0, 2);
      panel_product<T>(job, copy_a ? block : a_block, copy_a ? k_block : job.lda, rows, p, k0, k1,
                       copy_c ? sums + (p - p0) * rows * kPanel : c + job.w.column(p), copy_c ? kPanel : job.ldc, start, ahead, scratch, thread);
    }
  }
  each_sum([](float *sum, float *out, int64_t n) { copy_row(out, sum, n); });
}

}  // namespace FLASHMLA_NS
}  // namespace flashmla
