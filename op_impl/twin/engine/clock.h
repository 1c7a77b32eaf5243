// Vector clocks: what a pipe knows to have happened before its next operation.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace twin {

class Clock {
 public:
  explicit Clock(int size = 0) : at_(size, 0) {}
  uint32_t operator[](int i) const { return at_[i]; }
  uint32_t& operator[](int i) { return at_[i]; }
  void join(const Clock& other) {
    const uint32_t* from = other.at_.data();
    uint32_t* to = at_.data();
    const int n = static_cast<int>(at_.size());
    for (int i = 0; i < n; ++i) to[i] = to[i] < from[i] ? from[i] : to[i];
  }

 private:
  std::vector<uint32_t> at_;
};

using SharedClock = std::shared_ptr<const Clock>;

}  // namespace twin
