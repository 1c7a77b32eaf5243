// Small kernels in AscendC, each right as it stands and wrong in a known way when `broken` says so.
#pragma once

#include <string>

#include "kernel_operator.h"

using namespace AscendC;

inline std::string broken;  // the fault to plant, "" for none
inline bool is(const char* fault) { return broken == fault; }

// y = 2 x on the vector unit: tiles of 256 floats through two buffers. Each AIV takes its share.
struct Doubler {
  static constexpr int kTile = 256;
  GM_ADDR x;
  GM_ADDR y;
  int tiles;  // of all AIVs

  void operator()() const {
    if ASCEND_IS_AIC return;
    GlobalTensor<float> in, out;
    in.SetGlobalBuffer(reinterpret_cast<float*>(x));
    out.SetGlobalBuffer(reinterpret_cast<float*>(y));
    const int vectors = static_cast<int>(GetBlockNum()) * 2, self = static_cast<int>(GetBlockIdx());
    LocalTensor<float> buffers[2] = {LocalTensor<float>(TPosition::VECCALC, 0, kTile), LocalTensor<float>(TPosition::VECCALC, kTile * 4, is("short buffer") ? kTile - 8 : kTile)};
    for (int id = 0; id < 2; ++id) SetFlag<HardEvent::MTE3_MTE2>(id);
    int step = 0;
    for (int tile = self; tile < tiles; tile += vectors, ++step) {
      const int id = step % 2, in_id = is("swapped event") ? 1 - id : id;
      const LocalTensor<float> buffer = is("swapped buffer") && step == 2 ? buffers[1 - id] : buffers[id];
      if (!is("no wait for the buffer") || step < 2) WaitFlag<HardEvent::MTE3_MTE2>(id);
      DataCopyPad(buffer, in[tile * kTile], DataCopyExtParams(1, is("tail read") && tile + 1 == tiles ? kTile * 4 + 4 : kTile * 4, 0, 0, 0), DataCopyPadExtParams<float>(false, 0, 0, 0));
      SetFlag<HardEvent::MTE2_V>(id);
      if (!is("no wait for the input")) WaitFlag<HardEvent::MTE2_V>(in_id);
      Muls(buffer, buffer, 2.0f, kTile);
      if (!is("no set of the result")) SetFlag<HardEvent::V_MTE3>(id);
      WaitFlag<HardEvent::V_MTE3>(id);
      DataCopyPad(is("same output") ? out : out[tile * kTile], buffer, DataCopyExtParams(1, kTile * 4, 0, 0, 0));
      SetFlag<HardEvent::MTE3_MTE2>(id);
    }
    for (int id = 0; id < 2; ++id) if (!is("event left set")) WaitFlag<HardEvent::MTE3_MTE2>(id);
  }
};

// c [m, n] = (a [m, k] b [k, n]) as softmax sees it: the cube's scores go to both AIVs, which double them, and come back through L1
// to be multiplied by w [n, n].
struct HandOff {
  static constexpr int kM = 32, kK = 64, kN = 48;
  GM_ADDR a;  // half [kM, kK]
  GM_ADDR b;  // half [kK, kN]
  GM_ADDR w;  // half [kN, kN]
  GM_ADDR c;  // float [kM, kN]
  enum Flag : uint16_t { kScoresReady = 0, kProbsReady = 1, kScoresFree = 2 };

  static void load(const LocalTensor<half>& dst, GM_ADDR src, int rows, int columns) {
    GlobalTensor<half> gm;
    gm.SetGlobalBuffer(reinterpret_cast<half*>(src));
    DataCopy(dst, gm, Nd2NzParams(1, rows, columns, 0, columns, rows, 1, 0));
  }
  static void multiply(const LocalTensor<float>& dst, const LocalTensor<half>& a0, const LocalTensor<half>& b0, int m, int n, int k) {
    MmadParams p(m, n, k, 0, false, true);
    p.disableGemv = true;
    Mmad(dst, a0, b0, p);
  }

  void operator()() const {
    if ASCEND_IS_AIC cube();
    if ASCEND_IS_AIV vector();
  }

  void cube() const {
    const LocalTensor<half> l1_a(TPosition::A1, 0, kM * kK), l1_b(TPosition::B1, kM * kK * 2, kK * kN), l1_w(TPosition::B1, 64 * 1024, kN * kN);
    const LocalTensor<half> l1_p(TPosition::A1, 128 * 1024, kM * kN), l0a(TPosition::A2, 0, kM * kK), l0b(TPosition::B2, 0, kK * kN), l0b_w(TPosition::B2, 32 * 1024, kN * kN);
    const LocalTensor<float> scores(TPosition::CO1, 0, kM * kN), result(TPosition::CO1, 64 * 1024, kM * kN), ub(TPosition::VECCALC, 0, kM / 2 * kN);
    load(l1_a, a, kM, kK);
    load(l1_b, b, kK, kN);
    load(l1_w, w, kN, kN);
    SetFlag<HardEvent::MTE2_MTE1>(0);
    WaitFlag<HardEvent::MTE2_MTE1>(0);
    LoadData(l0a, l1_a, LoadData2DParamsV2(0, 0, kM / 16, kK / 16, is("wrong stride") ? kM / 16 + 1 : kM / 16, kM / 16, false, 0));
    LoadData(l0b, l1_b, LoadData2DParamsV2(0, 0, kK / 16, kN / 16, kK / 16, kN / 16, !is("not transposed"), 0));
    SetFlag<HardEvent::MTE1_M>(0);
    if (!is("no wait for L0")) WaitFlag<HardEvent::MTE1_M>(0);
    multiply(scores, l0a, l0b, kM, kN, kK);
    SetFlag<HardEvent::M_FIX>(0);
    WaitFlag<HardEvent::M_FIX>(0);
    static constexpr FixpipeConfig kToUb(CO2Layout::ROW_MAJOR, true);
    FixpipeParamsC310<CO2Layout::ROW_MAJOR> out(kN, kM, kM, kN);
    out.dualDstCtl = 1;
    if (!is("no credit")) CrossCoreWaitFlag<2, PIPE_FIX>(kScoresFree);
    Fixpipe<float, float, kToUb>(ub, scores, out);
    if (!is("no cross-core set")) CrossCoreSetFlag<2, PIPE_FIX>(kScoresReady);
    if (!is("no cross-core wait")) CrossCoreWaitFlag<2, PIPE_MTE1>(is("wrong cross-core flag") ? kScoresReady : kProbsReady);
    SetFlag<HardEvent::M_MTE1>(1);
    WaitFlag<HardEvent::M_MTE1>(1);
    LoadData(l0a, l1_p, LoadData2DParamsV2(0, 0, kM / 16, kN / 16, kM / 16, kM / 16, false, 0));
    LoadData(l0b_w, l1_w, LoadData2DParamsV2(0, 0, kN / 16, kN / 16, kN / 16, kN / 16, true, 0));
    SetFlag<HardEvent::MTE1_M>(1);
    WaitFlag<HardEvent::MTE1_M>(1);
    multiply(result, l0a, l0b_w, kM, kN, kN);
    SetFlag<HardEvent::M_FIX>(1);
    WaitFlag<HardEvent::M_FIX>(1);
    GlobalTensor<float> gm;
    gm.SetGlobalBuffer(reinterpret_cast<float*>(c));
    Fixpipe<float, float, CFG_ROW_MAJOR>(gm, result, FixpipeParamsC310<CO2Layout::ROW_MAJOR>(kN, kM, kM, kN));
  }

  void vector() const {
    const int half_rows = kM / 2, self = static_cast<int>(GetSubBlockIdx());
    const LocalTensor<float> scores(TPosition::VECCALC, 0, half_rows * kN);
    const LocalTensor<half> probs(TPosition::VECCALC, 32 * 1024, half_rows * kN), l1_p(TPosition::A1, 128 * 1024, kM * kN);
    CrossCoreSetFlag<2, PIPE_V>(kScoresFree);
    CrossCoreWaitFlag<2, PIPE_V>(kScoresReady);
    Muls(scores, scores, 2.0f, half_rows * kN);
    // Rows of kN floats become NZ: the 16 columns of a block of rows stand together.
    for (int block = 0; block < kN / 16; ++block) {
      Cast(probs[block * half_rows * 16], scores[block * 16], RoundMode::CAST_RINT, 16, half_rows, UnaryRepeatParams(1, 1, 1, kN / 8));
    }
    SetFlag<HardEvent::V_MTE3>(0);
    WaitFlag<HardEvent::V_MTE3>(0);
    DataCopy(l1_p[self * half_rows * 16], probs, DataCopyParams(kN / 16, half_rows, 0, is("wrong gap") ? 0 : kM - half_rows));
    CrossCoreSetFlag<2, PIPE_MTE3>(kProbsReady);
  }
};
