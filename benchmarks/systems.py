"""The systems under test, each ready to run one case: (name, dtype) -> object with run_once and bind."""

import mindspore as ms
import numpy as np
from cases import CFG

from ms_flashmla import dtypes
from ms_flashmla.cache import LatentKVCache
from ms_flashmla.layer import MLALayer
from ms_flashmla.reference.composed import ComposedMLA, composed_weights

DTYPES = {"float32": ms.float32, "bfloat16": ms.bfloat16, "float16": ms.float16}

# Against the float32 composition: 16-bit systems round weights, cache and activations as well, which their own tests bound tighter.
TOLERANCE = {"float32": 4e-5, "float16": 4e-3, "bfloat16": 3e-2}


class _System:
    """function(hidden, residual) -> Tensor in `dtype`."""

    def __init__(self, function, dtype):
        self.function, self.dtype = function, DTYPES[dtype]

    def bind(self, hidden, residual):
        """What a round of the benchmark calls: one whole call, until the output can be read."""
        arguments = [ms.Tensor.from_numpy(dtypes.cast(x, self.dtype)) for x in (hidden, residual)]
        return lambda: self.function(*arguments).asnumpy()

    def run_once(self, hidden, residual):
        return dtypes.cast(self.bind(hidden, residual)(), ms.float32).astype(np.float64)


def fused(case, weights, dtype, block_size=64):
    """The fused layer with a full paged cache."""
    layer = MLALayer(CFG, dtype=DTYPES[dtype])
    layer.load_hf_weights(weights, prefix="")
    blocks_each = -(-case.length // block_size)
    cache = LatentKVCache(CFG, case.batch * blocks_each, block_size, DTYPES[dtype])
    for b in range(case.batch):
        cache.allocate(b, case.length)
    table = cache.block_table(range(case.batch))
    if case.context:
        pages = np.zeros((case.batch, blocks_each * block_size, CFG.cache_dim), np.float32)
        pages[:, :case.context] = case.cached_rows()
        pool = np.empty((case.batch * blocks_each, block_size, CFG.cache_dim), np.float32)
        pool[table.asnumpy().reshape(-1)] = pages.reshape(pool.shape)
        dtypes.put(cache.data, dtypes.cast(pool, DTYPES[dtype]))
    lengths = ms.Tensor([case.tokens] * case.batch, ms.int32), ms.Tensor([case.context] * case.batch, ms.int32)
    return _System(lambda hidden, residual: layer(hidden, cache.data, table, *lengths, residual=residual), dtype)


def composed(case, weights):
    """The composition of MindSpore primitives, float32."""
    cell = ComposedMLA(CFG, composed_weights(CFG, weights), case.batch, case.context, case.tokens)
    cell.set_context(case.cached_rows())
    return _System(cell, "float32")


def build(case, weights):
    """Every system of a case: (name, dtype) -> system."""
    return {**{("ms_flashmla", dtype): fused(case, weights, dtype) for dtype in DTYPES}, ("mindspore", "float32"): composed(case, weights)}
