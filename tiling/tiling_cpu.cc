// Blocks of the CPU kernel from the caches of one core. All tiles that a thread computes on are float32.
#include <limits>

#include "tiling/cpu_working_set.h"
#include "tiling/tiling_backends.h"

namespace flashmla {

using namespace int_math;

namespace {

// A pass over a KV tile converts it once for all rows and rescales each row's output once for all keys: beyond these
// sizes both cost under 3 % of the multiply-adds, and smaller working sets leave more L2 to what streams through.
constexpr int64_t kMaxRows = 128;
constexpr int64_t kMaxKvTile = 64;
constexpr int64_t kMinKvTile = 8;
constexpr int64_t kQTile = 64;
constexpr int64_t kMinQTile = 8;
constexpr int64_t kMaxChunk = 4096;
constexpr int64_t kMaxTokenGroup = 4096;

// Both are part of a sequence's bits, since its splits follow its own length alone, on every machine.
// Keys of a split at least: with 16 heads and a latent of 512 they are 0.1 ms of a core (17.8 MFLOP at the 175 GFLOP/s of
// docs/performance.md), beside which handing out an item and merging its 16 rows of output stay small.
constexpr int64_t kSplitMin = 512;
// Splits of a sequence at the most: two for each of 16 cores, so that one that comes late leaves its second to another. Fewer cores
// lose nothing by it (16384 keys, 16 heads, float32: 3.6 ms in 32 splits and in 2).
constexpr int32_t kMaxSplits = 32;

constexpr int64_t kAbsorbedTokens = 128;
constexpr int64_t kGroupBytes = 80 * kMiB;       // scratch that grows with the tokens of a group
constexpr int64_t kChunkBytes = 8 * kMiB;        // K and V of one head
constexpr int64_t kPartialBytes = 32 * kMiB;     // outputs by split
constexpr int64_t kTransposedBytes = 80 * kMiB;  // W_UK of all heads on the value-absorbed path

// Up to as many rows a 16-bit tile is widened on the way into registers, and QK has all lanes on one row. Measured, 8192 keys in bfloat16:
// 1 row 1.8 times as fast as from a widened tile with 4 elements a row, 3 rows 1.7, 6 rows 1.2; from 7 on both take as long.
constexpr int32_t kFewRows = 6;
constexpr int64_t kQkKeys = 4;       // keys whose sums QK holds in registers, so that a loaded q serves as many multiply-adds
constexpr int64_t kUpTokens = 32;    // enough rows to pay for widening a 16-bit W_UV
constexpr int32_t kGemvRows = 8;     // as many as a register block takes at the most
constexpr int64_t kGemmPanels = 12;  // a row of activations is read once for all of them

// Half of L2 holds the tiles, the other half what streams through (cache rows, weights). A problem too large for that takes
// all of L2 before it spills.
int64_t tile_budget(const Machine& m) { return m.l2_bytes / 2; }

// Of a pass that leaves V in the latent.
int64_t absorbed_bytes(const Problem& p, int64_t rows, int64_t kv_tile, int64_t lanes) {
  return total_bytes(pass_tiles(p, p.rope_mode == kRopeFull ? kValueAbsorbed : kAbsorbed, rows, kv_tile, lanes));
}

struct AbsorbedBlocks {
  int64_t rows = 0;  // a multiple of the lanes, which the softmax fills with rows; 0: nothing fits
  int64_t kv_tile = 0;
  double overhead = std::numeric_limits<double>::infinity();
};

// Candidates -> compare: what a pass costs beside its multiply-adds, relative to them. An element of the KV tile is converted
// once (a load, a conversion and a store against `rows` multiply-adds); an output element is rescaled once a tile.
AbsorbedBlocks best_absorbed(const Problem& p, int64_t lanes, int64_t budget) {
  AbsorbedBlocks best;
  for (int64_t kv_tile = kMaxKvTile; kv_tile >= kMinKvTile; kv_tile -= 8) {
    for (int64_t rows = align_down(kMaxRows, lanes); rows >= lanes; rows -= lanes) {
      if (absorbed_bytes(p, rows, kv_tile, lanes) > budget) continue;
      double overhead = 3.0 / rows + 1.0 / kv_tile;
      if (overhead < best.overhead) best = {rows, kv_tile, overhead};
    }
  }
  return best;
}

// Rows up to which sums stay in registers over all of K (the flat loop), where K blocks would cost more in sums written and read
// again than the strip of weights costs to pass over once a row block. Measured with `python -m ms_flashmla tune`: at K 128 the flat
// loop leads up to 32 rows, with strips of up to 256 KiB (K 2048 in bfloat16, 512 in float32) up to 12, beyond by nothing.
int32_t flat_rows(const Problem& p, const Machine& m, int64_t gemm_k_block, int64_t k) {
  if (k <= gemm_k_block) return 32;
  return k * m.gemm_panel_cols * dtype_bytes(p.weight_dtype) <= m.l2_bytes / 8 ? 12 : 0;
}

void choose_gemms(const Problem& p, const Machine& m, TilingData* t) {
  const int32_t rank = p.kv_lora_rank, d_n = p.qk_nope_head_dim, d_v = p.v_head_dim;
  const int32_t shapes[kProjections][2] = {{static_cast<int32_t>(d_qk(p)), p.q_lora_rank > 0 ? p.q_lora_rank : p.hidden_size},
                                           {static_cast<int32_t>(latent_width(p)), p.hidden_size},
                                           {p.q_lora_rank, p.hidden_size},
                                           {rank, d_n},
                                           {d_v, rank},
                                           {p.hidden_size, static_cast<int32_t>(p.num_heads) * d_v}};
  for (int32_t i = 0; i < kProjections; ++i) {
    const int32_t n = shapes[i][0], k = shapes[i][1];
    t->gemm[i] = {n, k, kGemvRows, flat_rows(p, m, t->gemm_k_block, k)};
  }
}

}  // namespace

TilingData make_cpu_tiling(const Problem& p, const Machine& m) {
  TilingData t{};

  // QK holds kQkKeys keys by as many vectors of rows as the accumulators allow. PV takes the rows one by one, none is padded.
  const int32_t lanes = m.vector_lanes;
  t.qk_dim_pack = kQkDimPack;
  t.qk_row_pack = lanes / kQkDimPack;
  t.qk_row_group = static_cast<int32_t>(m.accumulators / kQkKeys) * t.qk_row_pack;
  t.pv_row_pack = 1;
  t.next_tile = 1;
  t.few_rows = lanes > kQkDimPack ? kFewRows : 0;

  AbsorbedBlocks blocks = best_absorbed(p, lanes, tile_budget(m));
  if (blocks.rows == 0) blocks = best_absorbed(p, lanes, m.l2_bytes);
  if (blocks.rows == 0) blocks = {lanes, kMinKvTile, 0};  // a latent beyond L2: the tiles live in scratch
  t.kv_tile = static_cast<int32_t>(blocks.kv_tile);
  t.absorbed_rows = static_cast<int32_t>(blocks.rows);
  t.split_min = kSplitMin;
  t.max_splits = kMaxSplits;
  t.expanded_splits = 1;  // heads and query tiles are work enough
  t.absorbed_tokens = static_cast<int32_t>(clamp(kGroupBytes / total_bytes(absorbed_scratch(p, 1)), 1, kAbsorbedTokens));
  t.value_absorbed = p.rope_mode == kRopeFull && transposed_w_uk(p).bytes() <= kTransposedBytes;
  t.up_tokens = kUpTokens;
  t.partial_bytes = kPartialBytes;

  // expanded path
  int64_t q_tile = kQTile;
  while (q_tile > kMinQTile && total_bytes(pass_tiles(p, kExpanded, q_tile, t.kv_tile, lanes)) > tile_budget(m)) q_tile -= 8;
  t.q_tile = static_cast<int32_t>(q_tile);
  const int64_t kv_row = 4 * std::max<int64_t>(1, aligned(d_qk(p)) + aligned(p.v_head_dim));
  t.kv_chunk = static_cast<int32_t>(align_down(clamp(kChunkBytes / kv_row, t.kv_tile, kMaxChunk), t.kv_tile));
  // W_o takes about 1024 columns at a time, so that the sums of its outputs are loaded and stored once per 1024 multiply-adds.
  t.head_group = static_cast<int32_t>(clamp(1024 / std::max(1, p.v_head_dim), 1, p.num_heads));
  // Every group of tokens decompresses the keys anew: as many as the scratch of a group allows.
  const int64_t tokens = clamp(kGroupBytes / total_bytes(expanded_scratch(p, t, 1)), 1, kMaxTokenGroup);
  t.token_group = static_cast<int32_t>(tokens < q_tile ? tokens : align_down(tokens, q_tile));

  // projections
  // A weight block [gemm_k_block, panel] takes two thirds of L1, the sums of a work item [gemm_rows, panel] pass through L1 once
  // per block; 24 rows are a whole number of register blocks on every ISA.
  const int64_t panel_row = 4 * m.gemm_panel_cols;
  t.gemm_k_block = static_cast<int32_t>(std::max<int64_t>(16, align_down(m.l1_bytes * 2 / 3 / panel_row, 16)));
  t.gemm_rows = static_cast<int32_t>(std::max<int64_t>(24, align_down(m.l1_bytes / panel_row, 24)));
  t.gemm_panels = kGemmPanels;
  choose_gemms(p, m, &t);

  // A weight block in L1 serves as many keys of a decompression as activation rows of a projection, where their latents fit.
  int64_t keys = std::max<int64_t>(t.kv_tile, align_down(t.gemm_rows, t.kv_tile));
  while (keys > t.kv_tile && total_bytes(decompression_tiles(p, keys)) > tile_budget(m)) keys -= t.kv_tile;
  t.decompress_rows = static_cast<int32_t>(keys);
  return t;
}

namespace {

std::vector<NamedValue> named_blocks(const TilingData& t) {
  return {
      {"kv_tile", t.kv_tile, "keys of a tile"},
      {"qk_row_pack", t.qk_row_pack, "rows of a vector of QK, which pads rows to a multiple of it"},
      {"qk_dim_pack", t.qk_dim_pack, "elements of the head dimension that each has there"},
      {"qk_row_group", t.qk_row_group, "rows that QK holds in registers together, at the most"},
      {"few_rows", t.few_rows, "rows up to which QK has all lanes on one row, and a 16-bit tile is read as it is stored"},
      {"absorbed_rows", t.absorbed_rows, "rows that share a pass over the tiles, absorbed paths"},
      {"absorbed_tokens", t.absorbed_tokens, "tokens that are attended together, absorbed paths"},
      {"up_tokens", t.up_tokens, "tokens of a head that pass through W_UV together, absorbed paths"},
      {"partial_bytes", t.partial_bytes, "bytes of outputs by split that end a group of tokens, absorbed paths"},
      {"q_tile", t.q_tile, "query tokens of a tile, expanded path"},
      {"kv_chunk", t.kv_chunk, "keys of one head that are held decompressed, expanded path"},
      {"decompress_rows", t.decompress_rows, "keys of them that a work item decompresses"},
      {"token_group", t.token_group, "query tokens whose softmax state is held at a time, expanded path"},
      {"head_group", t.head_group, "heads that enter W_o together"},
      {"gemm_k_block", t.gemm_k_block, "K elements of a weight block"},
      {"gemm_rows", t.gemm_rows, "activation rows of a work item"},
      {"gemm_panels", t.gemm_panels, "weight panels of a work item where rows are many"},
  };
}

// Why no larger block was taken.
void explain_blocks(const Problem& p, const Machine& m, TilingReport* report) {
  const TilingData& t = report->tiling;
  auto refuse = [&](const std::string& what, int64_t needs) {
    const char* share = needs > m.l2_bytes ? "capacity " : "half of it (the rest is for what streams through) is ";
    int64_t limit = needs > m.l2_bytes ? m.l2_bytes : tile_budget(m);
    report->reasons.push_back(what + " needs " + kib_text(needs) + " of L2, " + share + kib_text(limit));
  };
  const int32_t lanes = m.vector_lanes;
  const int64_t wider_tile = 2 * t.kv_tile, more_rows = t.absorbed_rows + lanes;
  if (int64_t needs = absorbed_bytes(p, t.absorbed_rows, wider_tile, lanes); needs > tile_budget(m)) {
    refuse("kv_tile " + std::to_string(wider_tile), needs);
  } else {
    report->reasons.push_back("kv_tile " + std::to_string(wider_tile) + " would fit, but rescaling costs under 2 % of the multiply-adds at " +
                              std::to_string(t.kv_tile) + " already");
  }
  if (int64_t needs = absorbed_bytes(p, more_rows, t.kv_tile, lanes); needs > tile_budget(m)) {
    refuse("absorbed_rows " + std::to_string(more_rows), needs);
  } else {
    report->reasons.push_back("absorbed_rows " + std::to_string(more_rows) +
                              " would fit, but converting a tile costs under 3 % of the multiply-adds at " +
                              std::to_string(t.absorbed_rows) + " already");
  }

  if (p.rope_mode == kRopeFull && !t.value_absorbed) {
    report->reasons.push_back("value-absorbed would hold " + kib_text(transposed_w_uk(p).bytes()) + " of W_UK, transposed for all heads; at most " +
                              kib_text(kTransposedBytes));
  }
}

// Every pass reads the keys, every group of tokens the transposed W_UK; what L2 does not keep is read from memory anew.
void count_bytes_read(const Problem& p, const Machine& m, TilingReport* report) {
  const TilingData& t = report->tiling;
  const int64_t passes = key_passes(p, t, report->seq.path, p.s_q);
  const int64_t key_bytes = p.s_kv * p.num_kv_heads * latent_width(p) * dtype_bytes(p.cache_dtype);
  report->bytes_read = report->least_bytes;
  if (passes > 1 && key_bytes > tile_budget(m) * m.cores) {
    report->bytes_read += static_cast<double>(passes - 1) * p.batch * key_bytes;
    report->reasons.push_back(std::to_string(passes) + " passes over the keys of a sequence, " + kib_text(key_bytes) +
                              " each: more than L2 keeps, so that memory may be read again (a last-level cache may save it)");
  }
  if (const int64_t w_uk = transposed_w_uk(p).bytes(); report->seq.path == kValueAbsorbed && w_uk > tile_budget(m) * m.cores) {
    const int64_t groups = ceil_div(p.batch * p.s_q, t.absorbed_tokens);
    report->bytes_read += 2.0 * groups * w_uk;
    report->reasons.push_back("W_UK of all heads takes " + kib_text(w_uk) + ", transposed as float32: more than L2 keeps, so that each " +
                              std::to_string(t.absorbed_tokens) + " tokens write it and read it again");
  }
}

}  // namespace

void explain_cpu(const Problem& p, const Machine& m, TilingReport* report) {
  report->blocks = named_blocks(report->tiling);
  explain_blocks(p, m, report);
  count_bytes_read(p, m, report);
}

}  // namespace flashmla
