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

// A slice of pieces for one inner loop. float: lines to fetch, spread evenly, since in bursts they would take all places for
// outstanding reads and stall the loads that feed the FMAs.
template <typename T>
struct Slice {
  const T *src = nullptr;       // [pieces, kPiece]
  float *dst = nullptr;         // [pieces, kPiece], 16 bits: where they go
  const T *later = nullptr;     // [pieces, kPiece], 16 bits: what is widened after this, fetched meanwhile
  int64_t pieces = 0;
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
  Pace(const Slice<float> &slice, int64_t rounds)
      : at_(reinterpret_cast<const char *>(slice.src)), step_(rounds > 0 ? slice.pieces * kLineBytes / rounds : 0) {}
  FM_INLINE_MEMBER void round() {  // the lines that begin within the round's share
    const int64_t end = offset_ + step_;
    for (; line_ < end; line_ += kLineBytes) __builtin_prefetch(at_ + line_, 0, 1);
    offset_ = end;
  }
  FM_INLINE_MEMBER void finish() {}

 private:
  const char *at_;                  // [pieces, kLineBytes]
  int64_t step_, offset_ = 0, line_ = 0;
};

// Consecutive memory to fetch.
struct Lines {
  const char *at = nullptr;     // [lines, kLineBytes]
  int64_t lines = 0;

  // The next of as many equal parts.
  Slice<float> take(int64_t parts) {
    const int64_t part = (lines + parts - 1) / parts;
    const Slice<float> slice = {reinterpret_cast<const float *>(at), nullptr, nullptr, part};
    at += part * kLineBytes;
    lines -= part;
    return slice;
  }
};

}  // namespace FLASHMLA_NS
}  // namespace flashmla
