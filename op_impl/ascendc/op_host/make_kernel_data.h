// From shapes and attributes to what the kernel reads: blocks from the tiling, the layout of the workspace. No framework.
#pragma once

#include "op_impl/ascendc/op_kernel/kernel_data.h"
#include "op_proto/op_list.h"
#include "tiling/cache_layout.h"
#include "tiling/machine.h"
#include "tiling/tiling.h"

namespace flashmla {

// What the shapes of a call say. Lengths of sequences are data on the device: the kernel reads them there.
struct KernelCall {
  FlashMLAAttrs attrs;
  int64_t hidden_size;
  int64_t num_tokens;   // T
  int64_t batch;        // B
  int64_t max_blocks;   // columns of the block table
  CacheLayout cache;
  int32_t act_dtype, weight_dtype, cache_dtype;  // DType
  bool has_b_q_a, has_b_kv_a, has_b_o, has_residual;
};

// Throws std::invalid_argument that names what the machine cannot do. `wanted`: blocks in place of those that the tiling selects.
KernelData make_kernel_data(const KernelCall &call, const Machine &machine, const WantedBlocks &wanted = {});

// The problem that the tiling is asked about: every sequence has its share of the new tokens, and as many keys as the table holds.
Problem kernel_problem(const KernelCall &call);

}  // namespace flashmla
