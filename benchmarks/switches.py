"""`bash build.sh bench --switches`: the kernel alone with one part of it off, and with all on, in turns."""

import cases
import fused
import systems
import timing
from ms_flashmla import _lib

# unified_max is an attribute of the operators (softmax_phi), off unless asked for: its line compares online softmax with it. The others: tiling/switches.h.
UNIFIED = "unified_max"
CORE = ("row_packing", "next_tile", UNIFIED)
FEW = ("few_rows", "next_tile")
GEMM = ("flat_gemm", "dataflow")
RUNS = [
    (cases.core("v2-lite", 1, 8192), "float32", CORE), (cases.core("v2-lite", 1, 8192), "bfloat16", CORE),
    (cases.core("v2-lite", 1, 8192, heads=12), "float32", CORE), (cases.core("v2-lite", 1, 8192, heads=128), "float32", CORE),
    (cases.core("v2-lite", 1, 32768), "bfloat16", CORE),
    (cases.core("v2-lite", 1, 8192, heads=1), "bfloat16", FEW), (cases.core("v2-lite", 1, 8192, heads=3), "bfloat16", FEW),
    *((cases.decode("v2-lite", batch, 2048), dtype, GEMM) for batch in (1, 8, 16) for dtype in cases.TWO),
    *((cases.prefill("v2-lite", 512), dtype, GEMM) for dtype in cases.TWO),
]


def lines(threads, measured, seconds):
    """A line for each run and part, as soon as it is measured."""
    for case, dtype, parts in RUNS:
        systems.release(case)
        built = fused.kernels_without(case, dtype, parts)
        names = {id(system): part for part, system in built.items()}

        def prepare(system):
            _lib.set_num_threads(threads)
            for part in parts:
                if part != UNIFIED:
                    _lib.set_switch(part, part != names[id(system)])
        try:
            us, _, _ = timing.run(built, measured, seconds, 3, prepare)
        finally:
            for part in parts:
                if part != UNIFIED:
                    _lib.set_switch(part, True)
        for part in parts:
            off, on = (us[""], us[part]) if part == UNIFIED else (us[part], us[""])
            yield f"{case.name:32} {dtype:8} {part:12} off {off:9.0f} us, on {on:9.0f} us: {off / on:4.2f}x"
