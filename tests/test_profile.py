"""The profile command: what the JSON holds, that times and bytes agree with each other, traces and pictures."""
import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ms_flashmla import cli, profile
from test_twin_layer import twin_library  # noqa: F401  (builds the library)

ROOT = Path(__file__).resolve().parent.parent
SHAPE = ["--heads", "4", "--head-dim", "32", "--latent", "64", "--rope-dim", "16", "--hidden", "128", "--seq", "512", "--batch", "3", "--dtype", "bf16"]


def run(tmp_path, *options):
    path = tmp_path / "profile.json"
    assert cli.main(["profile", *SHAPE, "--json", str(path), *options]) == 0
    return json.loads(path.read_text())


def test_fields_and_sums(tmp_path, capsys):
    result = run(tmp_path)
    for key in ("machine", "dtype", "us", "bound_us", "cube_utilisation", "vector_utilisation", "bubble_us", "hbm_bytes", "min_hbm_bytes", "launch_us", "pipes"):
        assert key in result
    assert result["machine"] == "ascend950pr_9599" and result["dtype"] == "bfloat16" and "predicted" in result["source"]
    assert result["us"] > result["bound_us"] > 0 and 0 < result["cube_utilisation"] < 1
    for pipe in result["pipes"]:
        assert 0 < pipe["busy_us"] + sum(pipe["wait_us"].values()) <= result["us"] * 1.0001, pipe
    assert sum(result["stage_us"]) == pytest.approx(result["us"])
    assert result["issued_macs"] >= result["macs"]
    text = capsys.readouterr().out
    assert "predicted by the twin" in text and "AIC MTE2" in text


def test_twice_the_run_is_the_same(tmp_path):
    assert run(tmp_path) == run(tmp_path)


def test_constants_move_the_result(tmp_path):
    us = run(tmp_path)["us"]
    assert run(tmp_path, "--scale", "startup_dma_gm=2")["us"] > us > run(tmp_path, "--scale", "startup_dma_gm=0.5,barrier_cycles=0.5")["us"]
    assert run(tmp_path, "--machine", "ascend950dt_9591")["us"] < us


def test_sample_and_check(tmp_path):
    whole, sample = run(tmp_path, "--check"), run(tmp_path, "--sample", "9")
    assert sample["simulated_cores"] == 9 and sample["cores"] == whole["cores"] == 36
    assert sample["us"] == pytest.approx(whole["us"], rel=0.1)


@pytest.mark.parametrize("model, options", [("v3", ["--batch", "32", "--seq", "4096"]), ("v3", ["--batch", "32", "--q-len", "2", "--seq", "4096"]),
                                            ("v2-lite", ["--batch", "64", "--seq", "8192"]), ("v2-lite", ["--phase", "prefill", "--seq", "2048"])])
def test_a_sample_is_close_to_the_whole(model, options):
    parser = argparse.ArgumentParser()
    profile.add_arguments(parser)
    problem = profile.problem_of(parser.parse_args(["--model", model, "--dtype", "bf16", *options]))
    whole, sample = (profile.profile("ascend950pr_9599", problem, sample=n) for n in (0, 9))
    assert sample["us"] == pytest.approx(whole["us"], rel=0.1)
    for weights in ("w_q", "w_o"):  # each byte once, whoever reads it; panels go to the cores in groups, of which a sample takes a whole number
        read = [next(t["read_bytes"] for t in run["tensors"] if t["name"] == weights) for run in (whole, sample)]
        assert read[1] == pytest.approx(read[0], rel=0.1)


def test_blocks_that_are_asked_for(tmp_path):
    us = {blocks: run(tmp_path, *blocks)["us"] for blocks in ((), ("--kv-buffers", "1"), ("--kv-buffers", "2"), ("--kv-tile", "64", "--rows", "16", "--kv-buffers", "2"))}
    assert us[("--kv-buffers", "1")] > us[("--kv-buffers", "2")] >= us[()]
    run(tmp_path, "--kv-buffers", "1", "--check")  # no race, no deadlock where nothing runs ahead


@pytest.mark.parametrize("options, words", [
    (["--kv-tile", "256"], "128 rows x 256 keys in 2 KV buffers do not fit ascend950pr_9599: 278528 bytes too many in L1: 4096 bytes too many in UB"),
    (["--kv-tile", "48"], "kv_tile is 48; it must be 16, 32, 64, 96, 128 or 256"), (["--rows", "136"], "rows is 136"), (["--kv-buffers", "5"], "kv_buffers is 5")])
def test_blocks_that_do_not_fit_say_by_how_much(options, words, capsys):
    assert cli.main(["profile", "--model", "v3", "--dtype", "bf16", "--batch", "32", "--seq", "4096", *options]) == 2
    assert words in capsys.readouterr().err


def test_trace_and_plot(tmp_path):
    trace, picture = tmp_path / "trace.json", tmp_path / "timeline.png"
    run(tmp_path, "--trace", str(trace), "--plot", str(picture))
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"AIC M", "AIC MTE1", "AIC MTE2", "AIC FIX", "AIV0 V", "AIV1 MTE3"} <= names
    assert all(event["dur"] >= 0 and ".h:" in event["args"]["at"] for event in events if event["ph"] == "X")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("options, words", [
    (["--machine", "cpu_avx512"], "machine"), (["--dtype", "fp32"], "float16 or bfloat16"), (["--scale", "speed=2"], "speed"), (["--heads", "0"], "num_heads|heads")])
def test_errors_name_the_option(options, words, capsys):
    assert cli.main(["profile", *SHAPE, *options]) == 2
    import re
    assert re.search(words, capsys.readouterr().err)


def test_models_have_names():
    command = [sys.executable, "-m", "ms_flashmla", "profile", "--model", "seed", "--seq", "2048", "--json", "-"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["path"] == "expanded" and set(profile.MODELS) == {"seed", "v2-lite", "v3"}
