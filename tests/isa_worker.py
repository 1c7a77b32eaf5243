"""Runs layers and operators against the reference under the ISA that MS_FLASHMLA_ISA names; an exception is the failure."""
import sys
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import ms_flashmla as fm  # noqa: E402
from cases import FLOATS, VARIANTS, LayerCase  # noqa: E402
from driver import Driver  # noqa: E402
from test_ops import CASES, check, tensors  # noqa: E402
from test_variants import cut, serve  # noqa: E402

from ms_flashmla import _lib  # noqa: E402

assert _lib.isa() == sys.argv[1], f"MS_FLASHMLA_ISA={sys.argv[1]}, but {_lib.isa()} runs"
for case in CASES:
    for dtype in FLOATS:
        case = replace(case, dtype=dtype)
        arrays = case.arrays()
        check(case, *fm.ops.flash_mla_with_kvcache(*tensors(case, arrays), case.d_v, case.scale, case.causal), arrays)
for i, case in enumerate(VARIANTS):
    serve(Driver(case if i % 2 else replace(case, act="bfloat16", weight="float16", cache="bfloat16")))
for heads, dtype in ((1, "bfloat16"), (3, "float16")):
    cut(Driver(LayerCase("cut", dict(num_heads=heads, max_position_embeddings=400), cache=dtype), num_blocks=300, sequences=65))
