// One attention pass of an AI core: what it holds and what a tile of it takes. The candidates of tiling_ascend.cc are measured by this.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tiling/machine.h"
#include "tiling/tiling.h"

namespace flashmla {

// A pass as the cube sees it: every width is padded to whole 16 x 16 fractals.
struct PassShape {
  const char* stage = "";
  int64_t most_rows = 0;    // rows that a sequence has for one pass
  int64_t d_qk = 0;         // columns of q and of K
  int64_t d_v = 0;          // columns of V
  int64_t d_rope = 0;       // trailing columns of K that are not V; P may take their place
  bool v_is_k = false;      // V is the first d_v columns of K: one tile holds both
};

std::vector<Buffer> pass_buffers(const PassShape& shape, const AscendBlocks& blocks, const Machine& machine);

// Whether those buffers fit; builds no list, because the host runs it for every candidate of every call.
bool pass_fits(const PassShape& shape, const AscendBlocks& blocks, const Machine& machine);

// What surrounds a pass on its core.
struct PassLoad {
  double gm_bytes_per_cycle = 0;  // share of HBM or L2 that the core gets for its tiles
  int64_t copies_a_tile = 0;      // GM -> L1 copies: a page of the cache each
};

// Cycles of one KV tile in a full pipeline: the busiest of the pipes (GM -> L1, L1 -> L0, cube, fixpipe, vector), which work
// side by side; with two KV buffers instead of three a hand-over between cores is left uncovered.
double tile_cycles(const PassShape& shape, const AscendBlocks& blocks, const PassLoad& load, const Machine& machine);

// What else the blocks follow from: the widths of a step in L0A, L0B (two buffers each) for this many rows and keys.
void fill_l0_steps(const PassShape& shape, const Machine& machine, AscendBlocks* blocks);

}  // namespace flashmla
