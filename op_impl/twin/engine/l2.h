// Global memory as the cores see it: tensors at their addresses, and which of their lines the L2 holds (LRU).
//
// A sample of the cores stands for `share` times as many. Each line that it brings into the L2 then takes the room of `share` lines, less what
// the cores have in common: where all cores together read every byte of an input `overlap` times, one at a time of them brings a line and the others
// find it, so that each is charged its part of the bytes. A line of the workspace that no core of the sample wrote was written by one that is left out.
#pragma once

#include <algorithm>
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
  double overlap;
  std::vector<int32_t> lines;  // slot of each line in the L2, kGone, or kNew: not used yet
  int64_t fresh_bytes = 0;     // of lines that were read or written at all
  int64_t read_bytes = 0;      // from memory
  int64_t written_bytes = 0;   // to memory
  int64_t hit_bytes = 0;       // served by the L2
};

class GlobalMemory {
 public:
  explicit GlobalMemory(int64_t l2_bytes, double share = 1);
  void add(const std::string& name, Role role, const void* data, int64_t bytes, Shadow::Namer namer, double overlap = 1);
  // The tensor that holds [address, address + bytes), or nullptr.
  GmTensor* find(int64_t address, int64_t bytes);
  GmTensor* nearest(int64_t address);  // the tensor that starts at or before it, for messages

  // Both return the bytes that come from, or go to, memory. What a kernel leaves is written once; a workspace is written only
  // when the L2 has no room for it, since the next call overwrites it.
  int64_t read(GmTensor* tensor, int64_t address, int64_t bytes);
  int64_t write(GmTensor* tensor, int64_t address, int64_t bytes);

  const std::vector<const GmTensor*>& tensors() const { return in_order_; }  // as they were added

  static constexpr int64_t kLine = 512;
  static constexpr int32_t kGone = -1, kNew = -2;

 private:
  struct Slot {
    GmTensor* tensor = nullptr;
    int32_t line = 0;
    int32_t newer = -1, older = -1;
    bool dirty = false;
  };
  bool touch(GmTensor* tensor, int64_t line, bool dirty);  // true: it was there
  double weight(const GmTensor& tensor) const { return std::max(1.0, share_ / tensor.overlap); }  // lines of room
  void evict_oldest();
  void unlink(int32_t slot);
  void link_newest(int32_t slot);

  std::map<int64_t, std::unique_ptr<GmTensor>> tensors_;  // by address
  std::vector<const GmTensor*> in_order_;
  double share_, capacity_, used_ = 0;  // in lines
  std::vector<Slot> slots_;
  std::vector<int32_t> free_;
  int32_t newest_ = -1, oldest_ = -1;
  double workspace_written_ = 0, workspace_gone_ = 0;  // lines
};

}  // namespace twin
