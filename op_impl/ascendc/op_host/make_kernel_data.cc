#include "op_impl/ascendc/op_host/make_kernel_data.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "op_impl/ascendc/op_host/product_blocks.h"
#include "tiling/int_math.h"

namespace flashmla {

using namespace int_math;

namespace {

constexpr int64_t kFractal = 16;
constexpr int64_t kZeroColumns = 1024;
constexpr int64_t kMostRowStride = 2032;          // float32 elements in whole fractals: a vector instruction strides over 255 data blocks at the most
constexpr int64_t kMostKey = 512, kMostRotatedKey = 384, kMostRotatedPart = 224;  // elements; what UB holds of 32 rows, tests/test_twin_capacity.py
constexpr int64_t kMostSourceStride = 65535;      // elements from row to row of a copy into fractals
constexpr int64_t kRoundBytes = int64_t{1} << 30; // K and V that a round of heads leaves in the workspace
constexpr int64_t kGmAlign = 512;

int64_t fractals(int64_t n) { return align_up(n, kFractal); }

void at_most(const char *what, int64_t value, int64_t most) {
  if (value > most)
    throw std::invalid_argument(std::string("FlashMLA on Ascend: ") + what + " is " + std::to_string(value) + ", expected at most " + std::to_string(most));
}

void check_limits(const KernelCall &c) {
  const FlashMLAAttrs &a = c.attrs;
  for (int32_t dtype : {c.act_dtype, c.weight_dtype, c.cache_dtype}) {
    if (dtype == kFloat32) throw std::invalid_argument("FlashMLA on Ascend: float32 is not supported, expected float16 or bfloat16");
    if (dtype != c.act_dtype) throw std::invalid_argument("FlashMLA on Ascend: hidden states, weights and cache must have one dtype");
  }
  at_most("elements from key to key of the cache", c.cache.row_stride, kMostSourceStride);
  if (!(a.softmax_scale > 0))  // maxima are taken before scores are scaled
    throw std::invalid_argument("FlashMLA on Ascend: softmax_scale is " + std::to_string(a.softmax_scale) + ", expected a positive number");
  at_most("hidden_size", c.hidden_size, kMostSourceStride);
  at_most("kv_lora_rank", a.kv_lora_rank, kMostRowStride);
  at_most("v_head_dim", a.v_head_dim, kMostRowStride);
  // 32 rows of a key, and the parts of it that RoPE turns, lie in UB as float32.
  if (a.rope_mode == kRopeFull) at_most("qk_nope_head_dim, all of it rotated,", a.qk_nope_head_dim, kMostRotatedKey);
  else at_most("qk_nope_head_dim", a.qk_nope_head_dim, kMostKey);
  at_most("qk_rope_head_dim", a.qk_rope_head_dim, kMostRotatedPart);
  at_most("q_lora_rank", a.q_lora_rank, 8192);
  at_most("num_heads x (qk_nope_head_dim + qk_rope_head_dim)", a.num_heads * fractals(a.qk_nope_head_dim + a.qk_rope_head_dim), kMostSourceStride);
  at_most("num_heads x v_head_dim", a.num_heads * a.v_head_dim, kMostSourceStride);
}

// Keys that a sequence has room for.
int64_t most_keys(const KernelCall &c) { return c.cache.paged ? c.max_blocks * c.cache.page : c.cache.page; }

class Layout {
 public:
  int64_t take(int64_t elements, int64_t element_bytes) {
    const int64_t offset = next_;
    next_ += align_up(elements * element_bytes, kGmAlign);
    return offset;
  }
  int64_t total() const { return next_; }

 private:
  int64_t next_ = 0;
};

WorkspaceLayout lay_out(const KernelData &d) {
  constexpr int64_t kHalf = 2, kSingle = 4;
  const bool absorbed = d.path == kAbsorbed;
  const int64_t rows = d.num_tokens * d.heads, ld_q = fractals(d.d_n + d.d_r), ld_latent = fractals(d.rank), ld_v = fractals(d.d_v);
  const int64_t partial_rows = 2 * int64_t{d.cores} * d.blocks.rows;
  const int64_t expanded_rows = absorbed ? 0 : d.round_heads * d.round_keys;
  const bool raw_keys = d.rope_mode == kRopeFull || d.d_n % kFractal != 0;
  Layout next;
  WorkspaceLayout w{};
  w.zeros = next.take(kFractal * kZeroColumns, kHalf);
  w.kv_raw = next.take(d.num_tokens * fractals(d.rank + d.d_r), kSingle);
  w.q_a_raw = next.take(d.num_tokens * fractals(d.q_rank), kSingle);
  const auto take_parts = [&](int64_t (&offsets)[2], int64_t elements) {
    offsets[0] = next.take(d.parts * elements, kHalf);
    offsets[1] = offsets[0] + (d.parts - 1) * elements * kHalf;
  };
  take_parts(w.q_a, d.num_tokens * fractals(d.q_rank));
  take_parts(w.q, rows * ld_q);
  w.q_latent = next.take(absorbed ? rows * ld_latent : 0, kSingle);
  w.query = next.take(absorbed ? rows * fractals(d.rank + d.d_r) : 0, kHalf);
  w.row_scale = next.take(absorbed ? rows : 0, kSingle);
  w.partial_o = next.take(partial_rows * (absorbed ? ld_latent : ld_v), kSingle);
  w.partial_state = next.take(2 * partial_rows, kSingle);
  take_parts(w.o_latent, absorbed ? rows * d.rank : 0);
  w.o_latent[1] = w.o_latent[0] + (d.parts - 1) * d.num_tokens * d.rank * kHalf;  // of each head
  w.o_padded = next.take(absorbed && d.d_v % kFractal != 0 ? rows * ld_v : 0, kHalf);
  w.o = next.take(rows * d.d_v, kHalf);
  w.k_raw = next.take(raw_keys ? expanded_rows * fractals(d.d_n) : 0, kSingle);
  w.k_expanded = next.take(expanded_rows * ld_q, kHalf);
  w.v_expanded = next.take(expanded_rows * ld_v, kHalf);
  w.total_bytes = next.total();
  return w;
}

}  // namespace

Problem kernel_problem(const KernelCall &c) {
  const FlashMLAAttrs &a = c.attrs;
  const auto dim = [](int64_t n) { return static_cast<int32_t>(n); };
  const int64_t batch = std::max<int64_t>(1, c.batch);
  const int64_t s_q = std::max<int64_t>(1, ceil_div(c.num_tokens, batch));
  return {dim(c.hidden_size), dim(a.num_heads), 1, dim(a.q_lora_rank), dim(a.kv_lora_rank), dim(a.qk_nope_head_dim),
          dim(a.qk_rope_head_dim), dim(a.v_head_dim), dim(a.rope_mode), c.act_dtype, c.weight_dtype, c.cache_dtype, dim(c.cache.page),
          batch, s_q, std::max(s_q, most_keys(c))};
}

KernelData make_kernel_data(const KernelCall &c, const Machine &machine, const WantedBlocks &wanted) {
  check_limits(c);
  const FlashMLAAttrs &a = c.attrs;
  const Problem problem = kernel_problem(c);
  const TilingData tiling = make_tiling(problem, machine);
  KernelData d{};
  d.hidden = static_cast<int32_t>(c.hidden_size);
  d.heads = problem.num_heads;
  d.rank = problem.kv_lora_rank;
  d.d_n = problem.qk_nope_head_dim;
  d.d_r = problem.qk_rope_head_dim;
  d.d_v = problem.v_head_dim;
  d.q_rank = problem.q_lora_rank;
  d.rope_mode = problem.rope_mode;
  d.path = make_seq_tiling(problem, tiling, problem.s_q, problem.s_kv).path;
  // Decompressed keys and values are rounded once more than the latent rows: a call of few tokens takes these, and no other rounding on the way.
  d.parts = c.num_tokens <= tiling.two_part_tokens ? 2 : 1;
  d.cores = tiling.num_cores;
  d.num_tokens = c.num_tokens;
  d.batch = c.batch;
  d.max_blocks = c.max_blocks;
  d.cache = c.cache;
  d.has_b_q_a = c.has_b_q_a;
  d.has_b_kv_a = c.has_b_kv_a;
  d.has_b_o = c.has_b_o;
  d.has_residual = c.has_residual;
  d.q_norm_eps = a.q_norm_eps;
  d.kv_norm_eps = a.kv_norm_eps;
  d.q_lora_scale = a.q_lora_scale;
  d.kv_lora_scale = a.kv_lora_scale;
  d.softmax_scale = a.softmax_scale;
  d.blocks = d.path == kAbsorbed ? tiling.absorbed : tiling.expanded;
  if (wanted.rows != 0 || wanted.kv_tile != 0 || wanted.kv_buffers != 0) d.blocks = wanted_blocks(problem, machine, tiling, d.path, wanted);
  d.min_tiles = static_cast<int32_t>(std::max<int64_t>(1, tiling.split_min / tiling.kv_tile));
  d.products = choose_product_blocks(d, machine);
  d.round_keys = d.path == kAbsorbed ? 0 : std::max<int64_t>(1, c.batch * most_keys(c));
  const int64_t head_bytes = d.round_keys * (2 * (fractals(d.d_n + d.d_r) + fractals(d.d_v)) + 4 * fractals(d.d_n));
  d.round_heads = head_bytes == 0 ? d.heads : static_cast<int32_t>(clamp(kRoundBytes / head_bytes, 1, d.heads));
  d.workspace = lay_out(d);
  return d;
}

}  // namespace flashmla
