// A timed run without data, for `python -m ms_flashmla profile`: the kernel's program and the clock run, memory is only reserved.
#include "op_impl/twin/twin_profile.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <map>
#include <stdexcept>
#include <vector>

#include "op_impl/twin/reserved.h"
#include "op_impl/twin/twin_launch.h"
#include "op_proto/op_proto.h"
#include "tiling/int_math.h"

#define FLASHMLA_EXPORT __attribute__((visibility("default")))

namespace flashmla {
namespace {

struct Call {
  Reserved memory;
  std::vector<int32_t> table, q_lens, contexts;
  LayerArgs args = {};
};

// A call of `batch` equal sequences on a cache whose pages lie in no order.
void fill(const Problem& p, Call* call) {
  LayerArgs& a = call->args;
  const int64_t pages = int_math::ceil_div(p.s_kv, int64_t{p.block_size}), blocks = p.batch * pages, width = p.kv_lora_rank + p.qk_rope_head_dim;
  const int64_t heads = p.num_heads, d_n = p.qk_nope_head_dim, d_r = p.qk_rope_head_dim, hidden = p.hidden_size, k_q = p.q_lora_rank > 0 ? p.q_lora_rank : hidden;
  FlashMLAAttrs& t = a.attrs;
  t.num_heads = heads, t.kv_lora_rank = p.kv_lora_rank, t.qk_nope_head_dim = d_n, t.qk_rope_head_dim = d_r, t.v_head_dim = p.v_head_dim;
  t.q_lora_rank = p.q_lora_rank, t.rope_mode = p.rope_mode, t.q_norm_eps = t.kv_norm_eps = 1e-6f, t.q_lora_scale = t.kv_lora_scale = 1.0f, t.softmax_scale = 0.1f;
  a.problem = p;
  a.num_tokens = p.batch * p.s_q;
  a.hidden_size = hidden;
  auto half = [&](int64_t elements) { return Storage{call->memory.take(elements * 2), p.act_dtype}; };
  a.hidden = half(a.num_tokens * hidden);
  a.cache = {half(blocks * p.block_size * width), blocks, p.block_size, 1, width};
  call->q_lens.assign(p.batch, static_cast<int32_t>(p.s_q));
  call->contexts.assign(p.batch, static_cast<int32_t>(p.s_kv - p.s_q));
  // A stride that shares no factor with the number of pages visits each once.
  int64_t stride = blocks / 2 + 1;
  auto divisor = [](int64_t x, int64_t y) {
    while (y != 0) { const int64_t r = x % y; x = y; y = r; }
    return x;
  };
  while (blocks > 0 && divisor(stride, blocks) != 1) ++stride;
  for (int64_t i = 0; i < blocks; ++i) call->table.push_back(static_cast<int32_t>(i * stride % blocks));
  a.batch = {p.batch, pages, call->table.data(), call->q_lens.data(), call->contexts.data()};
  const int64_t rope_dim = p.rope_mode == kRopeFull ? d_n : d_r;
  a.rope_positions = p.s_kv;
  a.rope_table = reinterpret_cast<const float*>(call->memory.take(p.s_kv * rope_dim * 4));
  a.w_q = half(packed_size(heads, d_n + d_r, k_q));
  a.w_kv_a = half(packed_size(1, width, hidden));
  a.kv_norm = half(p.kv_lora_rank);
  a.w_uk = half(packed_size(heads, p.kv_lora_rank, d_n));
  a.w_uv = half(packed_size(heads, p.v_head_dim, p.kv_lora_rank));
  a.w_o = half(packed_size(1, hidden, heads * p.v_head_dim));
  if (p.q_lora_rank > 0) {
    a.w_q_a = half(packed_size(1, p.q_lora_rank, hidden));
    a.q_norm = half(p.q_lora_rank);
  }
  a.out = half(a.num_tokens * hidden);
}

// "startup_cube=0.5,barrier_cycles=2": the machine with constants multiplied.
void scale_constants(const std::string& list, Machine* m) {
  const std::map<std::string, std::function<void(double)>> fields = {
      {"startup_cube", [&](double f) { m->startup_cube = int32_t(m->startup_cube * f); }},
      {"startup_vector", [&](double f) { m->startup_vector = int32_t(m->startup_vector * f); }},
      {"startup_dma_gm", [&](double f) { m->startup_dma_gm = int32_t(m->startup_dma_gm * f); }},
      {"startup_dma_onchip", [&](double f) { m->startup_dma_onchip = int32_t(m->startup_dma_onchip * f); }},
      {"startup_fixpipe", [&](double f) { m->startup_fixpipe = int32_t(m->startup_fixpipe * f); }},
      {"vector_slow_divisor", [&](double f) { m->vector_slow_divisor = int32_t(m->vector_slow_divisor * f); }},
      {"event_cycles", [&](double f) { m->event_cycles = int32_t(m->event_cycles * f); }},
      {"cross_core_flag_cycles", [&](double f) { m->cross_core_flag_cycles = int32_t(m->cross_core_flag_cycles * f); }},
      {"barrier_cycles", [&](double f) { m->barrier_cycles = int32_t(m->barrier_cycles * f); }},
      {"hbm_efficiency", [&](double f) { m->hbm_efficiency *= f; }},
      {"l2_bytes_per_cycle", [&](double f) { m->l2_bytes_per_cycle = int32_t(m->l2_bytes_per_cycle * f); }}};
  for (size_t at = 0; at < list.size();) {
    const size_t end = std::min(list.find(',', at), list.size()), equals = list.find('=', at);
    if (equals == std::string::npos || equals > end) throw std::invalid_argument("scale: expected constant=factor, got '" + list.substr(at, end - at) + "'");
    const auto field = fields.find(list.substr(at, equals - at));
    if (field == fields.end()) throw std::invalid_argument("scale: '" + list.substr(at, equals - at) + "' is no assumed constant of a machine");
    field->second(std::stod(list.substr(equals + 1, end - equals - 1)));
    at = end + 1;
  }
}

}  // namespace
}  // namespace flashmla

extern "C" FLASHMLA_EXPORT int64_t fm_twin_profile(const char* machine_name, const flashmla::Problem* problem, const char* scale, int32_t sample, int32_t check, const int32_t* wanted, const char* trace_path, char* out,
                                                   int64_t out_bytes) {
  std::string text;
  bool failed = false;
  try {
    const flashmla::Machine* found = flashmla::find_machine(machine_name);
    if (found == nullptr || found->kind != flashmla::kAscend) throw std::invalid_argument(std::string("machine: '") + machine_name + "' is no Ascend machine of tiling/machines");
    flashmla::check_problem(*problem);
    flashmla::Machine machine = *found;
    flashmla::scale_constants(scale, &machine);
    flashmla::Call call;
    flashmla::fill(*problem, &call);
    twin::Options options;
    options.compute = false;
    options.check = check != 0;
    options.trace = trace_path != nullptr && *trace_path != '\0';
    options.sample = sample;
    const twin::RunReport report = flashmla::twin_flash_mla(call.args, machine, options, nullptr, {wanted[0], wanted[1], wanted[2]});
    if (options.trace) {
      std::ofstream file(trace_path);
      file << twin::trace_json(report, machine);
      if (!file) throw std::runtime_error(std::string("cannot write ") + trace_path);
    }
    text = twin::to_json(report, machine);
  } catch (const std::exception& error) {
    text = error.what();
    failed = true;
  }
  const int64_t needs = static_cast<int64_t>(text.size()) + 1;
  if (needs <= out_bytes) std::memcpy(out, text.c_str(), needs);
  return failed ? -needs : needs;
}
