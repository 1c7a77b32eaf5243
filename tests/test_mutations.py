"""Faults planted into a copy of the Ascend kernel, one at a time: each must be found by the twin or by the numbers; the kernel itself runs clean.

Each one is compiled: a run takes every fourth, FLASHMLA_ALL_MUTANTS=1 takes all of them."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mutants import MUTANTS

ROOT = Path(__file__).resolve().parent.parent
KERNEL = ROOT / "op_impl" / "ascendc" / "op_kernel"
BUILD = ROOT / ".build" / "mutants"
FLAGS = [os.environ.get("CXX", "g++"), "-std=c++17", "-D_GLIBCXX_USE_CXX11_ABI=0"]
SOURCES = ["tests/cpp_twin/mutant.cc", "op_proto/op_proto.cc", "op_impl/cpu/check.cc", "op_impl/cpu/thread_pool.cc", "op_impl/ascendc/op_host/make_kernel_data.cc", "op_impl/twin/twin_launch.cc",
           "op_impl/twin/twin_dispatch.cc", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "tiling").glob("*.cc") if p.stem != "tiling_c_api"),
           *sorted(str(p.relative_to(ROOT)) for folder in ("engine", "api") for p in (ROOT / "op_impl/twin" / folder).glob("*.cc"))]
CHOSEN = MUTANTS if os.environ.get("FLASHMLA_ALL_MUTANTS") else MUTANTS[::4]
TOLERANCE = 0.01  # of the largest value; what the kernel itself leaves is exact to the bit from run to run


def call(command):
    done = subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stderr[-4000:]}"


def compile_kernel(folder, include):
    call([*FLAGS, "-O0", "-I", include, "-I.", "-I", BUILD, "-Iop_impl/twin/include", "-c", "op_impl/twin/twin_kernel_half.cc", "-o", folder / "kernel.o"])
    call([FLAGS[0], "-pthread", *sorted(BUILD.glob("*.o")), folder / "kernel.o", "-o", folder / "run"])


def run(folder):
    """("clean", values), or (kind of fault, the twin's words)."""
    done = subprocess.run([str(folder / "run"), str(folder / "out.bin")], capture_output=True, text=True, timeout=300)
    if done.returncode == 3:
        return done.stdout.split(":")[0], done.stdout
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr[-2000:]}"
    return "clean", np.fromfile(folder / "out.bin", np.float32)


@pytest.fixture(scope="module")
def expected():
    BUILD.mkdir(parents=True, exist_ok=True)
    call([sys.executable, "tiling/gen_machines.py", BUILD])
    newest = max(p.stat().st_mtime for folder in ("op_impl", "op_proto", "tiling", "tests/cpp_twin") for p in (ROOT / folder).rglob("*") if p.is_file())
    for source in SOURCES:
        target = BUILD / (Path(source).stem + ".o")
        if not target.exists() or target.stat().st_mtime < newest:
            call([*FLAGS, "-O2", "-I.", "-I", BUILD, "-Iop_impl/twin/include", "-c", source, "-o", target])
    folder = BUILD / "kernel"
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
