#include "op_impl/twin/engine/l2.h"

#include <algorithm>

namespace twin {

GlobalMemory::GlobalMemory(int64_t l2_bytes, double share) : share_(share), capacity_(static_cast<double>(std::max<int64_t>(1, l2_bytes / kLine))) {}

void GlobalMemory::add(const std::string& name, Role role, const void* data, int64_t bytes, Shadow::Namer namer, double overlap) {
  if (data == nullptr || bytes == 0) return;
  const int64_t start = reinterpret_cast<int64_t>(data);
  std::unique_ptr<GmTensor> tensor(new GmTensor{name, role, start, bytes, Shadow("GM tensor " + name, namer), overlap, {}, 0, 0, 0, 0});
  tensor->lines.assign(bytes / kLine + 2, kNew);
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

void GlobalMemory::evict_oldest() {
  Slot& victim = slots_[oldest_];
  free_.push_back(oldest_);
  unlink(oldest_);
  victim.tensor->lines[victim.line] = kGone;
  used_ -= weight(*victim.tensor);
  if (!victim.dirty) return;
  victim.tensor->written_bytes += kLine;
  ++workspace_gone_;
}

bool GlobalMemory::touch(GmTensor* tensor, int64_t line, bool dirty) {
  int32_t slot = tensor->lines[line];
  const bool hit = slot >= 0;
  if (hit) {
    unlink(slot);
  } else {
    if (slot == kNew) tensor->fresh_bytes += std::min((line + 1) * kLine, tensor->bytes) - line * kLine;
    used_ += weight(*tensor);
    while (used_ > capacity_ && oldest_ >= 0) evict_oldest();
    if (free_.empty()) {
      free_.push_back(static_cast<int32_t>(slots_.size()));
      slots_.emplace_back();
    }
    slot = free_.back();
    free_.pop_back();
    slots_[slot] = {tensor, static_cast<int32_t>(line), -1, -1, false};
    tensor->lines[line] = slot;
  }
  if (dirty && !slots_[slot].dirty) ++workspace_written_;
  slots_[slot].dirty |= dirty;
  link_newest(slot);
  return hit;
}

int64_t GlobalMemory::read(GmTensor* tensor, int64_t address, int64_t bytes) {
  double from_memory = 0;
  const int64_t start = address - tensor->start, end = start + bytes;
  for (int64_t line = start / kLine; line * kLine < end; ++line) {
    const bool left_out_wrote = share_ > 1 && tensor->role == Role::kWorkspace && tensor->lines[line] == kNew;
    // A line that was fetched whole serves its other readers.
    if (touch(tensor, line, false)) continue;
    const double line_bytes = static_cast<double>(std::min((line + 1) * kLine, tensor->bytes) - line * kLine);
    from_memory += left_out_wrote ? line_bytes * workspace_gone_ / std::max(1.0, workspace_written_) : line_bytes / tensor->overlap;
  }
  const int64_t missed = static_cast<int64_t>(from_memory);
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
