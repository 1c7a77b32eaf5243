// One library, a unit per ISA, chosen once at run time.
#pragma once

#include "op_impl/cpu/kernel_args.h"
#include "op_impl/cpu/thread_pool.h"

namespace flashmla {

struct Kernels {
  void (*flash_mla)(const LayerArgs &, ThreadPool::Session &);
  void (*flash_mla_with_kvcache)(const AttendArgs &, ThreadPool::Session &);
  void (*merge_attention_states)(const MergeArgs &, ThreadPool::Session &);
  void (*gemm)(const GemmArgs &, ThreadPool::Session &);
};

struct Isa {
  const char *name;      // "avx512", "avx2", "generic"
  const char *machine;   // the tiling's machine
  const Kernels *kernels;
};

// The best ISA that this processor runs, or the one that MS_FLASHMLA_ISA names. Throws std::runtime_error when that is
// unknown, not in this build, or not supported by the processor.
const Isa &chosen_isa();

}  // namespace flashmla
