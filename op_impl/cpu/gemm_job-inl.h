// What a product with a packed weight is: the weight's layout, the operands, what a worker needs, and where the result goes.
#pragma once

#include "op_impl/cpu/parallel-inl.h"
#include "op_impl/cpu/rows-inl.h"

namespace flashmla {
namespace FLASHMLA_NS {

// Consecutive groups of a packed weight as one matrix; a group is padded to n_padded() columns, here and in C.
struct PackedWeight {
  ConstStorage data;  // the whole array: [all groups][panels][k, width]
  int64_t first_group, groups;
  int64_t n, k;     // of a group
  int64_t n_padded() const { return round_up(n, kPanelAlign); }
  int64_t panels_per_group() const { return (n_padded() + kPanel - 1) / kPanel; }
  int64_t panels() const { return groups * panels_per_group(); }
  // Panel p covers columns [column(p), column(p) + width(p)) of C; its [k][width] block starts at element offset(p).
  int64_t column(int64_t p) const { return p / panels_per_group() * n_padded() + p % panels_per_group() * kPanel; }
  int64_t width(int64_t p) const {
    const int64_t left = n_padded() - p % panels_per_group() * kPanel;
    return left < kPanel ? left : kPanel;
  }
  int64_t offset(int64_t p) const { return (first_group * n_padded() + column(p)) * k; }
};

// Where a finished product leaves the operator: out = C + bias + residual, rounded once.
struct Epilog {
  Storage out;            // [*, ld]
  ConstStorage residual;  // [*, ld] or absent
  int64_t first_row;      // of the job's rows in out and residual
  const float *bias;      // [n] or nullptr
  int64_t ld;
};

struct GemmJob {
  const float *a;         // [rows, lda], already at its k_begin
  int64_t lda, rows;
  PackedWeight w;
  int64_t k_begin, k_end; // the part of K that is added now
  float *c;               // [rows, ldc], ldc >= w.groups * w.n_padded()
  int64_t ldc;
  bool accumulate;
  const Epilog *epilog;   // with the last part of K, or nullptr; for one group
};

// What a worker needs beside the job.
struct GemmScratch {
  float *floats;              // [threads, per_thread]
  int64_t k_block, rows, panels, per_thread;
  const GemmChoice *choices;  // [kProjections]

  GemmScratch(Workers &workers, const TilingData &t) : k_block(t.gemm_k_block), rows(t.gemm_rows), panels(t.gemm_panels), choices(t.gemm) {
    per_thread = k_block * kPanel + rows * kPanel * panels + rows * k_block;
    floats = workers.scratch().alloc<float>(workers.threads() * per_thread);
  }
  // How a product with w is computed; of a matrix that is no projection, few rows by a register block, else by tiles.
  GemmChoice choice(const PackedWeight &w) const {
    for (int32_t i = 0; i < kProjections; ++i)
      if (choices[i].n == w.n && choices[i].k == w.k) return choices[i];
    return {int32_t(w.n), int32_t(w.k), INT32_MAX, 0};
  }
  float *wide(int thread) const { return floats + thread * per_thread; }                   // [k_block, kPanel] a weight block as float32
  float *sums(int thread) const { return wide(thread) + k_block * kPanel; }                // [panels][rows, kPanel]
  float *activations(int thread) const { return sums(thread) + rows * kPanel * panels; }  // [rows, k_block]
};

static void write_out(const GemmJob &job, int64_t row, int64_t rows, int64_t col, int64_t cols) {
  const Epilog &e = *job.epilog;
  float line[kPanel], add_on[kPanel];
  for (int64_t m = row; m < row + rows; ++m) {
    for (int64_t c0 = col; c0 < col + cols; c0 += kPanel) {
      const int64_t n = col + cols - c0 < kPanel ? col + cols - c0 : kPanel;
      const float *src = job.c + m * job.ldc + c0;  // [n]
      for (int64_t i = 0; i < n; ++i) line[i] = e.bias ? src[i] + e.bias[c0 + i] : src[i];
      if (e.residual.present()) {
        widen_any(add_on, e.residual, (e.first_row + m) * e.ld + c0, n);
        for (int64_t i = 0; i < n; ++i) line[i] += add_on[i];
      }
      narrow_any(e.out, (e.first_row + m) * e.ld + c0, line, n);
    }
  }
}

}  // namespace FLASHMLA_NS
}  // namespace flashmla
