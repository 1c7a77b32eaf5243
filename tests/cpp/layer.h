// A random MLA layer for the driver: attributes, packed weights, and calls on a paged cache.
#pragma once

#include <algorithm>
#include <numeric>

#include "aot.h"

struct Dims {
  int64_t hidden, heads, latent, nope, rope, value, q_latent;
  bool full;  // RoPE over the whole head, nothing decoupled
  bool bias;
};

struct Types {
  Type act, weight, cache;
};

// [groups * n, k] random outputs, packed: a group is padded to a multiple of 16 outputs and cut into panels of 64, each stored as [k][width].
inline Tensor packed(Type type, int64_t groups, int64_t n, int64_t k, Rng& rng) {
  const int64_t n16 = (n + 15) / 16 * 16;
  Tensor out(type, {groups * n16 * k});
  std::normal_distribution<float> draw(0.0f, 1.0f / std::sqrt(static_cast<float>(k)));
  for (int64_t g = 0; g < groups; ++g)
    for (int64_t first = 0; first < n16; first += 64) {
      const int64_t width = std::min<int64_t>(64, n16 - first);
      for (int64_t i = 0; i < k; ++i)
        for (int64_t j = 0; j < width && first + j < n; ++j) out.set((g * n16 + first) * k + i * width + j, draw(rng));
    }
  return out;
}

struct Layer {
  Dims d;
  Types t;
  AotExtra extra;
  Tensor rope, w_q, w_kv_a, kv_norm, w_uk, w_uv, w_o, w_q_a, q_norm, b_q_a, b_kv_a, b_o;

  Layer(Dims dims, Types types, int64_t positions, unsigned seed) : d(dims), t(types) {
    Rng rng(seed);
    const int64_t rotated = d.full ? d.nope : d.rope;
    rope = Tensor(Type::f32, {positions, rotated});
    for (int64_t p = 0; p < positions; ++p)
      for (int64_t i = 0; i < rotated / 2; ++i) {
        const double angle = static_cast<double>(p) * std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(rotated));
        rope.set(p * rotated + i, static_cast<float>(std::cos(angle)));
        rope.set(p * rotated + rotated / 2 + i, static_cast<float>(std::sin(angle)));
      }
    w_q = packed(t.weight, d.heads, d.nope + d.rope, d.q_latent ? d.q_latent : d.hidden, rng);
    w_kv_a = packed(t.weight, 1, d.latent + d.rope, d.hidden, rng);
    kv_norm = Tensor::normal(t.weight, {d.latent}, rng, 0.2f, 1.0f);
    w_uk = packed(t.weight, d.heads, d.latent, d.nope, rng);
    w_uv = packed(t.weight, d.heads, d.value, d.latent, rng);
    w_o = packed(t.weight, 1, d.hidden, d.heads * d.value, rng);
    if (d.q_latent) {
      w_q_a = packed(t.weight, 1, d.q_latent, d.hidden, rng);
      q_norm = Tensor::normal(t.weight, {d.q_latent}, rng, 0.2f, 1.0f);
    }
    if (d.bias) {
      if (d.q_latent) b_q_a = Tensor::normal(t.weight, {d.q_latent}, rng);
      b_kv_a = Tensor::normal(t.weight, {d.latent + d.rope}, rng);
      b_o = Tensor::normal(t.weight, {d.hidden}, rng);
    }
    extra.ints = {{"num_heads", d.heads}, {"kv_lora_rank", d.latent}, {"qk_nope_head_dim", d.nope}, {"qk_rope_head_dim", d.rope},
                  {"v_head_dim", d.value}, {"q_lora_rank", d.q_latent}, {"rope_mode", d.full}, {"index_topk", 0},
                  {"unified_max", 0}, {"deterministic", 1}};
    extra.floats = {{"q_norm_eps", 1e-6f}, {"kv_norm_eps", 1e-6f}, {"q_lora_scale", 1.0f}, {"kv_lora_scale", 1.0f},
                    {"softmax_scale", 1.0f / std::sqrt(static_cast<float>(d.nope + d.rope))},
                    {"phi", 0.0f}};
  }

  Tensor cache(int64_t blocks, int64_t block_size) const { return Tensor(t.cache, {blocks, block_size, d.latent + d.rope}, NAN); }

  // hidden [T, hidden] or [B, S, hidden]; table [B, columns]. Safe to call from several threads: the attributes are copied.
  Tensor run(Tensor hidden, Tensor& kv_cache, std::vector<int32_t> table, std::vector<int32_t> q_lens, std::vector<int32_t> contexts, Tensor residual = {}) {
    const int64_t batch = static_cast<int64_t>(q_lens.size());
    Tensor table_t = Tensor::ints(table, {batch, batch ? static_cast<int64_t>(table.size()) / batch : 1});
    Tensor q_lens_t = Tensor::ints(q_lens, {batch}), contexts_t = Tensor::ints(contexts, {batch});
    Tensor out(t.act, hidden.shape, NAN);
    AotExtra own = extra;
    call(FlashMLAInit, FlashMLA, own,
         {&hidden, &kv_cache, &table_t, &q_lens_t, &contexts_t, &rope, &w_q, &w_kv_a, &kv_norm, &w_uk, &w_uv, &w_o, &w_q_a, &q_norm, &b_q_a, &b_kv_a, &b_o,
          &residual, &out});
    return out;
  }
};

// Rows [first, first + n) of a [T, width] tensor.
inline Tensor rows(const Tensor& x, int64_t first, int64_t n) {
  const int64_t width = x.shape.back(), row_bytes = width * bytes_of(x.type);
  Tensor out(x.type, {n, width});
  if (n) std::memcpy(out.data.data(), x.data.data() + first * row_bytes, n * row_bytes);
  return out;
}
