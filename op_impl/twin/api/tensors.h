// GlobalTensor and LocalTensor. A local tensor is an address in a memory of the core that uses it, and knows where it ends: an
// operation beyond its end is an error even where the memory goes on.
#pragma once

#include "op_impl/twin/api/types.h"
#include "op_impl/twin/engine/engine.h"

namespace AscendC {

using twin::Fault;
using twin::Site;

twin::Space twin_space(TPosition position, const Site& site);
void twin_check_capacity(twin::Space space, uint32_t address, uint64_t bytes, const Site& site);

template <typename T>
class LocalTensor {
 public:
  using PrimType = T;
  LocalTensor() = default;
  LocalTensor(TPosition position, uint32_t address, uint32_t elements, const Site& site = Site::here())
      : position_(position), space_(twin_space(position, site)), address_(address), end_(address + elements * sizeof(T)) {
    twin_check_capacity(space_, address, uint64_t{elements} * sizeof(T), site);
  }
  LocalTensor operator[](uint32_t offset) const {
    LocalTensor part = *this;
    part.address_ += static_cast<uint32_t>(offset * sizeof(T));
    return part;
  }
  template <typename U>
  LocalTensor<U> ReinterpretCast() const {
    LocalTensor<U> other;
    other.position_ = position_, other.space_ = space_, other.address_ = address_, other.end_ = end_;
    return other;
  }
  uint32_t GetSize() const { return end_ > address_ ? static_cast<uint32_t>((end_ - address_) / sizeof(T)) : 0; }
  T GetValue(uint32_t index, const Site& site = Site::here()) const {
    scalar(index, false, site.named("GetValue"));
    T value = T(0);
    if (uint8_t* data = own_memory()) std::memcpy(&value, data + address_ + index * sizeof(T), sizeof(T));
    return value;
  }
  void SetValue(uint32_t index, T value, const Site& site = Site::here()) const {
    scalar(index, true, site.named("SetValue"));
    if (uint8_t* data = own_memory()) std::memcpy(data + address_ + index * sizeof(T), &value, sizeof(T));
  }
  TPosition GetPosition() const { return position_; }

  // of the twin
  twin::Space space() const { return space_; }
  uint32_t address() const { return address_; }
  uint32_t end() const { return end_; }

 private:
  template <typename U>
  friend class LocalTensor;
  uint8_t* own_memory() const { return twin::Engine::current().memory(space_, twin::Engine::current().core()); }
  void scalar(uint32_t index, bool write, const Site& site) const {
    twin::require(space_ == twin::kUB, Fault::kIllegal, site, "the scalar unit reaches the UB only");
    twin::require(address_ + (index + 1) * sizeof(T) <= end_, Fault::kBounds, site, "beyond the end of the tensor");
    twin::Engine& engine = twin::Engine::current();
    engine.scalar_access({space_, engine.core(), write, {int64_t(address_ + index * sizeof(T)), sizeof(T), 1, 0}, {}}, site);
  }
  TPosition position_ = TPosition::VECCALC;
  twin::Space space_ = twin::kUB;
  uint32_t address_ = 0;
  uint32_t end_ = 0;
};

template <typename T>
class GlobalTensor {
 public:
  using PrimType = T;
  void SetGlobalBuffer(__gm__ T* data) { data_ = data; }
  void SetGlobalBuffer(__gm__ T* data, uint64_t elements) { data_ = data, end_ = data + elements; }
  GlobalTensor operator[](uint64_t offset) const {
    GlobalTensor part = *this;
    part.data_ += offset;
    return part;
  }
  T GetValue(uint64_t index, const Site& site = Site::here()) const {
    scalar(index, false, site.named("GetValue"));
    return data_[index];
  }
  void SetValue(uint64_t index, T value, const Site& site = Site::here()) const {
    scalar(index, true, site.named("SetValue"));
    data_[index] = value;
  }
  __gm__ T* GetPhyAddr() const { return data_; }
  __gm__ T* GetPhyAddr(uint64_t offset) const { return data_ + offset; }

  int64_t address() const { return reinterpret_cast<int64_t>(data_); }

 private:
  void scalar(uint64_t index, bool write, const Site& site) const {
    twin::Engine::current().scalar_access({twin::kGM, 0, write, {reinterpret_cast<int64_t>(data_ + index), sizeof(T), 1, 0}, {}}, site);
  }
  T* data_ = nullptr;
  T* end_ = nullptr;
};

inline int64_t GetBlockIdx() {
  twin::Engine& engine = twin::Engine::current();
  return engine.core() == twin::kAIC ? engine.block() : engine.block() * 2 + engine.core() - twin::kAIV0;
}
inline int64_t GetBlockNum() { return twin::Engine::current().blocks(); }
inline int64_t GetSubBlockIdx() { return twin::Engine::current().core() == twin::kAIV1 ? 1 : 0; }
inline int64_t GetTaskRatio() { return 2; }
inline void InitSocState() {}
inline GM_ADDR GetUserWorkspace(GM_ADDR workspace) { return workspace; }

}  // namespace AscendC
