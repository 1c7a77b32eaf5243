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
  const int64_t tile_floats = TileStream<float>::floats(args.cache, args.tiling.kv_tile);
  struct Part { int64_t sequence, token, tokens; };  // tokens [token, token + tokens) of a sequence's s_q
  const Scratch::Mark mark = scratch.mark();
  Part next = {0, 0, 0};
  while (next.sequence < args.batch) {
    scratch.release(mark);
    // As many tokens at a time as the splits' outputs have room for; where a cut falls changes no bit.
    const int64_t parts_max = args.batch - next.sequence;
    Part *parts = scratch.alloc<Part>(parts_max);
    AttentionRequest *requests = scratch.alloc<AttentionRequest>(parts_max * h_kv);
    int64_t count = 0, room = args.tiling.partial_bytes;
    while (next.sequence < args.batch && count < parts_max && room > 0) {
      const int64_t s_kv = args.cache_seqlens[next.sequence];
      SeqTiling seq = make_seq_tiling(args.problem, args.tiling, args.s_q, s_kv);
      if (s_kv == 0) seq.num_splits = 0;
      const int64_t token_bytes = args.h_q * (seq.num_splits > 0 ? seq.num_splits : 1) * ldo * int64_t(sizeof(float));
      const int64_t left = args.s_q - next.token, affordable = room / token_bytes;
      Part &part = parts[count];
      part = {next.sequence, next.token, affordable >= left ? left : affordable > 0 ? affordable : count == 0 ? 1 : 0};
      if (part.tokens == 0) break;
      room -= part.tokens * token_bytes;
      for (int64_t h = 0; h < h_kv; ++h) {
        AttentionRequest &r = requests[count * h_kv + h];
        r = {args.block_table + part.sequence * args.max_blocks, count, h, part.tokens * per_kv, s_kv, seq, 0, 0, nullptr, nullptr, nullptr};
        r.o = scratch.alloc<float>(split_rows(r) * ldo);
        r.m = scratch.alloc<float>(split_rows(r));
        r.l = scratch.alloc<float>(split_rows(r));
      }
      ++count;
      next.token += part.tokens;
      if (next.token == args.s_q) next = {next.sequence + 1, 0, 0};
    }
    const auto token_of = [&](const AttentionRequest &r, int64_t row) { return parts[r.sequence].token + row / per_kv; };
    const auto q_row = [&](const AttentionRequest &r, int64_t row) {  // of q and out, [B, s_q, h_q]
      return (parts[r.sequence].sequence * args.s_q + token_of(r, row)) * args.h_q + r.kv_head * per_kv + row % per_kv;
    };
    float *tile_memory = scratch.alloc<float>(workers.threads() * tile_floats);
    with_dtype(args.cache.data.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      attend_requests(workers, requests, count * h_kv, d, args.head_dim_v, args.softmax, args.tiling,
                      [&](int thread) { return TileStream<T>(args.cache, args.head_dim_v, args.tiling.kv_tile, tile_memory + thread * tile_floats); },
                      [&](const AttentionRequest &r, int64_t row, float *buffer) {
                        widen_any(buffer, args.q, q_row(r, row) * d, d);
                        return static_cast<const float *>(buffer);
                      },
                      [&](const AttentionRequest &r, int64_t row) {
                        const int64_t limit = args.causal ? r.s_kv - args.s_q + token_of(r, row) + 1 : r.s_kv;  // bottom-right
                        return limit > 0 ? limit : 0;
                      });
    });
    int64_t rows_max = 0;
    for (int64_t i = 0; i < count; ++i) rows_max = parts[i].tokens * per_kv > rows_max ? parts[i].tokens * per_kv : rows_max;
    workers.run(count * h_kv * rows_max, [&](int64_t item, int thread) {
      const AttentionRequest &r = requests[item / rows_max];
      const int64_t row = item % rows_max;
      if (row >= r.rows) return;
      float *out = row_buffer + thread * ldo;
      const float lse = combine(r, row, out, ldo);
      narrow_any(args.out, q_row(r, row) * args.head_dim_v, out, args.head_dim_v);
      const int64_t head = r.kv_head * per_kv + row % per_kv;
      args.lse[(parts[r.sequence].sequence * args.h_q + head) * args.s_q + token_of(r, row)] = lse;
    });
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
