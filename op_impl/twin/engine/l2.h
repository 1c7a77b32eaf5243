// Global memory as the cores see it: tensors at their addresses, and which of their lines the L2 holds (LRU).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "op_impl/twin/engine/shadow.h"

namespace twin {

enum class Role { kInput, kInOut, kOutput, kWorkspace };

struct GmTensor {
  std::string name;
  Role role;
  int64_t start, bytes;
  Shadow shadow;
  std::vector<int32_t> lines;  // slot of each line in the L2, -1: not there
  int64_t read_bytes = 0;      // from memory
  int64_t written_bytes = 0;   // to memory
  int64_t hit_bytes = 0;       // served by the L2
};

class GlobalMemory {
 public:
  explicit GlobalMemory(int64_t l2_bytes);
  void add(const std::string& name, Role role, const void* data, int64_t bytes, Shadow::Namer namer);
  // The tensor that holds [address, address + bytes), or nullptr.
  GmTensor* find(int64_t address, int64_t bytes);
  GmTensor* nearest(int64_t address);  // the tensor that starts at or before it, for messages

  // Both return the bytes that come from, or go to, memory. What a kernel leaves is written once; a workspace is written only
  // when the L2 has no room for it, since the next call overwrites it.
  int64_t read(GmTensor* tensor, int64_t address, int64_t bytes);
  int64_t write(GmTensor* tensor, int64_t address, int64_t bytes);

  const std::vector<const GmTensor*>& tensors() const { return in_order_; }  // as they were added

  static constexpr int64_t kLine = 512;

 private:
  struct Slot {
    GmTensor* tensor = nullptr;
    int32_t line = 0;
    int32_t newer = -1, older = -1;
    bool dirty = false;
  };
  bool touch(GmTensor* tensor, int64_t line, bool dirty);  // true: it was there
  void unlink(int32_t slot);
  void link_newest(int32_t slot);

  std::map<int64_t, std::unique_ptr<GmTensor>> tensors_;  // by address
  std::vector<const GmTensor*> in_order_;
  std::vector<Slot> slots_;
  int32_t used_ = 0, newest_ = -1, oldest_ = -1;
};

}  // namespace twin
