#include "tiling/ascend_projections.h"

#include "tiling/int_math.h"

namespace flashmla {

using namespace int_math;

namespace {

constexpr int64_t kBaseM = 128;  // with 256 columns: two blocks of the result fill L0C
constexpr int64_t kBaseN = 256;
constexpr int64_t kBaseK = 64;  // two blocks of B [64, 256] fill L0B
constexpr int64_t kMostStepK = 1024;

struct EpilogBytes {
  double on_chip = 0;
  double through_l2 = 0;
};

// Bytes that each way of joining the heads moves beyond the chip's own memories. On chip, a core multiplies the outputs of its rows by their
// rows of W_o and adds float32 sums [tokens, hidden] in global memory, once for each group of heads; through L2, the
// outputs are written and read once and W_o is read once for each block of tokens.
EpilogBytes epilog_bytes(const Problem& p, const TilingData& t) {
  const double tokens = static_cast<double>(p.batch) * p.s_q;
  const double outputs = tokens * p.num_heads * p.v_head_dim * 2;
  const double w_o = static_cast<double>(p.num_heads) * p.v_head_dim * p.hidden_size * 2;
  const bool absorbed = t.absorbed.rows > 0;
  const int64_t rows = absorbed ? t.absorbed.rows : t.expanded.rows;
  const int64_t head_groups = absorbed ? ceil_div(p.num_heads, rows) : p.num_heads;
  const int64_t s_q = std::max<int64_t>(1, p.s_q);
  const int64_t passes = absorbed ? ceil_div(s_q * p.num_heads, rows) : p.num_heads * ceil_div(s_q, rows);
  EpilogBytes bytes;
  bytes.on_chip = w_o / head_groups * p.batch * passes + head_groups * tokens * p.hidden_size * 4 * 2;
  bytes.through_l2 = 2 * outputs + w_o * ceil_div(std::max<int64_t>(1, p.batch * p.s_q), kBaseM);
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
  const EpilogBytes bytes = epilog_bytes(p, *t);
  t->epilog_through_l2 = bytes.through_l2 <= bytes.on_chip;
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
  report->blocks.push_back({"epilog_through_l2", t.epilog_through_l2, "1: attention outputs go through L2 into W_o"});
  report->reasons.push_back("gemm_base_k " + std::to_string(2 * t.gemm_base_k) + " needs " + kib_text(4 * 2 * t.gemm_base_k * t.gemm_base_n) +
                            " of L0B (projections), capacity " + kib_text(m.l0b_bytes));
  const EpilogBytes bytes = epilog_bytes(p, t);
  report->reasons.push_back(std::string("outputs ") + (t.epilog_through_l2 ? "go through L2 into W_o: " : "stay on chip into W_o: ") +
                            whole_kib(bytes.through_l2) + " through L2 against " + whole_kib(bytes.on_chip) + " of weights and float32 sums");
}

}  // namespace flashmla
