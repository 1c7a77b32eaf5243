// The drivers: one operator call each.
#pragma once

#include "op_impl/cpu/expanded-inl.h"

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

// Attention alone: q against a paged cache of any number of kv heads.
static void flash_mla_with_kvcache(const AttendArgs &args, ThreadPool::Session &session) {
  Scratch &scratch = Scratch::instance();
  scratch.reset();
  Workers workers(session, scratch);
  const int64_t h_kv = args.cache.h_kv, per_kv = args.h_q / h_kv, d = args.cache.d;
  const int64_t ldo = round_up(args.head_dim_v, kPanelAlign);
  float *row_buffer = scratch.alloc<float>(workers.threads() * ldo);
  const Scratch::Mark mark = scratch.mark();
  // Sequence by sequence where the splits' outputs of all would be large.
  for (int64_t first = 0; first < args.batch;) {
    scratch.release(mark);
    AttentionRequest *requests = scratch.alloc<AttentionRequest>((args.batch - first) * h_kv);
    int64_t count = 0, bytes = 0, b = first;
    for (; b < args.batch && (b == first || bytes < kPartialBytes); ++b) {
      const int64_t s_kv = args.cache_seqlens[b];
      SeqTiling seq = make_seq_tiling(args.problem, args.tiling, args.s_q, s_kv);
      if (s_kv == 0) seq.num_splits = 0;
      for (int64_t h = 0; h < h_kv; ++h) {
        AttentionRequest &r = requests[count++];
        r = {args.block_table + b * args.max_blocks, b, h, args.s_q * per_kv, s_kv, seq, 0, 0, nullptr, nullptr, nullptr};
        r.o = scratch.alloc<float>(split_rows(r) * ldo);
        r.m = scratch.alloc<float>(split_rows(r));
        r.l = scratch.alloc<float>(split_rows(r));
        bytes += split_rows(r) * ldo * int64_t(sizeof(float));
      }
    }
    attend_requests(workers, requests, count, d, args.head_dim_v, args.softmax_scale, args.tiling,
                    CacheTiles(workers, args.cache, args.head_dim_v, args.tiling),
                    [&](const AttentionRequest &r, int64_t row, float *buffer) {
                      const int64_t token = row / per_kv, head = r.kv_head * per_kv + row % per_kv;
                      widen_any(buffer, args.q, ((r.sequence * args.s_q + token) * args.h_q + head) * d, d);
                      return static_cast<const float *>(buffer);
                    },
                    [&](const AttentionRequest &r, int64_t row) {
                      const int64_t limit = args.causal ? r.s_kv - args.s_q + row / per_kv + 1 : r.s_kv;  // bottom-right
                      return limit > 0 ? limit : 0;
                    });
    workers.run(count * args.s_q, [&](int64_t item, int thread) {
      const AttentionRequest &r = requests[item / args.s_q];
      float *out = row_buffer + thread * ldo;
      const int64_t token = item % args.s_q;
      for (int64_t g = 0; g < per_kv; ++g) {
        const int64_t head = r.kv_head * per_kv + g;
        const float lse = combine(r, token * per_kv + g, out, ldo);
        narrow_any(args.out, ((r.sequence * args.s_q + token) * args.h_q + head) * args.head_dim_v, out, args.head_dim_v);
        args.lse[(r.sequence * args.h_q + head) * args.s_q + token] = lse;
      }
    });
    first = b;
  }
}

// Two partial attentions over disjoint keys become one: weights exp(lse - max). lse of +inf or -inf: a side without keys.
static void merge_attention_states(const MergeArgs &args, ThreadPool::Session &session) {
  Scratch &scratch = Scratch::instance();
  scratch.reset();
  Workers workers(session, scratch);
  float *memory = scratch.alloc<float>(workers.threads() * 2 * args.d);
  const float inf = __builtin_inff();
  workers.run(args.batch * args.s_q, [&](int64_t item, int thread) {
    const int64_t b = item / args.s_q, token = item % args.s_q;
    float *a_row = memory + thread * 2 * args.d, *b_row = a_row + args.d;
    for (int64_t h = 0; h < args.heads; ++h) {
      const int64_t state = (b * args.heads + h) * args.s_q + token, at = (item * args.heads + h) * args.d;
      const float lse_a = args.lse_a[state], lse_b = args.lse_b[state];
      const bool has_a = lse_a != inf && lse_a != -inf, has_b = lse_b != inf && lse_b != -inf;
      if (has_a) widen_any(a_row, args.out_a, at, args.d); else zero_row(a_row, args.d);
      if (has_b) widen_any(b_row, args.out_b, at, args.d); else zero_row(b_row, args.d);
      float lse = inf;
      if (has_a && has_b) {
        const float top = lse_a > lse_b ? lse_a : lse_b;
        const float w_a = __builtin_expf(lse_a - top), w_b = __builtin_expf(lse_b - top), sum = w_a + w_b;
        for (int64_t i = 0; i < args.d; ++i) a_row[i] = (w_a * a_row[i] + w_b * b_row[i]) / sum;
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
