// Parts of the CPU kernel that can be switched off, to show what each brings. Results stay right in every setting; row_packing and
// few_rows change bits.
#pragma once

#include <string>

#include "tiling/machine.h"
#include "tiling/tiling_data.h"

namespace flashmla {

// Switches by name:
//   row_packing  lanes of QK over rows by elements of the head dimension; off: over the head dimension alone
//   few_rows     few rows have all lanes on the head dimension and read a 16-bit tile as it is stored
//   next_tile    the next tile is fetched or widened inside the loops of the one at work
//   flat_gemm    a product of few rows keeps its sums in registers over all of K; off: every product takes the loop for many rows
//   dataflow     the loop of a product follows its rows; off: every product takes the flat one
// MS_FLASHMLA_OFF lists those that start off, with commas between. std::invalid_argument where it or `name` names another.
void set_switch(const std::string& name, bool on);

// Throws when MS_FLASHMLA_OFF is wrong.
void check_switches();

// Takes what is off out of a CPU tiling. Throws std::invalid_argument as above.
void apply_switches(const Machine& machine, TilingData* tiling);

}  // namespace flashmla
