"""Weights and caches on huge pages where the system gives them; results do not depend on it."""
import os
import subprocess
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest

import ms_flashmla as fm
from ms_flashmla import _lib, dtypes
from small_layer import LENGTHS, TABLE, make_layer

HINTED = 8 << 20
WIDE = fm.MLAConfig(hidden_size=1024, num_heads=8, kv_lora_rank=256, qk_nope_head_dim=128, qk_rope_head_dim=32, v_head_dim=128)


def huge_bytes(address, size):
    """Bytes on huge pages in the mappings that overlap [address, address + size), as /proc/self/smaps tells."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(x, 16) for x in first.split("-"))
            inside = begin < address + size and end > address
        elif inside and first == "AnonHugePages:":
            total += int(line.split()[1]) << 10
    return total


def system_has_huge_pages():
    """Tried, not read: a container may mount another setting than the one that holds."""
    probe = dtypes.zeros(HINTED, ms.float32)
    probe[:] = 1
    return huge_bytes(_lib.address(probe), probe.nbytes) > 0


@pytest.mark.parametrize("dtype", [ms.float32, ms.float16, ms.bfloat16])
@pytest.mark.parametrize("shape", [1, (3, 5), (1024, 1024), (7, 1023, 321)])
def test_zeros(shape, dtype):
    array = dtypes.zeros(shape, dtype)
    assert array.shape == (shape if isinstance(shape, tuple) else (shape,)) and array.dtype == dtypes.NUMPY[dtype]
    assert array.flags.c_contiguous and array.flags.writeable and not array.view(np.uint8).any()
    if array.nbytes >= 4 << 20:
        assert _lib.address(array) % dtypes.HUGE_PAGE == 0


def test_large_memory_lies_on_them():
    if not system_has_huge_pages():
        pytest.skip("this system gives no huge pages")
    cache = fm.LatentKVCache(WIDE, 128, 64)
    cache.data.asnumpy()[:] = 1
    layer = make_layer(WIDE)
    for parameter in (cache.data, layer.w_q, layer.w_o):
        array = parameter.asnumpy()
        assert array.nbytes >= 4 << 20 and huge_bytes(_lib.address(array), array.nbytes) >= array.nbytes // dtypes.HUGE_PAGE * dtypes.HUGE_PAGE


def test_reserved_memory_costs_nothing():
    before = int(Path("/proc/self/statm").read_text().split()[1])
    arrays = [dtypes.zeros((64, 1 << 20), ms.float32) for _ in range(4)]
    arrays[0][5, 7] = 1
    assert int(Path("/proc/self/statm").read_text().split()[1]) - before < 16 << 8  # pages of 4 KiB: 16 MiB of 1 GiB


FRAMEWORK_MEMORY = """
import sys
import mindspore as ms
import numpy as np
from small_layer import *
from test_huge_pages import WIDE, huge_bytes
from ms_flashmla import _lib
layer = make_layer(WIDE)
for parameter in layer.get_parameters():
    parameter.set_data(ms.Tensor(np.array(parameter.asnumpy())))
x = Tensor(np.random.default_rng(1).standard_normal((5, 1024)).astype(np.float32))
outs = [layer(x, fm.LatentKVCache(WIDE, BLOCKS, PAGE).data, TABLE, *LENGTHS).asnumpy() for _ in range(2)]
assert (outs[0] == outs[1]).all()
print(outs[0].tobytes().hex()[:400])
"""


def test_the_hint_changes_no_bit():
    said = []
    for setting in ("1", "0"):
        path = os.pathsep.join([str(Path(fm.__file__).parents[1]), str(Path(__file__).parent)])
        done = subprocess.run([sys.executable, "-c", FRAMEWORK_MEMORY], env={**os.environ, "PYTHONPATH": path, "MS_FLASHMLA_HUGE_PAGES": setting},
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        said.append(done.stdout)
    assert said[0] == said[1]
