// Drives the operators with random shapes, ragged batches, all dtypes and several callers at once, to be run under the sanitizers. Results are held to each
// other: a prefill against its tokens one by one, a batch against its sequences alone, attention against plain loops, callers at once against one caller.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "layer.h"

namespace {

int64_t pick(Rng& rng, int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(rng); }

Type pick_type(Rng& rng) { return static_cast<Type>(pick(rng, 0, 2)); }

void require(bool ok, const std::string& what) {
  if (ok) return;
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  std::exit(1);
}

float tolerance(Type type) { return type == Type::f32 ? 5e-5f : type == Type::f16 ? 4e-3f : 3e-2f; }

void require_close(const Tensor& a, const Tensor& b, float limit, const std::string& what) {
  require(a.size() == b.size(), what + ": size");
  float largest = 1e-3f;
  for (int64_t i = 0; i < a.size(); ++i) {
    require(std::isfinite(a.get(i)) && std::isfinite(b.get(i)), what + ": not finite, or never written");
    largest = std::max(largest, std::fabs(b.get(i)));
  }
  for (int64_t i = 0; i < a.size(); ++i)
    require(std::fabs(a.get(i) - b.get(i)) <= limit * largest, what + ": element " + std::to_string(i) + " of " + std::to_string(a.size()) + " is " +
            std::to_string(a.get(i)) + ", expected " + std::to_string(b.get(i)) + ", largest " + std::to_string(largest) + ", " + name_of(a.type));
}

Dims random_dims(Rng& rng) {
  Dims d{pick(rng, 1, 70), pick(rng, 1, 9), pick(rng, 1, 80), 2 * pick(rng, 1, 20), 2 * pick(rng, 1, 10), pick(rng, 1, 40), 0, false, pick(rng, 0, 1) == 1};
  if (pick(rng, 0, 3) == 0) d.heads = pick(rng, 10, 128);
  if (pick(rng, 0, 1)) d.q_latent = pick(rng, 1, 40);
  if (pick(rng, 0, 2) == 0) d.full = true, d.rope = 0;
  return d;
}

// Pages for `lengths` tokens each, in random order from a pool; the padding is a trap.
std::vector<int32_t> random_table(Rng& rng, const std::vector<int64_t>& lengths, int64_t block_size, int64_t& blocks) {
  std::vector<int64_t> need;
  int64_t total = 2, columns = 1;
  for (int64_t n : lengths) {
    need.push_back((n + block_size - 1) / block_size);
    total += need.back();
    columns = std::max(columns, need.back() + 1);
  }
  std::vector<int32_t> pool(total), table(lengths.size() * columns, pick(rng, 0, 1) ? -1 : 2147480000);
  std::iota(pool.begin(), pool.end(), 0);
  std::shuffle(pool.begin(), pool.end(), rng);
  auto next = pool.begin();
  for (size_t b = 0; b < need.size(); ++b)
    for (int64_t i = 0; i < need[b]; ++i) table[b * columns + i] = *next++;
  blocks = total;
  return table;
}

void prefill_against_one_by_one(Rng& rng) {
  Types types{pick_type(rng), pick_type(rng), pick_type(rng)};
  Layer layer(random_dims(rng), types, 300, rng());
  const int64_t prefix = pick(rng, 0, 20), n = pick(rng, 1, 140), block_size = pick(rng, 1, 40);
  int64_t blocks;
  std::vector<int32_t> table = random_table(rng, {prefix + n}, block_size, blocks);
  Tensor at_once = layer.cache(blocks, block_size), stepped = layer.cache(blocks, block_size);
  Tensor hidden = Tensor::normal(types.act, {prefix + n, layer.d.hidden}, rng);
  const int32_t p = static_cast<int32_t>(prefix), t = static_cast<int32_t>(n);
  if (prefix) {
    layer.run(rows(hidden, 0, prefix), at_once, table, {p}, {0});
    layer.run(rows(hidden, 0, prefix), stepped, table, {p}, {0});
  }
  Tensor out = layer.run(rows(hidden, prefix, n), at_once, table, {t}, {p});
  Tensor one_by_one(types.act, out.shape);
  const int64_t row_bytes = layer.d.hidden * bytes_of(types.act);
  for (int32_t i = 0; i < t; ++i) {
    Tensor row = layer.run(rows(hidden, prefix + i, 1), stepped, table, {1}, {p + i});
    std::memcpy(one_by_one.data.data() + i * row_bytes, row.data.data(), row_bytes);
  }
  const Type coarse = types.act == Type::bf16 || types.cache == Type::bf16 ? Type::bf16 : std::max(types.act, types.cache);
  require_close(out, one_by_one, tolerance(coarse), "a prefill against its tokens one by one");
}

void batch_against_alone(Rng& rng) {
  Types types{pick_type(rng), pick_type(rng), pick_type(rng)};
  Layer layer(random_dims(rng), types, 400, rng());
  const int64_t batch = pick(rng, 1, 5), block_size = pick(rng, 1, 70);
  std::vector<int32_t> q_lens, contexts(batch, 0);
  std::vector<int64_t> totals;
  for (int64_t b = 0; b < batch; ++b) {
    q_lens.push_back(static_cast<int32_t>(pick(rng, 0, 3) == 0 ? 0 : pick(rng, 1, pick(rng, 0, 1) ? 4 : 90)));
    totals.push_back(2 * q_lens.back());
  }
  int64_t blocks;
  std::vector<int32_t> table = random_table(rng, totals, block_size, blocks);
  const size_t columns = table.size() / batch;
  Tensor together = layer.cache(blocks, block_size), alone = layer.cache(blocks, block_size);
  for (int step = 0; step < 2; ++step) {
    const int64_t tokens = std::accumulate(q_lens.begin(), q_lens.end(), int64_t{0});
    Tensor hidden = Tensor::normal(types.act, {tokens, layer.d.hidden}, rng), residual = Tensor::normal(types.act, hidden.shape, rng);
    Tensor out = layer.run(hidden, together, table, q_lens, contexts, residual);
    int64_t first = 0;
    for (int64_t b = 0; b < batch; ++b) {
      const std::vector<int32_t> own(table.begin() + b * columns, table.begin() + (b + 1) * columns);
      Tensor single = layer.run(rows(hidden, first, q_lens[b]), alone, own, {q_lens[b]}, {contexts[b]}, rows(residual, first, q_lens[b]));
      require(single.data == rows(out, first, q_lens[b]).data, "a sequence alone and in a batch");
      for (int64_t i = 0; i < single.size(); ++i) require(std::isfinite(single.get(i)), "not finite, or never written");
      first += q_lens[b];
      contexts[b] += q_lens[b];
    }
    require(together.data == alone.data, "the cache of a batch and of its sequences alone");
  }
}

void bad_calls_write_nothing(Rng& rng) {
  Layer layer(random_dims(rng), {Type::f32, Type::f32, Type::f32}, 40, rng());
  Tensor cache = layer.cache(3, 8);
  const Tensor before = cache, hidden = Tensor::normal(Type::f32, {4, layer.d.hidden}, rng);
  struct {
    std::vector<int32_t> table, q_lens, contexts;
  } bad[] = {{{3}, {4}, {0}}, {{-1}, {4}, {0}}, {{2147480000}, {4}, {0}}, {{0}, {-4}, {0}}, {{0}, {4}, {-1}}, {{0}, {3}, {0}}, {{0}, {5}, {0}},
             {{0}, {4}, {5}}, {{0}, {4}, {2147483647}}, {{0}, {2147483647}, {2147483647}}, {{0, 0}, {2, 2}, {0, 0}}, {{1, 1}, {4}, {6}}};
  for (auto& c : bad) {
    bool thrown = false;
    try {
      layer.run(hidden, cache, c.table, c.q_lens, c.contexts);
    } catch (const std::runtime_error& error) {
      thrown = *error.what() != '\0' && fm_last_error() == std::string(error.what());
    }
    require(thrown && cache.data == before.data, "a bad call must throw its words and write nothing");
  }
}

void attention_against_loops(Rng& rng) {
  const Type type = pick_type(rng);
  const int64_t batch = pick(rng, 0, 4), s_q = pick(rng, 1, 6), h_kv = pick(rng, 1, 3), group = pick(rng, 1, 20), d = pick(rng, 1, 90), d_v = pick(rng, 1, d);
  const int64_t page = pick(rng, 1, 70), h_q = h_kv * group;
  const bool causal = pick(rng, 0, 1);
  std::vector<int64_t> lengths;
  for (int64_t b = 0; b < batch; ++b) lengths.push_back(pick(rng, 0, 4) == 0 ? 0 : pick(rng, 1, 300));
  int64_t blocks;
  std::vector<int32_t> table = random_table(rng, lengths, page, blocks);
  const int64_t columns = batch ? static_cast<int64_t>(table.size()) / batch : 1;
  Tensor q = Tensor::normal(type, {batch, s_q, h_q, d}, rng), k(type, {blocks, page, h_kv, d}, NAN);
  auto row_of = [&](int64_t b, int64_t i, int64_t h) { return ((table[b * columns + i / page] * page + i % page) * h_kv + h) * d; };
  std::normal_distribution<float> draw;
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t i = 0; i < lengths[b]; ++i)
      for (int64_t e = 0; e < h_kv * d; ++e) k.set(row_of(b, i, 0) + e, draw(rng));
  Tensor table_t = Tensor::ints(table, {batch, columns}), lens_t(Type::i32, {batch});
  for (int64_t b = 0; b < batch; ++b) lens_t.set(b, static_cast<float>(lengths[b]));
  Tensor out(type, {batch, s_q, h_q, d_v}, NAN), lse(Type::f32, {batch, h_q, s_q}, NAN), out_ref = out, lse_ref = lse;
  AotExtra extra;
  extra.ints = {{"head_dim_v", d_v}, {"default_scale", 1}, {"causal", causal}, {"unified_max", pick(rng, 0, 1)}};
  extra.floats = {{"softmax_scale", 0.0f}, {"phi", 0.0f}};
  call(FlashMLAWithKVCacheInit, FlashMLAWithKVCache, extra, {&q, &k, &table_t, &lens_t, &out, &lse});
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t h = 0; h < h_q; ++h)
      for (int64_t s = 0; s < s_q; ++s) {
        const int64_t keys = causal ? std::max<int64_t>(0, lengths[b] - s_q + s + 1) : lengths[b], at = (b * s_q + s) * h_q + h;
        std::vector<double> logits(keys), sums(d_v, 0.0);
        double total = 0, top = -INFINITY;
        for (int64_t i = 0; i < keys; ++i) {
          for (int64_t e = 0; e < d; ++e) logits[i] += static_cast<double>(q.get(at * d + e)) * k.get(row_of(b, i, h / group) + e) / std::sqrt(static_cast<double>(d));
          top = std::max(top, logits[i]);
        }
        for (int64_t i = 0; i < keys; ++i) {
          const double p = std::exp(logits[i] - top);
          total += p;
          for (int64_t e = 0; e < d_v; ++e) sums[e] += p * k.get(row_of(b, i, h / group) + e);
        }
        for (int64_t e = 0; e < d_v; ++e) out_ref.set(at * d_v + e, keys ? static_cast<float>(sums[e] / total) : 0.0f);
        const int64_t lse_at = (b * h_q + h) * s_q + s;
        if (keys == 0) require(lse.get(lse_at) == INFINITY, "lse of a row without keys");
        if (keys == 0) lse.set(lse_at, 0.0f);
        lse_ref.set(lse_at, keys ? static_cast<float>(top + std::log(total)) : 0.0f);
      }
  require_close(out, out_ref, tolerance(type), "attention against plain loops");
  require_close(lse, lse_ref, 1e-4f, "lse against plain loops");
}

void merge_with_an_empty_side(Rng& rng) {
  const Type type = pick_type(rng);
  const std::vector<int64_t> shape{pick(rng, 0, 3), pick(rng, 1, 3), pick(rng, 1, 9), pick(rng, 1, 70)};
  Tensor a = Tensor::normal(type, shape, rng), b(type, shape, NAN), out(type, shape, NAN);
  Tensor lse_a = Tensor::normal(Type::f32, {shape[0], shape[2], shape[1]}, rng), lse_b(Type::f32, lse_a.shape, pick(rng, 0, 1) ? INFINITY : -INFINITY);
  Tensor lse(Type::f32, lse_a.shape, NAN);
  AotExtra extra;
  call(MergeAttentionStatesInit, MergeAttentionStates, extra, {&a, &lse_a, &b, &lse_b, &out, &lse});
  require(out.data == a.data && lse.data == lse_a.data, "an empty side must not count");
}

void callers_at_once(Rng& rng) {
  Layer layer(random_dims(rng), {Type::f32, Type::bf16, Type::f16}, 200, rng());
  const Tensor hidden = Tensor::normal(Type::f32, {75, layer.d.hidden}, rng);
  auto serve = [&layer, &hidden] {
    Tensor cache = layer.cache(8, 16);
    std::vector<unsigned char> bytes = layer.run(rows(hidden, 0, 70), cache, {3, 1, 7, 0, 5, -1}, {70}, {0}).data;
    for (int32_t i = 70; i < 75; ++i) {
      std::vector<unsigned char> row = layer.run(rows(hidden, i, 1), cache, {3, 1, 7, 0, 5, -1}, {1}, {i}).data;
      bytes.insert(bytes.end(), row.begin(), row.end());
    }
    return bytes;
  };
  const std::vector<unsigned char> expected = serve();
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i)
    callers.emplace_back([&] {
      for (int round = 0; round < 3; ++round) wrong += serve() != expected;
    });
  callers.emplace_back([] {
    for (int n : {1, 3, 2, 5, 2}) fm_set_num_threads(n);
  });
  for (int32_t block : {7, 9})  // callers that fail beside the work of others, each with its own words
    callers.emplace_back([&layer, &hidden, block] {
      Tensor cache = layer.cache(1, 16);
      for (int i = 0; i < 20; ++i) {
        try {
          layer.run(rows(hidden, 0, 3), cache, {block}, {3}, {0});
          std::exit(2);
        } catch (const std::runtime_error& error) {
          require(std::strstr(error.what(), (" " + std::to_string(block) + ",").c_str()), std::string("words of another caller: ") + error.what());
          require(*fm_last_error() != '\0', "the words of an error");
        }
      }
    });
  for (std::thread& caller : callers) caller.join();
  require(wrong == 0, "callers at once gave other bits than one caller");
}

// A child of fork() has none of the pool's threads, and perhaps locks that they held.
void a_forked_child_computes(Rng& rng) {
  Layer layer(random_dims(rng), {Type::f32, Type::f32, Type::f32}, 200, rng());
  const Tensor hidden = Tensor::normal(Type::f32, {60, layer.d.hidden}, rng);
  auto serve = [&] {
    Tensor cache = layer.cache(4, 16);
    return layer.run(hidden, cache, {3, 1, 0, 2}, {60}, {0}).data;
  };
  const std::vector<unsigned char> expected = serve();
  const int threads = fm_num_threads();
  const pid_t child = fork();
  if (child == 0) _exit(serve() == expected && fm_num_threads() == threads ? 0 : 1);
  int status = 0;
  waitpid(child, &status, 0);
  require(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a forked child gave other bits, or died");
  require(serve() == expected, "the parent of a forked child gave other bits");
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 10;
  std::printf("isa %s\n", fm_isa());
  Rng rng(20240607);
  for (int i = 0; i < rounds; ++i) {
    fm_set_num_threads(static_cast<int>(pick(rng, 1, 4)));
    prefill_against_one_by_one(rng);
    batch_against_alone(rng);
    bad_calls_write_nothing(rng);
    for (int j = 0; j < 3; ++j) attention_against_loops(rng);
    merge_with_an_empty_side(rng);
    if (i % 3 == 0) callers_at_once(rng);
#ifndef __SANITIZE_THREAD__  // which ends the child of a process with threads
    if (i % 3 == 1) a_forked_child_computes(rng);
#endif
  }
  std::printf("ok %d rounds\n", rounds);
}
