// Names shared by all stages: memory sizes, tensors at fixed addresses, parameters of the copies.
#pragma once

#include "kernel_operator.h"
#include "op_proto/op_list.h"
#include "kernel_data.h"

namespace flashmla {

using AscendC::GlobalTensor;
using AscendC::HardEvent;
using AscendC::LocalTensor;
using AscendC::TPosition;

constexpr int32_t kFractal = 16;           // rows and columns of a fractal of 16-bit elements
constexpr int32_t kFractalElements = 256;
constexpr int32_t kBlockBytes = 32;        // of a data block of UB and L1
constexpr int32_t kVectorFloats = 64;      // float32 elements of a vector repeat
constexpr int32_t kFloatsOfBlock = 8;
constexpr int32_t kL1Bytes = 512 * 1024;
constexpr int32_t kL0HalfBytes = 32 * 1024;  // L0A and L0B are used as two buffers each
constexpr int32_t kL0CBytes = 256 * 1024;
constexpr int32_t kUbBytes = 248 * 1024;
constexpr int32_t kZeroColumns = 1024;
constexpr int32_t kMostMatrixStride = 65535;  // elements between the matrices of one copy, in global memory
constexpr int32_t kMostTileStride = 16384;    // .. and in L1
constexpr int32_t kMostRepeats = 248;      // of a vector instruction, a multiple of 8 below 256

// Flags between the AIC and both AIVs of a core, named producer_consumer_what; counters, so that one id serves all copies of a buffer.
constexpr uint16_t FIX_V_SCORES = 0;
constexpr uint16_t V_FIX_SCORES_FREE = 1;
constexpr uint16_t MTE3_MTE1_P = 2;
constexpr uint16_t MTE1_MTE3_P_FREE = 3;
constexpr uint16_t FIX_V_PV = 4;
constexpr uint16_t V_FIX_PV_FREE = 5;
constexpr uint16_t FIX_V_RESULT = 6;
constexpr uint16_t V_FIX_RESULT_FREE = 7;
constexpr uint8_t kCoreMode = 2;           // AIC with both AIVs of its core

// Cores that begin together would start up their copies together too, and leave the memory idle meanwhile: each begins in one of so many phases,
// as many as by the twin's clock fill a step of a product and a KV tile.
constexpr int64_t kStepPhases = 6;
constexpr int64_t kTilePhases = 4;

__aicore__ inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
__aicore__ inline int64_t align_up(int64_t n, int64_t multiple) { return ceil_div(n, multiple) * multiple; }
__aicore__ inline int64_t align_down(int64_t n, int64_t multiple) { return n / multiple * multiple; }
__aicore__ inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
__aicore__ inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
__aicore__ inline int64_t clamp(int64_t n, int64_t low, int64_t high) { return smaller(larger(n, low), high); }

template <typename T>
__aicore__ inline GlobalTensor<T> global(GM_ADDR base, int64_t byte_offset = 0) {
  GlobalTensor<T> tensor;
  tensor.SetGlobalBuffer(reinterpret_cast<__gm__ T *>(base + byte_offset));
  return tensor;
}

// Hands out addresses of one memory, one buffer after the other.
class Region {
 public:
  __aicore__ inline explicit Region(TPosition position) : position_(position) {}
  template <typename T>
  __aicore__ inline LocalTensor<T> take(int64_t elements, int64_t alignment = kBlockBytes) {
    next_ = static_cast<uint32_t>(align_up(next_, alignment));
    LocalTensor<T> tensor(position_, next_, static_cast<uint32_t>(elements));
    next_ += static_cast<uint32_t>(align_up(elements * static_cast<int64_t>(sizeof(T)), kBlockBytes));
    return tensor;
  }

 private:
  TPosition position_;
  uint32_t next_ = 0;
};

// [rows, columns] of global memory, `ld` elements a row, to fractals of an L1 tile whose column blocks hold `tile_rows` rows each; columns
// beyond a multiple of 16 become zero.
template <typename T>
__aicore__ inline void load_fractals(const LocalTensor<T> &tile, const GlobalTensor<T> &source, int64_t rows, int64_t columns, int64_t ld,
                                     int64_t tile_rows) {
  AscendC::Nd2NzParams params;
  params.ndNum = 1;
  params.nValue = static_cast<uint16_t>(rows);
  params.dValue = static_cast<uint32_t>(columns);
  params.srcNdMatrixStride = 0;
  params.srcDValue = static_cast<uint64_t>(ld);
  params.dstNzC0Stride = static_cast<uint16_t>(tile_rows);
  params.dstNzNStride = 1;
  params.dstNzMatrixStride = 0;
  AscendC::DataCopy(tile, source, params);
}

// Several such matrices, their tiles side by side.
template <typename T>
__aicore__ inline void load_matrices(const LocalTensor<T> &tile, const GlobalTensor<T> &source, int64_t count, int64_t distance, int64_t rows, int64_t columns,
                                     int64_t ld, int64_t tile_rows) {
  AscendC::Nd2NzParams params;
  params.ndNum = static_cast<uint16_t>(count);
  params.nValue = static_cast<uint16_t>(rows);
  params.dValue = static_cast<uint32_t>(columns);
  params.srcNdMatrixStride = static_cast<uint64_t>(distance);
  params.srcDValue = static_cast<uint64_t>(ld);
  params.dstNzC0Stride = static_cast<uint16_t>(tile_rows);
  params.dstNzNStride = 1;
  params.dstNzMatrixStride = static_cast<uint32_t>(columns * tile_rows);
  AscendC::DataCopy(tile, source, params);
}

// Rows [rows, next multiple of 16) of such a tile become zero: what a sum runs over must be defined, for 0 * NaN is NaN.
template <typename T>
__aicore__ inline void zero_last_rows(const LocalTensor<T> &tile, const GlobalTensor<T> &zeros, int64_t rows, int64_t columns, int64_t tile_rows) {
  const int64_t fill = align_up(rows, kFractal) - rows;
  for (int64_t c = 0; fill > 0 && c < columns; c += kZeroColumns)
    load_fractals(tile[c * tile_rows + rows * kFractal], zeros, fill, smaller(columns - c, kZeroColumns), kZeroColumns, tile_rows);
}

// Fractals of an L1 tile to L0A (A [m, k]) or L0B (B [k, n] from a tile that holds its rows n, elements k).
template <typename T>
__aicore__ inline void load_l0(const LocalTensor<T> &dst, const LocalTensor<T> &src, int64_t m, int64_t k, int64_t tile_rows) {
  AscendC::LoadData2DParamsV2 params;
  params.mStep = static_cast<uint16_t>(ceil_div(m, kFractal));
  params.kStep = static_cast<uint16_t>(ceil_div(k, kFractal));
  params.srcStride = static_cast<int32_t>(tile_rows / kFractal);
  params.dstStride = params.mStep;
  AscendC::LoadData(dst, src, params);
}

// To L0B from a tile that holds B itself: its rows k, elements n.
template <typename T>
__aicore__ inline void load_l0_transposed(const LocalTensor<T> &dst, const LocalTensor<T> &src, int64_t k, int64_t n, int64_t tile_rows) {
  AscendC::LoadData2DParamsV2 params;
  params.mStep = static_cast<uint16_t>(ceil_div(k, kFractal));
  params.kStep = static_cast<uint16_t>(ceil_div(n, kFractal));
  params.srcStride = static_cast<int32_t>(tile_rows / kFractal);
  params.dstStride = params.kStep;
  params.ifTranspose = true;
  AscendC::LoadData(dst, src, params);
}

template <typename T>
__aicore__ inline void multiply(const LocalTensor<float> &c, const LocalTensor<T> &a, const LocalTensor<T> &b, int64_t m, int64_t n, int64_t k,
                                bool first) {
  AscendC::MmadParams params;
  params.m = static_cast<uint16_t>(m);
  params.n = static_cast<uint16_t>(n);
  params.k = static_cast<uint16_t>(k);
  params.cmatrixInitVal = first;
  params.disableGemv = true;  // one row takes the layout of all others
  AscendC::Mmad(c, a, b, params);
}

constexpr AscendC::FixpipeConfig kToUb{AscendC::CO2Layout::ROW_MAJOR, true};

// An absorbed query may exceed the range of float16: every row is divided by a scale of its own, which its scores are multiplied with.
template <typename T>
struct QueryRange {};
template <>
struct QueryRange<half> { static constexpr float most = 32768.0f; };
template <>
struct QueryRange<bfloat16_t> { static constexpr float most = 0.0f; };  // as wide as float32

template <typename T>
struct Rounding {};
template <>
struct Rounding<float> { static constexpr QuantMode_t mode = QuantMode_t::NoQuant; };
template <>
struct Rounding<half> { static constexpr QuantMode_t mode = QuantMode_t::F322F16; };
template <>
struct Rounding<bfloat16_t> { static constexpr QuantMode_t mode = QuantMode_t::F322BF16; };

template <typename T>
__aicore__ inline AscendC::FixpipeParamsC310<AscendC::CO2Layout::ROW_MAJOR> fixpipe_params(int64_t m, int64_t n, int64_t ld) {
  AscendC::FixpipeParamsC310<AscendC::CO2Layout::ROW_MAJOR> params;
  params.nSize = static_cast<uint16_t>(n);
  params.mSize = static_cast<uint16_t>(m);
  params.srcStride = static_cast<uint16_t>(align_up(m, kFractal));
  params.dstStride = static_cast<uint32_t>(ld);
  params.quantPre = Rounding<T>::mode;
  params.params.ndNum = 1;
  params.params.srcNdStride = 0;
  params.params.dstNdStride = 0;
  return params;
}

// A result [m, n] leaves L0C for global memory, rounded to O.
template <typename O>
__aicore__ inline void store_result(const GlobalTensor<O> &dst, const LocalTensor<float> &l0c, int64_t m, int64_t n, int64_t ld) {
  AscendC::Fixpipe<O, float, AscendC::CFG_ROW_MAJOR>(dst, l0c, fixpipe_params<O>(m, n, ld));
}

// .. or for the UBs of both AIVs, which take half of the rows each; m is a multiple of 16.
__aicore__ inline void share_result(const LocalTensor<float> &ub, const LocalTensor<float> &l0c, int64_t m, int64_t n, int64_t ld) {
  auto params = fixpipe_params<float>(m, n, ld);
  params.dualDstCtl = 1;
  AscendC::Fixpipe<float, float, kToUb>(ub, l0c, params);
}

// `count` runs of `length` elements, `gap` elements apart in global memory; in UB each run starts at a multiple of 32 bytes.
template <typename T>
__aicore__ inline void load_runs(const LocalTensor<T> &ub, const GlobalTensor<T> &source, int64_t count, int64_t length, int64_t gap,
                                 int64_t ub_gap_blocks = 0) {
  const AscendC::DataCopyExtParams runs(static_cast<uint16_t>(count), static_cast<uint32_t>(length * sizeof(T)), gap * int64_t(sizeof(T)),
                                        ub_gap_blocks, 0);
  const AscendC::DataCopyPadExtParams<T> no_padding(false, 0, 0, T(0));
  AscendC::DataCopyPad(ub, source, runs, no_padding);
}

template <typename T>
__aicore__ inline void store_runs(const GlobalTensor<T> &dst, const LocalTensor<T> &ub, int64_t count, int64_t length, int64_t gap,
                                  int64_t ub_gap_blocks = 0) {
  const AscendC::DataCopyExtParams runs(static_cast<uint16_t>(count), static_cast<uint32_t>(length * sizeof(T)), ub_gap_blocks,
                                        gap * int64_t(sizeof(T)), 0);
  AscendC::DataCopyPad(dst, ub, runs);
}

template <HardEvent event>
__aicore__ inline void hand_over(int32_t id = 0) {
  AscendC::SetFlag<event>(id);
  AscendC::WaitFlag<event>(id);
}

__aicore__ inline void v_barrier() { AscendC::PipeBarrier<PIPE_V>(); }

// The call as every stage sees it: arguments of the operator, dimensions, padded widths.
template <typename T>
struct Call {
  const KernelData &d;
  GM_ADDR in[FlashMLAIn::count];
  GM_ADDR out;
  GM_ADDR workspace;

  __aicore__ inline int64_t ld_kv() const { return align_up(d.rank + d.d_r, kFractal); }
  __aicore__ inline int64_t ld_q_a() const { return align_up(d.q_rank, kFractal); }
  __aicore__ inline int64_t ld_q() const { return align_up(d.d_n + d.d_r, kFractal); }
  __aicore__ inline int64_t ld_latent() const { return align_up(d.rank, kFractal); }
  __aicore__ inline int64_t ld_query() const { return align_up(d.rank + d.d_r, kFractal); }
  __aicore__ inline int64_t ld_v() const { return align_up(d.d_v, kFractal); }
  __aicore__ inline int64_t rope_dim() const { return d.rope_mode == kRopeFull ? d.d_n : d.d_r; }
  __aicore__ inline bool absorbed() const { return d.path == kAbsorbed; }

  template <typename E>
  __aicore__ inline GlobalTensor<E> input(int i) const { return global<E>(in[i]); }
  template <typename E>
  __aicore__ inline GlobalTensor<E> buffer(int64_t byte_offset) const { return global<E>(workspace, byte_offset); }

  // Both parts of a buffer, as A of a product.
  __aicore__ inline void set_parts(GlobalTensor<T> (&parts)[2], const int64_t (&offsets)[2]) const {
    for (int32_t i = 0; i < 2; ++i) parts[i] = buffer<T>(offsets[i]);
  }

  // Scalar reads touch inputs alone, never what the kernel writes: their data cache is not kept coherent.
  __aicore__ inline int64_t q_len(int64_t b) const { return input<int32_t>(FlashMLAIn::q_seq_lens).GetValue(b); }
  __aicore__ inline int64_t context(int64_t b) const { return input<int32_t>(FlashMLAIn::context_lens).GetValue(b); }
  // Element of the cache at which key `position` of sequence b begins: the one place that knows how sequences lie.
  __aicore__ inline int64_t cache_row(int64_t b, int64_t position) const {
    const CacheLayout &c = d.cache;
    const int64_t block = c.paged ? input<int32_t>(FlashMLAIn::block_table).GetValue(b * d.max_blocks + position / c.page) : b;
    return block * c.block_stride + position % c.page * c.row_stride;
  }
  // Keys from `position` on, `most` at the most, that lie one after the other.
  __aicore__ inline int64_t cache_run(int64_t position, int64_t most) const { return smaller(most, d.cache.page - position % d.cache.page); }
};

}  // namespace flashmla
