// The rows of flash_mla_with_kvcache as requests, in groups whose outputs by split fit into the tiling's partial_bytes.
#pragma once

#include "op_impl/cpu/work_items-inl.h"

namespace flashmla {
namespace FLASHMLA_NS {

// Tokens [token, token + tokens) of a sequence's s_q.
struct TokenRange { int64_t sequence, token, tokens; };

// Requests that are attended together. Row i of one is (token, head) i of its part: the heads of its kv head, token by token.
struct RequestGroup {
  const AttendArgs &args;
  const TokenRange *parts = nullptr;     // [count / h_kv]
  AttentionRequest *requests = nullptr;  // [count], the kv heads of a part behind each other
  int64_t count = 0;
  int64_t rows_max = 0;                  // of a request

  int64_t per_kv() const { return args.h_q / args.cache.h_kv; }
  int64_t sequence(const AttentionRequest &r) const { return parts[r.part].sequence; }
  int64_t token(const AttentionRequest &r, int64_t row) const { return parts[r.part].token + row / per_kv(); }
  int64_t head(const AttentionRequest &r, int64_t row) const { return r.kv_head * per_kv() + row % per_kv(); }
  // Its row of q and out, [B, s_q, h_q], and its element of lse, [B, h_q, s_q].
  int64_t q_row(const AttentionRequest &r, int64_t row) const { return (sequence(r) * args.s_q + token(r, row)) * args.h_q + head(r, row); }
  int64_t lse_at(const AttentionRequest &r, int64_t row) const { return (sequence(r) * args.h_q + head(r, row)) * args.s_q + token(r, row); }
  // Keys that a row sees: the causal diagonal is aligned bottom-right.
  int64_t limit(const AttentionRequest &r, int64_t row) const {
    const int64_t keys = args.causal ? r.s_kv - args.s_q + token(r, row) + 1 : r.s_kv;
    return keys > 0 ? keys : 0;
  }
};

// Walks the tokens in order and cuts them into groups; where a cut falls changes no bit, since rows never mix.
class RequestPlan {
 public:
  RequestPlan(const AttendArgs &args, Scratch &scratch) : args_(args), scratch_(scratch) {}

  // The group's memory is taken from the scratch.
  bool next(RequestGroup *group) {
    const int64_t h_kv = args_.cache.h_kv, parts_max = args_.batch - sequence_;
    if (parts_max == 0) return false;
    TokenRange *parts = scratch_.alloc<TokenRange>(parts_max);                        // [parts_max]
    AttentionRequest *requests = scratch_.alloc<AttentionRequest>(parts_max * h_kv);  // [parts_max, h_kv]
    int64_t count = 0, room = args_.tiling.partial_bytes, tokens_max = 0;
    while (sequence_ < args_.batch && room > 0) {
      const int64_t s_kv = args_.cache_seqlens[sequence_];
      SeqTiling seq = make_seq_tiling(args_.problem, args_.tiling, args_.s_q, s_kv);
      if (s_kv == 0) seq.num_splits = 0;
      const int64_t tokens = affordable_tokens(seq, room, count == 0);
      if (tokens == 0) break;
      for (int64_t h = 0; h < h_kv; ++h) {
        AttentionRequest &r = requests[count * h_kv + h];
        r = {args_.block_table + sequence_ * args_.max_blocks, count, h, tokens * group->per_kv(), s_kv, seq, 0, 0, nullptr, nullptr, nullptr};
        alloc_outputs(scratch_, r, ldo());
      }
      parts[count++] = {sequence_, token_, tokens};
      room -= tokens * token_bytes(seq);
      tokens_max = tokens > tokens_max ? tokens : tokens_max;
      token_ += tokens;
      if (token_ == args_.s_q) ++sequence_, token_ = 0;
    }
    group->parts = parts;
    group->requests = requests;
    group->count = count * h_kv;
    group->rows_max = tokens_max * group->per_kv();
    return true;
  }

 private:
  int64_t ldo() const { return round_up(args_.head_dim_v, kPanelAlign); }
  int64_t token_bytes(const SeqTiling &seq) const {
    return args_.h_q * (seq.num_splits > 0 ? seq.num_splits : 1) * ldo() * int64_t(sizeof(float));
  }
  // What is left of the sequence's tokens, as far as the room goes; a group takes one token at least.
  int64_t affordable_tokens(const SeqTiling &seq, int64_t room, bool first) const {
    const int64_t left = args_.s_q - token_, affordable = room / token_bytes(seq);
    return affordable >= left ? left : affordable > 0 ? affordable : first ? 1 : 0;
  }

  const AttendArgs &args_;
  Scratch &scratch_;
  int64_t sequence_ = 0, token_ = 0;  // the next token to place
};

}  // namespace FLASHMLA_NS
}  // namespace flashmla
