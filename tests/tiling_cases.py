"""Problems for the tests of the tiling, and the C functions behind it."""
import ctypes
import re
from collections import defaultdict
from dataclasses import dataclass, replace

from ms_flashmla import tiling_report as tiling
from ms_flashmla._lib import library

KIB, MIB = 1 << 10, 1 << 20

CPUS = ("cpu_avx512", "cpu_avx2", "cpu_generic")
# AICs, MHz, L2 MiB, memory GiB, GB/s of every SKU
ASCENDS = {
    "ascend950pr_9599": (36, 1800, 128, 128, 1600), "ascend950pr_9589": (32, 1650, 128, 128, 1600),
    "ascend950pr_9579": (28, 1650, 128, 128, 1600), "ascend950pr_950z": (4, 1650, 16, 24, 1600),
    "ascend950dt_9591": (36, 1800, 128, 144, 4000), "ascend950dt_9581": (32, 1650, 128, 144, 4000),
    "ascend950dt_9571": (28, 1650, 128, 144, 4000),
}


@dataclass(frozen=True)
class Case:
    heads: int = 16
    latent: int = 512
    nope: int = 128
    rope: int = 64
    v: int = 128
    hidden: int = 2048
    q_lora: int = 0
    mode: str = "decoupled"
    dtype: str = "float16"
    page: int = 64
    batch: int = 1
    s_q: int = 1
    s_kv: int = 2048

    def problem(self):
        return tiling.make_problem(num_heads=self.heads, kv_lora_rank=self.latent, qk_nope_head_dim=self.nope, qk_rope_head_dim=self.rope,
                                   v_head_dim=self.v, hidden_size=self.hidden, q_lora_rank=self.q_lora, rope_mode=self.mode, dtype=self.dtype,
                                   block_size=self.page, batch=self.batch, s_q=self.s_q, s_kv=self.s_kv)

    def full_rope(self):
        return replace(self, nope=self.nope + self.rope, rope=0, mode="full")


V2_LITE = Case()
V3 = Case(heads=128, hidden=7168, q_lora=1536)
ARTICLE = Case(heads=12, rope=0, hidden=1536, mode="full")
ODD = Case(heads=3, latent=20, nope=10, rope=4, v=6, hidden=30)
GLM = Case(heads=20, nope=192, v=256, q_lora=768)
MINICPM3 = Case(heads=40, latent=256, nope=64, rope=32, v=64, hidden=2560, q_lora=768)
MODELS = (V2_LITE, V3, ARTICLE, ODD, GLM, MINICPM3)

LENGTHS = ((1, 1), (1, 17), (1, 2048), (1, 131072), (2, 4097), (5, 5), (8, 8192), (64, 1000), (129, 129), (2048, 2048), (4096, 32768))


@dataclass
class SeqTiling:
    path: str
    num_splits: int
    split_len: int
    qk_dim_pack: int


class _SeqTiling(ctypes.Structure):
    _fields_ = [("path", ctypes.c_int32), ("num_splits", ctypes.c_int32), ("split_len", ctypes.c_int64), ("qk_dim_pack", ctypes.c_int32)]


def seq_tiling(machine, case, s_q, s_kv):
    seq = _SeqTiling()
    assert library().fm_seq_tiling(machine.encode(), ctypes.byref(case.problem()), ctypes.c_int64(s_q), ctypes.c_int64(s_kv), ctypes.byref(seq)) == 0
    return SeqTiling(("absorbed", "expanded", "value-absorbed")[seq.path], seq.num_splits, seq.split_len, seq.qk_dim_pack)


def key_tiles(machine, case, s_q, s_kv):
    """[(split, start, length)] of a sequence, as the kernel walks them."""
    lib = library()
    lib.fm_tiles.restype = ctypes.c_int64
    capacity = s_kv // 8 + 64
    triples = (ctypes.c_int64 * (3 * capacity))()
    count = lib.fm_tiles(machine.encode(), ctypes.byref(case.problem()), ctypes.c_int64(s_q), ctypes.c_int64(s_kv), triples, ctypes.c_int64(capacity))
    assert 0 <= count <= capacity
    return [tuple(triples[3 * i:3 * i + 3]) for i in range(count)]


def blocks_of(result):
    return {block["name"]: block["value"] for block in result["blocks"]}


def used_by_memory(result):
    used = defaultdict(int)
    for buffer in result["buffers"]:
        used[buffer["stage"], buffer["memory"]] += buffer["bytes"]
    return used


def check_fits(machine, case):
    result = tiling.report(machine, case.problem())
    capacity = {(b["stage"], b["memory"]): b["capacity"] for b in result["buffers"]}
    for (stage, memory), used in used_by_memory(result).items():
        assert used <= capacity[stage, memory], (machine, case, stage, memory, used)
    # A reason that speaks of room is about more than there is.
    for reason in result["reasons"]:
        room = re.search(r"needs ([\d.]+) KiB of .*(?:capacity|for what streams through\) is) ([\d.]+) KiB", reason)
        if room and "beside the tiles" not in reason:
            assert float(room[1]) > float(room[2]), reason
    return result
