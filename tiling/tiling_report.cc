// What a Problem costs at least on a Machine, and the report that explains the blocks chosen for it.
#include <algorithm>
#include <cstdio>

#include "tiling/tiling.h"
#include "tiling/tiling_backends.h"

namespace flashmla {
namespace {

// Weights of the projections in elements, without W_UK and W_UV.
struct Projections {
  double prolog = 0;
  double epilog = 0;
};

Projections projection_weights(const Problem& p) {
  const double hidden = p.hidden_size, heads = p.num_heads, r = p.kv_lora_rank, d_qk = p.qk_nope_head_dim + p.qk_rope_head_dim;
  Projections w;
  w.prolog = hidden * (r + p.qk_rope_head_dim);
  w.prolog += p.q_lora_rank > 0 ? p.q_lora_rank * (hidden + heads * d_qk) : hidden * heads * d_qk;
  w.epilog = heads * p.v_head_dim * hidden;
  return w;
}

StageBound stage(const char* name, double bytes, double flops, const Machine& m) {
  const double memory_us = bytes / (m.dram_gb_per_s * 1e3);
  const double compute_us = flops / (m.peak_flops_per_s() * 1e-6);
  return {name, bytes, flops, std::max(memory_us, compute_us), memory_us > compute_us ? "memory" : "compute"};
}

// Least bytes (weights, cache rows and activations once each) and causal flops of the stages that wait for each other.
std::vector<StageBound> stage_bounds(const Problem& p, int32_t path, const Machine& m) {
  const Projections w = projection_weights(p);
  const double act = dtype_bytes(p.act_dtype), weight = dtype_bytes(p.weight_dtype), cache = dtype_bytes(p.cache_dtype);
  const double tokens = static_cast<double>(p.batch) * p.s_q;
  const double row = static_cast<double>(p.num_kv_heads) * (p.kv_lora_rank + p.qk_rope_head_dim) * cache;
  const AttentionFlops one = attention_flops(p, path, p.s_q, p.s_kv);
  double core_bytes = p.batch * static_cast<double>(p.s_kv) * row;
  double core_flops = p.batch * (one.scores + one.values + one.by_key);
  if (p.hidden_size == 0) {  // the bare operator also reads q and writes out
    core_bytes += tokens * p.num_heads * (2.0 * p.kv_lora_rank + p.qk_rope_head_dim) * act;
    return {stage("attention", core_bytes, core_flops, m)};
  }

  // An absorbed W_UK multiplies q, an absorbed W_UV the outputs; what is not absorbed decompresses keys and values. That
  // decides which stage waits for it.
  const double heads = p.num_heads, r = p.kv_lora_rank;
  const double w_uk = heads * r * p.qk_nope_head_dim, w_uv = heads * r * p.v_head_dim;
  const double prolog_weights = w.prolog + (path == kAbsorbed ? w_uk : 0);
  const double epilog_weights = w.epilog + (path != kExpanded ? w_uv : 0);
  core_bytes += ((path != kAbsorbed ? w_uk : 0) + (path == kExpanded ? w_uv : 0)) * weight;
  const double prolog_flops = 2 * prolog_weights * tokens, epilog_flops = 2 * epilog_weights * tokens;
  return {stage("prolog", prolog_weights * weight + tokens * (p.hidden_size * act + row), prolog_flops, m),
          stage("attention", core_bytes, core_flops, m),
          stage("epilog", epilog_weights * weight + tokens * p.hidden_size * act, epilog_flops, m)};
}

std::string flops_text(double flops) {
  char text[32];
  const bool giga = flops >= 1e9;
  std::snprintf(text, sizeof text, "%.4g %s", flops * (giga ? 1e-9 : 1e-6), giga ? "GFLOP" : "MFLOP");
  return text;
}

// Why the path of a sequence was taken; "" for the bare operator, which has no choice.
std::string path_reason(const Problem& p, const TilingData& t, int32_t taken) {
  const int32_t absorbed = latent_path(p, t);
  if (p.hidden_size == 0) return "";
  if (absorbed == kExpanded) return "expanded at any length: RoPE over the whole head stands between W_UK and the latent";
  const int32_t other = taken == kExpanded ? absorbed : kExpanded;
  const auto cost = [&](int32_t path) { return flops_text(path_cost(p, t, path, p.s_q, p.s_kv)); };
  return std::string("the ") + path_name(taken) + " path takes " + cost(taken) + " a sequence, " + path_name(other) + " would take " + cost(other) +
         " (padding and repeated passes counted)";
}

}  // namespace

TilingReport make_report(const Problem& problem, const Machine& machine) {
  TilingReport report;
  report.tiling = make_tiling(problem, machine);
  report.seq = make_seq_tiling(problem, report.tiling, problem.s_q, problem.s_kv);
  report.stages = stage_bounds(problem, report.seq.path, machine);
  for (const StageBound& s : report.stages) {
    report.least_bytes += s.bytes;
    report.flops += s.flops;
    report.bound_us += s.us;
  }
  const bool cpu = machine.kind == kCpu;
  report.buffers = cpu ? cpu_buffers(problem, machine, report.tiling) : ascend_buffers(problem, machine, report.tiling);
  cpu ? explain_cpu(problem, machine, &report) : explain_ascend(problem, machine, &report);
  if (const std::string reason = path_reason(problem, report.tiling, report.seq.path); !reason.empty()) report.reasons.push_back(reason);
  return report;
}

}  // namespace flashmla
