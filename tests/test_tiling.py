"""The tiling by itself: every table fits its machine, tiles cover every key once, a sequence is cut by its own lengths, the path follows the flops."""
import ctypes
import importlib.util
import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ms_flashmla import tiling_report as tiling
from ms_flashmla._lib import library
from tiling_cases import (ARTICLE, ASCENDS, CPUS, KIB, LENGTHS, MIB, MODELS, ODD, V2_LITE, V3, Case, blocks_of, check_fits, key_tiles, seq_tiling,
                          used_by_memory)

ROOT = Path(__file__).resolve().parent.parent


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


def keys_of_kernel():
    entry = (ROOT / "op_impl/ascendc/op_kernel/flash_mla.cpp").read_text()
    variants = re.findall(r"TILING_KEY_IS\((\d+)\)\) \{\n    FLASHMLA_VARIANT\(flashmla::k(\w+), (\d+)\)", entry)
    return {int(key): (path.lower(), int(kv_tile)) for key, path, kv_tile in variants}


@pytest.mark.parametrize("machine", ASCENDS)
def test_configurations_are_the_precomputed_ones(machine):
    """Every choice stands in the table, and its key names the kernel's variant for that path and tile."""
    table = (ROOT / "tiling/ascend_configs.h").read_text()
    configs = {(int(rows), int(kv_tile)) for kv_tile, rows in re.findall(r"\{(\d+), (\d+)\}", table)}
    variants, chosen = keys_of_kernel(), set()
    assert {kv_tile for _, kv_tile in configs} == {kv_tile for _, kv_tile in variants.values()} and len(variants) == 12
    for case in grid_calls():
        result = tiling.report(machine, case.problem())
        blocks, path = blocks_of(result), result["seq"]["path"]
        rows, kv_tile = blocks[f"{path}.rows"], blocks[f"{path}.kv_tile"]
        assert (rows, kv_tile) in configs and variants[blocks["tiling_key"]] == (path, kv_tile)
        assert any(reason.startswith(f"configuration {rows} rows x {kv_tile} keys: of {len(configs)} precomputed ones") for reason in result["reasons"])
        chosen.add((rows, kv_tile))
    assert len(chosen) >= 10  # shapes decide: no configuration does for all


def epilog_bytes(case, machine="ascend950pr_9599"):
    reasons = tiling.report(machine, case.problem())["reasons"]
    through, on_chip = next(re.search(r"busiest core moves (\d+) KiB that way, and on chip (\d+) KiB", reason).groups() for reason in reasons if reason.startswith("outputs go through L2"))
    return int(through), int(on_chip)


@pytest.mark.parametrize("machine", ASCENDS)
def test_outputs_go_through_l2_by_the_byte_count(machine):
    real = [replace(model, s_q=s_q, s_kv=s_kv, batch=batch) for model in MODELS if model is not ODD for (s_q, s_kv), batch in itertools.product(LENGTHS, (1, 7, 32, 64, 128, 144))]
    for case in [*real, *[Case(heads=heads, batch=36) for heads in range(2, 129)]]:
        through, on_chip = epilog_bytes(case, machine)
        assert through <= on_chip and blocks_of(tiling.report(machine, case.problem()))["epilog_through_l2"] == 1, case


def test_epilog_bytes_by_hand():
    # 32 tokens, one pass each: 128 heads of W_UV [512, 128] and W_o [128, 7168], and 7168 float32 sums there and back. Through L2, 36 cores share the weights and two 16-bit
    # parts of 640 columns a head, written and read.
    weights = 128 * 128 * (7168 + 512) * 2
    through, on_chip = epilog_bytes(replace(V3, batch=32, s_kv=4096))
    assert on_chip == round((weights + 2 * 4 * 7168) / KIB)
    assert through == round((weights + 32 * 128 * 640 * 2 * 2 * 2) / 36 / KIB)


# --- tails and splits ---


@pytest.mark.parametrize("machine, case", [
    *itertools.product(["cpu_avx512", "cpu_generic", "ascend950pr_9599"], [V2_LITE, ODD, ARTICLE]),
    ("cpu_avx512", Case(latent=8000)), ("cpu_generic", Case(latent=8000))])  # Ascend takes latents up to 1024
def test_tiles_cover_every_key_once(machine, case):
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
    # RoPE over the whole head: K is decompressed in any case, 2 d_n r a key and pass of 128 rows, and V stays the latent while
    # 2 (d_n + r) a key and token, with that, stay below 2 (d_n + d_v) and 2 (d_n + d_v) r a key.
    for machine in CPUS:
        for s_q in (1, 3, 5, 64, 128):
            assert seq_tiling(machine, ARTICLE, s_q, 4096).path == "value-absorbed"
        for s_q in (129, 172, 2048):
            assert seq_tiling(machine, ARTICLE, s_q, 4096).path == "expanded"
    for s_q, s_kv in LENGTHS:
        assert seq_tiling("ascend950pr_9599", ARTICLE, s_q, s_kv).path == "expanded"


def test_rows_are_padded_as_the_kernel_packs_them():
    packs = {machine: blocks_of(tiling.report(machine, V2_LITE.problem())) for machine in CPUS}
    assert [packs[machine]["qk_row_pack"] for machine in CPUS] == [4, 2, 1]
    assert [packs[machine]["qk_row_group"] for machine in CPUS] == [24, 6, 3]
    assert {packs[machine]["qk_dim_pack"] for machine in CPUS} == {4}
    # A key and head cost, absorbed, 5 rows x (16 + 4 + 16) = 180; expanded, rows x (4 + 4) + 5 x 3 + 7 x 16 with 5 rows padded to
    # 8, 6 or 5: 191, 175 or 167.
    case = Case(latent=16, nope=4, rope=4, v=3)
    assert [seq_tiling(machine, case, 5, 10**6).path for machine in CPUS] == ["absorbed", "expanded", "expanded"]


def test_value_absorbed_needs_room_for_its_weights():
    small, large = Case(heads=128, rope=0, nope=192, mode="full"), Case(heads=128, rope=0, nope=512, mode="full")
    assert seq_tiling("cpu_avx512", small, 1, 2048).path == "value-absorbed"  # 48 MiB of W_UK as float32
    assert seq_tiling("cpu_avx512", large, 1, 2048).path == "expanded"  # 128 MiB
    reasons = tiling.report("cpu_avx512", large.problem())["reasons"]
    assert any(reason.startswith("value-absorbed would hold 131072.0 KiB of W_UK") for reason in reasons)
    w_uk = next(b for b in tiling.report("cpu_avx512", small.problem())["buffers"] if b["name"] == "W_UK of all heads")
    assert (w_uk["stage"], w_uk["memory"], w_uk["bytes"]) == ("value-absorbed", "DRAM", 128 * 192 * 512 * 4)


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


def test_lanes_run_over_the_head_dimension_where_rows_are_few():
    """Few rows (token, head) would leave most lanes of rows by four elements empty, and do not pay for widening a tile."""
    for machine, lanes in (("cpu_avx512", 16), ("cpu_avx2", 8), ("cpu_generic", 4)):
        one_head = replace(V2_LITE, heads=1)
        assert [seq_tiling(machine, one_head, s_q, 8192).qk_dim_pack for s_q in (1, 6, 7)] == [lanes, lanes, 4]
        assert seq_tiling(machine, V2_LITE, 1, 8192).qk_dim_pack == 4
