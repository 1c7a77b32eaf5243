"""The twin of the Ascend chip by small kernels of the tests' own: right ones pass with the right numbers and the clock worked out by hand, and every
planted fault is found, with the file and line of the kernel."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / ".build" / "twin_tests"
SOURCES = ["tests/cpp_twin/twin_tests.cc", "tiling/machine.cc", *sorted(str(p.relative_to(ROOT)) for f in ("engine", "api") for p in (ROOT / "op_impl/twin" / f).glob("*.cc"))]


def build():
    BUILD.mkdir(parents=True, exist_ok=True)
    program = BUILD / "twin_tests"
    inputs = [*ROOT.glob("op_impl/twin/**/*"), *ROOT.glob("tests/cpp_twin/*"), *ROOT.glob("tiling/*")]
    if program.exists() and all(program.stat().st_mtime > p.stat().st_mtime for p in inputs if p.is_file()):
        return program
    subprocess.run([sys.executable, "tiling/gen_machines.py", str(BUILD)], cwd=ROOT, check=True)
    subprocess.run([os.environ.get("CXX", "g++"), "-std=c++17", "-O1", "-g1", "-Wall", "-Wextra", "-I.", "-Iop_impl/twin/include", f"-I{BUILD}", *SOURCES, "-o", str(program)], cwd=ROOT, check=True)
    return program


def listed():
    text = subprocess.run([str(build()), "--list"], capture_output=True, text=True, check=True).stdout
    return [line.split("\t") for line in text.splitlines()]


@pytest.mark.parametrize("name, fault", listed())
def test_case(name, fault):
    done = subprocess.run([str(build()), name], capture_output=True, text=True)
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}{done.stderr}"
    if fault == "none":
        assert done.stdout == "passed\n"
        return
    assert done.stdout.startswith(tuple(f"{kind}: " for kind in fault.split("|"))), done.stdout
    assert "kernels.h:" in done.stdout or "illegal.h:" in done.stdout, done.stdout
    if done.stdout.startswith("data race"):
        assert done.stdout.count(".h:") == 2, f"a race names two places: {done.stdout}"
