// Work that rides along in the inner loops of a product: the memory that the next one reads is fetched into L2 or, where it is
// of 16 bits, widened into a buffer, a piece a round. The loops leave load slots free for it; done by itself it would add up.
#pragma once

#include "op_impl/cpu/simd-inl.h"

namespace flashmla {
namespace FLASHMLA_NS {

constexpr int64_t kLineBytes = 64;  // of a cache line, on every processor these kernels run on; elsewhere a fetch too many or too few
constexpr int64_t kLineFloats = kLineBytes / int64_t(sizeof(float));

// One vector's worth of 16 elements: a line of float32, half a line of 16 bits.
constexpr int64_t kPiece = kLineFloats;

// A slice of pieces for one inner loop, spread evenly over its rounds: in bursts they would take all places for outstanding
// reads and stall the loads that feed the FMAs.
template <typename T>
struct Slice {                  // 16 bits, widened
  const T *src = nullptr;       // [pieces, kPiece]
  float *dst = nullptr;         // [pieces, kPiece]: where they go
  const T *later = nullptr;     // [pieces, kPiece]: what is widened after this, fetched meanwhile
  int64_t pieces = 0;
};

// Lines that are fetched come from as many places of a tile in turn. One after the other they would all lie in one page at a time,
// and the core's own prefetcher, which runs ahead page by page, would have one page to run ahead in: one thread, 8192 keys in
// float32, 16 heads: 70 % of the FMA peak from one place, 79 % from 2, 4 or 8; 12 heads 65 % and 70 %.
constexpr int64_t kStreams = 8;

template <>
struct Slice<float> {           // lines to fetch
  const char *at = nullptr;     // of the first line, or with streams of the memory that they share
  int64_t lines = 0;
  int64_t first = 0;            // with streams: lines before these
  int64_t stream_lines = 0;     // of one of the kStreams; 0: one behind the other
};

template <typename T>
class Pace {
 public:
  Pace(const Slice<T> &slice, int64_t rounds) : s_(slice), a_round_(rounds > 0 ? (slice.pieces + rounds - 1) / rounds : 0) {}
  FM_INLINE_MEMBER void round() {
    for (int64_t i = 0; i < a_round_ && done_ < s_.pieces; ++i) widen_piece();
  }
  FM_INLINE_MEMBER void finish() {
    while (done_ < s_.pieces) widen_piece();
  }

 private:
  FM_INLINE_MEMBER void widen_piece() {
    if (s_.later) __builtin_prefetch(s_.later + done_ * kPiece, 0, 1);
    for (int64_t v = 0; v < kPiece; v += kLanes) store(s_.dst + done_ * kPiece + v, load(s_.src + done_ * kPiece + v));
    ++done_;
  }
  const Slice<T> s_;
  const int64_t a_round_;
  int64_t done_ = 0;
};

template <>
class Pace<float> {
 public:
  Pace(const Slice<float> &slice, int64_t rounds) : s_(slice), step_(rounds > 0 ? slice.lines * kLineBytes / rounds : 0) {}
  FM_INLINE_MEMBER void round() {  // the lines that begin within the round's share
    for (end_ += step_; line_ * kLineBytes < end_; ++line_) {
      const int64_t i = s_.first + line_;
      const int64_t line = s_.stream_lines ? i % kStreams * s_.stream_lines + i / kStreams : line_;
      __builtin_prefetch(s_.at + line * kLineBytes, 0, 1);
    }
  }
  FM_INLINE_MEMBER void finish() {}

 private:
  const Slice<float> s_;
  const int64_t step_;
  int64_t end_ = 0, line_ = 0;
};

// Consecutive memory to fetch.
struct Lines {
  const char *at = nullptr;     // [lines, kLineBytes]
  int64_t lines = 0;

  // The next of as many equal parts.
  Slice<float> take(int64_t parts) {
    const int64_t part = (lines + parts - 1) / parts;
    const Slice<float> slice = {at, part};
    at += part * kLineBytes;
    lines -= part;
    return slice;
  }
};

}  // namespace FLASHMLA_NS
}  // namespace flashmla
