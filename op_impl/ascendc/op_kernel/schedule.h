// Who attends to what: the KV tiles of all passes lie in one line, and every core takes an equal piece of it, whatever the lengths of the
// sequences. A pass that falls to several cores is split; combine merges what they leave.
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
    int64_t total = 0;
    for (int64_t b = 0; b < call.d.batch; ++b) total += heads_ * sequence_tiles(call.q_len(b), call.context(b));
    per_core_ = larger(ceil_div(total, call.d.cores), call.d.min_tiles);
    total_ = total;
  }

  __aicore__ inline int64_t row_heads() const { return row_heads_; }

  // f(segment) for what falls to one core, in order.
  template <typename F>
  __aicore__ inline void for_core(int64_t core, const F &f) const {
    visit(core * per_core_, smaller((core + 1) * per_core_, total_), f);
  }

  // f(pass, position of its first tile) for passes of several cores.
  template <typename F>
  __aicore__ inline void for_split(const F &f) const {
    visit(0, total_, [&](const Segment &segment) {
      if (first_core(segment.line) != last_core(segment.line, segment.pass.tiles)) f(segment.pass, segment.line);
    });
  }

  __aicore__ inline int64_t first_core(int64_t line) const { return line / per_core_; }
  __aicore__ inline int64_t last_core(int64_t line, int64_t tiles) const { return (line + tiles - 1) / per_core_; }

  // Where a core leaves its share of a split pass: a core ends at most one pass that came from before, and begins one that goes on.
  __aicore__ inline int64_t partial_slot(int64_t core, int64_t line) const { return 2 * core + (line > core * per_core_ ? 1 : 0); }

 private:
  __aicore__ inline int64_t rows_of(int64_t tokens) const { return tokens * row_heads_; }
  __aicore__ inline int64_t keys_of(int64_t row_end, int64_t context) const { return context + (row_end - 1) / row_heads_ + 1; }

  __aicore__ inline int64_t sequence_tiles(int64_t tokens, int64_t context) const {
    const int64_t rows = rows_of(tokens), pass_rows = call_.d.blocks.rows;
    int64_t tiles = 0;
    for (int64_t row = 0; row < rows; row += pass_rows)
      tiles += ceil_div(keys_of(smaller(row + pass_rows, rows), context), call_.d.blocks.kv_tile);
    return tiles;
  }

  template <typename F>
  __aicore__ inline void visit(int64_t begin, int64_t end, const F &f) const {
    int64_t line = 0, first_token = 0, key0 = 0;
    for (int64_t b = 0; b < call_.d.batch && line < end; ++b) {
      const int64_t tokens = call_.q_len(b), context = call_.context(b), rows = rows_of(tokens), pass_rows = call_.d.blocks.rows;
      const int64_t tiles_of_head = sequence_tiles(tokens, context);
      for (int64_t h = 0; h < heads_ && line < end; ++h) {
        if (line + tiles_of_head <= begin) {
          line += tiles_of_head;
          continue;
        }
        for (int64_t row = 0; row < rows && line < end; row += pass_rows) {
          const int64_t row_end = smaller(row + pass_rows, rows), keys = keys_of(row_end, context);
          const int64_t tiles = ceil_div(keys, call_.d.blocks.kv_tile);
          const int64_t low = larger(begin, line), high = smaller(end, line + tiles);
          if (low < high)
            f(Segment{{b, context, first_token, first_head_ + h, row, row_end - row, key0, keys, tiles}, low - line, high - line, line});
          line += tiles;
        }
      }
      first_token += tokens;
      if (tokens > 0) key0 += context + tokens;
    }
  }

  const Call<T> &call_;
  int64_t first_head_, heads_, row_heads_, per_core_, total_;
};

}  // namespace flashmla
