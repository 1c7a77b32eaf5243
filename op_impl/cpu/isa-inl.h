// The body of a translation unit that compiles the kernels for one ISA: it defines the table that dispatch.cc picks from.
#pragma once

#include "machine_constants.h"
#include "op_impl/cpu/dispatch.h"
#include "op_impl/cpu/flash_mla-inl.h"

namespace flashmla {
namespace FLASHMLA_NS {

// What tiling counts on for this ISA is what the leaf is written for.
#define FLASHMLA_JOIN_(a, b) a##b
#define FLASHMLA_JOIN(a, b) FLASHMLA_JOIN_(a, b)
using TilingMachine = machine_constants::FLASHMLA_JOIN(cpu_, FLASHMLA_NS);
static_assert(kLanes == TilingMachine::vector_lanes && kPanel == TilingMachine::gemm_panel_cols);
static_assert(kQkAccumulators == TilingMachine::accumulators && kGemmRows * kGemmVecs == TilingMachine::accumulators);
static_assert(kQkVecs * 4 == kQkAccumulators);  // the vectors of rows that tiling's qk_row_group counts, by the four keys that go with them

static void gemm(const GemmArgs &args, ThreadPool::Session &session) {
  Scratch &scratch = Scratch::instance();
  scratch.reset();
  Workers workers(session, scratch);
  const GemmScratch gemm_scratch(workers, args.tiling);
  const GemmJob job = {args.a, args.k, args.rows, {args.w, 0, args.groups, args.n, args.k}, 0, args.k, args.c,
                       args.groups * round_up(args.n, kPanelAlign), false, nullptr};
  run_gemms(workers, &job, 1, gemm_scratch);
}

extern const Kernels kKernels;
const Kernels kKernels = {flash_mla, flash_mla_with_kvcache, merge_attention_states, gemm};

}  // namespace FLASHMLA_NS
}  // namespace flashmla
