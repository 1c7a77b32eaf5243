"""Caches that are not paged, through the strides of the tiling: the kernel's outputs and cache rows are the paged cache's, bit for bit."""
import subprocess

import pytest

import twin_program


@pytest.fixture(scope="module")
def lines():
    objects = twin_program.build(["tests/cpp_twin/layouts.cc", "op_impl/twin/twin_kernel_half.cc", "op_impl/twin/twin_kernel_bf16.cc"], "-O1")
    program = twin_program.BUILD / "layouts"
    twin_program.link(objects, program)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["BSND", "BNSD", "BSND, every third head", "BNSD, every second head", "padded sequences"])
def test_layout(lines, dtype, layout):
    assert lines.count(f"{dtype}, {layout}") == 5
