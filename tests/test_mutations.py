"""Faults planted into a copy of the Ascend kernel, one at a time: each must be found by the twin or by the numbers; the kernel itself runs clean.

Each one is compiled: a run takes every fourth, FLASHMLA_ALL_MUTANTS=1 takes all of them."""
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import twin_program
from mutants import MUTANTS

ROOT = Path(__file__).resolve().parent.parent
KERNEL = ROOT / "op_impl" / "ascendc" / "op_kernel"
CHOSEN = MUTANTS if os.environ.get("FLASHMLA_ALL_MUTANTS") else MUTANTS[::4]
TOLERANCE = 0.01  # of the largest value; what the kernel itself leaves is exact to the bit from run to run


def compile_kernel(folder, include):
    twin_program.compile_object("op_impl/twin/twin_kernel_half.cc", folder / "kernel.o", include, "-O0")
    twin_program.link([*twin_program.build(["tests/cpp_twin/mutant.cc"]), folder / "kernel.o"], folder / "run")


def run(folder):
    """("clean", values), or (kind of fault, the twin's words)."""
    done = subprocess.run([str(folder / "run"), str(folder / "out.bin")], capture_output=True, text=True, timeout=300)
    if done.returncode == 3:
        return done.stdout.split(":")[0], done.stdout
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr[-2000:]}"
    return "clean", np.fromfile(folder / "out.bin", np.float32)


@pytest.fixture(scope="module")
def expected():
    twin_program.build(["tests/cpp_twin/mutant.cc"])
    folder = twin_program.BUILD / "kernel"
    folder.mkdir(exist_ok=True)
    compile_kernel(folder, ROOT)
    kind, values = run(folder)
    assert kind == "clean", f"a false alarm, or a fault of the kernel: {values}"
    return values


def outcome(mutant, folder, expected):
    """How a mutant shows, and the words."""
    copy = folder / "op_impl" / "ascendc" / "op_kernel"
    shutil.copytree(KERNEL, copy)
    path = copy / mutant.file
    text = path.read_text()
    assert text.count(mutant.old) == mutant.times, f"{mutant.file} holds {mutant.old!r} {text.count(mutant.old)} times"
    path.write_text(text.replace(mutant.old, mutant.new))
    compile_kernel(folder, folder)
    kind, result = run(folder)
    if kind != "clean":
        return kind, result
    worst = np.abs(result - expected).max() / np.abs(expected).max() if np.isfinite(result).all() else np.inf
    return ("numbers" if worst > TOLERANCE else "nothing"), f"off by {worst:.3g} of the largest value"


@pytest.mark.parametrize("mutant", CHOSEN, ids=lambda m: m.name)
def test_mutant_is_found(mutant, tmp_path, expected):
    kind, words = outcome(mutant, tmp_path, expected)
    assert kind in (mutant.found or ("nothing",)), words
    if kind in ("data race", "deadlock", "event misuse"):
        assert ".h:" in words, words


def test_every_fault_has_its_place():
    for mutant in MUTANTS:
        count = (KERNEL / mutant.file).read_text().count(mutant.old)
        assert count == mutant.times, f"{mutant.name}: {mutant.file} holds {mutant.old!r} {count} times"
    assert sum(bool(m.found) for m in MUTANTS) >= 30 and all(m.reason for m in MUTANTS if not m.found)
