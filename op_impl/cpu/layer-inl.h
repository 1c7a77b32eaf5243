// The layer as its stages see it, and how the tokens of a call fall into groups.
#pragma once

#include "op_impl/cpu/gemm-inl.h"
#include "tiling/tiles.h"

namespace flashmla {
namespace FLASHMLA_NS {

// Consecutive new tokens of one sequence.
struct Piece {
  const int32_t *blocks;  // [max_blocks]: the sequence's row of the block table
  int64_t row;            // of the first token in hidden_states
  int64_t tokens;
  int64_t position;       // of the first token
  SeqTiling seq;          // of the whole sequence
};

// Consecutive rows of hidden_states that take the same path together.
struct TokenGroup {
  int64_t row, tokens;    // rows [row, row + tokens)
  int32_t path;           // AttentionPath
  const Piece *pieces;    // [num_pieces]
  int64_t num_pieces;
};

// s as float32 [n], or nullptr where it is absent.
static const float *widened(Scratch &scratch, const ConstStorage &s, int64_t n) {
  if (!s.present()) return nullptr;
  float *copy = scratch.alloc<float>(n);  // [n]
  widen_any(copy, s, 0, n);
  return copy;
}

struct Layer {
  const LayerArgs &args;
  Workers &workers;
  const TilingData &tiling;
  int64_t heads, rank, d_n, d_r, d_v, hidden, q_rank;
  bool rope_full;
  int64_t rope_dim;

  // float32 copies of the small vectors
  const float *kv_norm;         // [rank]
  const float *q_norm, *b_q_a;  // [q_rank] or nullptr
  const float *b_kv_a;          // [rank + d_r] or nullptr
  const float *b_o;             // [hidden] or nullptr
  GemmScratch gemm;

  // of the current group, written by prolog
  const float *x = nullptr;     // [tokens, hidden] float32 hidden states
  const float *q_in = nullptr;  // [tokens, ld_q_in]: what w_q multiplies, x or the normed low-rank q
  int64_t ld_q_in = 0;
  float *q = nullptr;           // [tokens, heads * ld_q], absorbed paths only

  Layer(const LayerArgs &layer_args, Workers &layer_workers)
      : args(layer_args), workers(layer_workers), tiling(args.tiling), heads(args.attrs.num_heads), rank(args.attrs.kv_lora_rank),
        d_n(args.attrs.qk_nope_head_dim), d_r(args.attrs.qk_rope_head_dim), d_v(args.attrs.v_head_dim), hidden(args.hidden_size),
        q_rank(args.attrs.q_lora_rank), rope_full(args.attrs.rope_mode == kRopeFull), rope_dim(rope_full ? d_n : d_r),
        kv_norm(widened(workers.scratch(), args.kv_norm, rank)), q_norm(widened(workers.scratch(), args.q_norm, q_rank)),
        b_q_a(widened(workers.scratch(), args.b_q_a, q_rank)), b_kv_a(widened(workers.scratch(), args.b_kv_a, rank + d_r)),
        b_o(widened(workers.scratch(), args.b_o, hidden)),
        gemm(workers, tiling) {}

  int64_t d_q() const { return d_n + d_r; }
  int64_t q_width() const { return q_rank > 0 ? q_rank : hidden; }
  int64_t ld_q() const { return round_up(d_q(), kPanelAlign); }       // one head of q, padded
  int64_t ld_v() const { return round_up(d_v, kPanelAlign); }
  int64_t ld_latent() const { return round_up(rank, kPanelAlign); }
  int64_t ld_query() const { return ld_latent() + round_up(d_r, kPanelAlign); }  // one head of an absorbed query
  const float *rope_row(int64_t position) const {  // [rope_dim]
    return args.rope_table + position * rope_dim;
  }
};

static inline Epilog layer_epilog(const Layer &layer, const TokenGroup &g) {
  return {layer.args.out, layer.args.residual, g.row, layer.b_o, layer.hidden};
}

// Walks the tokens in order and cuts them into groups. Neighbours with the same path share a group, so that the weights
// are read once for all of them; where a cut falls changes no bit, since rows never mix.
class GroupPlan {
 public:
  explicit GroupPlan(const Layer &layer) : layer_(layer), pieces_(layer.workers.scratch().alloc<Piece>(layer.args.batch.size + 1)) {}

  bool next(TokenGroup *group) {
    const Batch &batch = layer_.args.batch;
    *group = {row_, 0, -1, pieces_, 0};
    int64_t partial_bytes = 0;
    while (sequence_ < batch.size) {
      const int64_t s_q = batch.q_seq_lens[sequence_];
      if (done_ == s_q) {
        ++sequence_;
        done_ = 0;
        continue;
      }
      const int64_t context = batch.context_lens[sequence_];
      const SeqTiling seq = make_seq_tiling(layer_.args.problem, layer_.tiling, s_q, context + s_q);
      if (group->path >= 0 && seq.path != group->path) break;
      const bool absorbed = seq.path != kExpanded;
      int64_t room = (absorbed ? layer_.tiling.absorbed_tokens : layer_.tiling.token_group) - group->tokens;
      const int64_t token_bytes = layer_.heads * seq.num_splits * layer_.ld_latent() * int64_t(sizeof(float));
      if (absorbed) {
        const int64_t affordable = (layer_.tiling.partial_bytes - partial_bytes) / token_bytes;
        room = room < affordable ? room : affordable;
        if (room < 1 && group->tokens == 0) room = 1;
      }
      if (room < 1) break;
      const int64_t tokens = s_q - done_ < room ? s_q - done_ : room;
      group->path = seq.path;
      pieces_[group->num_pieces++] = {batch.block_table + sequence_ * batch.max_blocks, row_, tokens, context + done_, seq};
      partial_bytes += absorbed ? tokens * token_bytes : 0;
      group->tokens += tokens;
      row_ += tokens;
      done_ += tokens;
    }
    return group->tokens > 0;
  }

 private:
  const Layer &layer_;
  Piece *pieces_;  // [B + 1]
  int64_t sequence_ = 0, done_ = 0, row_ = 0;
};

}  // namespace FLASHMLA_NS
}  // namespace flashmla
