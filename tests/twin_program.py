"""Programs of the tests' own around the Ascend kernel on the twin: what they all link is compiled once."""
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / ".build" / "twin_programs"
FLAGS = [os.environ.get("CXX", "g++"), "-std=c++17", "-D_GLIBCXX_USE_CXX11_ABI=0"]
SOURCES = ["op_proto/op_proto.cc", "op_impl/cpu/check.cc", "op_impl/cpu/thread_pool.cc", "op_impl/ascendc/op_host/make_kernel_data.cc", "op_impl/ascendc/op_host/product_blocks.cc", "op_impl/twin/twin_launch.cc",
           "op_impl/twin/twin_dispatch.cc", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "tiling").glob("*.cc") if p.stem != "tiling_c_api"),
           *sorted(str(p.relative_to(ROOT)) for folder in ("engine", "api") for p in (ROOT / "op_impl/twin" / folder).glob("*.cc"))]


def call(command):
    done = subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stderr[-4000:]}"


def compile_object(source, target, include=ROOT, optimize="-O2"):
    """`include` is searched first: a copy of the kernel may stand there."""
    call([*FLAGS, optimize, "-I", include, "-I.", "-I", BUILD, "-Iop_impl/twin/include", "-c", source, "-o", target])


def build(sources, optimize="-O2"):
    """Objects of the twin without a kernel and those of `sources`, compiled where something is newer."""
    BUILD.mkdir(parents=True, exist_ok=True)
    call([sys.executable, "tiling/gen_machines.py", BUILD])
    newest = max(p.stat().st_mtime for folder in ("op_impl", "op_proto", "tiling", "tests/cpp_twin") for p in (ROOT / folder).rglob("*") if p.is_file())
    objects = []
    for source in [*SOURCES, *sources]:
        target = BUILD / (Path(source).stem + ".o")
        if not target.exists() or target.stat().st_mtime < newest:
            compile_object(source, target, optimize="-O2" if source in SOURCES else optimize)
        objects.append(target)
    return objects


def link(objects, program):
    call([FLAGS[0], "-pthread", *objects, "-o", program])
