"""The tiling by itself: every table fits its machine, tiles cover every key once, a sequence is cut by its own lengths, figures agree with hand computations."""
import argparse
import ctypes
import importlib.util
import itertools
import json
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ms_flashmla import tiling_report as tiling
from ms_flashmla._lib import library

ROOT = Path(__file__).resolve().parent.parent
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


class _SeqTiling(ctypes.Structure):
    _fields_ = [("path", ctypes.c_int32), ("num_splits", ctypes.c_int32), ("split_len", ctypes.c_int64)]


def seq_tiling(machine, case, s_q, s_kv):
    seq = _SeqTiling()
    assert library().fm_seq_tiling(machine.encode(), ctypes.byref(case.problem()), ctypes.c_int64(s_q), ctypes.c_int64(s_kv), ctypes.byref(seq)) == 0
    return SeqTiling(("absorbed", "expanded")[seq.path], seq.num_splits, seq.split_len)


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


@pytest.fixture(scope="module")
def gen_machines():
    spec = importlib.util.spec_from_file_location("gen_machines", ROOT / "tiling" / "gen_machines.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- machines ---


def test_machine_list(gen_machines):
    assert tiling.machines() == sorted([*CPUS, *ASCENDS])
    assert sorted(gen_machines.load_machines()) == tiling.machines()


@pytest.mark.parametrize("name", ASCENDS)
def test_ascend_constants(gen_machines, name):
    machine = {key: entry[0] for key, entry in gen_machines.load_machines()[name].items() if key != "kind"}
    cores, mhz, l2, memory, gb_per_s = ASCENDS[name]
    assert (machine["cores"], machine["freq_mhz"], machine["l2_bytes"], machine["dram_bytes"], machine["dram_gb_per_s"]) == (
        cores, mhz, l2 * MIB, memory << 30, gb_per_s)
    assert [machine[key] for key in ("l1_bytes", "l0a_bytes", "l0b_bytes", "l0c_bytes", "ub_bytes")] == [512 * KIB, 64 * KIB, 64 * KIB, 256 * KIB, 253952]
    result = tiling.report(name, V2_LITE.problem())
    assert result["peak_gflops"] == pytest.approx(cores * 4096 * 2 * mhz * 1e-3)


def test_every_constant_has_a_source(gen_machines, tmp_path):
    for name, machine in gen_machines.load_machines().items():
        assert all(entry[1] for key, entry in machine.items() if key != "kind"), name
    for text, words in (("abstract: true\ncores: 3\n", "must be {value, source}"), ("name: other\nkind: kCpu\n", "name must be m"),
                        ("name: m\nkind: kGpu\n", "kind must be"), ("name: m\nkind: kCpu\n", "missing"), ("base: none\nname: m\n", "no such base")):
        (tmp_path / "m.yaml").write_text(text.replace("abstract: true", "name: m"))
        with pytest.raises(ValueError, match=words):
            gen_machines.load_machines(tmp_path)


# --- every table fits ---


def grid_heads():
    return [Case(heads=heads) for heads in range(1, 129)]


def grid_dims():
    dims = itertools.product((1, 20, 100, 512, 1000, 1024), (10, 128, 192, 256), (0, 4, 64), (6, 128, 256))
    return [Case(heads=(3, 12, 128)[i % 3], latent=r, nope=d_n, rope=d_r, v=d_v, hidden=(30, 2048, 7168)[i // 3 % 3], dtype=("float16", "bfloat16")[i % 2])
            for i, (r, d_n, d_r, d_v) in enumerate(dims)]


def grid_calls():
    calls = itertools.product(MODELS, LENGTHS, (1, 7, 64), (16, 128))
    return [replace(model, s_q=s_q, s_kv=s_kv, batch=batch, page=page) for model, (s_q, s_kv), batch, page in calls]


@pytest.mark.parametrize("grid", [grid_heads, grid_dims, grid_calls])
@pytest.mark.parametrize("machine", [*CPUS, *ASCENDS])
def test_tables_fit(machine, grid):
    for i, case in enumerate(grid()):
        check_fits(machine, case)
        if i % 4 == 0 and case.mode == "decoupled":
            check_fits(machine, case.full_rope())


@pytest.mark.parametrize("machine", CPUS)
def test_cpu_tables_fit_large_problems(machine):
    for latent, heads, head, hidden, dtype in itertools.product((1536, 4096, 8192, 16384), (1, 128), (1, 512), (1, 8191, 65536), ("float32", "bfloat16")):
        case = Case(heads=heads, latent=latent, nope=head, v=head, hidden=hidden, dtype=dtype, s_q=3, s_kv=100)
        check_fits(machine, case)
        check_fits(machine, case.full_rope())


def test_vendor_tile_fits_as_counted():
    # 64 rows x 128 keys x (512 + 64): q 72K, three KV tiles of 144K and p over the rope columns make 504K of L1.
    result = tiling.report("ascend950pr_9599", replace(V3, heads=64, batch=36, s_kv=32768).problem())
    blocks = blocks_of(result)
    assert (blocks["absorbed.rows"], blocks["absorbed.kv_tile"], blocks["absorbed.kv_buffers"]) == (64, 128, 3)
    assert used_by_memory(result)["absorbed", "L1"] == 504 * KIB
    assert any(re.search(r"kv_tile 256 needs .* KiB of", reason) for reason in result["reasons"])


def test_short_context_takes_small_tiles():
    tiles = [blocks_of(tiling.report("ascend950pr_9599", replace(V2_LITE, s_kv=s_kv, batch=8).problem()))["absorbed.kv_tile"] for s_kv in (16, 64, 4096)]
    assert tiles[0] <= 16 and tiles[0] <= tiles[1] <= tiles[2]


def test_rope_table_stays_when_it_fits():
    short = tiling.report("ascend950pr_9599", replace(ARTICLE, s_kv=64).problem())
    assert blocks_of(short)["rope_rows"] == 64
    assert any("the rope table (32.0 KiB) stays in UB" in reason for reason in short["reasons"])
    assert any(reason.startswith("the rope table needs 1024.0 KiB") for reason in tiling.report("ascend950pr_9599", ARTICLE.problem())["reasons"])


# --- tails and splits ---


@pytest.mark.parametrize("machine", ["cpu_avx512", "cpu_generic", "ascend950pr_9599"])
@pytest.mark.parametrize("case", [V2_LITE, ODD, ARTICLE, Case(latent=8000)], ids=["v2_lite", "odd", "article", "large"])
def test_tiles_cover_every_key_once(machine, case):
    if machine.startswith("ascend") and case.latent > 1024:
        pytest.skip("latents up to 1024 on Ascend")
    kv_tile = None
    for s_kv in [*range(1, 140), 511, 512, 513, 1023, 1024, 1025, 4095, 8192, 8193, 65537]:
        for s_q in {1, min(3, s_kv), s_kv}:
            if s_q > 4096:
                continue
            seq, tiles = seq_tiling(machine, case, s_q, s_kv), key_tiles(machine, case, s_q, s_kv)
            assert all(length >= 1 for _, _, length in tiles)
            ends = [start + length for _, start, length in tiles]
            assert [start for _, start, _ in tiles] == [0, *ends[:-1]] and ends[-1] == s_kv  # in order, no gap, no overlap
            assert [split for split, _, _ in tiles] == sorted(split for split, _, _ in tiles)
            assert {split for split, _, _ in tiles} == set(range(seq.num_splits))
            assert all(start // seq.split_len == split for split, start, _ in tiles)
            full = {length for (_, _, length), (split, _, _) in zip(tiles, tiles[1:]) if length != tiles[-1][2]}
            if full:  # every tile but the last is whole: splits are multiples of the tile
                kv_tile = kv_tile or full.pop()
                assert seq.split_len % kv_tile == 0
                assert all(length == kv_tile for _, _, length in tiles[:-1])


def test_splits_hold_512_keys_at_least():
    for s_kv in (1, 511, 1023, 1024, 1500, 2048, 5000, 8192, 32768, 131072, 10**6):
        seq = seq_tiling("cpu_avx512", V2_LITE, 1, s_kv)
        assert 1 <= seq.num_splits <= 32
        assert seq.num_splits == 1 or seq.split_len >= 512
        assert (seq.num_splits - 1) * seq.split_len < s_kv <= seq.num_splits * seq.split_len
    assert [seq_tiling("cpu_avx512", V2_LITE, 1, s_kv).num_splits for s_kv in (1023, 2048, 8192, 131072)] == [1, 4, 16, 32]


@pytest.mark.parametrize("machine", CPUS)
def test_a_sequence_is_cut_by_its_own_lengths(machine):
    for case, (s_q, s_kv) in itertools.product(MODELS, LENGTHS):
        alone = seq_tiling(machine, case, s_q, s_kv)
        for batch, other in itertools.product((1, 3, 200), ((1, 1), (7, 5000), (2048, 2048))):
            company = replace(case, batch=batch, s_q=other[0], s_kv=other[1])
            assert seq_tiling(machine, company, s_q, s_kv) == alone
        assert blocks_of(tiling.report(machine, case.problem())) == blocks_of(tiling.report(machine, replace(case, batch=9, s_q=5, s_kv=777).problem()))


def test_empty_sequence_is_legal():
    for machine in ("cpu_avx512", "ascend950dt_9591"):
        assert seq_tiling(machine, V2_LITE, 0, 0).num_splits == 1
        assert key_tiles(machine, V2_LITE, 0, 0) == []
        check_fits(machine, replace(V2_LITE, s_q=0, s_kv=0, batch=0))


def test_path_follows_the_flops():
    assert seq_tiling("cpu_avx512", V2_LITE, 1, 8192).path == "absorbed"
    assert seq_tiling("cpu_avx512", V2_LITE, 8, 8192).path == "absorbed"
    assert seq_tiling("cpu_avx512", V2_LITE, 2048, 2048).path == "expanded"
    assert seq_tiling("cpu_avx512", V2_LITE, 512, 8192).path == "expanded"
    # Long contexts: absorbed costs 2 (2 r + d_r) a key and token, expanded 2 (d_n + d_r + d_v) and 2 (d_n + d_v) r a key:
    # they meet at 256 * 512 / (1088 - 320) = 170.7 tokens.
    assert seq_tiling("cpu_generic", V2_LITE, 168, 10**6).path == "absorbed"
    assert seq_tiling("cpu_generic", V2_LITE, 172, 10**6).path == "expanded"
    for s_q, s_kv in LENGTHS:
        assert seq_tiling("cpu_avx512", ARTICLE, s_q, s_kv).path == "expanded"


def test_causal_range_is_what_rows_see():
    lib = library()
    cut = (ctypes.c_int64 * 3)()
    for start, length, first, rows in itertools.product((0, 5, 8), (1, 4, 7), range(0, 20), (1, 2, 5)):
        lib.fm_causal_range(*[ctypes.c_int64(x) for x in (start, length, first, first + rows - 1)], cut)
        keys = range(start, start + length)
        seen_by_all = [key for key in keys if all(key <= first + row for row in range(rows))]
        seen_by_some = [key for key in keys if any(key <= first + row for row in range(rows)) and key not in seen_by_all]
        assert list(range(cut[0], cut[1])) == seen_by_all
        assert list(range(cut[1], cut[2])) == seen_by_some


# --- figures by hand ---


def test_decode_figures_by_hand():
    result = tiling.report("cpu_avx512", replace(V2_LITE, dtype="float32").problem())
    prolog, attention, epilog = result["stages"]
    weights_in, weights_out = 2048 * 16 * 192 + 2048 * 576 + 16 * 512 * 128, 16 * 512 * 128 + 2048 * 2048
    assert prolog["bytes"] == 4 * (weights_in + 2048 + 576) and prolog["flops"] == 2 * weights_in
    assert attention["bytes"] == 4 * 2048 * 576 and attention["flops"] == 2 * (512 + 64 + 512) * 16 * 2048
    assert epilog["bytes"] == 4 * (weights_out + 2048) and epilog["flops"] == 2 * weights_out
    assert prolog["us"] == pytest.approx(prolog["bytes"] / 34e3) and prolog["limited_by"] == "memory"
    assert attention["us"] == pytest.approx(attention["flops"] / (2 * 2760e6 * 64) * 1e6) and attention["limited_by"] == "compute"
    assert result["bound_us"] == pytest.approx(1821.5, abs=0.1)  # 1.82 ms
    assert result["least_bytes"] == sum(stage["bytes"] for stage in result["stages"])
    kv_tile = next(b for b in result["buffers"] if (b["stage"], b["name"]) == ("absorbed", "kv tile"))
    assert (kv_tile["shape"], kv_tile["bytes"], kv_tile["memory"], kv_tile["capacity"]) == ("[64, 576] float32", 64 * 576 * 4, "L2", 2 * MIB)
    assert kv_tile["share"] == pytest.approx(64 * 576 * 4 / (2 * MIB))


def test_prefill_figures_by_hand():
    result = tiling.report("cpu_avx512", replace(V2_LITE, dtype="float32", s_q=2048).problem())
    assert result["seq"]["path"] == "expanded"
    projections = 2 * 2048 * (2048 * 16 * 192 + 2048 * 576 + 2048 * 2048)
    core = 2 * (192 + 128) * 16 * (2048 * 2049 // 2)
    decompression = 2 * 2048 * 16 * 256 * 512
    assert result["flops"] == pytest.approx(projections + core + decompression, rel=1e-9)
    assert result["bound_us"] == pytest.approx(result["flops"] / 353.28e9 * 1e6)  # 220 ms


def test_article_figures_by_hand():
    result = tiling.report("ascend950pr_9599", ARTICLE.problem())
    attention = result["stages"][1]
    assert attention["bytes"] == 2 * (2048 * 512 + 2 * 512 * 12 * 128)  # the latent, W_UK and W_UV once
    assert attention["flops"] == 2 * 256 * 12 * 2048 + 2 * 12 * 256 * 512 * 2048
    assert attention["us"] == pytest.approx(attention["flops"] / (36 * 1800e6 * 8192) * 1e6)
    latent = next(b for b in result["buffers"] if b["name"] == "latent tile")
    blocks = blocks_of(result)
    assert latent["bytes"] == blocks["expanded.kv_buffers"] * blocks["expanded.kv_tile"] * 512 * 2
    assert latent["copies"] == blocks["expanded.kv_buffers"]
    assert latent["share"] == pytest.approx(latent["bytes"] / (512 * KIB))


def test_bytes_read_again_are_counted():
    small, large = replace(V3, batch=32, s_kv=4096), replace(V3, batch=64, s_q=2, s_kv=32768)
    result = tiling.report("ascend950pr_9599", small.problem())
    assert result["bytes_read"] == result["least_bytes"]
    result = tiling.report("ascend950pr_9599", large.problem())
    assert result["bytes_read"] - result["least_bytes"] == 64 * 32768 * 576 * 2  # 256 rows in passes of 128: the cache once more


# --- errors and the command line ---


@pytest.mark.parametrize("changes,words", [
    ({"heads": 0}, "num_heads is 0"), ({"latent": 0}, "kv_lora_rank is 0"), ({"nope": -1}, "qk_nope_head_dim is -1"), ({"s_q": 9, "s_kv": 8}, "s_kv is 8"),
    ({"page": 0}, "block_size is 0"), ({"mode": "full"}, "qk_rope_head_dim is 64"), ({"batch": -2}, "batch is -2")])
def test_illegal_problems_name_the_field(changes, words):
    for machine in ("cpu_avx2", "ascend950pr_9599"):
        with pytest.raises(ValueError, match=words):
            tiling.report(machine, replace(V2_LITE, **changes).problem())


def test_refusals_say_what_is_allowed():
    with pytest.raises(ValueError, match="act_dtype is float32; on ascend950pr_9599 it must be float16 or bfloat16"):
        tiling.report("ascend950pr_9599", replace(V2_LITE, dtype="float32").problem())
    with pytest.raises(ValueError, match="machine is 'tpu'; it must be one of ascend950dt_9571, .*cpu_generic"):
        tiling.report("tpu", V2_LITE.problem())
    with pytest.raises(ValueError, match="the smallest tiles of the absorbed path do not fit ascend950pr_9599: .* needs .* of"):
        tiling.report("ascend950pr_9599", replace(V2_LITE, latent=16384).problem())
    with pytest.raises(ValueError, match="dtype: 'int8' is not allowed"):
        replace(V2_LITE, dtype="int8").problem()


def run_command(*arguments):
    parser = argparse.ArgumentParser()
    tiling.add_arguments(parser)
    return tiling.run(parser.parse_args(arguments))


COMMAND = ("--heads", "12", "--head-dim", "128", "--latent", "512", "--seq", "2048")


def test_command_prints_the_table(capsys):
    assert run_command("--machine", "ascend950pr_9599", *COMMAND, "--dtype", "fp16") == 0
    text = capsys.readouterr().out
    for words in ("latent tile", "double-buffered", "expanded.kv_tile", "kv_tile 256 needs", "capacity 512.0 KiB", "bytes read", "lower bound in time: 19.05 us"):
        assert words in text
    assert run_command("--machine", "cpu_avx512", *COMMAND, "--dtype", "fp32", "--rope-dim", "64", "--json") == 0
    assert json.loads(capsys.readouterr().out)["seq"]["path"] == "absorbed"


def test_command_refuses_with_code_2(capsys):
    for arguments, words in (
        (("--machine", "z80", *COMMAND), "machine is 'z80'"), (("--machine", "cpu_avx2", *COMMAND, "--dtype", "int4"), "dtype: 'int4'"),
        (("--machine", "ascend950pr_9599", *COMMAND, "--dtype", "fp32"), "must be float16 or bfloat16"),
        (("--machine", "cpu_avx2", *COMMAND, "--q-len", "4096"), "s_kv is 2048"), (("--machine", "cpu_avx2", *COMMAND, "--hidden", "0"), "hidden: 0"),
        (("--machine", "cpu_avx2", *COMMAND, "--batch", str(10**30)), "batch")):
        assert run_command(*arguments) == 2
        assert words in capsys.readouterr().err
    command = [sys.executable, "-m", "ms_flashmla", "tiling", "--machine", "z80", *COMMAND]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "machine is 'z80'" in done.stderr
