"""Each part of the CPU kernel that can be switched off leaves a right kernel behind, and all but those that sum a product in another order leave
its very bits."""
from dataclasses import replace

import numpy as np
import pytest

import ms_flashmla as fm
from cases import FLOATS, LayerCase, OpCase, bits
from driver import Driver
from ms_flashmla import _lib
from test_ops import check, tensors

SWITCHES = ["row_packing", "few_rows", "next_tile", "flat_gemm", "dataflow"]
REORDER = ["row_packing", "few_rows"]  # which lanes QK has on the head dimension
LAYERS = [LayerCase("float32", {}), LayerCase("bfloat16", dict(num_heads=12, q_lora_rank=24), "bfloat16", "bfloat16", "bfloat16"),
          LayerCase("mixed", dict(num_heads=3), "float32", "bfloat16", "float16")]


@pytest.fixture
def switch():
    changed = []

    def off(name):
        changed.append(name)
        _lib.set_switch(name, False)
    yield off
    for name in changed:
        _lib.set_switch(name, True)


def served(case):
    """Every step held to the reference; its bits and the cache's at the end."""
    run = Driver(case)
    return [bits(run.step(q_lens)) for q_lens in ([70, 3, 0, 150], [1, 1, 2, 1], [16, 9, 1, 5])] + [run.snapshot()]


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("case", LAYERS, ids=lambda case: case.name)
def test_layer_without_a_part(case, name, switch):
    expected = served(case)
    switch(name)
    without = served(case)
    if name not in REORDER:
        assert without == expected


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (12, 1), (20, 5)])
def test_attention_without_a_part(heads, kv_heads, dtype, name, switch):
    case = replace(OpCase("switch", (700, 1, 65), s_q=2), h_q=heads, h_kv=kv_heads, dtype=dtype, causal=True)
    arrays = case.arrays()

    def run():
        out, lse = fm.ops.flash_mla_with_kvcache(*tensors(case, arrays), case.d_v, case.scale, case.causal)
        check(case, out, lse, arrays)
        return bits(out), bits(lse)
    expected = run()
    switch(name)
    without = run()
    assert without == expected or name in REORDER


def test_a_switch_is_known_by_its_name():
    with pytest.raises(ValueError, match="'turbo'"):
        _lib.set_switch("turbo", False)


def test_switches_reach_the_kernel(switch):
    """row_packing changes the order of sums: equal bits would say that a switch does nothing."""
    case = OpCase("switch", (700,), s_q=2)
    arrays = case.arrays()
    before = fm.ops.flash_mla_with_kvcache(*tensors(case, arrays), case.d_v)[0].asnumpy()
    switch("row_packing")
    after = fm.ops.flash_mla_with_kvcache(*tensors(case, arrays), case.d_v)[0].asnumpy()
    assert not np.array_equal(before, after)
