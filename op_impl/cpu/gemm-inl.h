// Products with a packed weight: C[m, n] (+)= sum over k of A[m, k] W[n, k]. How products are cut into blocks for the workers, and
// which loop a block takes; no bit depends on either.
#pragma once

#include "op_impl/cpu/gemm_loops-inl.h"

namespace flashmla {
namespace FLASHMLA_NS {

constexpr int kMostGemms = 2;  // products side by side: the prolog's first two

// Row blocks a worker from which on items take the tiling's gemm_panels each: the workers then end within a quarter of their share
// of each other, however wide an item is.
constexpr int64_t kRowBlocksPerWorker = 4;
// Panels of an item where row blocks are fewer but more than one: a row of A, brought in once, serves that many of them, and a
// product of 512 columns is still two items a row block.
constexpr int64_t kFewPanels = 4;

// The block of one work item.
template <typename T>
static void gemm_item(const GemmJob &job, int64_t row, int64_t rows, int64_t p0, int64_t p1, const GemmScratch &scratch, int thread) {
  const GemmChoice choice = scratch.choice(job.w);
  if (rows <= few_rows<T>() && rows <= choice.gemv_rows && kPanel <= kGemmVecs * kLanes) {
    gemm_few_rows<T>(job, row, rows, p0, p1);
  } else if (rows <= choice.flat_rows) {
    gemm_flat<T>(job, row, rows, p0, p1);
  } else {
    for (int64_t m = row; m < row + rows; m += scratch.rows)
      for (int64_t p = p0; p < p1; p += scratch.panels)
        gemm_many_rows<T>(job, m, m + scratch.rows < row + rows ? scratch.rows : row + rows - m, p,
                          p + scratch.panels < p1 ? p + scratch.panels : p1, scratch, thread);
  }
  if (job.epilog) {
    const int64_t end = p1 * kPanel < job.w.n ? p1 * kPanel : job.w.n;
    write_out(job, row, rows, p0 * kPanel, end - p0 * kPanel);
  }
}

// The whole product on the calling worker.
static void gemm_all(const GemmJob &job, const GemmScratch &scratch, int thread) {
  with_dtype(job.w.data.dtype, [&](auto tag) {
    gemm_item<typename decltype(tag)::type>(job, 0, job.rows, 0, job.w.panels(), scratch, thread);
  });
}

// Runs independent products side by side.
static void run_gemms(Workers &workers, const GemmJob *jobs /* [count] */, int count, const GemmScratch &scratch) {
  struct Cut { int64_t row_blocks, rows, panels, items; } cuts[kMostGemms];
  int64_t items = 0;
  for (int j = 0; j < count; ++j) {
    const GemmJob &job = jobs[j];
    Cut &cut = cuts[j];
    cut.row_blocks = (job.rows + scratch.rows - 1) / scratch.rows;
    cut.rows = cut.row_blocks ? (job.rows + cut.row_blocks - 1) / cut.row_blocks : 0;
    cut.rows = round_up(cut.rows, cut.row_blocks > 1 ? kGemmRows : 1);
    // Where row blocks alone make items enough, panels are taken together: a row of A is read once for all of them.
    cut.panels = cut.row_blocks >= kRowBlocksPerWorker * workers.threads() ? scratch.panels : cut.row_blocks > 1 ? kFewPanels : 1;
    cut.items = cut.row_blocks * ((job.w.panels() + cut.panels - 1) / cut.panels);
    items += cut.items;
  }
  workers.run(items, [&](int64_t item, int thread) {
    int j = 0;
    while (item >= cuts[j].items) item -= cuts[j++].items;
    const GemmJob &job = jobs[j];
    const Cut &cut = cuts[j];
    const int64_t row = item % cut.row_blocks * cut.rows;
    const int64_t p0 = item / cut.row_blocks * cut.panels;
    const int64_t p1 = p0 + cut.panels < job.w.panels() ? p0 + cut.panels : job.w.panels();
    const int64_t rows = row + cut.rows < job.rows ? cut.rows : job.rows - row;
    if (rows <= 0) return;
    with_dtype(job.w.data.dtype, [&](auto tag) {
      gemm_item<typename decltype(tag)::type>(job, row, rows, p0, p1, scratch, thread);
    });
  });
}

}  // namespace FLASHMLA_NS
}  // namespace flashmla
