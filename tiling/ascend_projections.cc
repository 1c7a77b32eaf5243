#include "tiling/ascend_projections.h"

#include "tiling/int_math.h"

namespace flashmla {

using namespace int_math;

namespace {

constexpr int64_t kBaseM = 128;  // with 256 columns: two blocks of the result fill L0C
constexpr int64_t kBaseN = 256;
constexpr int64_t kBaseK = 64;  // two blocks of B [64, 256] fill L0B
constexpr int64_t kMostStepK = 1024;

// Bytes that the busiest core moves beyond the chip's own memories for each way from attention into W_o.
struct EpilogBytes {
  double on_chip = 0;
  double through_l2 = 0;
};

// On chip, a core multiplies the output of every pass of its own by W_UV and W_o of the pass's heads: few tokens share them, as a pass has all
// heads of a token first. Cores take equal pieces of the KV tiles, whatever the lengths, so that any pass may be split and its share of W_o's
// result is kept as float32 [tokens, hidden], written once and read once: sums in a fixed order, for the same call gives the same bits. Through L2,
// latent outputs and outputs are written and read once, and all cores share the weights, which every block of tokens reads.
EpilogBytes epilog_bytes(const Problem& p, const TilingData& t, int32_t path) {
  const bool absorbed = path == kAbsorbed;
  const int64_t s_q = std::max<int64_t>(1, p.s_q), batch = std::max<int64_t>(1, p.batch), tokens = batch * s_q;
  const AscendBlocks& blocks = absorbed ? t.absorbed : t.expanded;
  const int64_t rows = blocks.rows;
  const int64_t passes = batch * (absorbed ? ceil_div(s_q * p.num_heads, rows) : p.num_heads * ceil_div(s_q, rows));
  const int64_t pass_heads = absorbed ? std::min<int64_t>(p.num_heads, rows) : 1;
  const int64_t pass_tokens = absorbed ? ceil_div(rows, p.num_heads) : std::min(rows, s_q);
  const double head_weights = 2.0 * p.v_head_dim * (p.hidden_size + (absorbed ? p.kv_lora_rank : 0));
  const double parts = tokens <= t.two_part_tokens ? 2 : 1;
  const double outputs = 2 * 2.0 * parts * tokens * p.num_heads * (p.v_head_dim + (absorbed ? p.kv_lora_rank : 0));
  const int64_t tiles = std::max<int64_t>(1, ceil_div(p.s_kv, blocks.kv_tile));
  const int64_t core_tiles = std::max<int64_t>(ceil_div(passes * tiles, t.num_cores), t.split_min / t.kv_tile);
  EpilogBytes bytes;
  bytes.on_chip = std::min(passes, ceil_div(core_tiles, tiles)) * (pass_heads * head_weights + 2 * 4.0 * pass_tokens * p.hidden_size);
  bytes.through_l2 = (outputs + p.num_heads * head_weights * ceil_div(tokens, kBaseM)) / t.num_cores;
  return bytes;
}

std::string whole_kib(double bytes) {
  return std::to_string(static_cast<int64_t>(bytes / kKiB + 0.5)) + " KiB";
}

Buffer buffer(const char* name, int64_t rows, int64_t cols, int64_t element, const char* memory, int64_t capacity) {
  Buffer b;
  b.stage = "projections";
  b.name = name;
  b.shape = "[" + std::to_string(rows) + ", " + std::to_string(cols) + (element == 4 ? "] float32" : "] 16-bit");
  b.copies = 2;
  b.bytes = 2 * rows * cols * element;
  b.memory = memory;
  b.capacity = capacity;
  return b;
}

}  // namespace

void choose_projections(const Problem& p, const Machine& m, TilingData* t) {
  const int64_t tokens = std::max<int64_t>(1, p.batch * p.s_q);
  t->gemm_base_m = static_cast<int32_t>(clamp(align_up(tokens, 16), 16, kBaseM));
  t->gemm_base_n = kBaseN;
  t->gemm_base_k = kBaseK;
  // Two steps of A and of B share L1.
  const int64_t room = m.l1_bytes / (2 * 2 * (t->gemm_base_m + t->gemm_base_n));
  t->gemm_step_k = static_cast<int32_t>(clamp(align_down(room, kBaseK), kBaseK, kMostStepK));
}

std::vector<Buffer> projection_buffers(const TilingData& t, const Machine& m) {
  return {buffer("a", t.gemm_base_m, t.gemm_step_k, 2, "L1", m.l1_bytes),
          buffer("weights", t.gemm_step_k, t.gemm_base_n, 2, "L1", m.l1_bytes),
          buffer("a step", t.gemm_base_m, t.gemm_base_k, 2, "L0A", m.l0a_bytes),
          buffer("weights step", t.gemm_base_k, t.gemm_base_n, 2, "L0B", m.l0b_bytes),
          buffer("result", t.gemm_base_m, t.gemm_base_n, 4, "L0C", m.l0c_bytes),
          // norm, rope or residual: each AIV takes half of the rows
          buffer("result", ceil_div(t.gemm_base_m, m.vectors_per_core), t.gemm_base_n, 4, "UB", m.ub_bytes),
          buffer("residual or written result", ceil_div(t.gemm_base_m, m.vectors_per_core), t.gemm_base_n, 2, "UB", m.ub_bytes)};
}

void explain_projections(const Problem& p, const Machine& m, TilingReport* report) {
  const TilingData& t = report->tiling;
  report->blocks.push_back({"gemm_base_m", t.gemm_base_m, "rows of a projection block"});
  report->blocks.push_back({"gemm_base_n", t.gemm_base_n, "columns of a projection block"});
  report->blocks.push_back({"gemm_base_k", t.gemm_base_k, "K of a step in L0A, L0B"});
  report->blocks.push_back({"gemm_step_k", t.gemm_step_k, "K of a step in L1"});
  report->reasons.push_back("gemm_base_k " + std::to_string(2 * t.gemm_base_k) + " needs " + kib_text(4 * 2 * t.gemm_base_k * t.gemm_base_n) +
                            " of L0B (projections), capacity " + kib_text(m.l0b_bytes));
  const EpilogBytes bytes = epilog_bytes(p, t, report->seq.path);
  const bool through_l2 = bytes.through_l2 <= bytes.on_chip;
  report->blocks.push_back({"epilog_through_l2", through_l2, "1: fewer bytes where attention outputs go through L2 into W_o, as the kernel does; 0: on chip"});
  report->reasons.push_back("outputs go through L2 into W_o: the busiest core moves " + whole_kib(bytes.through_l2) + " that way, and on chip " + whole_kib(bytes.on_chip) +
                            " of weights and float32 sums" + (through_l2 ? "" : ": fewer, for a layer this narrow, of which the epilog is the smaller part"));
}

}  // namespace flashmla
