// Scratch memory of the operators. It lives in the library and not in the framework's workspace, because a workspace
// size set under dynamic shape stays at its first value.
#pragma once

#include <cstdint>

namespace flashmla {

// A bump allocator, reset at the start of each call. Memory is kept between calls up to kKeepBytes.
class Scratch {
 public:
  // The one that goes with the pool's session.
  static Scratch &instance();

  void reset();
  // n elements, aligned to a cache line and padded by one vector, uninitialised; throws std::bad_alloc.
  template <typename T>
  T *alloc(int64_t n) { return static_cast<T *>(bytes(n * static_cast<int64_t>(sizeof(T)))); }

  // Marks a point to which release() goes back, so that a stage's memory serves the next stage.
  struct Mark { int chunk; int64_t used; };
  Mark mark() const { return {current_, used_}; }
  void release(Mark mark) { current_ = mark.chunk; used_ = mark.used; }

 private:
  void *bytes(int64_t n);
  static constexpr int kMaxChunks = 64;
  static constexpr int64_t kKeepBytes = int64_t{256} << 20;
  struct Chunk { char *data /* [size] */; int64_t size; };
  Chunk chunks_[kMaxChunks] = {};
  int count_ = 0;
  int current_ = 0;
  int64_t used_ = 0;
};

}  // namespace flashmla
