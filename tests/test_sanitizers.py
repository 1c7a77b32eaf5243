"""The kernel as a plain C++ program: under AddressSanitizer with UndefinedBehaviorSanitizer for every ISA that runs here, and under ThreadSanitizer for the best
of them (which memory threads share does not depend on the ISA)."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

from test_determinism import NEEDS, flags_of_this_processor

ROOT = Path(__file__).resolve().parent.parent
SANITIZERS = {"address": "-fsanitize=address,undefined -fno-sanitize-recover=all", "thread": "-fsanitize=thread"}
ROUNDS = {"address": "12", "thread": "4"}


def run(command, **env):
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return done.stdout


ISAS = [isa for isa, flags in NEEDS.items() if flags <= flags_of_this_processor()]


def build(sanitizer):
    """The library and tests/cpp/drive.cc built with one sanitizer; objects are kept, so that only what changed is compiled again."""
    flags = f"{SANITIZERS[sanitizer]} -O1 -g1"
    folder = ROOT / ".build" / sanitizer
    lib, program = folder / "libms_flashmla.so", folder / "drive"
    run(["bash", "build.sh", "lib"], CXXFLAGS=flags, FLASHMLA_BUILD_DIR=str(folder), FLASHMLA_LIB=str(lib), FLASHMLA_PYTHON=sys.executable)
    run([os.environ.get("CXX", "g++"), "-std=c++17", "-D_GLIBCXX_USE_CXX11_ABI=0", "-pthread", "-Wall", "-Wextra", *flags.split(), "tests/cpp/drive.cc", str(lib),
         f"-Wl,-rpath,{folder}", "-o", str(program)])
    return program


@pytest.mark.parametrize("sanitizer, isa", [("address", isa) for isa in ISAS] + [("thread", ISAS[-1])])
def test_kernel_is_clean(sanitizer, isa):
    program = build(sanitizer)
    assert f"isa {isa}" in run([str(program), ROUNDS[sanitizer]], MS_FLASHMLA_ISA=isa, TSAN_OPTIONS="halt_on_error=1")
