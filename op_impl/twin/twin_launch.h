// Runs the operator's AscendC kernel on the twin.
#pragma once

#include "op_impl/cpu/kernel_args.h"
#include "op_impl/twin/engine/engine.h"
#include "tiling/tiling.h"

namespace flashmla {

// The machine that MS_FLASHMLA_TWIN_MACHINE names, or the first SKU. Throws std::runtime_error for an unknown one.
const Machine& twin_machine();

// FlashMLA with the arguments of the CPU kernel, checked already; `layout` stands for the paged one of args.cache when it is given, `wanted` for blocks that the tiling selects. Throws what the twin finds, or std::runtime_error for dtypes that the Ascend
// kernel does not take.
twin::RunReport twin_flash_mla(const LayerArgs& args, const Machine& machine, const twin::Options& options, const CacheLayout* layout = nullptr,
                               const WantedBlocks& wanted = {});

}  // namespace flashmla
