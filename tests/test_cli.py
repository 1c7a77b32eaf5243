"""The command line: doctor, demo, usage; run in this process unless the environment matters."""
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ms_flashmla import cli, demo, demo_models, doctor

ROOT = Path(__file__).resolve().parent.parent
HF_CASES = Path(__file__).resolve().parent / "hf_cases"

SMALL = {  # the shapes of the built-in models, scaled down
    "v2-lite": dict(hidden_size=64, num_attention_heads=3, kv_lora_rank=20, qk_nope_head_dim=10, qk_rope_head_dim=4, v_head_dim=6, max_position_embeddings=200),
    "v3-tp8": dict(hidden_size=64, num_attention_heads=2, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, q_lora_rank=24,
                   max_position_embeddings=200),
    "seed": dict(hidden_size=48, num_attention_heads=3, kv_lora_rank=32, qk_nope_head_dim=16, v_head_dim=16, max_position_embeddings=200),
}


def module(*arguments, **environment):
    return subprocess.run([sys.executable, "-m", "ms_flashmla", *arguments], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)


def test_doctor_names_what_would_run(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["isa"] in ("avx512", "avx2", "generic") and facts["threads"] >= 1 and facts["device"] == "CPU"
    assert facts["library_built"] and Path(facts["library"]).is_file() and not facts["problems"]
    assert cli.main(["doctor"]) == 0
    assert facts["runs"] in capsys.readouterr().out


def test_doctor_obeys_the_environment():
    done = module("doctor", "--json", MS_FLASHMLA_ISA="generic", MS_FLASHMLA_NUM_THREADS="3")
    facts = json.loads(done.stdout)
    assert done.returncode == 0 and facts["isa"] == "generic" and facts["threads"] == 3


@pytest.mark.parametrize("variable, value", [("MS_FLASHMLA_ISA", "mmx"), ("MS_FLASHMLA_IMPL", "gpu")])
def test_doctor_says_what_is_wrong(variable, value):
    done = module("doctor", "--json", **{variable: value})
    facts = json.loads(done.stdout)
    assert done.returncode == 1 and facts["runs"] is None
    assert any(variable in problem and value in problem for problem in facts["problems"]), facts["problems"]


def test_doctor_finds_cann(monkeypatch, tmp_path):
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert doctor.cann_home() == str(tmp_path)


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["demo", "--model", "gpt"], ["demo", "--layer", "first"], ["doctor", "extra"]])
def test_wrong_usage_exits_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2 and "usage:" in capsys.readouterr().err


def run_demo(capsys, *arguments):
    status = cli.main(["demo", "--json", *arguments])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", ["v2_lite", "v3_yarn", "minicpm3", "longcat_flash"])
def test_demo_runs_a_checkpoint(graph, capsys, name):
    status, facts = run_demo(capsys, "--checkpoint", str(HF_CASES / name))
    assert status == 0 and facts["passed"]
    assert [row["step"] for row in facts["steps"]][:2] == ["prefill", "chunk"] and facts["steps"][-1]["step"] == "decode"
    for row, earlier in zip(facts["steps"], [{"context": 0}, *facts["steps"]]):
        assert row["context"] == earlier["context"] + row["tokens"]
        assert row["max_error"] <= facts["tolerance"] and row["mindspore_max_error"] <= facts["tolerance"]
        assert row["ms"] > 0 and row["tokens_per_s"] > 0 and row["mindspore_ms"] > 0


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_demo_runs_the_built_in_models(graph, capsys, monkeypatch, name, dtype):
    monkeypatch.setitem(demo_models.MODELS, name, {**demo_models.MODELS[name], **SMALL[name]})
    status, facts = run_demo(capsys, "--model", name, "--dtype", dtype)
    assert status == 0 and facts["rope_mode"] == ("full" if name == "seed" else "decoupled")
    assert facts["steps"][-1]["context"] == 200


def test_demo_fails_when_a_step_is_off(graph, capsys, monkeypatch):
    monkeypatch.setattr(demo, "TOLERANCE", dict.fromkeys(demo.TOLERANCE, 1e-12))
    status, facts = run_demo(capsys, "--checkpoint", str(HF_CASES / "minicpm3"))
    assert status == 1 and not facts["passed"]


def test_demo_prints_a_row_per_step(graph, capsys):
    assert cli.main(["demo", "--checkpoint", str(HF_CASES / "minicpm3")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["step", "tokens", "context", "ms", "tokens/s", "max", "error", "MindSpore", "ms", "faster"]
    assert [line.split()[0] for line in lines[2:-1]] == ["prefill", "chunk", *["decode"] * (len(lines) - 5)] and "passed" in lines[-1]


def test_progress_shows_on_a_terminal_alone(monkeypatch):
    for terminal in (True, False):
        shown = io.StringIO()
        shown.isatty = lambda: terminal
        monkeypatch.setattr("sys.stderr", shown)
        progress = demo._Progress(2)
        progress.step("packing the weights")
        progress.step("decode")
        progress.close()
        assert shown.getvalue().split("\r")[1:3] == ["[" + "." * 30 + "] packing the weights".ljust(52), "[" + "#" * 15 + "." * 15 + "] decode".ljust(52)] \
            if terminal else not shown.getvalue()


@pytest.mark.parametrize("arguments, words", [
    (["--checkpoint", "no/such/folder"], "no/such/folder"),
    (["--checkpoint", str(HF_CASES / "v2_lite"), "--layer", "99"], "layer 99"),
])
def test_demo_says_what_is_missing(capsys, arguments, words):
    assert cli.main(["demo", *arguments]) == 1
    assert words in capsys.readouterr().err
