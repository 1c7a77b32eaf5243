// What a Problem costs at least on a Machine, and the report that explains the blocks chosen for it.
#include <algorithm>

#include "tiling/tiling.h"
#include "tiling/tiling_backends.h"

namespace flashmla {
namespace {

struct Projections {
  double prolog_weights = 0;  // elements, both paths
  double up_weights = 0;      // W_UK and W_UV together
  double epilog_weights = 0;
};

Projections projection_weights(const Problem& p) {
  const double hidden = p.hidden_size, heads = p.num_heads, r = p.kv_lora_rank, d_qk = p.qk_nope_head_dim + p.qk_rope_head_dim;
  Projections w;
  if (p.hidden_size == 0) return w;
  w.prolog_weights = hidden * (r + p.qk_rope_head_dim);
  w.prolog_weights += p.q_lora_rank > 0 ? p.q_lora_rank * (hidden + heads * d_qk) : hidden * heads * d_qk;
  w.up_weights = heads * r * (p.qk_nope_head_dim + p.v_head_dim);
  w.epilog_weights = heads * p.v_head_dim * hidden;
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
  double core_flops = p.batch * one.scores_and_values;
  if (p.hidden_size == 0) {  // the bare operator also reads q and writes out
    core_bytes += tokens * p.num_heads * (2.0 * p.kv_lora_rank + p.qk_rope_head_dim) * act;
    return {stage("attention", core_bytes, core_flops, m)};
  }

  // W_UK and W_UV turn q and outputs (absorbed) or keys and values (expanded): the stage that waits for them differs.
  const double heads = p.num_heads, r = p.kv_lora_rank;
  double prolog_weights = w.prolog_weights, epilog_weights = w.epilog_weights;
  double prolog_flops = 2 * w.prolog_weights * tokens, epilog_flops = 2 * w.epilog_weights * tokens;
  if (path == kAbsorbed) {
    prolog_weights += heads * r * p.qk_nope_head_dim;
    epilog_weights += heads * r * p.v_head_dim;
    prolog_flops += 2 * heads * r * p.qk_nope_head_dim * tokens;
    epilog_flops += 2 * heads * r * p.v_head_dim * tokens;
  } else {
    core_bytes += w.up_weights * weight;
    core_flops += p.batch * one.up_projection;
  }
  return {stage("prolog", prolog_weights * weight + tokens * (p.hidden_size * act + row), prolog_flops, m),
          stage("attention", core_bytes, core_flops, m),
          stage("epilog", epilog_weights * weight + tokens * p.hidden_size * act, epilog_flops, m)};
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
  return report;
}

}  // namespace flashmla
