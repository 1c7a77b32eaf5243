#include "op_proto/op_proto.h"

#include <stdexcept>

namespace flashmla {
namespace {

constexpr int64_t kUnknownRank = -2;

bool rank_unknown(const Shape &shape) { return shape.size() == 1 && shape[0] == kUnknownRank; }

std::string join(const Shape &shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

const char *dtype_name(int32_t dtype) {
  switch (dtype) {
    case kFloat32: return "float32";
    case kFloat16: return "float16";
    case kBFloat16: return "bfloat16";
    case kInt32: return "int32";
    default: return "an unsupported dtype";
  }
}

bool is_float(int32_t dtype) { return dtype == kFloat32 || dtype == kFloat16 || dtype == kBFloat16; }

// Collects the first complaint about a list of named arguments.
class Checker {
 public:
  Checker(const char *op, const std::vector<TensorDesc> &inputs, const std::vector<const char *> &names)
      : op_(op), inputs_(inputs), names_(names) {}

  void shape(int i, const Shape &want) {
    if (!inputs_[i].present || inputs_[i].shape == want) return;
    fail(i, "has shape " + join(inputs_[i].shape) + ", expected " + join(want));
  }
  void rank(int i, size_t low, size_t high) {
    const size_t got = inputs_[i].shape.size();
    if (got >= low && got <= high) return;
    fail(i, "has rank " + std::to_string(got) + " (shape " + join(inputs_[i].shape) + "), expected rank " +
                std::to_string(low) + (low == high ? "" : " or " + std::to_string(high)));
  }
  void floating(int i) {
    if (inputs_[i].present && !is_float(inputs_[i].dtype))
      fail(i, std::string("is ") + dtype_name(inputs_[i].dtype) + ", expected float32, float16 or bfloat16");
  }
  void dtype(int i, int32_t want) {
    if (inputs_[i].present && inputs_[i].dtype != want)
      fail(i, std::string("is ") + dtype_name(inputs_[i].dtype) + ", expected " + dtype_name(want));
  }
  void require(bool ok, int i, const std::string &what) {
    if (!ok) fail(i, what);
  }
  void attr(bool ok, const std::string &what) {
    if (!ok && error_.empty()) error_ = std::string(op_) + ": " + what;
  }
  void presence(int i, bool required) {
    if (required && !inputs_[i].present) fail(i, "is missing");
  }
  bool failed() const { return !error_.empty(); }
  const std::string &error() const { return error_; }

 private:
  void fail(int i, const std::string &what) {
    if (error_.empty()) error_ = std::string(op_) + ": " + names_[i] + " " + what;
  }
  const char *op_;
  const std::vector<TensorDesc> &inputs_;
  const std::vector<const char *> &names_;
  std::string error_;
};

#define FLASHMLA_NAME(name, required) #name,
#define FLASHMLA_REQUIRED(name, required) required,
}  // namespace

Shape infer_flash_mla_shape(const Shape &hidden_states) {
  if (!rank_unknown(hidden_states) && hidden_states.size() != 2 && hidden_states.size() != 3)
    throw std::runtime_error("FlashMLA: hidden_states has shape " + join(hidden_states) + ", expected [T, hidden] or [B, S, hidden]");
  return hidden_states;
}

std::vector<Shape> infer_flash_mla_with_kvcache_shape(const Shape &q, int64_t head_dim_v) {
  if (rank_unknown(q)) return {{kUnknownRank}, {kUnknownRank}};
  if (q.size() != 4) throw std::runtime_error("FlashMLAWithKVCache: q has shape " + join(q) + ", expected [B, s_q, h_q, d]");
  return {{q[0], q[1], q[2], head_dim_v}, {q[0], q[2], q[1]}};
}

std::vector<Shape> infer_merge_attention_states_shape(const Shape &out_a, const Shape &lse_a) { return {out_a, lse_a}; }

std::string check_flash_mla(const std::vector<TensorDesc> &inputs, const FlashMLAAttrs &a) {
  using In = FlashMLAIn;
  static const std::vector<const char *> names = {FLASH_MLA_INPUTS(FLASHMLA_NAME)};
  static const bool required[] = {FLASH_MLA_INPUTS(FLASHMLA_REQUIRED)};
  Checker check("FlashMLA", inputs, names);
  for (int i = 0; i < In::count; ++i) check.presence(i, required[i]);
  check.attr(a.num_heads >= 1 && a.kv_lora_rank >= 1 && a.qk_nope_head_dim >= 1 && a.qk_rope_head_dim >= 0 &&
                 a.v_head_dim >= 1 && a.q_lora_rank >= 0,
             "num_heads, kv_lora_rank, qk_nope_head_dim and v_head_dim must be positive");
  check.attr(a.rope_mode == kRopeDecoupled || a.rope_mode == kRopeFull, "rope_mode must be 0 (decoupled) or 1 (full)");
  if (check.failed()) return check.error();

  const int64_t rope_dim = a.rope_mode == kRopeFull ? a.qk_nope_head_dim : a.qk_rope_head_dim;
  check.attr(rope_dim >= 2 && rope_dim % 2 == 0 && (a.rope_mode == kRopeDecoupled || a.qk_rope_head_dim == 0),
             "the rotated dimension must be even and positive, and qk_rope_head_dim 0 when rope_mode is full");
  check.rank(In::hidden_states, 2, 3);
  check.rank(In::kv_cache, 3, 3);
  check.rank(In::block_table, 2, 2);
  check.rank(In::q_seq_lens, 1, 1);
  check.rank(In::rope_table, 2, 2);
  for (int i : {In::hidden_states, In::kv_cache, In::w_q}) check.floating(i);
  for (int i : {In::block_table, In::q_seq_lens, In::context_lens}) check.dtype(i, kInt32);
  check.dtype(In::rope_table, kFloat32);
  if (check.failed()) return check.error();
  for (int i : {In::w_kv_a, In::kv_norm, In::w_uk, In::w_uv, In::w_o, In::w_q_a, In::q_norm, In::b_q_a, In::b_kv_a, In::b_o})
    check.dtype(i, inputs[In::w_q].dtype);
  check.dtype(In::residual, inputs[In::hidden_states].dtype);

  const int64_t heads = a.num_heads, rank = a.kv_lora_rank, d_n = a.qk_nope_head_dim, d_r = a.qk_rope_head_dim;
  const Shape &cache = inputs[In::kv_cache].shape;
  const int64_t hidden = inputs[In::hidden_states].shape.back();
  const int64_t batch = inputs[In::q_seq_lens].shape[0];
  check.require(hidden >= 1, In::hidden_states, "has an empty last dimension");
  check.require(cache[1] >= 1, In::kv_cache, "has an empty block");
  check.shape(In::kv_cache, {cache[0], cache[1], rank + d_r});
  check.shape(In::block_table, {batch, inputs[In::block_table].shape[1]});
  check.shape(In::context_lens, {batch});
  check.shape(In::rope_table, {inputs[In::rope_table].shape[0], rope_dim});
  const bool low_rank_q = a.q_lora_rank > 0;
  check.attr(inputs[In::w_q_a].present == low_rank_q && inputs[In::q_norm].present == low_rank_q,
             "w_q_a and q_norm go with q_lora_rank > 0, and only with it");
  check.attr(low_rank_q || !inputs[In::b_q_a].present, "b_q_a goes with q_lora_rank > 0 only");
  check.shape(In::w_q, {packed_size(heads, d_n + d_r, low_rank_q ? a.q_lora_rank : hidden)});
  check.shape(In::w_kv_a, {packed_size(1, rank + d_r, hidden)});
  check.shape(In::kv_norm, {rank});
  check.shape(In::w_uk, {packed_size(heads, rank, d_n)});
  check.shape(In::w_uv, {packed_size(heads, a.v_head_dim, rank)});
  check.shape(In::w_o, {packed_size(1, hidden, heads * a.v_head_dim)});
  check.shape(In::w_q_a, {packed_size(1, a.q_lora_rank, hidden)});
  check.shape(In::q_norm, {a.q_lora_rank});
  check.shape(In::b_q_a, {a.q_lora_rank});
  check.shape(In::b_kv_a, {rank + d_r});
  check.shape(In::b_o, {hidden});
  check.shape(In::residual, inputs[In::hidden_states].shape);
  return check.error();
}

std::string check_flash_mla_with_kvcache(const std::vector<TensorDesc> &inputs, const FlashMLAWithKVCacheAttrs &a) {
  using In = FlashMLAWithKVCacheIn;
  static const std::vector<const char *> names = {FLASH_MLA_WITH_KVCACHE_INPUTS(FLASHMLA_NAME)};
  Checker check("FlashMLAWithKVCache", inputs, names);
  for (int i = 0; i < In::count; ++i) check.presence(i, true);
  if (check.failed()) return check.error();
  check.rank(In::q, 4, 4);
  check.rank(In::k_cache, 3, 4);
  check.rank(In::block_table, 2, 2);
  for (int i : {In::q, In::k_cache}) check.floating(i);
  check.dtype(In::block_table, kInt32);
  check.dtype(In::cache_seqlens, kInt32);
  if (check.failed()) return check.error();
  const Shape &q = inputs[In::q].shape;
  const Shape &k = inputs[In::k_cache].shape;
  const int64_t h_kv = k.size() == 4 ? k[2] : 1;
  check.require(k.back() == q[3], In::k_cache, "has rows of " + std::to_string(k.back()) + " elements, q has " + std::to_string(q[3]));
  check.require(k[1] >= 1, In::k_cache, "has an empty page");
  check.require(h_kv >= 1 && q[2] % h_kv == 0 && q[2] >= 1, In::q,
                "has " + std::to_string(q[2]) + " heads, not a multiple of the cache's " + std::to_string(h_kv));
  check.require(q[3] >= 1, In::q, "has an empty head dimension");
  check.shape(In::block_table, {q[0], inputs[In::block_table].shape[1]});
  check.shape(In::cache_seqlens, {q[0]});
  check.attr(a.head_dim_v >= 1 && a.head_dim_v <= q[3],
             "head_dim_v is " + std::to_string(a.head_dim_v) + ", expected 1 to " + std::to_string(q[3]));
  return check.error();
}

std::string check_merge_attention_states(const std::vector<TensorDesc> &inputs) {
  using In = MergeAttentionStatesIn;
  static const std::vector<const char *> names = {MERGE_ATTENTION_STATES_INPUTS(FLASHMLA_NAME)};
  Checker check("MergeAttentionStates", inputs, names);
  for (int i = 0; i < In::count; ++i) check.presence(i, true);
  if (check.failed()) return check.error();
  check.rank(In::out_a, 4, 4);
  if (check.failed()) return check.error();
  const Shape &o = inputs[In::out_a].shape;
  for (int i : {In::out_a, In::out_b}) check.floating(i);
  for (int i : {In::lse_a, In::lse_b}) check.dtype(i, kFloat32);
  check.shape(In::out_b, o);
  for (int i : {In::lse_a, In::lse_b}) check.shape(i, {o[0], o[2], o[1]});
  return check.error();
}

}  // namespace flashmla
