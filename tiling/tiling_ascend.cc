// Blocks of the Ascend kernel: the precomputed configurations -> what fits -> compare by predicted cycles -> one printable choice.
#include <algorithm>
#include <cstdio>
#include <iterator>
#include <limits>
#include <map>
#include <stdexcept>
#include <utility>

#include "tiling/ascend_attention.h"
#include "tiling/ascend_configs.h"
#include "tiling/ascend_projections.h"
#include "tiling/int_math.h"
#include "tiling/tiling_backends.h"

namespace flashmla {

using namespace int_math;

namespace {

constexpr int64_t kFractal = 16;
// Copies of columns of P V in UB and in L0C: with three the vector units work on one while one comes and the third goes back.
constexpr std::pair<int32_t, int32_t> kOutputCopies[] = {{3, 4}, {3, 3}, {2, 4}, {2, 3}, {2, 2}, {1, 2}, {1, 1}};
// Copies of the scores and of P.
constexpr std::pair<int32_t, int32_t> kScoreCopies[] = {{2, 2}, {2, 1}, {1, 1}};
constexpr int32_t kLargestTileAsked = 1024;  // keys, up to which the report says why a larger tile is not taken
// Where the weights' bytes bound the products, a second part of A costs the cube time that it has; with more tokens the cube is the bound.
constexpr int32_t kMostTokensInParts = 256;
constexpr int32_t kMostRows = 128;
constexpr int64_t kTilesOfASplit = 4;  // below, filling the pipeline and merging outweigh the idle core

int64_t fractals(int64_t n) { return align_up(n, kFractal); }
bool takes_path(const Problem& p, int32_t path) {
  return path == kAbsorbed ? p.rope_mode == kRopeDecoupled : p.hidden_size > 0;
}

PassShape absorbed_shape(const Problem& p) {
  PassShape s;
  s.stage = "absorbed";
  s.most_rows = std::max<int64_t>(1, p.s_q * (p.num_heads / p.num_kv_heads));
  s.d_v = fractals(p.kv_lora_rank);
  s.d_qk = fractals(p.kv_lora_rank + p.qk_rope_head_dim);
  s.d_rope = s.d_qk - s.d_v;
  s.v_is_k = true;
  return s;
}

// K and V come from the workspace.
PassShape expanded_shape(const Problem& p) {
  PassShape s;
  s.stage = "expanded";
  s.most_rows = std::max<int64_t>(1, p.s_q);
  s.d_qk = fractals(p.qk_nope_head_dim + p.qk_rope_head_dim);
  s.d_v = fractals(p.v_head_dim);
  return s;
}

// The passes that a core runs one after the other, and where their tiles come from.
struct PassCost {
  double cycles = 0;
  double tile_cycles = 0;
};

PassCost pass_cost(const Problem& p, const PassShape& s, const AscendBlocks& b, const Machine& m) {
  const int64_t heads = s.v_is_k ? p.num_kv_heads : p.num_heads;
  const int64_t groups = heads * ceil_div(s.most_rows, b.rows);
  const int64_t batch = std::max<int64_t>(1, p.batch);
  // The tiles of all passes lie in one line, of which every core takes an equal piece.
  const int64_t all_tiles = batch * groups * std::max<int64_t>(1, ceil_div(p.s_kv, b.kv_tile));
  const int64_t tiles = std::max(ceil_div(all_tiles, m.cores), std::min(all_tiles, kTilesOfASplit));
  const int64_t busy_cores = std::min<int64_t>(m.cores, ceil_div(all_tiles, tiles));

  // HBM is shared by the cores that read; what another row group has read before comes from L2 when it stays there.
  const double cycles_per_s = m.freq_mhz * 1e6;
  const double hbm = m.dram_gb_per_s * 1e9 * m.hbm_efficiency / busy_cores / cycles_per_s;
  const double row_bytes = 2.0 * (s.v_is_k ? p.kv_lora_rank + p.qk_rope_head_dim : heads * (s.d_qk + s.d_v));
  const bool stays_in_l2 = row_bytes * batch * p.s_kv < 0.5 * m.l2_bytes;
  const double sharing = s.v_is_k ? groups : ceil_div(s.most_rows, b.rows);
  const double from_hbm = stays_in_l2 ? 1 / sharing : 1;
  PassLoad load;
  load.gm_bytes_per_cycle = 1 / (from_hbm / std::min<double>(hbm, m.l2_bytes_per_cycle) + (1 - from_hbm) / m.l2_bytes_per_cycle);
  load.copies_a_tile = s.v_is_k ? ceil_div(b.kv_tile, p.block_size) : 2;

  PassCost cost;
  cost.tile_cycles = tile_cycles(s, b, load, m);
  // QK runs a tile ahead of PV: a core takes a tile more than it has.
  cost.cycles = cost.tile_cycles * (tiles + 1);
  return cost;
}

struct Choice {
  bool found = false;
  AscendBlocks blocks{};
  PassCost cost{std::numeric_limits<double>::infinity(), 0};
};

// The best of the variants of one (rows, kv_tile): copies and columns of P V, KV buffers.
Choice best_variant(const Problem& p, const PassShape& s, const Machine& m, int32_t rows, int32_t kv_tile, int32_t only_buffers = 0) {
  Choice best;
  for (int32_t kv_buffers : {4, 3, 2, 1}) {
    // Nothing is loaded ahead into a single buffer: for measurements alone.
    if (only_buffers != 0 ? kv_buffers != only_buffers : kv_buffers == 1) continue;
    for (int64_t parts : {1, 2, 4, 8}) {
      AscendBlocks b{};
      b.rows = rows;
      b.kv_tile = kv_tile;
      b.kv_buffers = kv_buffers;
      b.p_in_rope = s.v_is_k && rows <= s.d_rope;
      b.pv_columns = static_cast<int32_t>(fractals(ceil_div(s.d_v, parts)));
      fill_l0_steps(s, m, &b);
      for (const auto& [ub_copies, l0c_copies] : kOutputCopies) {
        for (const auto& [score_copies, p_copies] : kScoreCopies) {
          for (int64_t pieces : {1, 2}) {
            b.ub_columns = static_cast<int32_t>(fractals(ceil_div(int64_t{b.pv_columns}, pieces)));
            b.l0c_out_buffers = l0c_copies;
            b.ub_out_buffers = ub_copies;
            b.score_buffers = score_copies;
            b.p_buffers = p_copies;
            if (!pass_fits(s, b, m)) continue;
            PassCost cost = pass_cost(p, s, b, m);
            // A single copy makes cube and vector wait for each other at every hand-over of P V.
            cost.cycles *= 1 + 0.02 * ((l0c_copies == 1) + (ub_copies == 1));
            if (cost.cycles < best.cost.cycles) best = {true, b, cost};
          }
        }
      }
    }
  }
  return best;
}

// Half of a tile at least is real, and no rows are added beyond whole fractals of them.
bool suits(const AscendConfig& config, const Problem& p, const PassShape& s) {
  return (config.kv_tile == kFractal || config.kv_tile / 2 < p.s_kv) && (config.rows == kFractal || config.rows <= fractals(s.most_rows));
}

Choice best_blocks(const Problem& p, const PassShape& s, const Machine& m) {
  Choice best;
  for (const AscendConfig& config : kAscendConfigs) {
    if (!suits(config, p, s)) continue;
    Choice choice = best_variant(p, s, m, config.rows, config.kv_tile);
    if (choice.cost.cycles < best.cost.cycles) best = choice;
  }
  if (!best.found) {
    AscendBlocks least{};
    least.rows = least.kv_tile = kFractal;
    least.kv_buffers = 2;
    least.pv_columns = least.ub_columns = static_cast<int32_t>(fractals(ceil_div(s.d_v, 8)));
    least.l0c_out_buffers = least.ub_out_buffers = least.score_buffers = least.p_buffers = 1;
    fill_l0_steps(s, m, &least);
    throw std::invalid_argument(std::string("the smallest tiles of the ") + s.stage + " path do not fit " + m.name + ": 16 rows x 16 keys " +
                                overflow(pass_buffers(s, least, m)));
  }
  return best;
}

// Memories that the buffers of a pass exceed, and by how many bytes.
std::map<std::string, int64_t> excess(const std::vector<Buffer>& buffers) {
  std::map<std::string, int64_t> left;
  for (const Buffer& b : buffers) left.emplace(b.memory, -b.capacity).first->second += b.bytes;
  for (auto memory = left.begin(); memory != left.end();) memory = memory->second > 0 ? std::next(memory) : left.erase(memory);
  return left;
}

void check_dtypes(const Problem& p, const Machine& m) {
  const std::pair<const char*, int32_t> dtypes[] = {{"act_dtype", p.act_dtype}, {"weight_dtype", p.weight_dtype}, {"cache_dtype", p.cache_dtype}};
  for (const auto& [field, dtype] : dtypes) {
    if (dtype == kFloat32) throw std::invalid_argument(std::string(field) + " is float32; on " + m.name + " it must be float16 or bfloat16");
  }
}

// K and V of workspace_heads heads of a sequence, and of the next ones; in L2 when they fit there.
Buffer workspace_buffer(const Problem& p, const Machine& m, const TilingData& t) {
  const PassShape s = expanded_shape(p);
  const int64_t columns = int64_t{t.workspace_heads} * (s.d_qk + s.d_v);
  Buffer b;
  b.stage = s.stage;
  b.name = "k, v workspace";
  b.shape = "[" + std::to_string(p.s_kv) + ", " + std::to_string(columns) + "] 16-bit";
  b.copies = 2;
  b.bytes = b.copies * 2 * p.s_kv * columns;
  const bool in_l2 = b.bytes <= m.l2_bytes;
  b.memory = in_l2 ? "L2" : "HBM";
  b.capacity = in_l2 ? m.l2_bytes : m.dram_bytes;
  return b;
}

}  // namespace

TilingData make_ascend_tiling(const Problem& p, const Machine& m) {
  check_dtypes(p, m);
  TilingData t{};
  t.num_cores = m.cores;
  t.two_part_tokens = kMostTokensInParts;
  t.qk_row_pack = t.qk_dim_pack = t.pv_row_pack = kFractal;

  if (takes_path(p, kAbsorbed)) t.absorbed = best_blocks(p, absorbed_shape(p), m).blocks;
  if (takes_path(p, kExpanded)) {
    t.expanded = best_blocks(p, expanded_shape(p), m).blocks;
    // Query tiles of as many heads as give every core one.
    const int64_t q_tiles = ceil_div(std::max<int64_t>(1, p.s_q), t.expanded.rows);
    t.workspace_heads = static_cast<int32_t>(clamp(ceil_div(m.cores, q_tiles), 1, p.num_heads));
  }

  t.absorbed_rows = t.absorbed.rows;
  t.q_tile = t.expanded.rows;
  t.kv_tile = takes_path(p, kAbsorbed) ? t.absorbed.kv_tile : t.expanded.kv_tile;
  t.split_min = static_cast<int32_t>(kTilesOfASplit * t.kv_tile);
  t.max_splits = static_cast<int32_t>(std::max<int64_t>(1, m.cores / std::max<int64_t>(1, p.batch)));
  t.expanded_splits = t.max_splits;
  if (p.hidden_size > 0) choose_projections(p, m, &t);
  return t;
}

AscendBlocks wanted_blocks(const Problem& p, const Machine& m, const TilingData& t, int32_t path, const WantedBlocks& wanted) {
  const PassShape s = path == kAbsorbed ? absorbed_shape(p) : expanded_shape(p);
  AscendBlocks b = path == kAbsorbed ? t.absorbed : t.expanded;
  if (wanted.rows > 0) b.rows = wanted.rows;
  if (wanted.kv_tile > 0) b.kv_tile = wanted.kv_tile;
  const bool known = std::any_of(std::begin(kAscendConfigs), std::end(kAscendConfigs), [&](const AscendConfig& config) { return config.kv_tile == b.kv_tile; });
  if (!known) throw std::invalid_argument("kv_tile is " + std::to_string(b.kv_tile) + "; it must be 16, 32, 64, 96, 128 or 256");
  if (b.rows < kFractal || b.rows > kMostRows || b.rows % kFractal != 0) throw std::invalid_argument("rows is " + std::to_string(b.rows) + "; it must be a multiple of 16 up to 128");
  if (wanted.kv_buffers < 0 || wanted.kv_buffers > 4) throw std::invalid_argument("kv_buffers is " + std::to_string(wanted.kv_buffers) + "; it must be 1 to 4");
  const Choice choice = best_variant(p, s, m, b.rows, b.kv_tile, wanted.kv_buffers);
  if (choice.found) return choice.blocks;
  b.kv_buffers = wanted.kv_buffers > 0 ? wanted.kv_buffers : 2;
  b.p_in_rope = s.v_is_k && b.rows <= s.d_rope;
  b.l0c_out_buffers = b.ub_out_buffers = b.score_buffers = b.p_buffers = 1;
  b.pv_columns = b.ub_columns = static_cast<int32_t>(fractals(ceil_div(s.d_v, 8)));
  fill_l0_steps(s, m, &b);
  std::string text = std::to_string(b.rows) + " rows x " + std::to_string(b.kv_tile) + " keys in " + std::to_string(b.kv_buffers) + " KV buffers do not fit " + m.name;
  for (const auto& [memory, bytes] : excess(pass_buffers(s, b, m))) text += ": " + std::to_string(bytes) + " bytes too many in " + memory;
  throw std::invalid_argument(text);
}

std::vector<Buffer> ascend_buffers(const Problem& p, const Machine& m, const TilingData& t) {
  std::vector<Buffer> list;
  auto append = [&list](std::vector<Buffer> more) { list.insert(list.end(), more.begin(), more.end()); };
  if (takes_path(p, kAbsorbed)) append(pass_buffers(absorbed_shape(p), t.absorbed, m));
  if (takes_path(p, kExpanded)) {
    append(pass_buffers(expanded_shape(p), t.expanded, m));
    list.push_back(workspace_buffer(p, m, t));
    append(projection_buffers(t, m));
  }
  return list;
}

namespace {

// Why the next larger (rows, kv_tile, copies) was not taken: it does not fit even with the fewest buffers, or is predicted slower.
std::string refusal(const Problem& p, const PassShape& s, const AscendBlocks& taken, const Machine& m, const std::string& what, int32_t rows,
                    int32_t kv_tile, int32_t kv_buffers) {
  const Choice larger = best_variant(p, s, m, rows, kv_tile, kv_buffers);
  if (larger.found) {
    const double ratio = larger.cost.cycles / pass_cost(p, s, taken, m).cycles;
    char text[32];
    std::snprintf(text, sizeof text, "%.2f", ratio);
    return what + " fits, but is predicted to take " + text + " times as long at this shape";
  }
  AscendBlocks b = taken;
  b.rows = rows;
  b.kv_tile = kv_tile;
  b.kv_buffers = kv_buffers == 0 ? 2 : kv_buffers;
  b.p_in_rope = s.v_is_k && rows <= s.d_rope;
  b.l0c_out_buffers = b.ub_out_buffers = b.score_buffers = b.p_buffers = 1;
  b.pv_columns = b.ub_columns = static_cast<int32_t>(fractals(ceil_div(s.d_v, 8)));
  fill_l0_steps(s, m, &b);
  return what + " " + overflow(pass_buffers(s, b, m));
}

// Which configuration is taken, of how many, and what the next best one would take.
std::string selection(const Problem& p, const PassShape& s, const AscendBlocks& taken, const Machine& m) {
  int32_t small = 0, fitting = 0, all = 0;
  const AscendConfig* next = nullptr;
  double least = std::numeric_limits<double>::infinity();
  for (const AscendConfig& config : kAscendConfigs) {
    ++all;
    if (!suits(config, p, s)) continue;
    ++small;
    const Choice choice = best_variant(p, s, m, config.rows, config.kv_tile);
    if (!choice.found) continue;
    ++fitting;
    const bool own = config.rows == taken.rows && config.kv_tile == taken.kv_tile;
    if (!own && choice.cost.cycles < least) least = choice.cost.cycles, next = &config;
  }
  std::string text = "configuration " + std::to_string(taken.rows) + " rows x " + std::to_string(taken.kv_tile) + " keys: of " + std::to_string(all) + " precomputed ones " +
                     std::to_string(small) + " are no larger than this shape, " + std::to_string(fitting) + " of them fit";
  if (next == nullptr) return text;
  char ratio[32];
  std::snprintf(ratio, sizeof ratio, "%.2f", least / pass_cost(p, s, taken, m).cycles);
  return text + ", and the next best, " + std::to_string(next->rows) + " x " + std::to_string(next->kv_tile) + ", is predicted to take " + ratio + " times as long";
}

void explain_pass(const Problem& p, const PassShape& s, const AscendBlocks& taken, const Machine& m, TilingReport* report) {
  const AscendBlocks& b = taken;
  report->reasons.push_back(selection(p, s, taken, m));
  auto reason = [&](const std::string& what, int32_t rows, int32_t kv_tile, int32_t buffers) {
    report->reasons.push_back(refusal(p, s, taken, m, what, rows, kv_tile, buffers));
  };
  bool fits = true;  // up to the first larger tile that does not fit
  for (int32_t larger = 2 * b.kv_tile; fits && larger <= kLargestTileAsked; larger *= 2) {
    fits = best_variant(p, s, m, b.rows, larger).found;
    reason("kv_tile " + std::to_string(larger), b.rows, larger, 0);
  }
  int32_t taller = 0;  // the next one for these tiles
  for (const AscendConfig& config : kAscendConfigs) {
    if (config.kv_tile == b.kv_tile && config.rows > b.rows && (taller == 0 || config.rows < taller)) taller = config.rows;
  }
  if (taller > 0 && fractals(s.most_rows) > b.rows) reason("rows " + std::to_string(taller), taller, b.kv_tile, 0);
  if (fractals(s.most_rows) <= b.rows) report->reasons.push_back("rows " + std::to_string(b.rows) + " already hold all rows of a sequence");
  if (b.kv_buffers == 2) reason("a third KV buffer", b.rows, b.kv_tile, 3);
  if (b.p_in_rope) report->reasons.push_back("p takes the place of the rope columns of its KV tile: no L1 of its own");

  report->blocks.push_back({"tiling_key", tiling_key(report->seq.path, b.kv_tile), "the kernel's variant: 1000 absorbed, 2000 expanded, and kv_tile"});
  const std::pair<const char*, std::pair<int64_t, const char*>> blocks[] = {
      {"rows", {b.rows, "query rows that share a pass over the KV tiles"}},
      {"kv_tile", {b.kv_tile, "keys of a tile"}},
      {"kv_buffers", {b.kv_buffers, "KV tiles in L1"}},
      {"qk_k_block", {b.qk_k_block, "columns of a QK step in L0A, L0B"}},
      {"pv_k_block", {b.pv_k_block, "keys of a PV step in L0A, L0B"}},
      {"pv_n_block", {b.pv_n_block, "columns of V of a PV step"}},
      {"pv_columns", {b.pv_columns, "columns of P V in L0C at a time"}},
      {"ub_columns", {b.ub_columns, "columns of P V in UB at a time"}},
  };
  for (const auto& [name, entry] : blocks) report->blocks.push_back({std::string(s.stage) + "." + name, entry.first, entry.second});
}

void explain_expansion(const Problem& p, const PassShape& s, TilingReport* report) {
  const TilingData& t = report->tiling;
  report->reasons.push_back("K and V go through a workspace, decompressed once: " + std::to_string(ceil_div(s.most_rows, t.expanded.rows) * p.num_heads) +
                            " query tiles would each decompress their KV tiles again");
  report->blocks.push_back({"workspace_heads", t.workspace_heads, "heads whose K and V the workspace holds at a time"});
}

}  // namespace

void explain_ascend(const Problem& p, const Machine& m, TilingReport* report) {
  const TilingData& t = report->tiling;
  const bool absorbed = report->seq.path == kAbsorbed;
  const PassShape s = absorbed ? absorbed_shape(p) : expanded_shape(p);
  report->bytes_read = report->least_bytes;
  explain_pass(p, s, absorbed ? t.absorbed : t.expanded, m, report);
  if (!absorbed) explain_expansion(p, s, report);
  if (p.hidden_size > 0) explain_projections(p, m, report);

  // Passes over the same keys by other rows read HBM again when the keys of the batch do not stay in L2.
  const double row = 2.0 * p.num_kv_heads * (p.kv_lora_rank + p.qk_rope_head_dim);
  const double cache = p.batch * static_cast<double>(p.s_kv) * row;
  const int64_t passes = ceil_div(s.most_rows, absorbed ? t.absorbed.rows : t.expanded.rows);
  if (cache > 0.5 * m.l2_bytes && passes > 1) report->bytes_read += (passes - 1) * cache;
}

}  // namespace flashmla
