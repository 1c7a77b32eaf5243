// MindSpore's AOT entry: raw pointers and strings in, checked arguments out. A thrown std::runtime_error carries its text
// into MindSpore's RuntimeError, in both modes; a return code would carry a number only.
#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "op_impl/cpu/aot_extra.h"
#include "op_impl/cpu/check.h"
#include "op_impl/cpu/dispatch.h"
#include "op_impl/cpu/huge_pages.h"
#include "op_proto/op_proto.h"
#include "tiling/tune.h"

#define FLASHMLA_EXPORT extern "C" __attribute__((visibility("default")))

namespace flashmla {
namespace {

// MindSpore's id of a dtype, handed through as it comes; the one id that has to be known is that of float32, for lse.
using TypeId = int;
constexpr TypeId kTypeFloat32 = 43;

int32_t parse_dtype(const char *name) {
  if (std::strcmp(name, "float32") == 0) return kFloat32;
  if (std::strcmp(name, "float16") == 0) return kFloat16;
  if (std::strcmp(name, "bfloat16") == 0) return kBFloat16;
  if (std::strcmp(name, "int32") == 0) return kInt32;
  return -1;
}

struct Params {
  int count;
  void **data;
  int *ndims;
  int64_t **shapes;
  const char **dtypes;

  Shape shape(int i) const { return Shape(shapes[i], shapes[i] + ndims[i]); }
  // An absent optional input keeps its place, as a null pointer of dtype "none"; an empty tensor may be null too.
  bool absent(int i) const { return dtypes[i] == nullptr || std::strcmp(dtypes[i], "none") == 0; }
  std::vector<TensorDesc> describe(int n) const {
    std::vector<TensorDesc> descs(n);
    for (int i = 0; i < n; ++i)
      if (!absent(i)) descs[i] = {true, parse_dtype(dtypes[i]), shape(i)};
    return descs;
  }
  Storage storage(int i) const { return absent(i) ? Storage{nullptr, kFloat32} : Storage{data[i], parse_dtype(dtypes[i])}; }
  template <typename T>
  T *as(int i) const { return static_cast<T *>(data[i]); }
};

int64_t read_attr(AotExtra *extra, const char *name, int64_t) { return extra->GetAttrInt(name); }
float read_attr(AotExtra *extra, const char *name, float) { return extra->GetAttrFloat(name); }

#define FLASHMLA_READ_ATTR(name, type) attrs.name = read_attr(extra, #name, attrs.name);
FlashMLAAttrs flash_mla_attrs(AotExtra *extra) {
  FlashMLAAttrs attrs = {};
  FLASH_MLA_ATTRS(FLASHMLA_READ_ATTR)
  return attrs;
}
FlashMLAWithKVCacheAttrs with_kvcache_attrs(AotExtra *extra) {
  FlashMLAWithKVCacheAttrs attrs = {};
  FLASH_MLA_WITH_KVCACHE_ATTRS(FLASHMLA_READ_ATTR)
  return attrs;
}

void require(const std::string &error) {
  if (!error.empty()) throw std::runtime_error(error);
}

// Runs an operator; whatever goes wrong is remembered and thrown as std::runtime_error.
template <typename F>
int guarded(const F &f) {
  std::string error;
  try {
    f();
    return 0;
  } catch (const std::bad_alloc &) {
    error = "not enough memory for the operator's scratch";
  } catch (const std::exception &e) {
    error = e.what();
  }
  set_last_error(error);
  throw std::runtime_error(error);
}

TilingData tiling_for(const Problem &problem) {
  const Machine *machine = find_machine(chosen_isa().machine);
  if (machine == nullptr) throw std::runtime_error(std::string("no machine file for ") + chosen_isa().machine);
  return tuned_tiling(problem, *machine);
}

// Weights and cache, which a decode step reads from memory as a whole.
void hint_layer(const Params &p) {
  using In = FlashMLAIn;
  for (int i : {In::kv_cache, In::w_q, In::w_kv_a, In::w_uk, In::w_uv, In::w_o, In::w_q_a}) {
    if (p.absent(i)) continue;
    int64_t elements = 1;
    for (int d = 0; d < p.ndims[i]; ++d) elements *= p.shapes[i][d];
    hint_huge_pages(p.data[i], elements * dtype_bytes(parse_dtype(p.dtypes[i])));
  }
}

int32_t dim(int64_t n) { return static_cast<int32_t>(n); }

void run_flash_mla(const Params &p, AotExtra *extra) {
  using In = FlashMLAIn;
  if (p.count != In::count + 1)
    throw std::runtime_error("FlashMLA takes " + std::to_string(In::count) + " inputs and gives 1 output, got " + std::to_string(p.count) + " tensors");
  const std::vector<TensorDesc> inputs = p.describe(In::count);
  LayerArgs args = {};
  args.attrs = flash_mla_attrs(extra);
  require(check_flash_mla(inputs, args.attrs));

  const Shape hidden = inputs[In::hidden_states].shape, cache = inputs[In::kv_cache].shape;
  const bool packed = hidden.size() == 2;
  args.hidden_size = hidden.back();
  args.num_tokens = packed ? hidden[0] : hidden[0] * hidden[1];
  args.hidden = p.storage(In::hidden_states);
  args.cache = {p.storage(In::kv_cache), cache[0], cache[1], 1, cache[2]};
  args.batch = {inputs[In::q_seq_lens].shape[0], inputs[In::block_table].shape[1], p.as<const int32_t>(In::block_table),
                p.as<const int32_t>(In::q_seq_lens), p.as<const int32_t>(In::context_lens)};
  BatchLimits limits;
  limits.num_tokens = args.num_tokens;
  limits.tokens_per_seq = packed ? -1 : hidden[1];
  limits.max_positions = inputs[In::rope_table].shape[0];
  limits.index_topk = args.attrs.index_topk;
  require(check_batch({cache[0], cache[1]}, args.batch, limits));
  if (args.num_tokens == 0) return;

  args.rope_table = p.as<const float>(In::rope_table);
  args.rope_positions = limits.max_positions;
  args.w_q = p.storage(In::w_q);
  args.w_kv_a = p.storage(In::w_kv_a);
  args.kv_norm = p.storage(In::kv_norm);
  args.w_uk = p.storage(In::w_uk);
  args.w_uv = p.storage(In::w_uv);
  args.w_o = p.storage(In::w_o);
  args.w_q_a = p.storage(In::w_q_a);
  args.q_norm = p.storage(In::q_norm);
  args.b_q_a = p.storage(In::b_q_a);
  args.b_kv_a = p.storage(In::b_kv_a);
  args.b_o = p.storage(In::b_o);
  args.residual = p.storage(In::residual);
  args.out = p.storage(In::count);
  const FlashMLAAttrs &a = args.attrs;
  args.problem = {dim(args.hidden_size), dim(a.num_heads), 1, dim(a.q_lora_rank), dim(a.kv_lora_rank), dim(a.qk_nope_head_dim),
                  dim(a.qk_rope_head_dim), dim(a.v_head_dim), dim(a.rope_mode), args.hidden.dtype, args.w_q.dtype,
                  args.cache.data.dtype, dim(cache[1]), args.batch.size, 1, 1};
  args.tiling = tiling_for(args.problem);
  hint_layer(p);
  ThreadPool::Session session(ThreadPool::instance());
  if (a.deterministic == 0) args.tiling.split_threads = session.num_threads();
  chosen_isa().kernels->flash_mla(args, session);
}

void run_with_kvcache(const Params &p, AotExtra *extra) {
  using In = FlashMLAWithKVCacheIn;
  if (p.count != In::count + 2) throw std::runtime_error("FlashMLAWithKVCache takes 4 inputs and gives 2 outputs");
  const std::vector<TensorDesc> inputs = p.describe(In::count);
  const FlashMLAWithKVCacheAttrs attrs = with_kvcache_attrs(extra);
  require(check_flash_mla_with_kvcache(inputs, attrs));

  const Shape q = inputs[In::q].shape, cache = inputs[In::k_cache].shape;
  AttendArgs args = {};
  args.q = p.storage(In::q);
  args.batch = q[0];
  args.s_q = q[1];
  args.h_q = q[2];
  args.cache = {p.storage(In::k_cache), cache[0], cache[1], cache.size() == 4 ? cache[2] : 1, cache.back()};
  args.max_blocks = inputs[In::block_table].shape[1];
  args.block_table = p.as<const int32_t>(In::block_table);
  args.cache_seqlens = p.as<const int32_t>(In::cache_seqlens);
  require(check_cache_seqlens({cache[0], cache[1]}, args.batch, args.max_blocks, args.block_table, args.cache_seqlens));
  if (args.batch == 0 || args.s_q == 0) return;
  args.head_dim_v = attrs.head_dim_v;
  args.softmax = {attrs.default_scale ? 1.0f / std::sqrt(float(q[3])) : attrs.softmax_scale, attrs.unified_max != 0, attrs.phi};
  args.causal = attrs.causal != 0;
  args.out = p.storage(In::count);
  args.lse = p.as<float>(In::count + 1);
  // As a problem of the tiling: rows of d elements whose first head_dim_v are the values, no projections.
  args.problem = {0, dim(args.h_q), dim(args.cache.h_kv), 0, dim(args.head_dim_v), dim(args.head_dim_v), dim(q[3] - args.head_dim_v),
                  dim(args.head_dim_v), kRopeDecoupled, args.q.dtype, args.q.dtype, args.cache.data.dtype, dim(cache[1]),
                  args.batch, 1, 1};
  args.tiling = tiling_for(args.problem);
  ThreadPool::Session session(ThreadPool::instance());
  chosen_isa().kernels->flash_mla_with_kvcache(args, session);
}

void run_merge(const Params &p) {
  using In = MergeAttentionStatesIn;
  if (p.count != In::count + 2) throw std::runtime_error("MergeAttentionStates takes 4 inputs and gives 2 outputs");
  const std::vector<TensorDesc> inputs = p.describe(In::count);
  require(check_merge_attention_states(inputs));
  const Shape o = inputs[In::out_a].shape;
  const MergeArgs args = {o[0], o[1], o[2], o[3], p.storage(In::out_a), p.storage(In::out_b), p.storage(In::count),
                          p.as<const float>(In::lse_a), p.as<const float>(In::lse_b), p.as<float>(In::count + 1)};
  ThreadPool::Session session(ThreadPool::instance());
  chosen_isa().kernels->merge_attention_states(args, session);
}

}  // namespace
}  // namespace flashmla

using flashmla::Shape;
using Types = std::vector<flashmla::TypeId>;

FLASHMLA_EXPORT int FlashMLA(int count, void **data, int *ndims, int64_t **shapes, const char **dtypes, void *, void *extra) {
  return flashmla::guarded([&] { flashmla::run_flash_mla({count, data, ndims, shapes, dtypes}, static_cast<AotExtra *>(extra)); });
}
FLASHMLA_EXPORT int FlashMLAInit(int *, int64_t **, const char **, AotExtra *) { return 0; }
FLASHMLA_EXPORT Shape FlashMLAInferShape(int *ndims, int64_t **shapes, AotExtra *) {
  return flashmla::infer_flash_mla_shape(Shape(shapes[0], shapes[0] + ndims[0]));
}
FLASHMLA_EXPORT flashmla::TypeId FlashMLAInferType(Types types, AotExtra *) { return flashmla::infer_flash_mla_dtype(types); }

FLASHMLA_EXPORT int FlashMLAWithKVCache(int count, void **data, int *ndims, int64_t **shapes, const char **dtypes, void *, void *extra) {
  return flashmla::guarded([&] { flashmla::run_with_kvcache({count, data, ndims, shapes, dtypes}, static_cast<AotExtra *>(extra)); });
}
FLASHMLA_EXPORT int FlashMLAWithKVCacheInit(int *, int64_t **, const char **, AotExtra *) { return 0; }
FLASHMLA_EXPORT std::vector<Shape> FlashMLAWithKVCacheInferShape(int *ndims, int64_t **shapes, AotExtra *extra) {
  return flashmla::infer_flash_mla_with_kvcache_shape(Shape(shapes[0], shapes[0] + ndims[0]), extra->GetAttrInt("head_dim_v"));
}
FLASHMLA_EXPORT Types FlashMLAWithKVCacheInferType(Types types, AotExtra *) {
  return flashmla::infer_flash_mla_with_kvcache_dtype(types, flashmla::kTypeFloat32);
}

FLASHMLA_EXPORT int MergeAttentionStates(int count, void **data, int *ndims, int64_t **shapes, const char **dtypes, void *, void *) {
  return flashmla::guarded([&] { flashmla::run_merge({count, data, ndims, shapes, dtypes}); });
}
FLASHMLA_EXPORT int MergeAttentionStatesInit(int *, int64_t **, const char **, AotExtra *) { return 0; }
FLASHMLA_EXPORT std::vector<Shape> MergeAttentionStatesInferShape(int *ndims, int64_t **shapes, AotExtra *) {
  return flashmla::infer_merge_attention_states_shape(Shape(shapes[0], shapes[0] + ndims[0]), Shape(shapes[1], shapes[1] + ndims[1]));
}
FLASHMLA_EXPORT Types MergeAttentionStatesInferType(Types types, AotExtra *) {
  return flashmla::infer_merge_attention_states_dtype(types, flashmla::kTypeFloat32);
}
