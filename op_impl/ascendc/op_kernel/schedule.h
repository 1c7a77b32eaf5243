// Who attends to what: the KV tiles of all passes lie in one line, and every core takes an equal piece of it, whatever the lengths of the
// sequences. A pass that falls to several cores is split; combine merges what they leave. Where sequences have several passes over the same keys,
// as many cores are a team that takes a piece together, a pass each: the tile that one of them fetches serves the others from L2.
#pragma once

#include "common.h"

namespace flashmla {

// Rows that pass over the keys together.
struct Pass {
  int64_t sequence;
  int64_t context;      // keys before the first new token
  int64_t first_token;  // of the sequence in hidden_states
  int64_t head;         // expanded: the head, else 0
  int64_t row0, rows;   // of the sequence: (token, head) pairs when absorbed, tokens when expanded
  int64_t member;       // of a team, that it falls to
  int64_t key0;         // expanded: the sequence's first key in the workspace
  int64_t keys;         // that its last row sees
  int64_t tiles;
};

// Tiles [begin, end) of a pass, on one core.
struct Segment {
  Pass pass;
  int64_t begin, end;
  int64_t line;         // position of the pass's first tile in the line
  __aicore__ inline bool whole() const { return begin == 0 && end == pass.tiles; }
};

template <typename T>
class Schedule {
 public:
  // Heads [first_head, first_head + heads) of an expanded round; absorbed rows take all heads together.
  __aicore__ inline Schedule(const Call<T> &call, int64_t first_head, int64_t heads)
      : call_(call), first_head_(first_head), heads_(call.absorbed() ? 1 : heads), row_heads_(call.absorbed() ? call.d.heads : 1) {
    int64_t side_by_side = 0, most_passes = 1;
    for (int64_t b = 0; b < call.d.batch; ++b) {
      total_ += heads_ * sequence_tiles(call.q_len(b), call.context(b));
      side_by_side += longest_pass(call.q_len(b), call.context(b));
      most_passes = larger(most_passes, ceil_div(rows_of(call.q_len(b)), call.d.blocks.rows));
    }
    piece_ = larger(ceil_div(total_, call.d.cores), call.d.min_tiles);
    if (!call.absorbed() || most_passes == 1 || most_passes > call.d.cores) return;
    // Teams may leave cores over, and members idle where other sequences have more passes: up to a tenth of the time.
    const int64_t piece = larger(ceil_div(side_by_side, call.d.cores / most_passes), call.d.min_tiles);
    if (10 * piece > 11 * piece_) return;
    team_ = most_passes;
    piece_ = piece;
    total_ = side_by_side;
  }

  __aicore__ inline int64_t row_heads() const { return row_heads_; }

  // f(segment) for what falls to one core, in order.
  template <typename F>
  __aicore__ inline void for_core(int64_t core, const F &f) const {
    visit(core / team_ * piece_, smaller((core / team_ + 1) * piece_, total_), core % team_, f);
  }

  // f(pass, position of its first tile) for passes of several cores.
  template <typename F>
  __aicore__ inline void for_split(const F &f) const {
    visit(0, total_, kAllMembers, [&](const Segment &segment) {
      if (splits(segment.pass, segment.line) > 1) f(segment.pass, segment.line);
    });
  }

  // Cores that a pass falls to.
  __aicore__ inline int64_t splits(const Pass &pass, int64_t line) const { return (line + pass.tiles - 1) / piece_ - line / piece_ + 1; }

  // Where the i-th of them leaves its share: a core ends at most one pass that came from before, and begins one that goes on.
  __aicore__ inline int64_t partial_slot(const Pass &pass, int64_t line, int64_t i) const { return slot(line / piece_ + i, pass.member, line); }
  __aicore__ inline int64_t slot_of_core(int64_t core, int64_t line) const { return slot(core / team_, core % team_, line); }

 private:
  static constexpr int64_t kAllMembers = -1;

  __aicore__ inline int64_t slot(int64_t piece, int64_t member, int64_t line) const {
    return 2 * (piece * team_ + member) + (line > piece * piece_ ? 1 : 0);
  }
  __aicore__ inline int64_t rows_of(int64_t tokens) const { return tokens * row_heads_; }
  __aicore__ inline int64_t keys_of(int64_t row_end, int64_t context) const { return context + (row_end - 1) / row_heads_ + 1; }

  __aicore__ inline int64_t sequence_tiles(int64_t tokens, int64_t context) const {
    const int64_t rows = rows_of(tokens), pass_rows = call_.d.blocks.rows;
    int64_t tiles = 0;
    for (int64_t row = 0; row < rows; row += pass_rows)
      tiles += ceil_div(keys_of(smaller(row + pass_rows, rows), context), call_.d.blocks.kv_tile);
    return tiles;
  }

  // Tiles of the last pass of a sequence, which sees all its keys.
  __aicore__ inline int64_t longest_pass(int64_t tokens, int64_t context) const {
    return tokens > 0 ? ceil_div(keys_of(rows_of(tokens), context), call_.d.blocks.kv_tile) : 0;
  }

  template <typename F>
  __aicore__ inline void visit(int64_t begin, int64_t end, int64_t member, const F &f) const {
    int64_t line = 0, first_token = 0, key0 = 0;
    for (int64_t b = 0; b < call_.d.batch && line < end; ++b) {
      const int64_t tokens = call_.q_len(b), context = call_.context(b), rows = rows_of(tokens), pass_rows = call_.d.blocks.rows;
      const int64_t tiles_of_head = team_ > 1 ? longest_pass(tokens, context) : sequence_tiles(tokens, context);
      for (int64_t h = 0; h < heads_ && line < end; ++h) {
        if (line + tiles_of_head <= begin) {
          line += tiles_of_head;
          continue;
        }
        int64_t at = line, i = 0;  // position and number of the pass
        for (int64_t row = 0; row < rows && at < end; row += pass_rows, ++i) {
          const int64_t row_end = smaller(row + pass_rows, rows), keys = keys_of(row_end, context);
          const int64_t tiles = ceil_div(keys, call_.d.blocks.kv_tile);
          const int64_t low = larger(begin, at), high = smaller(end, at + tiles), own = team_ > 1 ? i : 0;
          if (low < high && (member == kAllMembers || own == member))
            f(Segment{{b, context, first_token, first_head_ + h, row, row_end - row, own, key0, keys, tiles}, low - at, high - at, at});
          if (team_ == 1) at += tiles;
        }
        line += tiles_of_head;
      }
      first_token += tokens;
      if (tokens > 0) key0 += context + tokens;
    }
  }

  const Call<T> &call_;
  int64_t first_head_, heads_, row_heads_;
  int64_t team_ = 1, piece_, total_ = 0;  // cores of a team, tiles that it takes, tiles of all
};

}  // namespace flashmla
