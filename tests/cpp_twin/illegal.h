// Calls that the chip does not have, each alone in a kernel; and small right ones that need several cores.
#pragma once

#include <functional>
#include <vector>

#include "kernel_operator.h"

namespace illegal {

using namespace AscendC;

inline uint8_t* gm;  // 16 KiB, read and written

template <typename T>
GlobalTensor<T> data() {
  GlobalTensor<T> t;
  t.SetGlobalBuffer(reinterpret_cast<T*>(gm));
  return t;
}
inline LocalTensor<half> l1(uint32_t at = 0) { return LocalTensor<half>(TPosition::A1, at, 4096); }
inline LocalTensor<half> l0a() { return LocalTensor<half>(TPosition::A2, 0, 4096); }
inline LocalTensor<half> l0b() { return LocalTensor<half>(TPosition::B2, 0, 4096); }
inline LocalTensor<float> l0c(uint32_t at = 0) { return LocalTensor<float>(TPosition::CO1, at, 4096); }
inline LocalTensor<float> ub(uint32_t at = 0, uint32_t n = 1024) { return LocalTensor<float>(TPosition::VECCALC, at, n); }

// Every AIC waits for every other; what AIV0 wrote before the barrier, AIV1 of the next block reads after it.
inline void sync_all() {
  if ASCEND_IS_AIV {
    const int self = static_cast<int>(GetBlockIdx()), all = static_cast<int>(GetBlockNum()) * 2;
    Duplicate(ub(), static_cast<float>(self), 64);
    SetFlag<HardEvent::V_MTE3>(0);
    WaitFlag<HardEvent::V_MTE3>(0);
    DataCopyPad(data<float>()[self * 64], ub(), DataCopyExtParams(1, 256, 0, 0, 0));
    SyncAll<false>();
    DataCopyPad(ub(4096), data<float>()[(self + 1) % all * 64], DataCopyExtParams(1, 256, 0, 0, 0), DataCopyPadExtParams<float>(false, 0, 0, 0));
    SetFlag<HardEvent::MTE2_S>(0);
    WaitFlag<HardEvent::MTE2_S>(0);
    if (ub(4096).GetValue(3) != static_cast<float>((self + 1) % all)) throw std::runtime_error("the neighbour's value is not there");
  }
  if ASCEND_IS_AIC SyncAll<false>();
}

inline void scalar() {
  if ASCEND_IS_AIC return;
  if (GetSubBlockIdx() == 1) return;
  ub().SetValue(0, 3.0f);
  SetFlag<HardEvent::S_V>(0);
  WaitFlag<HardEvent::S_V>(0);
  Adds(ub(), ub(), 1.0f, 8);
  SetFlag<HardEvent::V_S>(0);
  WaitFlag<HardEvent::V_S>(0);
  if (ub().GetValue(0) != 4.0f) throw std::runtime_error("3 + 1 is not 4");
}

inline void flag_modes() {
  if ASCEND_IS_AIC {
    CrossCoreSetFlag<0, PIPE_FIX>(1);
    CrossCoreWaitFlag<0, PIPE_FIX>(1);
    CrossCoreSetFlag<4, PIPE_FIX>(16 + 2);
    CrossCoreWaitFlag<4, PIPE_MTE1>(3);
  }
  if ASCEND_IS_AIV {
    CrossCoreSetFlag<1, PIPE_V>(4);
    CrossCoreWaitFlag<1, PIPE_V>(4);
    if (GetSubBlockIdx() == 1) CrossCoreWaitFlag<4, PIPE_V>(2);
    if (GetSubBlockIdx() == 0) CrossCoreSetFlag<4, PIPE_MTE3>(3);
  }
}

struct Call {
  const char* name;
  const char* fault;
  std::function<void()> kernel;
};

inline MmadParams square(int m = 16, int n = 16, int k = 16) {
  MmadParams p(m, n, k, 0, false, true);
  p.disableGemv = true;
  return p;
}

#define ON_AIC(...) [] { if ASCEND_IS_AIC { __VA_ARGS__; } }
#define ON_AIV(...) [] { if ASCEND_IS_AIV { if (GetSubBlockIdx() == 0) { __VA_ARGS__; } } }

inline std::vector<Call> calls() {
  using Row = FixpipeParamsC310<CO2Layout::ROW_MAJOR>;
  static constexpr FixpipeConfig kToUb(CO2Layout::ROW_MAJOR, true);
  return {
      {"GM to L0A", "illegal operation", ON_AIC(DataCopy(l0a(), data<half>(), Nd2NzParams(1, 16, 16, 0, 16, 16, 1, 0)))},
      {"L1 to GM", "illegal operation", ON_AIC(DataCopy(data<half>(), l1(), 256))},
      {"L0C to GM by DataCopy", "illegal operation", ON_AIC(DataCopy(data<float>(), l0c(), 256))},
      {"L1 to L0A transposed", "illegal operation", ON_AIC(LoadData(l0a(), l1(), LoadData2DParamsV2(0, 0, 1, 1, 1, 1, true, 0)))},
      {"UB to L0A", "illegal operation", ON_AIV(DataCopy(l0a(), LocalTensor<half>(TPosition::VECCALC, 0, 256), DataCopyParams(1, 1, 0, 0)))},
      {"vector on the AIC", "illegal operation", ON_AIC(Adds(ub(), ub(), 1.0f, 64))},
      {"vector on L1", "illegal operation", ON_AIV(Adds(l1(), l1(), half(1.0f), 64))},
      {"cube on an AIV", "illegal operation", ON_AIV(Mmad(l0c(), l0a(), l0b(), square()))},
      {"cube with half and bfloat16", "illegal operation", ON_AIC(Mmad(l0c(), l0a(), l0b().ReinterpretCast<bfloat16_t>(), square()))},
      {"cube in half precision", "illegal operation", ON_AIC(Mmad(l0c().ReinterpretCast<half>(), l0a(), l0b(), square()))},
      {"m = 1 without disableGemv", "wrong layout", ON_AIC(MmadParams p = square(1); p.disableGemv = false; Mmad(l0c(), l0a(), l0b(), p))},
      {"UB one element too large", "over capacity", ON_AIV(ub(0, 253952 / 4 + 8))},
      {"L1 beyond its end", "over capacity", ON_AIC(l1(524288 - 4096))},
      {"local tensor at 16 bytes", "misaligned", ON_AIV(ub(16))},
      {"vector at 4 bytes", "misaligned", ON_AIV(Adds(ub()[1], ub(), 1.0f, 64))},
      {"L0A at 32 bytes", "misaligned", ON_AIC(LoadData(l0a()[16], l1(), LoadData2DParamsV2(0, 0, 1, 1, 1, 1, false, 0)))},
      {"L0C at 512 bytes", "misaligned", ON_AIC(Mmad(l0c(512), l0a(), l0b(), square()))},
      {"count beyond the tensor", "out of bounds", ON_AIV(Adds(ub(), ub(), 1.0f, 1025))},
      {"copy beyond the GM tensor", "out of bounds", ON_AIV(DataCopyPad(ub(), data<float>()[4096 - 63], DataCopyExtParams(1, 256, 0, 0, 0), DataCopyPadExtParams<float>(false, 0, 0, 0)))},
      {"DataCopy of 20 bytes", "misaligned", ON_AIV(DataCopy(ub(), data<float>(), 5))},
      {"mask of 65 floats", "illegal operation", ON_AIV(Add(ub(), ub(), ub(), 65, 1, BinaryRepeatParams(1, 1, 1, 8, 8, 8)))},
      {"fixpipe of 24 columns", "illegal operation", ON_AIC((Fixpipe<float, float, CFG_ROW_MAJOR>(data<float>(), l0c(), Row(24, 16, 16, 24))))},
      {"fixpipe to half without a cast", "illegal operation", ON_AIC((Fixpipe<half, float, CFG_ROW_MAJOR>(data<half>(), l0c(), Row(16, 16, 16, 16))))},
      {"fixpipe of 17 rows to two AIVs", "illegal operation", ON_AIC(Row p(16, 17, 32, 16); p.dualDstCtl = 1; (Fixpipe<float, float, kToUb>(ub(), l0c(), p)))},
      {"event 8", "event misuse", ON_AIV(SetFlag<HardEvent::MTE2_V>(8))},
      {"event of the cube on an AIV", "illegal operation", ON_AIV(SetFlag<HardEvent::MTE1_M>(0))},
      {"event set twice", "event misuse", ON_AIV(SetFlag<HardEvent::MTE2_V>(0); SetFlag<HardEvent::MTE2_V>(0); WaitFlag<HardEvent::MTE2_V>(0); WaitFlag<HardEvent::MTE2_V>(0))},
      {"event never set", "deadlock", ON_AIV(WaitFlag<HardEvent::MTE2_V>(0); Adds(ub(), ub(), 1.0f, 64))},
      {"event reused without an order", "event misuse",
       ON_AIV(for (int i = 0; i < 2; ++i) { Adds(ub(), ub(), 1.0f, 64); SetFlag<HardEvent::V_MTE3>(0); WaitFlag<HardEvent::V_MTE3>(0); })},
      {"cross-core mode 3", "illegal operation", ON_AIC((CrossCoreSetFlag<3, PIPE_FIX>(0)))},
      {"cross-core flag 16 in mode 2", "event misuse", ON_AIC((CrossCoreSetFlag<2, PIPE_FIX>(16)))},
      {"a flag of SyncAll", "event misuse", [] { if ASCEND_IS_AIC { CrossCoreSetFlag<0, PIPE_FIX>(12); CrossCoreWaitFlag<0, PIPE_FIX>(12); } SyncAll<false>(); }},
      {"cross-core flag set 16 times", "event misuse", ON_AIC(for (int i = 0; i < 16; ++i) CrossCoreSetFlag<4, PIPE_FIX>(0))},
      {"cross-core flag of one AIV alone", "event misuse", ON_AIV((CrossCoreSetFlag<2, PIPE_V>(0)))},
      {"SyncAll without the others", "deadlock", ON_AIC(SyncAll<false>())},
      {"scalar write without an event", "data race", ON_AIV(ub().SetValue(0, 1.0f); Adds(ub(), ub(), 1.0f, 64))},
      {"scalar read without an event", "data race", ON_AIV(Adds(ub(), ub(), 1.0f, 64); (void)ub().GetValue(0))},
      {"both AIVs to the same bytes", "data race", [] { if ASCEND_IS_AIV DataCopyPad(data<float>(), ub(), DataCopyExtParams(1, 64, 0, 0, 0)); }},
      {"NZ read with another stride", "wrong layout", ON_AIC(DataCopy(l1(), data<half>(), Nd2NzParams(1, 16, 64, 0, 64, 32, 1, 0)); SetFlag<HardEvent::MTE2_MTE1>(0);
                                                              WaitFlag<HardEvent::MTE2_MTE1>(0); LoadData(l0a(), l1(), LoadData2DParamsV2(0, 0, 1, 4, 1, 1, false, 0)))},
      {"L0A of another m", "wrong layout", ON_AIC(DataCopy(l1(), data<half>(), Nd2NzParams(1, 32, 64, 0, 64, 32, 1, 0)); SetFlag<HardEvent::MTE2_MTE1>(0);
                                                  WaitFlag<HardEvent::MTE2_MTE1>(0); LoadData(l0a(), l1(), LoadData2DParamsV2(0, 0, 2, 4, 2, 2, false, 0));
                                                  LoadData(l0b(), l1(), LoadData2DParamsV2(0, 0, 2, 4, 2, 2, false, 0)); SetFlag<HardEvent::MTE1_M>(0);
                                                  WaitFlag<HardEvent::MTE1_M>(0); Mmad(l0c(), l0a(), l0b(), square(16, 32, 64)))},
      {"write of an L0C that is being read", "data race",
       ON_AIC(Mmad(l0c(), l0a(), l0b(), square()); SetFlag<HardEvent::M_FIX>(0); WaitFlag<HardEvent::M_FIX>(0);
              (Fixpipe<float, float, CFG_ROW_MAJOR>(data<float>(), l0c(), Row(16, 16, 16, 16))); Mmad(l0c(), l0a(), l0b(), square()))},
  };
}

}  // namespace illegal
