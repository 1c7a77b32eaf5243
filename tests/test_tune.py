"""Tune tables: what they hold, that they change no bit of a deterministic layer, and the command that writes them."""
import ctypes
import os
import subprocess
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
import yaml

import ms_flashmla as fm
from ms_flashmla import _lib, cli, dtypes, tune, tune_table, weights
from small_layer import BLOCKS, CFG, LENGTHS, PAGE, TABLE, hidden, ints, make_layer
from tiling_cases import Case

MACHINE = {"avx512": b"cpu_avx512", "avx2": b"cpu_avx2", "generic": b"cpu_generic"}
GEMM = {"projection": "w_o", "n": 48, "k": 64, "weight": "float32", "gemv_rows": 3, "flat_rows": 7}
ATTENTION = {**{name: getattr(CFG, name) for name in tune_table.LAYER_FIELDS}, "weight": "float32", "cache": "float32",
             "points": [{"context": 0, "expanded_from": 5}, {"context": 8, "expanded_from": 2}]}


@pytest.fixture(autouse=True)
def no_rules():
    ms.set_context(mode=ms.PYNATIVE_MODE)
    tune_table.clear()
    yield
    tune_table.clear()


def write(path, **table):
    path.write_text(yaml.safe_dump({"isa": _lib.isa(), **table}))
    return path


def choices(problem):
    """({(n, k): (gemv_rows, flat_rows)}, [(context, expanded_from)]) in force on this machine."""
    gemm, path = (tune_table.GemmChoice * 6)(), tune_table.PathRule()
    assert _lib.library().fm_choices(MACHINE[_lib.isa()], ctypes.byref(problem), gemm, ctypes.byref(path)) == 0
    return {(c.n, c.k): (c.gemv_rows, c.flat_rows) for c in gemm}, [(p.context, p.expanded_from) for p in path.points[:path.count]]


def test_a_table_replaces_the_choices_of_its_layer_only(tmp_path):
    problem = Case(heads=4, latent=32, nope=16, rope=8, v=16, hidden=48, dtype="float32").problem()
    other = Case(heads=4, latent=32, nope=16, rope=8, v=16, hidden=48).problem()  # float16 weights
    modelled = choices(problem)
    assert (48, 64) in modelled[0] and modelled[1] == []
    tune_table.use(write(tmp_path / "t.yaml", gemm=[GEMM], attention=[ATTENTION]))
    gemm, points = choices(problem)
    assert gemm == {**modelled[0], (48, 64): (3, 7)} and points == [(0, 5), (8, 2)]
    assert choices(other)[0][48, 64] != (3, 7) and choices(other)[1] == []
    tune_table.use(write(tmp_path / "u.yaml", gemm=[{**GEMM, "flat_rows": 9}]))
    assert choices(problem)[0][48, 64] == (3, 9)
    tune_table.clear()
    assert choices(problem) == modelled


@pytest.mark.parametrize("table, words", [
    ("just words", "not a tune table"), ("a: [", "not a tune table"), ("gemm: []", "isa is missing"),
    ({"gemm": [{**GEMM, "n": 0}]}, r"gemm\[0\]: n"), ({"gemm": [{k: v for k, v in GEMM.items() if k != "k"}]}, r"gemm\[0\]: k"),
    ({"gemm": [GEMM, {**GEMM, "weight": "int8"}]}, r"gemm\[1\]: weight"), ({"gemm": [{**GEMM, "flat_rows": -1}]}, "flat_rows"),
    ({"attention": [{**ATTENTION, "points": []}]}, "points must be"), ({"attention": [{**ATTENTION, "points": ATTENTION["points"][::-1]}]}, "ascending"),
    ({"attention": [{**ATTENTION, "cache": None}]}, "cache"), ({"gemm": 3}, "not a tune table"),
])
def test_what_is_no_table_is_refused_and_nothing_is_taken(tmp_path, table, words):
    path = tmp_path / "t.yaml"
    path.write_text(table if isinstance(table, str) else yaml.safe_dump({"isa": _lib.isa(), **table}))
    with pytest.raises(ValueError, match=words):
        fm.MLALayer(CFG, tune=path)
    assert choices(Case(heads=4, latent=32, nope=16, rope=8, v=16, hidden=48, dtype="float32").problem())[0][48, 64] != (3, 7)


def test_a_table_of_another_isa_is_left_alone(tmp_path):
    path = tmp_path / "t.yaml"
    path.write_text(yaml.safe_dump({"isa": "sve", "gemm": [GEMM]}))
    with pytest.warns(UserWarning, match="measured with sve"):
        fm.MLALayer(CFG, tune=str(path))
    assert choices(Case(heads=4, latent=32, nope=16, rope=8, v=16, hidden=48, dtype="float32").problem())[0][48, 64] != (3, 7)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("groups, n, k", [(1, 48, 33), (3, 20, 300), (2, 130, 16)])
def test_every_loop_gives_the_same_bits(dtype, groups, n, k):
    lib, rng = _lib.library(), np.random.default_rng(groups)
    lib.fm_gemm.argtypes = [ctypes.c_int64] * 4 + [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
    matrix = dtypes.cast(rng.standard_normal((groups * n, k)).astype(np.float32), getattr(ms, dtype))
    packed = weights.pack(matrix, groups)
    wide = dtypes.cast(matrix, ms.float32).astype(np.float64)
    for rows in (1, 2, 5, 6, 7, 8, 9, 13, 40, 200):
        a, results = rng.standard_normal((rows, k)).astype(np.float32), {}
        for loop, limits in tune.LOOPS.items():
            c = np.full((rows, groups * weights.padded(n)), np.nan, np.float32)
            assert lib.fm_gemm(rows, groups, n, k, _lib.address(a), _lib.address(packed), tune_table.DTYPES[dtype], _lib.address(c), *limits) == 0
            results[loop] = c.reshape(rows, groups, -1)[:, :, :n]
        expected = (a.astype(np.float64) @ wide.T).reshape(rows, groups, n)
        assert np.abs(results["tiled"] - expected).max() < 1e-5 * np.abs(expected).max() * np.sqrt(k)
        assert results["gemv"].tobytes() == results["flat"].tobytes() == results["tiled"].tobytes(), rows


def served(layer):
    cache, outs = fm.LatentKVCache(CFG, BLOCKS, PAGE), []
    for x, q_lens, contexts in ((hidden(5), *LENGTHS), (hidden(2, seed=5), ints(1, 1), ints(3, 2)), (hidden(6, seed=6), ints(2, 4), ints(4, 3))):
        outs.append(layer(x, cache.data, TABLE, q_lens, contexts).asnumpy())
    return outs


def test_a_deterministic_layer_keeps_its_bits_under_any_table(tmp_path):
    layer = make_layer()
    before = [out.tobytes() for out in served(layer)]
    for gemv, flat, expanded_from in ((0, 0, 0), (0, 100, 10**6), (100, 100, 3)):
        entries = [{"n": n, "k": k, "weight": "float32", "gemv_rows": gemv, "flat_rows": flat} for n, k in choices(
            Case(heads=4, latent=32, nope=16, rope=8, v=16, hidden=48, q_lora=24, dtype="float32").problem())[0] if n]
        tune_table.use(write(tmp_path / "t.yaml", gemm=entries, attention=[{**ATTENTION, "points": [{"context": 0, "expanded_from": expanded_from}]}]))
        assert [out.tobytes() for out in served(layer)] == before


def test_a_layer_that_need_not_be_deterministic_follows_the_table():
    exact = served(make_layer())
    layer = fm.MLALayer(CFG, deterministic=False)
    layer.load_hf_weights(make_layer().export_hf_weights())
    paths = []
    for expanded_from in (0, 10**6):
        tune_table.add([], [tune_table.path_rule("", {**ATTENTION, "points": [{"context": 0, "expanded_from": expanded_from}]})])
        paths.append(served(layer))
        for out, expected in zip(paths[-1], exact):
            np.testing.assert_allclose(out, expected, atol=2e-5 * np.abs(expected).max())
    assert any((a != b).any() for a, b in zip(*paths)), "both paths gave the same bits: the table was not followed"


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_deterministic_is_a_bool(value):
    with pytest.raises(TypeError, match="deterministic"):
        fm.MLALayer(CFG, deterministic=value)


def test_splits_follow_the_threads_only_where_they_may():
    """Long contexts in few blocks of a small layer: more threads, other splits, other bits; the deterministic layer keeps its own."""
    cfg = fm.MLAConfig(hidden_size=16, num_heads=1, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, max_position_embeddings=8192)
    rng = np.random.default_rng(2)
    source = {name: 0.2 * rng.standard_normal(shape) for name, shape in weights.hf_shapes(cfg).items()}  # small logits: every key counts
    cache = ms.Tensor(rng.standard_normal((64, 64, 20)).astype(np.float32))
    table, x = ms.Tensor(np.arange(64, dtype=np.int32)[None]), ms.Tensor(rng.standard_normal((1, 16)).astype(np.float32))
    before = _lib.num_threads()
    try:
        bits = {}
        for deterministic in (True, False):
            layer = fm.MLALayer(cfg, deterministic=deterministic)
            layer.load_hf_weights(source, prefix="")
            for threads in (1, 3):
                fm.set_num_threads(threads)
                bits[deterministic, threads] = layer(x, cache, table, ints(1), ints(4000)).asnumpy()
        assert bits[True, 1].tobytes() == bits[True, 3].tobytes()
        assert bits[False, 1].tobytes() != bits[False, 3].tobytes()
        np.testing.assert_allclose(bits[False, 3], bits[True, 1], atol=2e-5 * np.abs(bits[True, 1]).max())
    finally:
        fm.set_num_threads(before)


@pytest.mark.parametrize("measured, limits", [
    ({1: dict(gemv=1, flat=2, tiled=2), 6: dict(gemv=2, flat=3, tiled=3), 12: dict(flat=4, tiled=5), 16: dict(flat=9, tiled=5)}, (6, 12)),
    ({1: dict(gemv=1, flat=1, tiled=1), 8: dict(gemv=5, flat=1, tiled=1.02), 12: dict(flat=1.02, tiled=1), 16: dict(flat=2, tiled=1)}, (1, 12)),
    ({1: dict(gemv=3, flat=2, tiled=1), 8: dict(gemv=1, flat=2, tiled=2), 12: dict(flat=1, tiled=2)}, (0, 0)),
])
def test_thresholds(measured, limits):
    assert tune.thresholds(measured) == limits


def test_the_command_writes_a_table_that_loads(tmp_path, monkeypatch, capsys):
    for name, value in (("ROWS", (1, 9)), ("NEW_TOKENS", (2, 40)), ("CONTEXTS", (0, 100)), ("ROTATED_BYTES", 1 << 16)):
        monkeypatch.setattr(tune, name, value)
    out = tmp_path / "tune.yaml"
    small = ["tune", "--hidden", "64", "--heads", "2", "--latent", "32", "--head-dim", "16", "--rope-dim", "8", "--repeats", "1"]
    assert cli.main([*small, "--q-lora", "24", "--dtype", "bfloat16", "--out", str(out)]) == 0
    table = yaml.safe_load(out.read_text())
    assert table["isa"] == _lib.isa() and [entry["projection"] for entry in table["gemm"]] == ["w_q", "w_kv_a", "w_uk", "w_uv", "w_o", "w_q_a"]
    assert [point["context"] for point in table["attention"][0]["points"]] == [0, 100]
    fm.MLALayer(CFG, tune=out)
    assert cli.main([*small, "--only", "gemm"]) == 0 and "attention" not in yaml.safe_load(capsys.readouterr().out)
    for wrong, words in ((["tune", "--heads", "2"], "--hidden"), (["tune", "--model", "seed", "--heads", "2"], "exclude"),
                         (["tune", "--repeats", "0"], "--repeats")):
        assert cli.main(wrong) == 1 and words in capsys.readouterr().err


def test_the_environment_names_a_table(tmp_path):
    code = ("import sys; sys.path[:0] = sys.argv[1:]\nfrom small_layer import *; from test_tune import choices; from tiling_cases import Case\nfm.MLALayer(CFG)\n"
            "print(choices(Case(heads=4, latent=32, nope=16, rope=8, v=16, hidden=48, dtype='float32').problem())[0][48, 64])")

    def run(path):
        search = [str(Path(fm.__file__).parents[1]), str(Path(__file__).parent)]
        return subprocess.run([sys.executable, "-c", code, *search], env={**os.environ, "MS_FLASHMLA_TUNE": str(path)}, capture_output=True, text=True)

    assert run(write(tmp_path / "t.yaml", gemm=[GEMM])).stdout.split("\n")[0] == "(3, 7)"
    missing = run(tmp_path / "missing.yaml")
    assert missing.returncode == 1 and "ValueError: MS_FLASHMLA_TUNE" in missing.stderr
