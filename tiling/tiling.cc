#include "tiling/tiling.h"

#include <stdexcept>

#include "tiling/int_math.h"
#include "tiling/tiling_backends.h"

namespace flashmla {

using int_math::align_up;
using int_math::ceil_div;
using int_math::clamp;

namespace {

void require(bool ok, const char* field, int64_t value, const char* allowed) {
  if (!ok) throw std::invalid_argument(std::string(field) + " is " + std::to_string(value) + "; it must be " + allowed);
}

bool is_storage(int32_t dtype) { return dtype == kFloat32 || dtype == kFloat16 || dtype == kBFloat16; }

// Keys that the s_q tokens see together, causal.
double causal_pairs(int64_t s_q, int64_t s_kv) { return static_cast<double>(s_q) * (s_kv - 0.5 * (s_q - 1)); }

}  // namespace

void check_problem(const Problem& p) {
  // The upper limits are far beyond any model; they keep every product of sizes within 63 bits.
  constexpr int64_t kMostDim = int64_t{1} << 20, kMostHeads = int64_t{1} << 16, kMostLength = int64_t{1} << 24;
  auto between = [](const char* field, int64_t value, int64_t low, int64_t high, const char* note = "") {
    const std::string allowed = std::to_string(low) + ".." + std::to_string(high) + note;
    require(value >= low && value <= high, field, value, allowed.c_str());
  };
  between("hidden_size", p.hidden_size, 0, kMostDim, " (0: no projections)");
  between("num_heads", p.num_heads, 1, kMostHeads);
  require(p.num_kv_heads >= 1 && p.num_heads % p.num_kv_heads == 0, "num_kv_heads", p.num_kv_heads, ">= 1 and divide num_heads");
  between("q_lora_rank", p.q_lora_rank, 0, kMostDim, " (0: none)");
  between("kv_lora_rank", p.kv_lora_rank, 1, kMostDim);
  const bool layer = p.hidden_size > 0;  // the bare operator has no head dimensions of its own
  between("qk_nope_head_dim", p.qk_nope_head_dim, layer ? 1 : 0, kMostDim);
  between("qk_rope_head_dim", p.qk_rope_head_dim, 0, kMostDim);
  between("v_head_dim", p.v_head_dim, layer ? 1 : 0, kMostDim);
  require(p.rope_mode == kRopeDecoupled || p.rope_mode == kRopeFull, "rope_mode", p.rope_mode, "0 (decoupled) or 1 (full)");
  require(p.rope_mode != kRopeFull || p.qk_rope_head_dim == 0, "qk_rope_head_dim", p.qk_rope_head_dim, "0 when rope_mode is full");
  require(p.rope_mode != kRopeFull || p.hidden_size > 0, "hidden_size", p.hidden_size, ">= 1 when rope_mode is full");
  require(is_storage(p.act_dtype), "act_dtype", p.act_dtype, "float32, float16 or bfloat16");
  require(is_storage(p.weight_dtype), "weight_dtype", p.weight_dtype, "float32, float16 or bfloat16");
  require(is_storage(p.cache_dtype), "cache_dtype", p.cache_dtype, "float32, float16 or bfloat16");
  between("block_size", p.block_size, 1, INT32_MAX);
  between("batch", p.batch, 0, kMostLength);
  between("s_q", p.s_q, 0, kMostLength);
  require(p.s_kv >= p.s_q && p.s_kv <= kMostLength, "s_kv", p.s_kv, ("s_q.." + std::to_string(kMostLength) + " (the new tokens are keys too)").c_str());
}

AttentionFlops attention_flops(const Problem& p, int32_t path, int64_t s_q, int64_t s_kv) {
  const double r = p.kv_lora_rank, d_n = p.qk_nope_head_dim, d_r = p.qk_rope_head_dim, d_v = p.v_head_dim, heads = p.num_heads;
  const double pairs = causal_pairs(s_q, s_kv);
  AttentionFlops flops;
  if (path == kAbsorbed) {
    flops.scores = 2 * (r + d_r) * heads * pairs;
    flops.values = 2 * r * heads * pairs;
    flops.by_token = p.hidden_size == 0 ? 0 : 2 * heads * (d_n + d_v) * r * s_q;
  } else if (path == kValueAbsorbed) {
    flops.scores = 2 * d_n * heads * pairs;
    flops.values = 2 * r * heads * pairs;
    flops.by_key = 2 * heads * d_n * r * s_kv;
    flops.by_token = 2 * heads * d_v * r * s_q;
  } else {
    flops.scores = 2 * (d_n + d_r) * heads * pairs;
    flops.values = 2 * d_v * heads * pairs;
    flops.by_key = 2 * heads * (d_n + d_v) * r * s_kv;
  }
  return flops;
}

const char* path_name(int32_t path) {
  return path == kAbsorbed ? "absorbed" : path == kExpanded ? "expanded" : "value-absorbed";
}

TilingData make_tiling(const Problem& problem, const Machine& machine) {
  check_problem(problem);
  return machine.kind == kCpu ? make_cpu_tiling(problem, machine) : make_ascend_tiling(problem, machine);
}

int64_t kv_splits(const TilingData& tiling, int64_t s_kv, int64_t work_items) {
  const int64_t splits = clamp(s_kv / tiling.split_min, 1, std::max<int64_t>(1, work_items));
  // On a CPU the split may not depend on the cores, so it shares evenly among 2, 4, 8 .. of them: 3 splits would leave one
  // of two cores idle for a third of the time.
  return tiling.num_cores > 0 ? splits : int_math::floor_pow2(splits);
}

int32_t latent_path(const Problem& p, const TilingData& tiling) {
  if (p.rope_mode == kRopeDecoupled) return kAbsorbed;
  return tiling.value_absorbed ? kValueAbsorbed : kExpanded;
}

int64_t key_passes(const Problem& p, const TilingData& t, int32_t path, int64_t s_q) {
  if (path == kAbsorbed) return tile_count(s_q * (p.num_heads / p.num_kv_heads), t.absorbed_rows);
  // A decompressed K serves the tokens of its own head only.
  const int64_t tokens = path == kExpanded ? t.token_group : std::min(t.absorbed_rows, t.absorbed_tokens);
  return p.num_heads * (tokens > 0 ? tile_count(s_q, tokens) : 1);  // Ascend groups no tokens
}

double path_cost(const Problem& p, const TilingData& t, int32_t path, int64_t s_q, int64_t s_kv) {
  const AttentionFlops flops = attention_flops(p, path, s_q, s_kv);
  const bool absorbed = path == kAbsorbed;
  const int64_t rows = absorbed ? s_q * (p.num_heads / p.num_kv_heads) : s_q;
  const int64_t d_qk = (absorbed ? p.kv_lora_rank : p.qk_nope_head_dim) + p.qk_rope_head_dim;
  const auto padding = [](int64_t n, int64_t pack) { return n > 0 ? static_cast<double>(align_up(n, pack)) / n : 1; };
  return flops.scores * padding(rows, t.qk_row_pack) * padding(d_qk, t.qk_dim_pack) + flops.values * padding(rows, t.pv_row_pack) +
         flops.by_key * key_passes(p, t, path, s_q) / p.num_heads + flops.by_token;
}

namespace {

// Absorbed or expanded as measured, where the call may follow a measurement; -1 where it may not.
int32_t measured_path(const TilingData& tiling, int32_t latent, int64_t s_q, int64_t s_kv) {
  if (tiling.split_threads == 0) return -1;
  int32_t path = -1;
  for (int32_t i = 0; i < tiling.path_points && tiling.path[i].context <= s_kv - s_q; ++i)
    path = s_q < tiling.path[i].expanded_from ? latent : kExpanded;
  return path;
}

}  // namespace

SeqTiling make_seq_tiling(const Problem& p, const TilingData& tiling, int64_t s_q, int64_t s_kv) {
  SeqTiling seq{};
  seq.path = latent_path(p, tiling);
  // The bare operator is handed what to attend to. Few tokens on Ascend keep to the latent rows, which are exact as they are.
  const bool few = tiling.two_part_tokens > 0 && p.batch * s_q <= tiling.two_part_tokens;
  const bool chooses = p.hidden_size > 0 && seq.path != kExpanded && !few;
  if (const int32_t path = measured_path(tiling, seq.path, s_q, s_kv); chooses && path >= 0) seq.path = path;
  else if (chooses && path_cost(p, tiling, kExpanded, s_q, s_kv) < path_cost(p, tiling, seq.path, s_q, s_kv)) seq.path = kExpanded;

  // Row groups already are work for the cores: splits only fill up to the work items of a sequence.
  int64_t row_groups = p.num_heads * tile_count(s_q, seq.path == kExpanded ? tiling.q_tile : tiling.absorbed_rows);
  if (seq.path == kAbsorbed) row_groups = p.num_kv_heads * tile_count(s_q * (p.num_heads / p.num_kv_heads), tiling.absorbed_rows);
  int64_t items = seq.path == kExpanded ? tiling.expanded_splits : tiling.max_splits;
  // Two splits a thread: a thread that comes late leaves its second one to another.
  if (tiling.split_threads > 0) items = std::min<int64_t>(items, 2 * tiling.split_threads);
  const int64_t splits = kv_splits(tiling, s_kv, items / std::max<int64_t>(1, row_groups));
  seq.split_len = align_up(std::max<int64_t>(1, ceil_div(s_kv, splits)), tiling.kv_tile);
  seq.num_splits = static_cast<int32_t>(std::max<int64_t>(1, tile_count(s_kv, seq.split_len)));
  const int64_t rows = seq.path == kAbsorbed ? s_q * (p.num_heads / p.num_kv_heads) : s_q;
  seq.qk_dim_pack = rows <= tiling.few_rows ? tiling.qk_row_pack * tiling.qk_dim_pack : tiling.qk_dim_pack;
  return seq;
}

std::string kib_text(int64_t bytes) {
  const int64_t tenths = (bytes * 10 + int_math::kKiB / 2) / int_math::kKiB;
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " KiB";
}

std::string overflow(const std::vector<Buffer>& buffers) {
  for (const Buffer& first : buffers) {
    int64_t used = 0;
    for (const Buffer& other : buffers) {
      if (other.stage == first.stage && other.memory == first.memory) used += other.bytes;
    }
    if (used > first.capacity) {
      return "needs " + kib_text(used) + " of " + first.memory + " (" + first.stage + "), capacity " + kib_text(first.capacity);
    }
  }
  return "";
}

}  // namespace flashmla
