#include "op_impl/twin/engine/l2.h"

#include <algorithm>

namespace twin {

GlobalMemory::GlobalMemory(int64_t l2_bytes) : slots_(std::max<int64_t>(1, l2_bytes / kLine)) {}

void GlobalMemory::add(const std::string& name, Role role, const void* data, int64_t bytes, Shadow::Namer namer) {
  if (data == nullptr || bytes == 0) return;
  const int64_t start = reinterpret_cast<int64_t>(data);
  std::unique_ptr<GmTensor> tensor(new GmTensor{name, role, start, bytes, Shadow("GM tensor " + name, namer), {}, 0, 0, 0});
  tensor->lines.assign(bytes / kLine + 2, -1);
  // One buffer may come in as two inputs, such as hidden_states that are the residual too.
  const bool added = tensors_.emplace(start, std::move(tensor)).second;
  if (added) in_order_.push_back(tensors_[start].get());
}

GmTensor* GlobalMemory::nearest(int64_t address) {
  auto after = tensors_.upper_bound(address);
  return after == tensors_.begin() ? nullptr : std::prev(after)->second.get();
}

GmTensor* GlobalMemory::find(int64_t address, int64_t bytes) {
  GmTensor* tensor = nearest(address);
  return tensor != nullptr && address + bytes <= tensor->start + tensor->bytes ? tensor : nullptr;
}

void GlobalMemory::unlink(int32_t slot) {
  Slot& s = slots_[slot];
  (s.newer < 0 ? newest_ : slots_[s.newer].older) = s.older;
  (s.older < 0 ? oldest_ : slots_[s.older].newer) = s.newer;
}

void GlobalMemory::link_newest(int32_t slot) {
  Slot& s = slots_[slot];
  s.newer = -1;
  s.older = newest_;
  (newest_ < 0 ? oldest_ : slots_[newest_].newer) = slot;
  newest_ = slot;
}

bool GlobalMemory::touch(GmTensor* tensor, int64_t line, bool dirty) {
  int32_t slot = tensor->lines[line];
  const bool hit = slot >= 0;
  if (hit) {
    unlink(slot);
  } else {
    if (used_ < static_cast<int32_t>(slots_.size())) {
      slot = used_++;
    } else {
      slot = oldest_;
      Slot& victim = slots_[slot];
      unlink(slot);
      victim.tensor->lines[victim.line] = -1;
      if (victim.dirty) victim.tensor->written_bytes += kLine;
    }
    slots_[slot] = {tensor, static_cast<int32_t>(line), -1, -1, false};
    tensor->lines[line] = slot;
  }
  slots_[slot].dirty |= dirty;
  link_newest(slot);
  return hit;
}

int64_t GlobalMemory::read(GmTensor* tensor, int64_t address, int64_t bytes) {
  int64_t missed = 0;
  const int64_t start = address - tensor->start, end = start + bytes;
  for (int64_t line = start / kLine; line * kLine < end; ++line) {
    // A line that was fetched whole serves its other readers.
    if (!touch(tensor, line, false)) missed += std::min((line + 1) * kLine, tensor->bytes) - line * kLine;
  }
  tensor->read_bytes += missed;
  tensor->hit_bytes += std::max<int64_t>(0, bytes - missed);
  return missed;
}

int64_t GlobalMemory::write(GmTensor* tensor, int64_t address, int64_t bytes) {
  const int64_t start = address - tensor->start, end = start + bytes;
  const bool leaves = tensor->role != Role::kWorkspace;
  for (int64_t line = start / kLine; line * kLine < end; ++line) touch(tensor, line, !leaves);
  if (!leaves) return 0;
  tensor->written_bytes += bytes;
  return bytes;
}

}  // namespace twin
