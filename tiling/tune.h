// Choices found by measuring (`python -m ms_flashmla tune`) in place of the cost model's, and the tilings made so far.
#pragma once

#include "tiling/machine.h"
#include "tiling/tiling_data.h"

namespace flashmla {

// For every product with a group [n, k] of a packed weight of that dtype.
struct GemmRule {
  int32_t weight_dtype;
  GemmChoice choice;
};

// For every layer of these dimensions; the points by ascending context.
struct PathRule {
  int32_t num_heads, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim;
  int32_t weight_dtype, cache_dtype;
  int32_t count;
  PathPoint points[kMostPathPoints];
};

// Rules of the process; the last one for the same key holds. Safe from any thread.
void add_rule(const GemmRule& rule);
void add_rule(const PathRule& rule);
void clear_rules();

// For a switch that changes: the tilings made so far hold the old one.
void forget_tilings();

// make_tiling with the rules and the switches (switches.h) applied, made once for a problem. batch, s_q and s_kv must not matter, as on a CPU. Safe from any thread.
TilingData tuned_tiling(const Problem& problem, const Machine& machine);

}  // namespace flashmla
