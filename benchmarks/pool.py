"""One paged cache a dtype, large enough for every case's rotation, so that all cases share a signature (and so a compiled graph)."""

import ctypes

import mindspore as ms
import numpy as np

import cases
import timing
from ms_flashmla import dtypes
from ms_flashmla.cache import LatentKVCache

DTYPES = {"float32": ms.float32, "bfloat16": ms.bfloat16, "float16": ms.float16}
POOL_BLOCKS = {576: 4224, 512: 2112}  # cache_dim -> blocks: the largest case, B8 L32768, needs 4096


def to_dtype(array, dtype):
    """float32 numpy -> numpy of the dtype's width."""
    return dtypes.cast(array, DTYPES[dtype])


def to_float32(array):
    return dtypes.cast(array, ms.float32)


def fill(parameter, rows):
    """Writes rows, repeated, into the parameter's own memory: its pages stay those that LatentKVCache gave it."""
    words = np.dtype(f"u{rows.dtype.itemsize}")
    view = np.frombuffer((ctypes.c_char * (parameter.size * rows.dtype.itemsize)).from_address(parameter.data_ptr()), words)
    flat = rows.view(words).reshape(-1)
    for start in range(0, view.size, flat.size):
        part = view[start:start + flat.size]
        part[:] = flat[:part.size]
    return view


class Pool:
    """rows: the cached rows as numpy words [num_blocks * BLOCK, cache_dim], the memory of cache.data itself."""

    _made = {}

    @classmethod
    def of(cls, cfg, dtype):
        key = cfg.cache_dim, dtype
        if key not in cls._made:
            cls._made[key] = cls(cfg, dtype)
        return cls._made[key]

    @classmethod
    def release(cls, cache_dim):
        """Frees the pools of another row width."""
        for key in [key for key in cls._made if key[0] != cache_dim]:
            del cls._made[key]

    def __init__(self, cfg, dtype):
        self.dtype, self.width = dtype, cfg.cache_dim
        self.blocks = POOL_BLOCKS[cfg.cache_dim]
        self.cache = LatentKVCache(cfg, self.blocks, cases.BLOCK, DTYPES[dtype])
        rows = np.random.default_rng(3).standard_normal((8191, cfg.cache_dim), dtype=np.float32)  # 8191: copies do not line up with pages
        self.rows = fill(self.cache.data, to_dtype(rows, dtype)).reshape(-1, cfg.cache_dim)

    @property
    def nbytes(self):
        return self.rows.nbytes

    def places(self, case):
        """First row of each copy of the case's sequences, as many as the rotation needs and the pool holds."""
        rows = case.batch * case.length
        copies = timing.copies_for(rows * self.width * self.rows.itemsize)
        return [i * rows for i in range(max(1, min(copies, len(self.rows) // rows)))]

    def table(self, case, place):
        """int32 Tensor [batch, blocks of a sequence]."""
        each = case.length // cases.BLOCK
        first = place // cases.BLOCK
        return ms.Tensor.from_numpy(np.arange(first, first + case.batch * each, dtype=np.int32).reshape(case.batch, each))

    def view(self, case, place):
        """numpy words [batch, length, width]: the case's cached rows themselves."""
        return self.rows[place:place + case.batch * case.length].reshape(case.batch, case.length, self.width)

    def rows_float32(self, case, place=0):
        view = self.view(case, place)
        return to_float32(view.view(dtypes.NUMPY[DTYPES[self.dtype]]))
