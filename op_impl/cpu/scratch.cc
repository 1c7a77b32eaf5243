#include "op_impl/cpu/scratch.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <new>

namespace flashmla {
namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kHugePage = int64_t{2} << 20;

}  // namespace

Scratch &Scratch::instance() {
  static Scratch *scratch = new Scratch;
  return *scratch;
}

void Scratch::reset() {
  int64_t total = 0;
  for (int i = 0; i < count_; ++i) total += chunks_[i].size;
  // Several chunks mean that the last call outgrew the first: give them back, and the next call takes what it needs in
  // one piece. Above the limit the memory goes back as well.
  if (count_ > 1 || total > kKeepBytes) {
    for (int i = 0; i < count_; ++i) std::free(chunks_[i].data);
    count_ = 0;
    if (total <= kKeepBytes) bytes(total);
  }
  current_ = 0;
  used_ = 0;
}

void *Scratch::bytes(int64_t n) {
  n = (n + kLine + kLine - 1) / kLine * kLine;
  for (; current_ < count_; ++current_, used_ = 0) {
    if (chunks_[current_].size - used_ >= n) {
      void *p = chunks_[current_].data + used_;
      used_ += n;
      return p;
    }
  }
  if (count_ == kMaxChunks) throw std::bad_alloc();
  const int64_t doubled = count_ ? chunks_[count_ - 1].size * 2 : kHugePage;
  const int64_t size = (std::max(n, std::min(doubled, 16 * kHugePage)) + kHugePage - 1) / kHugePage * kHugePage;
  void *data = std::aligned_alloc(kHugePage, size);
  if (data == nullptr) throw std::bad_alloc();
  madvise(data, size, MADV_HUGEPAGE);  // a hint: without huge pages everything works, about a quarter slower from memory
  chunks_[count_++] = {static_cast<char *>(data), size};
  used_ = n;
  return data;
}

}  // namespace flashmla
