// Runs a few calls of the kernel on the twin and writes what they leave: outputs and caches as float32. A fault that the twin finds goes to stdout
// and ends the program with 3. Calls: both paths, both kinds of RoPE, splits, tails of every kind, padded dimensions, biases and a residual.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "op_impl/twin/api/types.h"
#include "op_impl/twin/twin_launch.h"

extern "C" void flash_mla_bf16(uint8_t*, uint8_t*, uint8_t*, uint8_t*, uint8_t*, uint8_t*, uint8_t*, uint8_t*, uint8_t*, uint8_t*, uint8_t*, uint8_t*, uint8_t*, uint8_t*, uint8_t*, uint8_t*,
                               uint8_t*, uint8_t*, uint8_t*, uint8_t*, uint8_t*) {}  // half alone is run here

namespace {

using namespace flashmla;

struct Case {
  int32_t hidden, heads, rank, d_n, d_r, d_v, q_rank, rope_mode, page;
  bool extras;  // biases and a residual
  std::vector<int32_t> contexts, q_lens;
};

const Case kCases[] = {
    {96, 6, 64, 32, 16, 32, 48, kRopeDecoupled, 16, true, {1500, 0, 130}, {1, 0, 2}},   // absorbed, split over cores
    {80, 40, 32, 16, 8, 16, 0, kRopeDecoupled, 16, false, {600, 37}, {2, 1}},           // absorbed, several passes of rows
    {96, 3, 64, 32, 16, 32, 48, kRopeDecoupled, 16, true, {0, 33}, {290, 21}},          // expanded prefill
    {96, 3, 64, 32, 0, 32, 0, kRopeFull, 16, false, {90, 300}, {40, 1}},                // RoPE over the whole head
    {27, 3, 20, 10, 4, 6, 7, kRopeDecoupled, 7, true, {40, 3}, {1, 19}},                // nothing is a multiple of anything
    {600, 4, 128, 64, 32, 64, 0, kRopeDecoupled, 64, true, {20}, {150}},                // wide projections: several blocks of rows and columns
};

std::mt19937 rng;

std::vector<half> normal(int64_t n, double scale, double mean = 0) {
  std::normal_distribution<double> draw(mean, scale);
  std::vector<half> out(n);
  for (half& x : out) x = half(static_cast<float>(draw(rng)));
  return out;
}

void run(const Case& c, std::FILE* file) {
  rng.seed(7);
  LayerArgs a = {};
  const int64_t batch = c.q_lens.size(), width = c.rank + c.d_r, k_q = c.q_rank > 0 ? c.q_rank : c.hidden, rope_dim = c.rope_mode == kRopeFull ? c.d_n : c.d_r;
  int64_t tokens = 0, pages = 1, longest = 1;
  for (int64_t b = 0; b < batch; ++b) {
    tokens += c.q_lens[b];
    longest = std::max<int64_t>(longest, c.contexts[b] + c.q_lens[b]);
  }
  pages = (longest + c.page - 1) / c.page;
  std::vector<int32_t> table(batch * pages);
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(table.size() - 1 - i);
  auto weight = [&](int64_t groups, int64_t n, int64_t k) { return normal(packed_size(groups, n, k), 1 / std::sqrt(double(k))); };
  std::vector<half> hidden = normal(tokens * c.hidden, 1), cache = normal(int64_t(table.size()) * c.page * width, 1), w_q = weight(c.heads, c.d_n + c.d_r, k_q),
                    w_kv_a = weight(1, width, c.hidden), kv_norm = normal(c.rank, 0.2, 1), w_uk = weight(c.heads, c.rank, c.d_n), w_uv = weight(c.heads, c.d_v, c.rank),
                    w_o = weight(1, c.hidden, c.heads * c.d_v), w_q_a = weight(1, c.q_rank, c.hidden), q_norm = normal(c.q_rank, 0.2, 1), b_q_a = normal(c.q_rank, 1),
                    b_kv_a = normal(width, 1), b_o = normal(c.hidden, 1), residual = normal(tokens * c.hidden, 1), out(tokens * c.hidden, half(NAN));
  std::vector<float> rope(longest * rope_dim);
  for (int64_t p = 0; p < longest; ++p) {
    for (int64_t i = 0; i < rope_dim / 2; ++i) {
      const double angle = p * std::pow(10000.0, -2.0 * i / rope_dim);
      rope[p * rope_dim + i] = static_cast<float>(std::cos(angle));
      rope[p * rope_dim + rope_dim / 2 + i] = static_cast<float>(std::sin(angle));
    }
  }
  auto storage = [](std::vector<half>& t, bool present = true) { return Storage{present ? t.data() : nullptr, present ? kFloat16 : kFloat32}; };
  FlashMLAAttrs& t = a.attrs;
  t.num_heads = c.heads, t.kv_lora_rank = c.rank, t.qk_nope_head_dim = c.d_n, t.qk_rope_head_dim = c.d_r, t.v_head_dim = c.d_v, t.q_lora_rank = c.q_rank, t.rope_mode = c.rope_mode;
  t.q_norm_eps = t.kv_norm_eps = 1e-6f, t.q_lora_scale = 1.25f, t.kv_lora_scale = 0.75f, t.softmax_scale = 1.0f / std::sqrt(float(c.d_n + c.d_r));
  a.num_tokens = tokens;
  a.hidden_size = c.hidden;
  a.hidden = storage(hidden);
  a.cache = {storage(cache), int64_t(table.size()), c.page, 1, width};
  a.batch = {batch, pages, table.data(), c.q_lens.data(), c.contexts.data()};
  a.rope_table = rope.data();
  a.rope_positions = longest;
  a.w_q = storage(w_q), a.w_kv_a = storage(w_kv_a), a.kv_norm = storage(kv_norm), a.w_uk = storage(w_uk), a.w_uv = storage(w_uv), a.w_o = storage(w_o);
  a.w_q_a = storage(w_q_a, c.q_rank > 0), a.q_norm = storage(q_norm, c.q_rank > 0), a.b_q_a = storage(b_q_a, c.q_rank > 0 && c.extras);
  a.b_kv_a = storage(b_kv_a, c.extras), a.b_o = storage(b_o, c.extras), a.residual = storage(residual, c.extras), a.out = storage(out);
  a.problem = {c.hidden, c.heads, 1, c.q_rank, c.rank, c.d_n, c.d_r, c.d_v, c.rope_mode, kFloat16, kFloat16, kFloat16, c.page, batch, 1, longest};
  twin_flash_mla(a, *find_machine("ascend950pr_950z"), twin::Options());
  for (const std::vector<half>* values : {&out, &cache}) {
    for (half x : *values) {
      const float wide = x;
      std::fwrite(&wide, 4, 1, file);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  std::FILE* file = std::fopen(argv[1], "wb");
  try {
    for (const Case& c : kCases) run(c, file);
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    std::fclose(file);
    return 3;
  }
  std::fclose(file);
  return 0;
}
