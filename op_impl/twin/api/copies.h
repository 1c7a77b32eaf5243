// Copies: GM -> L1 (with ND to NZ), GM <-> UB, UB -> L1, L1 -> L0A / L0B, L0C -> GM / UB. What is not here does not exist on
// the chip, or the twin does not know it; both are errors with file and line.
#pragma once

#include <functional>
#include <type_traits>

#include "op_impl/twin/api/tensors.h"

namespace AscendC {

// A tensor without its type, for the code behind the templates.
struct TwinLocal {
  twin::Space space;
  uint32_t address, end;
  int element;
  bool is_half, is_bfloat16, is_float;
};
template <typename T>
TwinLocal twin_local(const LocalTensor<T>& t) {
  return {t.space(), t.address(), t.end(), int(sizeof(T)), std::is_same<T, half>::value, std::is_same<T, bfloat16_t>::value, std::is_same<T, float>::value};
}

void twin_nd2nz(const TwinLocal& dst, int64_t src, const Nd2NzParams& params, const Site& site);
void twin_gm_to_local(const TwinLocal& dst, int64_t src, int64_t blocks, int64_t block_bytes, int64_t src_gap, int64_t dst_gap, const Site& site);
void twin_local_to_gm(int64_t dst, const TwinLocal& src, int64_t blocks, int64_t block_bytes, int64_t src_gap, int64_t dst_gap, const Site& site);
void twin_local_to_local(const TwinLocal& dst, const TwinLocal& src, const DataCopyParams& params, const Site& site);
void twin_load(const TwinLocal& dst, const TwinLocal& src, const LoadData2DParamsV2& params, const Site& site);
void twin_fixpipe_gm(int64_t dst, int dst_element, bool half_dst, bool bfloat16_dst, const TwinLocal& src, const FixpipeParamsArch3510<>& params, const Site& site);
void twin_fixpipe_ub(const TwinLocal& dst, const TwinLocal& src, const FixpipeParamsArch3510<>& params, const Site& site);

template <typename T, bool enableSmallC0 = false>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const Nd2NzParams& params, const Site& site = Site::here()) {
  static_assert(!enableSmallC0, "the twin does not know the small C0 mode");
  twin_nd2nz(twin_local(dst), src.address(), params, site.named("DataCopy"));
}
template <typename T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyParams& p, const Site& site = Site::here()) {
  twin_gm_to_local(twin_local(dst), src.address(), p.blockCount, p.blockLen * 32, p.srcGap * 32, p.dstGap * 32, site.named("DataCopy"));
}
template <typename T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, uint32_t count, const Site& site = Site::here()) {
  twin::require(count * sizeof(T) % 32 == 0, Fault::kAlignment, site.named("DataCopy"), "the bytes are not a multiple of 32");
  twin_gm_to_local(twin_local(dst), src.address(), 1, count * sizeof(T), 0, 0, site.named("DataCopy"));
}
template <typename T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& p, const Site& site = Site::here()) {
  twin_local_to_gm(dst.address(), twin_local(src), p.blockCount, p.blockLen * 32, p.srcGap * 32, p.dstGap * 32, site.named("DataCopy"));
}
template <typename T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, uint32_t count, const Site& site = Site::here()) {
  twin::require(count * sizeof(T) % 32 == 0, Fault::kAlignment, site.named("DataCopy"), "the bytes are not a multiple of 32");
  twin_local_to_gm(dst.address(), twin_local(src), 1, count * sizeof(T), 0, 0, site.named("DataCopy"));
}
template <typename T>
void DataCopy(const LocalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& params, const Site& site = Site::here()) {
  twin_local_to_local(twin_local(dst), twin_local(src), params, site.named("DataCopy"));
}

// Blocks of any number of bytes; in local memory each starts at a multiple of 32 bytes.
template <typename T>
void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyExtParams& p, const DataCopyPadExtParams<T>& pad, const Site& site = Site::here()) {
  twin::require(!pad.isPad, Fault::kIllegal, site.named("DataCopyPad"), "the twin does not know padding with a value");
  twin_gm_to_local(twin_local(dst), src.address(), p.blockCount, p.blockLen, p.srcStride, p.dstStride * 32, site.named("DataCopyPad"));
}
template <typename T>
void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyExtParams& p, const Site& site = Site::here()) {
  twin_local_to_gm(dst.address(), twin_local(src), p.blockCount, p.blockLen, p.srcStride * 32, p.dstStride, site.named("DataCopyPad"));
}

template <typename T>
void LoadData(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LoadData2DParamsV2& params, const Site& site = Site::here()) {
  static_assert(sizeof(T) == 2, "the twin loads 16-bit fractals");
  twin_load(twin_local(dst), twin_local(src), params, site.named("LoadData"));
}

template <typename T, typename U, const FixpipeConfig& config = CFG_ROW_MAJOR>
void Fixpipe(const GlobalTensor<T>& dst, const LocalTensor<U>& src, const FixpipeParamsArch3510<config.format>& params, const Site& site = Site::here()) {
  static_assert(!config.isToUB, "this configuration is for a destination in UB");
  twin_fixpipe_gm(dst.address(), sizeof(T), std::is_same<T, half>::value, std::is_same<T, bfloat16_t>::value, twin_local(src), params, site.named("Fixpipe"));
}
template <typename T, typename U, const FixpipeConfig& config = CFG_ROW_MAJOR>
void Fixpipe(const LocalTensor<T>& dst, const LocalTensor<U>& src, const FixpipeParamsArch3510<config.format>& params, const Site& site = Site::here()) {
  static_assert(config.isToUB, "a destination in UB needs a configuration with isToUB");
  twin_fixpipe_ub(twin_local(dst), twin_local(src), params, site.named("Fixpipe"));
}

}  // namespace AscendC
