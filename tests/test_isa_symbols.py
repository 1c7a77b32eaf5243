"""The objects of the instruction sets lend each other no code. The linker keeps one definition of a weak symbol, whichever object brought it, so an inline function
or a standard template that isa_avx512.o shares with another object by name could put AVX-512 into the path of a processor without it."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
UNITS = {path.stem: path.stem.removeprefix("isa_") for path in sorted((ROOT / "op_impl/cpu").glob("isa_*.cc"))}
WEAK = "VWuvw"  # nm: weak objects and functions, unique globals

pytestmark = pytest.mark.skipif(not (shutil.which("nm") and shutil.which(os.environ.get("CXX", "g++"))), reason="nm and a compiler are needed")


def strangers(path, isa):
    """What an object offers to the linker without its own namespace in the name: each is a symbol that another object may offer as well."""
    lines = subprocess.run(["nm", "--defined-only", "--extern-only", "--demangle", str(path)], capture_output=True, text=True, check=True).stdout.splitlines()
    found = [line.split(maxsplit=2)[1:] for line in lines if line.strip()]
    return [f"{kind} {name}" for kind, name in found if f"flashmla::{isa}::" not in name]


@pytest.fixture(scope="module")
def objects():
    """The library's objects, compiled where they are not current."""
    folder = Path(os.environ.get("FLASHMLA_BUILD_DIR", ROOT / ".build"))
    done = subprocess.run(["bash", "build.sh", "lib"], cwd=ROOT, env={**os.environ, "FLASHMLA_PYTHON": sys.executable}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {unit: folder / "obj" / f"{unit}.o" for unit in UNITS if (folder / "obj" / f"{unit}.o").exists()}


def test_an_isa_offers_its_own_symbols_alone(objects):
    assert "isa_generic" in objects
    for unit, path in objects.items():
        assert strangers(path, UNITS[unit]) == [], unit


def test_each_isa_offers_its_table(objects):
    for unit, path in objects.items():
        symbols = subprocess.run(["nm", "--defined-only", "--extern-only", "--demangle", str(path)], capture_output=True, text=True, check=True).stdout
        assert f"D flashmla::{UNITS[unit]}::kKernels" in symbols


@pytest.mark.parametrize("code, shows", [
    ("#include <vector>\nvoid use(std::vector<int> &v) { v.push_back(1); }", "std::vector<int"),
    ("inline int shared(int x) { return x < 2 ? x : shared(x - 1) + shared(x - 2); }\nint use(int x) { return shared(x); }", "flashmla::shared(int)"),
    ("template <typename T> struct Table { static T value; };\ntemplate <typename T> T Table<T>::value = 3;\nint use() { return Table<int>::value++; }", "flashmla::Table<int>::value"),
], ids=["standard template", "inline function", "template's variable"])
def test_a_planted_symbol_is_found(tmp_path, code, shows):
    """The check itself: what an ISA's unit must not hold is named."""
    include, body = code.split("\n", 1) if code.startswith("#include") else ("", code)
    (tmp_path / "unit.cc").write_text(f"{include}\nnamespace flashmla {{\n{body}\nnamespace avx512 {{ int mine(int x) {{ return x; }} inline int (*p)(int) = mine; }}\n}}\n")
    subprocess.run([os.environ.get("CXX", "g++"), "-std=c++17", "-O0", "-fPIC", "-c", "unit.cc", "-o", "unit.o"], cwd=tmp_path, check=True)
    found = strangers(tmp_path / "unit.o", "avx512")
    assert any(shows in symbol and symbol[0] in WEAK for symbol in found), found
    assert not any("avx512" in symbol for symbol in found)
