// The projections of an Ascend layer (prolog, epilog, decompression through a workspace): blocks of a product on one AI core.
#pragma once

#include <vector>

#include "tiling/machine.h"
#include "tiling/tiling.h"

namespace flashmla {

// Fills gemm_base_* and gemm_step_k.
void choose_projections(const Problem& problem, const Machine& machine, TilingData* tiling);

std::vector<Buffer> projection_buffers(const TilingData& tiling, const Machine& machine);

void explain_projections(const Problem& problem, const Machine& machine, TilingReport* report);

}  // namespace flashmla
