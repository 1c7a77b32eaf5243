// How the products of a layer are cut: blocks by predicted cycles.
#pragma once

#include "op_impl/ascendc/op_kernel/kernel_data.h"
#include "tiling/machine.h"

namespace flashmla {

// Of a call whose dimensions, tokens and parts are filled in.
ProductTiling choose_product_blocks(const KernelData &d, const Machine &machine);

}  // namespace flashmla
