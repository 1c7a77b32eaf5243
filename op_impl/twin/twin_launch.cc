#include "op_impl/twin/twin_launch.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "op_impl/ascendc/op_host/make_kernel_data.h"
#include "op_impl/twin/api/types.h"
#include "op_impl/twin/reserved.h"
#include "op_proto/op_proto.h"
#include "tiling/ascend_configs.h"

extern "C" {
#define FLASHMLA_PARAMETER(name, required) GM_ADDR name,
void flash_mla_half(FLASH_MLA_INPUTS(FLASHMLA_PARAMETER) GM_ADDR out, GM_ADDR workspace, GM_ADDR tiling);
void flash_mla_bf16(FLASH_MLA_INPUTS(FLASHMLA_PARAMETER) GM_ADDR out, GM_ADDR workspace, GM_ADDR tiling);
#undef FLASHMLA_PARAMETER
}

namespace flashmla {
namespace {

// One 16-bit dtype for activations, weights and cache.
void check_dtypes(const LayerArgs& a) {
  const int32_t dtype = a.hidden.dtype;
  if ((dtype != kFloat16 && dtype != kBFloat16) || a.w_q.dtype != dtype || a.cache.data.dtype != dtype)
    throw std::runtime_error("FlashMLA: the Ascend kernel takes float16 or bfloat16, the same for hidden_states, weights and cache");
}

struct Tensor {
  const char* name;
  twin::Role role;
  const void* data;
  int64_t bytes;
};

// Every tensor of the call with its bytes, in the order of op_list.h; absent ones have no data.
std::vector<Tensor> tensors_of(const LayerArgs& a, const CacheLayout& cache) {
  using twin::Role;
  const FlashMLAAttrs& t = a.attrs;
  const int64_t width = t.kv_lora_rank + t.qk_rope_head_dim, rope_dim = t.rope_mode == kRopeFull ? t.qk_nope_head_dim : t.qk_rope_head_dim;
  const int64_t k_q = t.q_lora_rank > 0 ? t.q_lora_rank : a.hidden_size;
  auto halves = [](const char* name, const Storage& s, int64_t elements, Role role = Role::kInput) { return Tensor{name, role, s.data, elements * 2}; };
  return {halves("hidden_states", a.hidden, a.num_tokens * a.hidden_size),
          halves("kv_cache", a.cache.data, (cache.paged ? a.cache.num_blocks : a.batch.size) * cache.block_stride, Role::kInOut),
          {"block_table", Role::kInput, a.batch.block_table, a.batch.size * a.batch.max_blocks * 4},
          {"q_seq_lens", Role::kInput, a.batch.q_seq_lens, a.batch.size * 4},
          {"context_lens", Role::kInput, a.batch.context_lens, a.batch.size * 4},
          {"rope_table", Role::kInput, a.rope_table, a.rope_positions * rope_dim * 4},
          halves("w_q", a.w_q, packed_size(t.num_heads, t.qk_nope_head_dim + t.qk_rope_head_dim, k_q)),
          halves("w_kv_a", a.w_kv_a, packed_size(1, width, a.hidden_size)),
          halves("kv_norm", a.kv_norm, t.kv_lora_rank),
          halves("w_uk", a.w_uk, packed_size(t.num_heads, t.kv_lora_rank, t.qk_nope_head_dim)),
          halves("w_uv", a.w_uv, packed_size(t.num_heads, t.v_head_dim, t.kv_lora_rank)),
          halves("w_o", a.w_o, packed_size(1, a.hidden_size, t.num_heads * t.v_head_dim)),
          halves("w_q_a", a.w_q_a, packed_size(1, t.q_lora_rank, a.hidden_size)),
          halves("q_norm", a.q_norm, t.q_lora_rank),
          halves("b_q_a", a.b_q_a, t.q_lora_rank),
          halves("b_kv_a", a.b_kv_a, width),
          halves("b_o", a.b_o, a.hidden_size),
          halves("residual", a.residual, a.num_tokens * a.hidden_size),
          halves("out", a.out, a.num_tokens * a.hidden_size, Role::kOutput)};
}

// A sample's inputs, of which its cores use more than their share: the launch uses these bytes so many times. Cores are at the same place of a product
// at the same time, so that each line comes from memory once; rows of a cache that the L2 does not keep they read at times of their own.
std::map<std::string, double> overlaps_of(const twin::RunReport& sample, const std::vector<Tensor>& tensors, const Machine& machine) {
  std::map<std::string, double> overlaps;
  for (const twin::TensorTraffic& t : sample.traffic) {
    const auto same = std::find_if(tensors.begin(), tensors.end(), [&](const Tensor& tensor) { return tensor.name == t.name; });
    if (same == tensors.end() || same->role == twin::Role::kOutput) continue;
    if (same->role == twin::Role::kInOut && same->bytes > machine.l2_bytes / 2) continue;
    overlaps[t.name] = std::max(1.0, double(t.fresh_bytes) * sample.launched / sample.blocks / double(t.bytes));
  }
  return overlaps;
}

}  // namespace

twin::RunReport twin_flash_mla(const LayerArgs& args, const Machine& machine, const twin::Options& options, const CacheLayout* layout, const WantedBlocks& wanted) {
  check_dtypes(args);
  const CacheLayout cache = layout != nullptr ? *layout : paged_cache(args.cache.block_size, args.cache.d);
  const KernelCall shapes = {args.attrs, args.hidden_size, args.num_tokens, args.batch.size, args.batch.max_blocks, cache,
                             args.hidden.dtype, args.w_q.dtype, args.cache.data.dtype, args.b_q_a.present(), args.b_kv_a.present(), args.b_o.present(),
                             args.residual.present()};
  const KernelData data = make_kernel_data(shapes, machine, wanted);
  Reserved reserved;
  uint8_t* workspace = reserved.take(data.workspace.total_bytes);
  if (options.compute) std::memset(workspace, 0xFF, data.workspace.total_bytes);  // what nobody wrote is NaN
  const std::vector<Tensor> tensors = tensors_of(args, cache);
  auto address = [&](int i) { return static_cast<uint8_t*>(const_cast<void*>(tensors[i].data)); };
  auto* kernel = args.hidden.dtype == kFloat16 ? flash_mla_half : flash_mla_bf16;
  uint8_t* tiling = reinterpret_cast<uint8_t*>(const_cast<KernelData*>(&data));
  AscendC::twin_tiling_key() = tiling_key(data.path, data.blocks.kv_tile);
  const auto run = [&](const twin::Options& how, const std::map<std::string, double>& overlaps) {
    twin::Engine engine(machine, how, data.cores);
    const auto overlap = [&](const char* name) { return overlaps.count(name) > 0 ? overlaps.at(name) : 1.0; };
    for (const Tensor& t : tensors) engine.add_tensor(t.name, t.role, t.data, t.bytes, overlap(t.name));
    engine.add_tensor("workspace", twin::Role::kWorkspace, workspace, data.workspace.total_bytes);
#define FLASHMLA_ARGUMENT(name, required) address(FlashMLAIn::name),
    return engine.run([&] { kernel(FLASH_MLA_INPUTS(FLASHMLA_ARGUMENT) address(FlashMLAIn::count), workspace, tiling); });
#undef FLASHMLA_ARGUMENT
  };
  if (options.sample <= 0 || options.sample >= data.cores) return run(options, {});
  twin::Options first = options;
  first.trace = first.check = false;
  return run(options, overlaps_of(run(first, {}), tensors, machine));
}

}  // namespace flashmla
