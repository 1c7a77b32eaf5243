#include "op_impl/ascendc/op_host/product_blocks.h"

#include <algorithm>
#include <vector>

#include "tiling/int_math.h"

namespace flashmla {

using namespace int_math;

namespace {

constexpr int64_t kFractal = 16, kPanelColumns = 64;
constexpr int64_t kMostColumns = 1024, kMostStep = 2048;
constexpr int64_t kMostWeights = 6, kMostResults = 8;      // pieces in L1 and in L0C, gemm.h
constexpr int64_t kMostPieceElements = 128 * 256;          // of a result in UB, half of it in each AIV
constexpr int64_t kMostMatrixStride = 65535, kMostTileRows = 512;  // in pairs of elements, within which one copy brings several panels
constexpr int64_t kL0Elements = 16384;                     // of half an L0A or L0B

int64_t fractals(int64_t n) { return align_up(n, kFractal); }

// C [groups][m, n] = A [parts][m, k] W [k, n].
struct Product {
  int64_t groups, m, n, k, parts;
};

// Columns that are no multiple of `unit` begin anywhere in one: how many of them they touch at the most.
int64_t touched(int64_t columns, int64_t all, int64_t unit) {
  return columns % unit == 0 || columns == all ? ceil_div(columns, unit) : ceil_div(columns - kFractal, unit) + 1;
}

bool in_one_copy(const Product &p, int64_t step) { return kPanelColumns / 2 * p.k <= kMostMatrixStride && std::min(step, p.k) <= kMostTileRows; }

// Cycles of one block on a core: whichever of its pipes works longest.
double block_cycles(const Product &p, const ProductBlocks &b, const Machine &machine) {
  const int64_t m = std::min<int64_t>(b.rows, fractals(p.m)), n = std::min<int64_t>(b.columns, fractals(p.n)), all = fractals(p.n);
  const int64_t pieces = touched(n, all, b.piece), panels = touched(n, all, kPanelColumns), steps = ceil_div(p.k, b.step);
  const int64_t copies = in_one_copy(p, b.step) ? pieces + (n % kPanelColumns != 0 ? 1 : 0) : panels;
  const double loads = steps * (copies + 1.0) * machine.startup_dma_gm + 2.0 * p.k * (p.parts * m + n) / machine.l2_bytes_per_cycle;

  const int64_t piece = std::min<int64_t>(n, b.piece), depth = std::min<int64_t>(b.step, p.k);
  const int64_t l0_k = clamp(align_down(std::min(kL0Elements / (p.parts * m), kL0Elements / piece), kFractal), kFractal, fractals(depth));
  const double l0_steps = double(pieces) * steps * ceil_div(depth, l0_k);
  const double to_l0 = l0_steps * ((p.parts + 1.0) * machine.startup_dma_onchip + 4.0 * machine.event_cycles) +
                       2.0 * p.k * (double(pieces) * p.parts * m + n) / machine.l1_l0_bytes_per_cycle;
  const double cube = l0_steps * (p.parts * machine.startup_cube + 2.0 * machine.event_cycles) + double(p.parts) * m * n * p.k / machine.macs_per_cycle_b16;

  const double leaves = 4.0 * m * n / machine.l2_bytes_per_cycle;
  const int64_t results = std::min(kMostResults, machine.l0c_bytes / (4 * b.rows * b.piece));
  // Where no piece of L0C is left over, the next block waits for one of this.
  return std::max({loads, to_l0, cube, leaves}) + (results > pieces ? 0 : leaves / pieces);
}

bool fits(const Product &p, const ProductBlocks &b, const Machine &machine) {
  const int64_t n = std::min<int64_t>(b.columns, fractals(p.n)), results = std::min(kMostResults, machine.l0c_bytes / (4 * b.rows * b.piece));
  return touched(n, fractals(p.n), b.piece) <= results;
}

// Predicted cycles of the products, which share a round; 0: they do not fit.
double cost(const std::vector<Product> &products, const ProductBlocks &b, const Machine &machine) {
  const double memory = machine.dram_gb_per_s * 1e9 * machine.hbm_efficiency / (machine.freq_mhz * 1e6);
  double bytes = 0, cycles = 0;
  int64_t items = 0;
  for (const Product &p : products) {
    if (p.n == 0) continue;
    if (!fits(p, b, machine)) return 0;
    cycles = std::max(cycles, block_cycles(p, b, machine));
    items += p.groups * ceil_div(p.m, b.rows) * ceil_div(fractals(p.n), std::min<int64_t>(b.columns, fractals(p.n)));
    bytes += 2.0 * p.groups * p.k * fractals(p.n);
  }
  const double core = ceil_div(items, machine.cores) * cycles;
  // Neither hides the other wholly.
  return std::max(core, bytes / memory) + 0.15 * std::min(core, bytes / memory);
}

// The largest step with so many pieces of weights beside two steps of A.
int64_t step_of(int64_t weights, int64_t rows, int64_t parts, int64_t piece, int64_t most, const Machine &machine) {
  return std::min(align_down(machine.l1_bytes / 2 / (2 * parts * rows + weights * piece), kPanelColumns), most);
}

ProductBlocks best_blocks(const std::vector<Product> &products, const Machine &machine) {
  int64_t tokens = 1, parts = 1, most_k = 1;
  for (const Product &p : products) tokens = std::max(tokens, p.m), parts = std::max(parts, p.parts), most_k = std::max(most_k, p.k);
  ProductBlocks best{};
  double best_cost = 0;
  for (int64_t most_rows : {128, 256}) {
    const int64_t rows = fractals(ceil_div(tokens, ceil_div(tokens, most_rows)));
    if (most_rows > 128 && rows <= 128) continue;
    for (int64_t piece : {256, 128, 64}) {
      if (rows * piece > kMostPieceElements) continue;
      for (int64_t weights : {2, 3, 4, 6}) {
        const int64_t most = 32 * most_k <= kMostMatrixStride && piece > kPanelColumns ? kMostTileRows : kMostStep;
        const int64_t step = step_of(weights, rows, parts, piece, std::min(most, align_up(most_k, kPanelColumns)), machine);
        if (step < kPanelColumns) continue;
        for (int64_t columns = kMostColumns; columns >= kFractal; columns -= columns > 512 ? 64 : columns > 256 ? 32 : kFractal) {
          const ProductBlocks blocks = {static_cast<int32_t>(rows), static_cast<int32_t>(columns), static_cast<int32_t>(piece), static_cast<int32_t>(step)};
          const double cycles = cost(products, blocks, machine);
          if (cycles == 0 || (best_cost > 0 && cycles >= best_cost)) continue;
          best_cost = cycles;
          best = blocks;
        }
      }
    }
  }
  return best;
}

}  // namespace

ProductTiling choose_product_blocks(const KernelData &d, const Machine &machine) {
  const int64_t t = std::max<int64_t>(1, d.num_tokens), head = d.d_n + d.d_r, k_q = d.q_rank > 0 ? d.q_rank : d.hidden;
  const bool whole_panels = head % kPanelColumns == 0;
  ProductTiling tiling{};
  tiling.hidden = best_blocks({{1, t, d.rank + d.d_r, d.hidden, 1}, {1, t, d.q_rank, d.hidden, 1}}, machine);
  tiling.query = best_blocks({{whole_panels ? 1 : d.heads, t, whole_panels ? d.heads * head : head, k_q, d.q_rank > 0 ? d.parts : 1}}, machine);
  tiling.absorb = best_blocks({{d.heads, t, d.rank, d.d_n, d.parts}}, machine);
  tiling.up = best_blocks({{d.heads, t, d.d_v, d.rank, d.parts}}, machine);
  tiling.output = best_blocks({{1, t, d.hidden, int64_t{d.heads} * d.d_v, 1}}, machine);
  // Keys are decompressed 128 at a time, a head's columns together.
  constexpr int32_t kKeyRows = 128, kKeyColumns = 256;
  const int32_t columns = static_cast<int32_t>(std::min<int64_t>(kKeyColumns, std::max(fractals(d.d_n), fractals(d.d_v))));
  tiling.keys = {kKeyRows, columns, columns, static_cast<int32_t>(step_of(2, kKeyRows, 1, columns, 1024, machine))};
  return tiling;
}

}  // namespace flashmla
