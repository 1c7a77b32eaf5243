// Address space for tensors: pages that nobody touches take no memory.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <new>
#include <utility>
#include <vector>

namespace flashmla {

class Reserved {
 public:
  Reserved() = default;
  Reserved(const Reserved&) = delete;
  Reserved& operator=(const Reserved&) = delete;
  ~Reserved() {
    for (const auto& part : parts_) munmap(part.first, part.second);
  }
  uint8_t* take(int64_t bytes) {
    const size_t size = static_cast<size_t>(bytes) + 4096;  // a page between neighbours
    void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
    parts_.push_back({data, size});
    return static_cast<uint8_t*>(data);
  }

 private:
  std::vector<std::pair<void*, size_t>> parts_;
};

}  // namespace flashmla
