"""What the tiling reports: figures that agree with hand computations, refusals, and the command line."""
import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ms_flashmla import tiling_report as tiling
from tiling_cases import ARTICLE, KIB, MIB, V2_LITE, V3, blocks_of

ROOT = Path(__file__).resolve().parent.parent


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
    assert (kv_tile["shape"], kv_tile["bytes"], kv_tile["memory"], kv_tile["capacity"]) == ("[64, 576] float32", 2 * 64 * 576 * 4, "L2", 2 * MIB)
    assert kv_tile["copies"] == 2 and kv_tile["share"] == pytest.approx(2 * 64 * 576 * 4 / (2 * MIB))


def test_value_absorbed_figures_by_hand():
    result = tiling.report("cpu_avx512", replace(ARTICLE, dtype="float32").problem())
    assert result["seq"] == {"path": "value-absorbed", "num_splits": 2, "split_len": 1024, "qk_dim_pack": 16}  # 32 work items over 12 heads
    prolog, attention, epilog = result["stages"]
    w_q, w_kv, w_u, w_o = 1536 * 12 * 128, 1536 * 512, 12 * 512 * 128, 12 * 128 * 1536
    assert prolog["bytes"] == 4 * (w_q + w_kv + 1536 + 512) and prolog["flops"] == 2 * (w_q + w_kv)
    assert attention["bytes"] == 4 * (2048 * 512 + w_u)  # the latent and W_UK
    assert attention["flops"] == 2 * 12 * 2048 * (128 + 512 + 128 * 512)  # q k, p c, and K decompressed
    assert epilog["bytes"] == 4 * (w_u + w_o + 1536) and epilog["flops"] == 2 * (w_u + w_o)
    shapes = {b["name"]: b["shape"] for b in result["buffers"] if b["stage"] == "value-absorbed"}
    assert shapes["k tile"] == "[64, 128] float32" and shapes["latent tile"] == "[64, 512] float32"
    assert shapes["packed q rows"] == "[128, 128] float32" and shapes["output rows"] == "[128, 512] float32"
    assert shapes["scores"] == "[64, 144] float32" and shapes["keys a row sees"] == "[128, 1] int64"
    assert shapes["W_UK of all heads"] == "[1536, 512] float32"
    assert not any(b["stage"] == "absorbed" for b in result["buffers"])
    latents = next(b for b in result["buffers"] if b["stage"] == "decompression")
    assert (latents["name"], latents["shape"], latents["memory"]) == ("latents", "[192, 512] float32", "L2")
    assert any("value-absorbed path takes 3.273 GFLOP" in reason and "expanded would take 6.474 GFLOP" in reason for reason in result["reasons"])


def test_passes_of_every_head_are_counted():
    # 40000 keys of 512 float32 are more than both L2 keep: each of 4 heads reads them. Their W_UK as float32 fits.
    few = replace(ARTICLE, heads=4, hidden=512, dtype="float32", s_kv=40000)
    result = tiling.report("cpu_avx512", few.problem())
    assert result["bytes_read"] - result["least_bytes"] == 3 * 40000 * 512 * 4
    # That of 12 heads does not: it is written, and read again. 2048 bytes x 500 keys do.
    result = tiling.report("cpu_avx512", replace(ARTICLE, dtype="float32", s_kv=500).problem())
    assert result["bytes_read"] - result["least_bytes"] == 2 * 12 * 128 * 512 * 4
    # Prefill: each head decompresses from the keys of the 4096 tokens of a group.
    result = tiling.report("cpu_avx512", replace(few, s_q=4096).problem())
    assert result["seq"]["path"] == "expanded" and result["bytes_read"] - result["least_bytes"] == 3 * 40000 * 512 * 4


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
    keys = next(b for b in result["buffers"] if b["name"] == "k tile")
    blocks = blocks_of(result)
    assert keys["bytes"] == blocks["expanded.kv_buffers"] * blocks["expanded.kv_tile"] * 128 * 2
    assert keys["copies"] == blocks["expanded.kv_buffers"]
    assert keys["share"] == pytest.approx(keys["bytes"] / (512 * KIB))


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
    for words in ("k tile", "double-buffered", "expanded.kv_tile", "kv_tile 512 needs", "capacity 512.0 KiB", "bytes read", "lower bound in time: 19.05 us"):
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
