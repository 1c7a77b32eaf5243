// The drivers: one operator call each.
#pragma once

#include "op_impl/cpu/absorbed-inl.h"
#include "op_impl/cpu/expanded-inl.h"
#include "op_impl/cpu/request_plan-inl.h"

namespace flashmla {
namespace FLASHMLA_NS {

// The layer. Group by group: prolog (project, norm, rope, append to cache), then attention over the cached keys,
// for each KV tile qk -> online_softmax -> pv (attend-inl.h), combine, epilog.
static void flash_mla(const LayerArgs &args, ThreadPool::Session &session) {
  Scratch &scratch = Scratch::instance();
  scratch.reset();
  Workers workers(session, scratch);
  Layer layer(args, workers);
  GroupPlan plan(layer);
  TokenGroup group;
  const Scratch::Mark mark = scratch.mark();
  while (plan.next(&group)) {
    scratch.release(mark);
    prolog(layer, group);
    if (group.path == kExpanded) attention_expanded(layer, group);
    else attention_absorbed(layer, group);
  }
}

// For each KV tile of each work item: qk -> online_softmax -> pv.
static void attend_group(Workers &workers, const AttendArgs &args, const RequestGroup &group) {
  const int64_t d = args.cache.d;
  const auto load_query = [&](const AttentionRequest &r, int64_t row, float *buffer /* [d] */) {
    widen_any(buffer, args.q, group.q_row(r, row) * d, d);
    return static_cast<const float *>(buffer);
  };
  const auto limit = [&](const AttentionRequest &r, int64_t row) { return group.limit(r, row); };
  const AttentionJob job = {group.requests, group.count, d, args.head_dim_v, args.softmax};
  attend_cache(workers, args.cache, job, args.tiling, load_query, limit);
}

// The splits of every row become its output and its lse.
static void combine_group(Workers &workers, const AttendArgs &args, const RequestGroup &group, float *buffers /* [threads, ldo] */) {
  const int64_t ldo = round_up(args.head_dim_v, kPanelAlign);
  workers.run(group.count * group.rows_max, [&](int64_t item, int thread) {
    const AttentionRequest &r = group.requests[item / group.rows_max];
    const int64_t row = item % group.rows_max;
    if (row >= r.rows) return;
    float *out = buffers + thread * ldo;  // [ldo]
    args.lse[group.lse_at(r, row)] = combine(r, row, out, ldo);
    narrow_any(args.out, group.q_row(r, row) * args.head_dim_v, out, args.head_dim_v);
  });
}

// Attention alone: q against a paged cache of any number of kv heads. Group by group: for each KV tile qk -> online_softmax -> pv,
// then combine.
static void flash_mla_with_kvcache(const AttendArgs &args, ThreadPool::Session &session) {
  Scratch &scratch = Scratch::instance();
  scratch.reset();
  Workers workers(session, scratch);
  float *buffers = scratch.alloc<float>(workers.threads() * round_up(args.head_dim_v, kPanelAlign));  // [threads, ldo]
  RequestPlan plan(args, scratch);
  RequestGroup group = {args};
  const Scratch::Mark mark = scratch.mark();
  while (plan.next(&group)) {
    attend_group(workers, args, group);
    combine_group(workers, args, group, buffers);
    scratch.release(mark);
  }
}

// Two partial attentions over disjoint keys become one: weights exp(lse - max). lse of +inf or -inf: a side without keys.
static void merge_attention_states(const MergeArgs &args, ThreadPool::Session &session) {
  Scratch &scratch = Scratch::instance();
  scratch.reset();
  Workers workers(session, scratch);
  float *memory = scratch.alloc<float>(workers.threads() * 2 * args.d);  // [threads][2, d]
  const float inf = __builtin_inff();
  workers.run(args.batch * args.s_q, [&](int64_t item, int thread) {
    const int64_t b = item / args.s_q, token = item % args.s_q;
    float *a_row = memory + thread * 2 * args.d, *b_row = a_row + args.d;  // [d]
    for (int64_t h = 0; h < args.heads; ++h) {
      const int64_t state = (b * args.heads + h) * args.s_q + token, at = (item * args.heads + h) * args.d;
      const float lse_a = args.lse_a[state], lse_b = args.lse_b[state];
      const bool has_a = lse_a != inf && lse_a != -inf, has_b = lse_b != inf && lse_b != -inf;
      if (has_a) widen_any(a_row, args.out_a, at, args.d); else zero_row(a_row, args.d);
      if (has_b) widen_any(b_row, args.out_b, at, args.d); else zero_row(b_row, args.d);
      float lse = inf;
      if (has_a && has_b) {
        const float top = lse_a > lse_b ? lse_a : lse_b;
        const float a_part = __builtin_expf(lse_a - top), b_part = __builtin_expf(lse_b - top), sum = a_part + b_part;
        const float w_a = a_part / sum, w_b = b_part / sum;
        for (int64_t i = 0; i < args.d; ++i) a_row[i] = w_a * a_row[i] + w_b * b_row[i];
        lse = top + __builtin_logf(sum);
      } else if (has_b) {
        copy_row(a_row, b_row, args.d);
        lse = lse_b;
      } else if (has_a) {
        lse = lse_a;
      }
      narrow_any(args.out, at, a_row, args.d);
      args.lse[state] = lse;
    }
  });
}

}  // namespace FLASHMLA_NS
}  // namespace flashmla
