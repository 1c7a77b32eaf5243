// A call of the kernel with data of its own, for programs that run it on the twin.
#pragma once

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "op_impl/twin/api/types.h"
#include "op_impl/twin/twin_launch.h"

namespace flashmla {

struct LayerCase {
  int32_t hidden, heads, rank, d_n, d_r, d_v, q_rank, rope_mode, page;
  bool extras;  // biases and a residual
  std::vector<int32_t> contexts, q_lens;

  int64_t width() const { return rank + d_r; }
  int64_t longest() const {
    int64_t most = 1;
    for (size_t b = 0; b < q_lens.size(); ++b) most = std::max<int64_t>(most, contexts[b] + q_lens[b]);
    return most;
  }
  int64_t pages() const { return (longest() + page - 1) / page; }
  int64_t blocks() const { return pages() * static_cast<int64_t>(q_lens.size()); }
  // Sequences take the blocks from the last one on.
  int64_t slot(int64_t b, int64_t position) const { return (blocks() - 1 - (b * pages() + position / page)) * page + position % page; }
};

inline std::mt19937& generator() {
  static std::mt19937 rng;
  return rng;
}

template <typename T>
std::vector<T> normal(int64_t n, double scale, double mean = 0) {
  std::normal_distribution<double> draw(mean, scale);
  std::vector<T> out(n);
  for (T& x : out) x = T(static_cast<float>(draw(generator())));
  return out;
}

// The arguments of a call and what they point to. The same case draws the same values every time.
template <typename T>
struct LayerData {
  LayerArgs args = {};
  std::vector<T> hidden, cache, w_q, w_kv_a, kv_norm, w_uk, w_uv, w_o, w_q_a, q_norm, b_q_a, b_kv_a, b_o, residual, out;
  std::vector<float> rope;
  std::vector<int32_t> table;

  LayerData(const LayerCase& c, int32_t dtype) {
    generator().seed(7);
    LayerArgs& a = args;
    const int64_t batch = c.q_lens.size(), width = c.width(), k_q = c.q_rank > 0 ? c.q_rank : c.hidden, rope_dim = c.rope_mode == kRopeFull ? c.d_n : c.d_r;
    const int64_t longest = c.longest();
    int64_t tokens = 0;
    for (int32_t length : c.q_lens) tokens += length;
    for (int64_t i = 0; i < c.blocks(); ++i) table.push_back(static_cast<int32_t>(c.blocks() - 1 - i));
    auto weight = [&](int64_t groups, int64_t n, int64_t k) { return normal<T>(packed_size(groups, n, k), 1 / std::sqrt(double(k))); };
    hidden = normal<T>(tokens * c.hidden, 1);
    cache = normal<T>(c.blocks() * c.page * width, 1);
    w_q = weight(c.heads, c.d_n + c.d_r, k_q);
    w_kv_a = weight(1, width, c.hidden);
    kv_norm = normal<T>(c.rank, 0.2, 1);
    w_uk = weight(c.heads, c.rank, c.d_n);
    w_uv = weight(c.heads, c.d_v, c.rank);
    w_o = weight(1, c.hidden, c.heads * c.d_v);
    w_q_a = weight(1, c.q_rank, c.hidden);
    q_norm = normal<T>(c.q_rank, 0.2, 1);
    b_q_a = normal<T>(c.q_rank, 1);
    b_kv_a = normal<T>(width, 1);
    b_o = normal<T>(c.hidden, 1);
    residual = normal<T>(tokens * c.hidden, 1);
    out.assign(tokens * c.hidden, T(NAN));
    rope.resize(longest * rope_dim);
    for (int64_t p = 0; p < longest; ++p) {
      for (int64_t i = 0; i < rope_dim / 2; ++i) {
        const double angle = p * std::pow(10000.0, -2.0 * i / rope_dim);
        rope[p * rope_dim + i] = static_cast<float>(std::cos(angle));
        rope[p * rope_dim + rope_dim / 2 + i] = static_cast<float>(std::sin(angle));
      }
    }
    auto storage = [&](std::vector<T>& t, bool present = true) { return Storage{present ? t.data() : nullptr, present ? dtype : kFloat32}; };
    FlashMLAAttrs& t = a.attrs;
    t.num_heads = c.heads, t.kv_lora_rank = c.rank, t.qk_nope_head_dim = c.d_n, t.qk_rope_head_dim = c.d_r, t.v_head_dim = c.d_v, t.q_lora_rank = c.q_rank, t.rope_mode = c.rope_mode;
    t.q_norm_eps = t.kv_norm_eps = 1e-6f, t.q_lora_scale = 1.25f, t.kv_lora_scale = 0.75f, t.softmax_scale = 1.0f / std::sqrt(float(c.d_n + c.d_r));
    a.num_tokens = tokens;
    a.hidden_size = c.hidden;
    a.hidden = storage(hidden);
    a.cache = {storage(cache), c.blocks(), c.page, 1, width};
    a.batch = {batch, c.pages(), table.data(), c.q_lens.data(), c.contexts.data()};
    a.rope_table = rope.data();
    a.rope_positions = longest;
    a.w_q = storage(w_q), a.w_kv_a = storage(w_kv_a), a.kv_norm = storage(kv_norm), a.w_uk = storage(w_uk), a.w_uv = storage(w_uv), a.w_o = storage(w_o);
    a.w_q_a = storage(w_q_a, c.q_rank > 0), a.q_norm = storage(q_norm, c.q_rank > 0), a.b_q_a = storage(b_q_a, c.q_rank > 0 && c.extras);
    a.b_kv_a = storage(b_kv_a, c.extras), a.b_o = storage(b_o, c.extras), a.residual = storage(residual, c.extras), a.out = storage(out);
    a.problem = {c.hidden, c.heads, 1, c.q_rank, c.rank, c.d_n, c.d_r, c.d_v, c.rope_mode, dtype, dtype, dtype, c.page, batch, 1, longest};
  }
};

}  // namespace flashmla
