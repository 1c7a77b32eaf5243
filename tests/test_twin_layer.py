"""The Ascend kernel's own source, run by the twin behind the same layer: the variants and traffic of the CPU's tests, held to the same float64
reference. Every race, deadlock and illegal call that the twin finds fails the step too."""
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cases import FULL, ODD, VARIANTS, LayerCase
from driver import Driver
from test_variants import serve

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True, scope="module")
def twin_library():
    done = subprocess.run(["bash", "build.sh", "twin"], cwd=ROOT, env={**os.environ, "FLASHMLA_PYTHON": sys.executable}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(autouse=True)
def on_the_twin(monkeypatch):
    monkeypatch.setenv("MS_FLASHMLA_IMPL", "twin")
    monkeypatch.setenv("MS_FLASHMLA_TWIN_MACHINE", "ascend950pr_950z")  # 4 cores: small cases use them all


def in_dtype(case, dtype):
    return replace(case, act=dtype, weight=dtype, cache=dtype, name=f"{case.name} {dtype}")


def ids(case):
    return case.name


@pytest.mark.parametrize("case", [in_dtype(case, dtype) for case in VARIANTS for dtype in ("float16", "bfloat16")], ids=ids)
def test_variant(case):
    serve(Driver(case))


@pytest.mark.parametrize("rope", [{}, FULL], ids=["decoupled", "full"])
@pytest.mark.parametrize("tokens", [1, 16, 17, 127, 129, 257])
def test_tails_of_every_tile(tokens, rope):
    run = Driver(in_dtype(LayerCase("tails", rope), "float16"))
    run.step([tokens])
    run.step([1])
    run.step([5])
    run.step([tokens], sequences=[1])


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_pages(block_size):
    run = Driver(in_dtype(LayerCase("pages", block_size=block_size), "float16"), num_blocks=4 + 640 // block_size)
    run.step([64, 65, 1])
    run.step([1, 127, 0])
    run.step([300, 0, 1])


def test_long_context_is_split_over_cores():
    run = Driver(in_dtype(LayerCase("long", dict(max_position_embeddings=6000), block_size=64), "bfloat16"))
    run.step([3000, 40])
    run.step([1, 1])
    run.step([7, 1])


def test_residual_and_batched_calls():
    run = Driver(in_dtype(LayerCase("shapes", dict(q_lora_rank=24)), "float16"))
    run.step([6, 6], batched=True, residual=True)
    run.step([3, 9], residual=True)
    run.step([1, 1], batched=True, residual=True)
    run.step([0, 0])


def test_float32_is_refused_with_words():
    run = Driver(LayerCase("float32"))
    with pytest.raises(RuntimeError, match="float16 or bfloat16|float32"):
        run.step([3])


def test_other_machines_do_the_same(monkeypatch):
    for machine in ("ascend950pr_9599", "ascend950dt_9571"):
        monkeypatch.setenv("MS_FLASHMLA_TWIN_MACHINE", machine)
        serve(Driver(in_dtype(LayerCase("odd sizes", ODD), "float16")))
