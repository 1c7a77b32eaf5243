#include <string>

#include "tiling/cpu_working_set.h"
#include "tiling/tiling_backends.h"

namespace flashmla {

using namespace int_math;

namespace {

// Prolog and epilog of a group of tokens, any path.
std::vector<Matrix> group_scratch(const Problem& p, int64_t tokens) {
  std::vector<Matrix> list = {{"latents before the cache", tokens, aligned(latent_width(p))}};
  if (p.q_lora_rank > 0) list.push_back({"low-rank q", tokens, aligned(p.q_lora_rank)});
  const bool single = p.act_dtype == kFloat32;
  if (!single) list.push_back({"hidden states", tokens, p.hidden_size});
  return list;
}

class BufferList {
 public:
  explicit BufferList(const Machine& m) : m_(m) {}
  void stage(const char* name) { stage_ = name; }
  void add(const Matrix& matrix, const char* memory, int64_t capacity) {
    if (matrix.bytes() == 0) return;
    Buffer b;
    b.stage = stage_;
    b.name = matrix.name;
    b.shape = "[" + std::to_string(matrix.rows) + ", " + std::to_string(matrix.cols) + (matrix.element_bytes == 4 ? "] float32" : "] int64");
    b.bytes = matrix.bytes();
    b.copies = matrix.copies;
    b.memory = memory;
    b.capacity = capacity;
    list_.push_back(b);
  }
  // Tiles stand in L2; those of a problem that no block fits there, in scratch.
  template <typename Tiles>
  void add_tiles(const Tiles& tiles) {
    const bool in_l2 = total_bytes(tiles) <= m_.l2_bytes;
    for (const Matrix& tile : tiles) add(tile, in_l2 ? "L2" : "DRAM", in_l2 ? m_.l2_bytes : m_.scratch_bytes);
  }
  void add_scratch(const std::vector<Matrix>& scratch) {
    for (const Matrix& matrix : scratch) add(matrix, "DRAM", m_.scratch_bytes);
  }
  void add_sums(const char* name) {
    add({name, m_.accumulators, m_.vector_lanes}, "registers", int64_t{m_.vector_registers} * m_.vector_lanes * 4);
  }
  std::vector<Buffer> take() { return std::move(list_); }

 private:
  const Machine& m_;
  const char* stage_ = "";
  std::vector<Buffer> list_;
};

}  // namespace

std::vector<Matrix> absorbed_scratch(const Problem& p, int64_t tokens) {
  std::vector<Matrix> list = group_scratch(p, tokens);
  const int64_t rows = tokens * p.num_heads;
  list.push_back({"q of all heads", tokens, p.num_heads * aligned(d_qk(p))});
  if (p.rope_mode == kRopeDecoupled) list.push_back({"absorbed q", rows, aligned(p.kv_lora_rank) + aligned(p.qk_rope_head_dim)});
  list.push_back({"outputs of all heads", tokens, int64_t{p.num_heads} * p.v_head_dim});
  list.push_back({"sums of W_o", tokens, aligned(p.hidden_size)});
  return list;
}

Matrix split_outputs(const Problem& p, const TilingData& t) {
  const bool per_head = p.rope_mode == kRopeFull;
  const int64_t row_groups = per_head ? p.num_heads : ceil_div(p.num_heads / p.num_kv_heads, t.absorbed_rows) * p.num_kv_heads;
  const int64_t splits = std::max<int64_t>(1, t.max_splits / row_groups);
  const int64_t width = aligned(p.kv_lora_rank) + 2;
  const int64_t least = p.num_heads * splits, most = least * t.absorbed_tokens;
  return {"outputs by split", clamp(t.partial_bytes / (4 * width), least, most), width};
}

std::vector<Matrix> expanded_scratch(const Problem& p, const TilingData& t, int64_t tokens) {
  std::vector<Matrix> list = group_scratch(p, tokens);
  list.push_back({"q of a head group", tokens, t.head_group * aligned(d_qk(p))});
  list.push_back({"outputs of a head group", tokens, int64_t{t.head_group} * p.v_head_dim});
  list.push_back({"outputs of a head", tokens, aligned(p.v_head_dim) + 2});
  const bool in_place = p.act_dtype == kFloat32 && p.hidden_size % kColumnAlign == 0;
  if (!in_place) list.push_back({"sums of W_o", tokens, aligned(p.hidden_size)});
  return list;
}

std::vector<Buffer> cpu_buffers(const Problem& p, const Machine& m, const TilingData& t) {
  BufferList list(m);
  const bool layer = p.hidden_size > 0;
  const Matrix vectors = {"norms and biases", 1, layer ? 2 * latent_width(p) + 2 * p.q_lora_rank + p.hidden_size : 0};
  if (const int32_t path = latent_path(p, t); path != kExpanded) {
    list.stage(path_name(path));
    list.add_sums("sums of QK, PV");
    list.add_tiles(pass_tiles(p, path, t.absorbed_rows, t.kv_tile, m.vector_lanes));
    if (layer) list.add_scratch(absorbed_scratch(p, t.absorbed_tokens));
    if (path == kValueAbsorbed) list.add_scratch({transposed_w_uk(p)});
    list.add_scratch({split_outputs(p, t), vectors});
  }
  if (!layer) return list.take();

  if (latent_path(p, t) != kExpanded) {
    list.stage("up-projection");
    list.add_tiles(up_projection_tiles(p, t.up_tokens));
  }

  list.stage("decompression");
  list.add_tiles(decompression_tiles(p, t.decompress_rows));

  list.stage("expanded");
  list.add_sums("sums of QK, PV");
  list.add_tiles(pass_tiles(p, kExpanded, t.q_tile, t.kv_tile, m.vector_lanes));
  list.add_scratch({{"W_UK of a head", aligned(p.qk_nope_head_dim), p.kv_lora_rank},
                    {"W_UV of a head", p.weight_dtype == kFloat32 ? 0 : aligned(p.v_head_dim), p.kv_lora_rank},
                    {"k chunk of a head", t.kv_chunk, aligned(d_qk(p))},
                    {"v chunk of a head", t.kv_chunk, aligned(p.v_head_dim)}});
  list.add_scratch(expanded_scratch(p, t, t.token_group));
  list.add_scratch({vectors});

  list.stage("projections");
  list.add_sums("sums of a register block");
  list.add({"weight block", t.gemm_k_block, m.gemm_panel_cols}, "L1", m.l1_bytes);
  list.add({"activation block", t.gemm_rows, t.gemm_k_block}, "L2", m.l2_bytes);
  list.add({"sums of a work item", t.gemm_rows, int64_t{t.gemm_panels} * m.gemm_panel_cols}, "L2", m.l2_bytes);
  return list.take();
}

}  // namespace flashmla
