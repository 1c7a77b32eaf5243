// Types, enumerations and parameter structs of AscendC for NpuArch 3510, as far as the kernel uses them: names, order of the
// fields and default values are those of the public headers.
#pragma once

#include <cstdint>
#include <cstring>

#define __NPU_ARCH__ 3510
#define __aicore__
#define __gm__
#define __global__
#define __ubuf__
#define __cbuf__
#define __inout_pipe__(pipe)
#define GM_ADDR __gm__ uint8_t*
#define KERNEL_TASK_TYPE_DEFAULT(type) static_assert(AscendC::type == AscendC::KERNEL_TYPE_MIX_AIC_1_2, "the twin runs 1 AIC with 2 AIVs")
#define REGISTER_TILING_DEFAULT(type) using twin_registered_tiling [[maybe_unused]] = type
#define GET_TILING_DATA_WITH_STRUCT(type, name, address) type name = *reinterpret_cast<const type*>(address)
#define TILING_KEY_IS(key) (AscendC::twin_tiling_key() == (key))
#define ASCEND_IS_AIC (AscendC::twin_on_aic())
#define ASCEND_IS_AIV (!AscendC::twin_on_aic())

enum pipe_t { PIPE_S = 0, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2, PIPE_MTE3, PIPE_ALL, PIPE_FIX = 10 };
enum event_t { EVENT_ID0 = 0, EVENT_ID1, EVENT_ID2, EVENT_ID3, EVENT_ID4, EVENT_ID5, EVENT_ID6, EVENT_ID7 };
enum QuantMode_t { NoQuant, F322F16, F322BF16 };

// IEEE half and bfloat16, rounded to nearest even.
struct half {
  uint16_t bits;
  half() = default;
  half(float x);
  operator float() const;
};
struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  bfloat16_t(float x) {
    uint32_t wide;
    std::memcpy(&wide, &x, 4);
    const bool nan = (wide & 0x7FFFFFFFu) > 0x7F800000u;
    bits = nan ? 0x7FC0 : static_cast<uint16_t>((wide + 0x7FFFu + (wide >> 16 & 1)) >> 16);
  }
  operator float() const {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float x;
    std::memcpy(&x, &wide, 4);
    return x;
  }
};

namespace AscendC {

enum KernelMetaType { KERNEL_TYPE_AIV_ONLY, KERNEL_TYPE_AIC_ONLY, KERNEL_TYPE_MIX_AIC_1_2 = 6 };
bool twin_on_aic();
// What the host's tiling chose, for the kernel that is launched next.
uint64_t& twin_tiling_key();

enum class TPosition : uint8_t { GM, A1, A2, B1, B2, C1, C2, CO1, CO2, VECIN, VECOUT, VECCALC, C2PIPE2GM };

enum class HardEvent : uint8_t {
  MTE2_MTE1, MTE1_MTE2, MTE1_M, M_MTE1, MTE2_V, V_MTE2, MTE3_V, V_MTE3, M_V, V_M, V_V, MTE3_MTE1, MTE1_MTE3, MTE1_V, MTE2_M, M_MTE2,
  V_MTE1, M_FIX, FIX_M, MTE3_MTE2, MTE2_MTE3, S_V, V_S, S_MTE2, MTE2_S, S_MTE3, MTE3_S, MTE2_FIX, FIX_MTE2, FIX_S, M_S, FIX_MTE3,
  MTE1_FIX, FIX_MTE1, FIX_FIX, MAX
};

enum class RoundMode : uint8_t { CAST_NONE = 0, CAST_RINT, CAST_FLOOR, CAST_CEIL, CAST_ROUND, CAST_TRUNC, CAST_ODD };
enum class ReduceType { NONE = -1, SUM = 0, MAX, MIN };
enum class ReduceOrder : uint8_t { ORDER_VALUE_INDEX = 0, ORDER_INDEX_VALUE, ORDER_ONLY_VALUE, ORDER_ONLY_INDEX };
enum class CO2Layout : uint8_t { NZ = 0, ROW_MAJOR, COLUMN_MAJOR };

struct Nd2NzParams {
  Nd2NzParams() = default;
  Nd2NzParams(uint16_t nd_num, uint16_t n_value, uint32_t d_value, uint64_t src_nd_matrix_stride, uint64_t src_d_value, uint16_t dst_nz_c0_stride,
              uint16_t dst_nz_n_stride, uint32_t dst_nz_matrix_stride)
      : ndNum(nd_num), nValue(n_value), dValue(d_value), srcNdMatrixStride(src_nd_matrix_stride), srcDValue(src_d_value),
        dstNzC0Stride(dst_nz_c0_stride), dstNzNStride(dst_nz_n_stride), dstNzMatrixStride(dst_nz_matrix_stride) {}
  uint16_t ndNum = 0;
  uint16_t nValue = 0;
  uint32_t dValue = 0;
  uint64_t srcNdMatrixStride = 0;
  uint64_t srcDValue = 0;
  uint16_t dstNzC0Stride = 0;
  uint16_t dstNzNStride = 0;
  uint32_t dstNzMatrixStride = 0;
};

struct DataCopyParams {
  DataCopyParams() {}
  DataCopyParams(uint16_t count, uint16_t len, uint16_t src_gap, uint16_t dst_gap) : blockCount(count), blockLen(len), srcGap(src_gap), dstGap(dst_gap) {}
  uint16_t blockCount = 1;
  uint16_t blockLen = 0;
  union { uint16_t srcGap = 0; uint16_t srcStride; };
  union { uint16_t dstGap = 0; uint16_t dstStride; };
};

struct DataCopyExtParams {
  DataCopyExtParams() = default;
  DataCopyExtParams(uint16_t count, uint32_t len, int64_t src_stride, int64_t dst_stride, uint32_t reserved)
      : blockCount(count), blockLen(len), srcStride(src_stride), dstStride(dst_stride), rsv(reserved) {}
  uint16_t blockCount = 1;
  uint32_t blockLen = 0;
  int64_t srcStride = 0;
  int64_t dstStride = 0;
  uint32_t rsv = 0;
};

template <typename T>
struct DataCopyPadExtParams {
  DataCopyPadExtParams() = default;
  DataCopyPadExtParams(bool pad, uint8_t left, uint8_t right, T value) : isPad(pad), leftPadding(left), rightPadding(right), paddingValue(value) {}
  bool isPad = false;
  uint8_t leftPadding = 0;
  uint8_t rightPadding = 0;
  T paddingValue = T(0);
};

struct LoadData2DParamsV2 {
  LoadData2DParamsV2() = default;
  LoadData2DParamsV2(uint32_t m_start, uint32_t k_start, uint16_t m_step, uint16_t k_step, int32_t src_stride, uint16_t dst_stride, bool transpose, uint8_t sid_in)
      : mStartPosition(m_start), kStartPosition(k_start), mStep(m_step), kStep(k_step), srcStride(src_stride), dstStride(dst_stride),
        ifTranspose(transpose), sid(sid_in) {}
  uint32_t mStartPosition = 0;
  uint32_t kStartPosition = 0;
  uint16_t mStep = 0;
  uint16_t kStep = 0;
  int32_t srcStride = 0;
  uint16_t dstStride = 0;
  bool ifTranspose = false;
  uint8_t sid = 0;
};

struct MmadParams {
  MmadParams() = default;
  MmadParams(uint16_t m_in, uint16_t n_in, uint16_t k_in, uint8_t unit_flag, bool source, bool init)
      : m(m_in), n(n_in), k(k_in), unitFlag(unit_flag), cmatrixSource(source), cmatrixInitVal(init) {}
  uint16_t m = 0;
  uint16_t n = 0;
  uint16_t k = 0;
  bool isBias = false;
  int32_t fmOffset = 0;
  bool enSsparse = false;
  bool enWinogradA = false;
  bool enWinogradB = false;
  uint8_t unitFlag = 0;
  bool kDirectionAlign = false;
  bool cmatrixSource = false;
  bool cmatrixInitVal = true;
  bool disableGemv = false;
};

struct FixpipeConfig {
  CO2Layout format;
  bool isToUB;
  constexpr FixpipeConfig(CO2Layout f) : format(f), isToUB(false) {}
  constexpr FixpipeConfig(CO2Layout f, bool to_ub) : format(f), isToUB(to_ub) {}
};
inline constexpr FixpipeConfig CFG_NZ(CO2Layout::NZ);
inline constexpr FixpipeConfig CFG_ROW_MAJOR(CO2Layout::ROW_MAJOR);
inline constexpr FixpipeConfig CFG_COLUMN_MAJOR(CO2Layout::COLUMN_MAJOR);

struct Nz2NdParams {
  uint16_t ndNum = 1;
  uint16_t srcNdStride = 0;
  uint32_t dstNdStride = 0;
};

template <CO2Layout format = CO2Layout::ROW_MAJOR>
struct FixpipeParamsArch3510 {
  static_assert(format == CO2Layout::ROW_MAJOR, "the twin knows the row-major fixpipe only");
  FixpipeParamsArch3510() = default;
  FixpipeParamsArch3510(uint16_t n_size, uint16_t m_size, uint16_t src_stride, uint32_t dst_stride)
      : nSize(n_size), mSize(m_size), srcStride(src_stride), dstStride(dst_stride) {}
  uint16_t nSize = 0;
  uint16_t mSize = 0;
  uint16_t srcStride = 0;
  uint32_t dstStride = 0;
  QuantMode_t quantPre = QuantMode_t::NoQuant;
  uint64_t deqScalar = 0;
  bool reluEn = false;
  uint8_t unitFlag = 0;
  uint8_t dualDstCtl = 0;
  bool subBlockId = false;
  Nz2NdParams params;
  bool isChannelSplit = false;
};
template <CO2Layout format = CO2Layout::ROW_MAJOR>
struct FixpipeParamsC310 : FixpipeParamsArch3510<format> {
  using FixpipeParamsArch3510<format>::FixpipeParamsArch3510;
};

struct BinaryRepeatParams {
  BinaryRepeatParams() = default;
  BinaryRepeatParams(uint8_t dst_blk, uint8_t src0_blk, uint8_t src1_blk, uint8_t dst_rep, uint8_t src0_rep, uint8_t src1_rep)
      : dstBlkStride(dst_blk), src0BlkStride(src0_blk), src1BlkStride(src1_blk), dstRepStride(dst_rep), src0RepStride(src0_rep), src1RepStride(src1_rep) {}
  uint32_t blockNumber = 8;
  uint8_t dstBlkStride = 1, src0BlkStride = 1, src1BlkStride = 1;
  uint8_t dstRepStride = 8, src0RepStride = 8, src1RepStride = 8;
};
struct UnaryRepeatParams {
  UnaryRepeatParams() = default;
  UnaryRepeatParams(uint16_t dst_blk, uint16_t src_blk, uint8_t dst_rep, uint8_t src_rep)
      : dstBlkStride(dst_blk), srcBlkStride(src_blk), dstRepStride(dst_rep), srcRepStride(src_rep) {}
  uint32_t blockNumber = 8;
  uint16_t dstBlkStride = 1, srcBlkStride = 1;
  uint8_t dstRepStride = 8, srcRepStride = 8;
};
struct BrcbRepeatParams {
  BrcbRepeatParams() = default;
  BrcbRepeatParams(uint16_t dst_blk, uint16_t dst_rep) : dstRepStride(dst_rep), dstBlkStride(dst_blk) {}
  uint32_t blockNumber = 8;
  uint16_t dstRepStride = 8;
  uint16_t dstBlkStride = 1;
};

}  // namespace AscendC
