// Blocks of the CPU kernel from the caches of one core. All tiles that a thread computes on are float32.
#include <limits>

#include "tiling/int_math.h"
#include "tiling/tiling_backends.h"

namespace flashmla {

using namespace int_math;

namespace {

// A pass over a KV tile converts it once for all rows and rescales each row's output once for all keys: beyond these
// sizes both cost under 2 % of the multiply-adds, and smaller working sets leave more L2 to what streams through.
constexpr int64_t kMaxRows = 128;
constexpr int64_t kMaxKvTile = 64;
constexpr int64_t kMinKvTile = 8;
constexpr int64_t kQTile = 64;
constexpr int64_t kMinQTile = 8;
constexpr int64_t kMaxChunk = 4096;
constexpr int64_t kMaxTokenGroup = 4096;

constexpr int64_t kSplitMin = 512;  // below, merging the partial results outweighs the idle core
constexpr int32_t kMaxSplits = 32;  // work items of one sequence; twice the cores of a common server socket

int64_t latent_width(const Problem& p) { return p.kv_lora_rank + p.qk_rope_head_dim; }
int64_t d_qk(const Problem& p) { return p.qk_nope_head_dim + p.qk_rope_head_dim; }

// float32 bytes that the absorbed pass keeps in L2: q rows, output rows, scores, softmax state (max, sum), KV tile.
int64_t absorbed_bytes(const Problem& p, int64_t rows, int64_t kv_tile) {
  return 4 * (rows * (latent_width(p) + p.kv_lora_rank + kv_tile + 2) + kv_tile * latent_width(p));
}

// The same for the expanded pass of one head: q tile, output tile, scores, softmax state, K and V tile.
int64_t expanded_bytes(const Problem& p, int64_t q_tile, int64_t kv_tile) {
  const int64_t d = d_qk(p) + p.v_head_dim;
  return 4 * (q_tile * (d + kv_tile + 2) + kv_tile * d);
}

// Half of L2 holds the tiles, the other half what streams through (cache rows, weights). A problem too large for that takes
// all of L2 before it spills.
int64_t tile_budget(const Machine& m) { return m.l2_bytes / 2; }

// Twice the lanes halve the loads per multiply-add, when that pads the heads of a token no further.
int64_t lanes_for(const Problem& p, const Machine& m) {
  const int64_t heads = p.num_heads / p.num_kv_heads;
  const int64_t lanes = m.vector_lanes;
  return align_up(heads, 2 * lanes) == align_up(heads, lanes) ? 2 * lanes : lanes;
}

struct AbsorbedBlocks {
  int64_t rows = 0;  // 0: nothing fits
  int64_t kv_tile = 0;
  double overhead = std::numeric_limits<double>::infinity();
};

// Candidates -> compare: what a pass costs beside its multiply-adds, relative to them. An element of the KV tile is converted
// once (a load, a conversion and a store against `rows` multiply-adds); an output element is rescaled once a tile.
AbsorbedBlocks best_absorbed(const Problem& p, int64_t lanes, int64_t budget) {
  AbsorbedBlocks best;
  for (int64_t kv_tile = kMaxKvTile; kv_tile >= kMinKvTile; kv_tile -= 8) {
    for (int64_t rows = align_down(kMaxRows, lanes); rows >= lanes; rows -= lanes) {
      if (absorbed_bytes(p, rows, kv_tile) > budget) continue;
      double overhead = 3.0 / rows + 1.0 / kv_tile;
      if (overhead < best.overhead) best = {rows, kv_tile, overhead};
    }
  }
  return best;
}

Buffer buffer(const char* stage, const char* name, int64_t rows, int64_t cols, const char* memory, int64_t capacity) {
  Buffer b;
  b.stage = stage;
  b.name = name;
  b.shape = "[" + std::to_string(rows) + ", " + std::to_string(cols) + "] float32";
  b.bytes = 4 * rows * cols;
  b.memory = memory;
  b.capacity = capacity;
  return b;
}

}  // namespace

TilingData make_cpu_tiling(const Problem& p, const Machine& m) {
  TilingData t{};

  // absorbed path
  int64_t lanes = lanes_for(p, m);
  AbsorbedBlocks blocks = best_absorbed(p, lanes, tile_budget(m));
  if (blocks.rows == 0) {
    lanes = m.vector_lanes;
    blocks = best_absorbed(p, lanes, m.l2_bytes);
  }
  if (blocks.rows == 0) blocks = {lanes, kMinKvTile, 0};  // a latent beyond L2: the tiles live in scratch
  t.row_lanes = static_cast<int32_t>(lanes);
  t.kv_tile = static_cast<int32_t>(blocks.kv_tile);
  t.absorbed_rows = static_cast<int32_t>(blocks.rows);
  t.split_min = kSplitMin;
  t.max_splits = kMaxSplits;
  t.expanded_splits = 1;  // heads and query tiles are work enough
  // Latent outputs [tokens, H, r] wait for W_UV: at most 32 MiB of them.
  t.absorbed_tokens = static_cast<int32_t>(clamp(32 * kMiB / (4 * int64_t{p.num_heads} * p.kv_lora_rank), 1, 128));

  // expanded path
  int64_t q_tile = kQTile;
  while (q_tile > kMinQTile && expanded_bytes(p, q_tile, t.kv_tile) > tile_budget(m)) q_tile -= 8;
  t.q_tile = static_cast<int32_t>(q_tile);
  // K and V of one head for a chunk of keys: at most 8 MiB a thread.
  const int64_t kv_row = 4 * std::max<int64_t>(1, d_qk(p) + p.v_head_dim);
  t.kv_chunk = static_cast<int32_t>(align_down(clamp(8 * kMiB / kv_row, t.kv_tile, kMaxChunk), t.kv_tile));
  // W_o takes about 512 columns at a time, so that the sums of its outputs are loaded and stored once per 512 multiply-adds.
  t.head_group = static_cast<int32_t>(clamp(512 / std::max(1, p.v_head_dim), 1, p.num_heads));
  // A token waits as its sums of W_o [hidden]: at most 48 MiB of them. Every group decompresses the keys anew.
  const int64_t token_bytes = 4 * std::max<int64_t>(1, p.hidden_size);
  t.token_group = static_cast<int32_t>(align_down(clamp(48 * kMiB / token_bytes, q_tile, kMaxTokenGroup), q_tile));

  // projections
  // A weight block [gemm_k_block, panel] takes two thirds of L1, the sums of a work item [gemm_rows, panel] pass through L1 once
  // per block; 24 rows are a whole number of register blocks on every ISA.
  const int64_t panel_row = 4 * m.gemm_panel_cols;
  t.gemm_k_block = static_cast<int32_t>(std::max<int64_t>(16, align_down(m.l1_bytes * 2 / 3 / panel_row, 16)));
  t.gemm_rows = static_cast<int32_t>(std::max<int64_t>(24, align_down(m.l1_bytes / panel_row, 24)));
  return t;
}

std::vector<Buffer> cpu_buffers(const Problem& p, const Machine& m, const TilingData& t) {
  const int64_t registers = int64_t{m.vector_registers} * m.vector_lanes * 4;
  const int64_t vector_block = m.accumulators;
  std::vector<Buffer> list;

  // Tiles stand in L2; for a latent that no block of fits there, in the thread's scratch.
  const bool absorbed_in_l2 = absorbed_bytes(p, t.absorbed_rows, t.kv_tile) <= m.l2_bytes;
  const char* memory = absorbed_in_l2 ? "L2" : "DRAM";
  int64_t capacity = absorbed_in_l2 ? m.l2_bytes : m.scratch_bytes;
  const char* stage = "absorbed";
  list.push_back(buffer(stage, "sums of QK, PV", vector_block, m.vector_lanes, "registers", registers));
  list.push_back(buffer(stage, "kv tile", t.kv_tile, latent_width(p), memory, capacity));
  list.push_back(buffer(stage, "q rows", t.absorbed_rows, latent_width(p), memory, capacity));
  list.push_back(buffer(stage, "output rows", t.absorbed_rows, p.kv_lora_rank, memory, capacity));
  list.push_back(buffer(stage, "scores", t.absorbed_rows, t.kv_tile, memory, capacity));
  list.push_back(buffer(stage, "softmax state", t.absorbed_rows, 2, memory, capacity));
  list.push_back(buffer(stage, "split partials", int64_t{t.max_splits} * t.absorbed_rows, p.kv_lora_rank + 2, "DRAM", m.scratch_bytes));
  if (p.hidden_size == 0) return list;
  list.push_back(buffer(stage, "latent outputs", int64_t{t.absorbed_tokens} * p.num_heads, p.kv_lora_rank, "DRAM", m.scratch_bytes));

  const bool expanded_in_l2 = expanded_bytes(p, t.q_tile, t.kv_tile) <= m.l2_bytes;
  memory = expanded_in_l2 ? "L2" : "DRAM";
  capacity = expanded_in_l2 ? m.l2_bytes : m.scratch_bytes;
  stage = "expanded";
  list.push_back(buffer(stage, "sums of QK, PV", vector_block, m.vector_lanes, "registers", registers));
  list.push_back(buffer(stage, "k tile, v tile", t.kv_tile, d_qk(p) + p.v_head_dim, memory, capacity));
  list.push_back(buffer(stage, "q tile", t.q_tile, d_qk(p), memory, capacity));
  list.push_back(buffer(stage, "output tile", t.q_tile, p.v_head_dim, memory, capacity));
  list.push_back(buffer(stage, "scores", t.q_tile, t.kv_tile, memory, capacity));
  list.push_back(buffer(stage, "softmax state", t.q_tile, 2, memory, capacity));
  list.push_back(buffer(stage, "k chunk, one head", t.kv_chunk, d_qk(p), "DRAM", m.scratch_bytes));
  list.push_back(buffer(stage, "v chunk, one head", t.kv_chunk, p.v_head_dim, "DRAM", m.scratch_bytes));
  list.push_back(buffer(stage, "token sums of W_o", t.token_group, p.hidden_size, "DRAM", m.scratch_bytes));
  list.push_back(buffer(stage, "head group outputs", t.token_group, int64_t{t.head_group} * p.v_head_dim, "DRAM", m.scratch_bytes));

  stage = "projections";
  list.push_back(buffer(stage, "sums of a register block", vector_block, m.vector_lanes, "registers", registers));
  list.push_back(buffer(stage, "weight block", t.gemm_k_block, m.gemm_panel_cols, "L1", m.l1_bytes));
  list.push_back(buffer(stage, "activation block", t.gemm_rows, t.gemm_k_block, "L2", m.l2_bytes));
  list.push_back(buffer(stage, "sums of a work item", t.gemm_rows, m.gemm_panel_cols, "L2", m.l2_bytes));
  return list;
}

void explain_cpu(const Problem& p, const Machine& m, TilingReport* report) {
  const TilingData& t = report->tiling;
  report->blocks = {
      {"kv_tile", t.kv_tile, "keys of a tile"},
      {"row_lanes", t.row_lanes, "(token, head) rows side by side in the lanes of QK"},
      {"absorbed_rows", t.absorbed_rows, "rows that share a pass over the tiles"},
      {"absorbed_tokens", t.absorbed_tokens, "tokens whose latent outputs wait for W_UV"},
      {"q_tile", t.q_tile, "query tokens of a tile, expanded path"},
      {"kv_chunk", t.kv_chunk, "keys of one head decompressed at a time"},
      {"token_group", t.token_group, "query tokens whose sums of W_o are held"},
      {"head_group", t.head_group, "heads that enter W_o together"},
      {"gemm_k_block", t.gemm_k_block, "K elements of a weight block"},
      {"gemm_rows", t.gemm_rows, "activation rows of a work item"},
  };
  auto refuse = [&](const std::string& what, int64_t needs) {
    const char* share = needs > m.l2_bytes ? "capacity " : "half of it (the rest is for what streams through) is ";
    int64_t limit = needs > m.l2_bytes ? m.l2_bytes : tile_budget(m);
    report->reasons.push_back(what + " needs " + kib_text(needs) + " of L2, " + share + kib_text(limit));
  };
  const int64_t wider_tile = 2 * t.kv_tile, more_rows = t.absorbed_rows + t.row_lanes;
  if (int64_t needs = absorbed_bytes(p, t.absorbed_rows, wider_tile); needs > tile_budget(m)) {
    refuse("kv_tile " + std::to_string(wider_tile), needs);
  } else {
    report->reasons.push_back("kv_tile " + std::to_string(wider_tile) + " would fit, but rescaling costs under 2 % of the multiply-adds at " +
                              std::to_string(t.kv_tile) + " already");
  }
  if (int64_t needs = absorbed_bytes(p, more_rows, t.kv_tile); needs > tile_budget(m)) {
    refuse("absorbed_rows " + std::to_string(more_rows), needs);
  } else {
    report->reasons.push_back("absorbed_rows " + std::to_string(more_rows) + " would fit, but converting a tile costs under 3 % of the multiply-adds at " +
                              std::to_string(t.absorbed_rows) + " already");
  }

  // Rows beyond absorbed_rows pass over the keys again, and so does each head of the expanded path; what L2 does not keep is read
  // from memory anew.
  const bool absorbed = report->seq.path == kAbsorbed;
  const int64_t rows = p.s_q * (p.num_heads / p.num_kv_heads);
  const int64_t passes = absorbed ? tile_count(rows, t.absorbed_rows) : p.num_heads * tile_count(p.s_q, t.token_group);
  const int64_t key_bytes = p.s_kv * p.num_kv_heads * latent_width(p) * dtype_bytes(p.cache_dtype);
  report->bytes_read = report->least_bytes;
  if (passes > 1 && key_bytes > tile_budget(m) * m.cores) {
    report->bytes_read += static_cast<double>(passes - 1) * p.batch * key_bytes;
    report->reasons.push_back(std::to_string(passes) + " passes over the keys of a sequence, " + kib_text(key_bytes) +
                              " each: more than L2 keeps, so that memory may be read again (a last-level cache may save it)");
  }
}

}  // namespace flashmla
