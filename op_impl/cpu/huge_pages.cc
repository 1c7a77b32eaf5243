#include "op_impl/cpu/huge_pages.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>

namespace flashmla {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int kMadvCollapse = 25;  // MADV_COLLAPSE, Linux 6.1; older headers lack it
constexpr size_t kMostBuffers = 65536;

bool wanted() {
  static const bool on = [] {
    const char *text = std::getenv("MS_FLASHMLA_HUGE_PAGES");
    return text == nullptr || std::strcmp(text, "0") != 0;
  }();
  return on;
}

// True once for a buffer. An address that is used again for another buffer of the same size is taken for the old one: a hint less.
bool first_time(const void *data, int64_t bytes) {
  static std::mutex mutex;
  static auto *seen = new std::unordered_map<const void *, int64_t>;  // not destroyed: a call may outlive static objects
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = seen->find(data);
  if (found != seen->end() && found->second == bytes) return false;
  if (seen->size() >= kMostBuffers) seen->clear();
  (*seen)[data] = bytes;
  return true;
}

}  // namespace

void hint_huge_pages(const void *data, int64_t bytes) {
  if (bytes < 2 * kHugePage || bytes > kMostHintedBytes || !wanted() || !first_time(data, bytes)) return;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / kHugePage * kHugePage;
  if (end > begin) madvise(reinterpret_cast<void *>(begin), end - begin, kMadvCollapse);
}

}  // namespace flashmla
