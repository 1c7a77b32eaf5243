"""Faults planted into the Ascend kernel: what is changed where, one at a time. `found`: the ways in which it may show, a fault of the twin or "numbers";
empty for a change that changes nothing, with the reason."""
from dataclasses import dataclass

SYNC = ("data race", "event misuse", "deadlock")
BOUNDS = ("out of bounds", "over capacity", "misaligned")
DATA = ("numbers", "wrong layout", *BOUNDS, *SYNC)


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str    # of op_impl/ascendc/op_kernel
    old: str     # stands there exactly `times` times; all of them are replaced
    new: str
    found: tuple = SYNC
    times: int = 1
    reason: str = ""


def dropped(name, file, line, found=SYNC, times=1, before="", then=""):
    return Mutant(f"dropped: {name}", file, before + line + then, before + then, found, times)


CUBE, VEC, GEMM, PRODUCTS, COMMON = "attention_cube.h", "attention_vec.h", "gemm.h", "products.h", "common.h"

MUTANTS = [
    # events of the cube
    dropped("wait for a free KV buffer", CUBE, "    AscendC::WaitFlag<HardEvent::MTE1_MTE2>(kv_);\n", then="    load_keys"),
    dropped("KV buffer handed back", CUBE, "        AscendC::SetFlag<HardEvent::MTE1_MTE2>(tile.kv);\n"),
    dropped("wait for free scores in L0C", CUBE, "    AscendC::WaitFlag<HardEvent::FIX_M>(s_index_);\n"),
    dropped("Q handed back", CUBE, " AscendC::SetFlag<HardEvent::MTE1_MTE2>(kQuery);", then=" }\n"),
    dropped("wait for a free Q", CUBE, "    AscendC::WaitFlag<HardEvent::MTE1_MTE2>(kQuery);\n", then="    const"),
    dropped("wait for the KV tile", CUBE, "    hand_over<HardEvent::MTE2_MTE1>(kv_);\n"),
    dropped("wait for the scores' product", CUBE, "    hand_over<HardEvent::M_FIX>(s_index_);\n"),
    dropped("wait for free P V in L0C", CUBE, "      AscendC::WaitFlag<HardEvent::FIX_M>(kPv + out_);\n", then="      for"),
    dropped("wait for L0 in attention", CUBE, "hand_over<HardEvent::MTE1_M>(l0_);", found=DATA, times=2),
    dropped("L0 handed back in attention", CUBE, "AscendC::SetFlag<HardEvent::M_MTE1>(l0_);", found=DATA, times=2),
    Mutant("swapped: the other KV buffer is handed back", CUBE, "AscendC::SetFlag<HardEvent::MTE1_MTE2>(tile.kv);", "AscendC::SetFlag<HardEvent::MTE1_MTE2>(tile.kv ^ 1);"),
    Mutant("reused: Q takes the event of KV buffer 0", CUBE, "kQuery = kMostKvBuffers;", "kQuery = 0;"),
    Mutant("reused: P V takes the events of the scores", CUBE, "kPv = 2;", "kPv = 0;"),
    dropped("wait at the end for KV buffers", CUBE, "    for (int32_t i = 0; i < s_.b.kv_buffers; ++i) AscendC::WaitFlag<HardEvent::MTE1_MTE2>(i);\n"),
    # flags between the cores
    dropped("scores ready", CUBE, "    AscendC::CrossCoreSetFlag<kCoreMode, PIPE_FIX>(FIX_V_SCORES);\n"),
    dropped("wait for free scores in UB", CUBE, "    AscendC::CrossCoreWaitFlag<kCoreMode, PIPE_FIX>(V_FIX_SCORES_FREE);\n", then="    share"),
    dropped("wait for P", CUBE, "    AscendC::CrossCoreWaitFlag<kCoreMode, PIPE_MTE1>(MTE3_MTE1_P);\n"),
    dropped("wait for free P V in UB", CUBE, "        AscendC::CrossCoreWaitFlag<kCoreMode, PIPE_FIX>(V_FIX_PV_FREE);\n", then="        share"),
    dropped("wait for the scores", VEC, "    AscendC::CrossCoreWaitFlag<kCoreMode, PIPE_V>(FIX_V_SCORES);\n"),
    dropped("wait for P V", VEC, "      AscendC::CrossCoreWaitFlag<kCoreMode, PIPE_V>(FIX_V_PV);\n"),
    dropped("wait for a free P in L1", VEC, "    AscendC::CrossCoreWaitFlag<kCoreMode, PIPE_MTE3>(MTE1_MTE3_P_FREE);\n", then="    const"),
    Mutant("too early: scores given back before they are read", VEC, "    AscendC::CrossCoreWaitFlag<kCoreMode, PIPE_V>(FIX_V_SCORES);\n",
           "    AscendC::CrossCoreWaitFlag<kCoreMode, PIPE_V>(FIX_V_SCORES);\n    AscendC::CrossCoreSetFlag<kCoreMode, PIPE_V>(V_FIX_SCORES_FREE);\n    AscendC::CrossCoreWaitFlag<kCoreMode, PIPE_V>(V_FIX_SCORES_FREE);\n"),
    Mutant("wrong pipe: P announced before it is copied", VEC, "AscendC::CrossCoreSetFlag<kCoreMode, PIPE_MTE3>(MTE3_MTE1_P);",
           "AscendC::CrossCoreSetFlag<kCoreMode, PIPE_V>(MTE3_MTE1_P);"),
    Mutant("mixed up: one id for scores and P V", COMMON, "FIX_V_PV = 4;", "FIX_V_PV = 0;"),
    Mutant("mixed up: P V given back as scores", COMMON, "V_FIX_PV_FREE = 5;", "V_FIX_PV_FREE = 1;", DATA),
    Mutant("reserved: an id of SyncAll", COMMON, "FIX_V_SCORES = 0;", "FIX_V_SCORES = 12;", ("event misuse", "illegal operation")),
    Mutant("one credit too many for the scores", VEC, "i < s_.b.score_buffers; ++i) AscendC::CrossCoreSetFlag<kCoreMode, PIPE_V>(V_FIX_SCORES_FREE);",
           "i <= s_.b.score_buffers; ++i) AscendC::CrossCoreSetFlag<kCoreMode, PIPE_V>(V_FIX_SCORES_FREE);"),
    dropped("barrier between attention and combine", "flash_mla_kernel.h", "  next_stage();\n", DATA, then="  if ASCEND_IS_AIV { combine(call, schedule); }\n  next_stage();"),
    # events of the vector units
    dropped("wait for P's copy before the next P", VEC, "    AscendC::WaitFlag<HardEvent::MTE3_V>(p_);\n"),
    dropped("P handed to the copy", VEC, "    hand_over<HardEvent::V_MTE3>(p_);\n"),
    dropped("output handed to the copy", VEC, "hand_over<HardEvent::V_MTE3>(kLeave);", times=2),
    dropped("wait until the output has left", VEC, "hand_over<HardEvent::MTE3_V>(kLeave);", times=2),
    dropped("scales handed to the vector unit", VEC, "      hand_over<HardEvent::MTE2_V>(pass_);\n"),
    dropped("norm: rows handed to the vector unit", "prolog.h", "    hand_over<HardEvent::MTE2_V>();\n", DATA, before="    load_runs(b.x, raw[t * ld], 1, rows * ld, 0);\n", then="    if (d.has_b_q_a)"),
    dropped("RoPE: k_pe handed to the copy", "prolog.h", "    hand_over<HardEvent::V_MTE3>();\n", then="    for (int64_t i"),
    dropped("combine: partial outputs handed to the vector unit", "combine.h", "        hand_over<HardEvent::MTE2_V>(next_);\n"),
    dropped("combine: buffer handed back", "combine.h", "        if (i + 1 < splits) AscendC::SetFlag<HardEvent::V_MTE2>(next_);\n"),
    # projections
    dropped("wait for free L1 in a product", GEMM, "          AscendC::WaitFlag<HardEvent::MTE1_MTE2>(kWeights + weight_);\n"),
    dropped("wait for free L1 of A in a product", GEMM, "      AscendC::WaitFlag<HardEvent::MTE1_MTE2>(step_);\n"),
    dropped("wait for free L1 before a barrier", GEMM, "        AscendC::WaitFlag<HardEvent::MTE1_MTE2>(kWeights + fetched_);\n"),
    Mutant("too early: the next product takes events that are still on their way", PRODUCTS, "    AscendC::PipeBarrier<PIPE_ALL>();", "    ", times=2),
    dropped("wait for free L0C in a product", GEMM, "        if (k0 == 0) AscendC::WaitFlag<HardEvent::FIX_M>(out);\n"),
    dropped("wait for A and the weights", GEMM, "        hand_over<HardEvent::MTE2_MTE1>(kWeights + weight_);  // A came before them\n"),
    dropped("wait for a free A", GEMM, "      AscendC::WaitFlag<HardEvent::MTE1_MTE2>(step_);\n"),
    Mutant("buffers of a product never change", GEMM, "    out_ = out;\n", "", (), reason="one accumulator with its own event is slower, not wrong"),
    # buffers
    Mutant("one too small: scores in UB", "attention.h", "scores[i] = ub.take<float>(half * s.b.kv_tile);", "scores[i] = ub.take<float>(half * s.b.kv_tile - 8);", BOUNDS),
    Mutant("one too small: KV tile in L1", "attention.h", "k[i] = l1.take<T>(s.b.kv_tile * s.d_qk16);", "k[i] = l1.take<T>(s.b.kv_tile * s.d_qk16 - 16);", BOUNDS),
    Mutant("too large: L0A's buffers", CUBE, "l0a_[i] = l0a.take<T>(kL0HalfBytes / sizeof(T));", "l0a_[i] = l0a.take<T>(kL0HalfBytes);", BOUNDS),
    Mutant("overlap: both scores in UB are one", "attention.h", "    o = ub.take<float>(half * s.d_v16);", "    scores[1] = scores[0];\n    o = ub.take<float>(half * s.d_v16);", DATA),
    Mutant("overlap: both KV buffers are one", "attention.h", "v[i] = call.absorbed() ? k[i] :", "if (i == 1) k[1] = k[0];\n      v[i] = call.absorbed() ? k[i] :", DATA),
    Mutant("swapped: the other buffer of P V is read", VEC, "const LocalTensor<float> &pv = ub_.pv[out_];", "const LocalTensor<float> &pv = ub_.pv[out_ ^ 1];", DATA),
    Mutant("swapped: the other copy of P is multiplied", CUBE, "&p = l1_.p[tile.p], &v", "&p = l1_.p[tile.p ^ 1], &v", DATA),
    Mutant("unaligned: results of a product at any address of L0C", GEMM, "c_[i] = l0c.take<float>(blocks.rows * piece_, 1024);",
           "c_[i] = l0c.take<float>(blocks.rows * piece_ - 16, 32);", (*BOUNDS, "numbers")),
    # layouts and strides
    Mutant("wrong stride: K read with the stride of Q", CUBE, "l1_.k[kv_][c * s_.b.kv_tile], tile.keys16, depth, s_.b.kv_tile);", "l1_.k[kv_][c * s_.b.kv_tile], tile.keys16, depth, tile.rows16);", DATA),
    Mutant("wrong stride: P laid out for whole rows of the AIV", VEC, "static_cast<uint16_t>(tile.rows16 - half));", "static_cast<uint16_t>(0));", DATA),
    Mutant("not transposed: V as if its rows were columns", CUBE, "load_l0_transposed(l0b_[l0_], v[", "load_l0(l0b_[l0_], v[", DATA),
    Mutant("wrong stride: L0 written for other columns", COMMON, "  params.dstStride = params.kStep;\n  params.ifTranspose = true;", "  params.dstStride = params.mStep;\n  params.ifTranspose = true;", DATA),
    Mutant("wrong row length: result leaves with the padded width", PRODUCTS, "c, item.m, item.n, job.ldc);\n    else", "c, item.m, item.n, job.ldc + 16);\n    else", DATA),
    Mutant("illegal: the cube's result rounded to half without a cast", COMMON, "  params.quantPre = Rounding<T>::mode;\n", "", ("illegal operation",)),
    # tails and masks
    Mutant("tail of a full tile: the last row of keys is left out", CUBE, "keys = smaller(s_.b.kv_tile, pass.keys - key);\n    tile.any", "keys = smaller(s_.b.kv_tile, pass.keys - key - 1);\n    tile.any", DATA),
    Mutant("tail: rows beyond the keys are not zeroed", CUBE, "    zero_last_rows(l1_.k[kv_], zeros_, keys, s_.d_qk16, kv_tile);\n", "", DATA),
    Mutant("mask: one key too many", VEC, "return pass.context + row / schedule_.row_heads() + 1 -", "return pass.context + row / schedule_.row_heads() + 2 -", DATA),
    Mutant("mask: never", VEC, "if (first_limit(pass, t) < kv) mask(pass, t, s);", "", DATA),
    Mutant("mask: always", VEC, "if (first_limit(pass, t) < kv) mask(pass, t, s);", "mask(pass, t, s);", (), reason="a mask on a full tile marks no key; it costs scalar work alone"),
    Mutant("page: the second page is read from the first one's place", CUBE, "cache[call_.cache_row(pass.sequence, key + at)]", "cache[call_.cache_row(pass.sequence, key)]", DATA),
    Mutant("AIV: both take the first half of the rows", VEC, "return pass.row0 + AscendC::GetSubBlockIdx() * half_of(pass);", "return pass.row0;", DATA),
    Mutant("rescale: the factor of the tile after", VEC, "ub_.rescale_blocks[coming_.tile]", "ub_.rescale_blocks[coming_.tile ^ 1]", DATA),
    Mutant("combine: the sum is not weighted", "combine.h", "    AscendC::Mul(weight_, weight_, sum, n);\n", "", DATA),
    Mutant("combine: one slot a core", "schedule.h", "return 2 * (piece * team_ + member) + (line > piece * piece_ ? 1 : 0);", "return 2 * (piece * team_ + member);", DATA),
    Mutant("norm: eps is left out of nothing", "vec.h", "  AscendC::Adds(s.sums, s.sums, eps, static_cast<int32_t>(rows));\n", "", (),
           reason="1e-6 beside a mean square near 1 is below float16; tests/test_twin_layer.py's case of two eps shows it"),
    Mutant("RoPE: sine with the wrong sign", "vec.h", "AscendC::Sub(s.rotated, s.rotated, s.product, count);", "AscendC::Add(s.rotated, s.rotated, s.product, count);", DATA),
    Mutant("residual is not added", "epilog.h", "      if (d.has_residual) AscendC::Add(y, y, wide_, count);\n", "", DATA),
    Mutant("barrier of a pipe that is in order anyway", "vec.h", "  invert(s.sums, s.part, rows);\n  spread(s.blocks, s.sums, rows);\n  v_barrier();\n", "  invert(s.sums, s.part, rows);\n  spread(s.blocks, s.sums, rows);\n", (),
           reason="the twin's pipes are in order, as the machine model says; a barrier within one orders nothing more"),
]
