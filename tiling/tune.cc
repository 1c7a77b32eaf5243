#include "tiling/tune.h"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <vector>

#include "tiling/switches.h"
#include "tiling/tiling.h"

namespace flashmla {
namespace {

constexpr size_t kMostTilings = 256;

using Key = std::array<int32_t, 13>;

struct State {
  std::mutex mutex;
  std::vector<GemmRule> gemms;
  std::vector<PathRule> paths;
  std::map<std::pair<const Machine*, Key>, TilingData> made;
};

State& state() {
  static State* s = new State;  // not destroyed: a call may outlive static objects
  return *s;
}

bool same_key(const GemmRule& a, const GemmRule& b) {
  return a.weight_dtype == b.weight_dtype && a.choice.n == b.choice.n && a.choice.k == b.choice.k;
}

bool same_key(const PathRule& a, const PathRule& b) {
  return a.num_heads == b.num_heads && a.kv_lora_rank == b.kv_lora_rank && a.qk_nope_head_dim == b.qk_nope_head_dim &&
         a.qk_rope_head_dim == b.qk_rope_head_dim && a.v_head_dim == b.v_head_dim && a.weight_dtype == b.weight_dtype && a.cache_dtype == b.cache_dtype;
}

template <typename Rule>
void put(std::vector<Rule>* rules, const Rule& rule) {
  const auto old = std::find_if(rules->begin(), rules->end(), [&](const Rule& other) { return same_key(other, rule); });
  if (old == rules->end()) rules->push_back(rule); else *old = rule;
}

void apply(const State& s, const Problem& p, TilingData* t) {
  for (const GemmRule& rule : s.gemms)
    for (GemmChoice& choice : t->gemm)
      if (rule.weight_dtype == p.weight_dtype && rule.choice.n == choice.n && rule.choice.k == choice.k) choice = rule.choice;
  const PathRule wanted = {p.num_heads, p.kv_lora_rank, p.qk_nope_head_dim, p.qk_rope_head_dim, p.v_head_dim, p.weight_dtype, p.cache_dtype, 0, {}};
  for (const PathRule& rule : s.paths) {
    if (!same_key(rule, wanted)) continue;
    t->path_points = std::min(rule.count, kMostPathPoints);
    std::copy_n(rule.points, t->path_points, t->path);
  }
}

}  // namespace

void add_rule(const GemmRule& rule) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  put(&s.gemms, rule);
  s.made.clear();
}

void add_rule(const PathRule& rule) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  put(&s.paths, rule);
  s.made.clear();
}

void clear_rules() {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.gemms.clear();
  s.paths.clear();
  s.made.clear();
}

void forget_tilings() {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.made.clear();
}

TilingData tuned_tiling(const Problem& p, const Machine& machine) {
  const Key key = {p.hidden_size, p.num_heads, p.num_kv_heads, p.q_lora_rank, p.kv_lora_rank, p.qk_nope_head_dim, p.qk_rope_head_dim,
                   p.v_head_dim, p.rope_mode, p.act_dtype, p.weight_dtype, p.cache_dtype, p.block_size};
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  const auto found = s.made.find({&machine, key});
  if (found != s.made.end()) return found->second;
  TilingData tiling = make_tiling(p, machine);
  apply(s, p, &tiling);
  apply_switches(machine, &tiling);
  if (s.made.size() >= kMostTilings) s.made.clear();
  s.made[{&machine, key}] = tiling;
  return tiling;
}

}  // namespace flashmla
