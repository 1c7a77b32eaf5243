"""The paged latent KV cache of one layer and its block allocator."""

import copy
import itertools

import mindspore as ms
import numpy as np

from . import dtypes
from ._check import as_int
from .config import check_config

_SERIAL = itertools.count()


class LatentKVCache:
    """Blocks of latent rows [c | k_pe] for one layer.

    cfg: MLAConfig. num_blocks, block_size: at least 1. dtype: ms.float32, ms.float16 or ms.bfloat16 of the stored rows.
    data: Parameter [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim], written in place by the layer. Each cache has a Parameter name of its
    own, because MindSpore makes two Parameters of one name in a graph into one.
    Raises TypeError for a cfg that is no MLAConfig, a number that is no integer and another dtype, ValueError for a number below 1.
    A block belongs to one sequence; the same tables serve the caches of all layers when these have the same num_blocks and block_size.
    """

    def __init__(self, cfg, num_blocks, block_size=64, dtype=ms.float32):
        self.cfg = check_config(cfg)
        self.num_blocks = as_int("num_blocks", num_blocks, 1, 2**31 - 1)
        self.block_size = as_int("block_size", block_size, 1, 2**31 - 1)
        self.dtype = dtypes.check_dtype("dtype", dtype)
        shape = (self.num_blocks, self.block_size, cfg.cache_dim)
        try:
            self.data = dtypes.zeros_parameter(f"latent_kv_cache_{next(_SERIAL)}", shape, dtype)
        except RuntimeError as error:
            raise RuntimeError(f"num_blocks: {self.num_blocks} blocks of {self.block_size} tokens: {error}") from error
        self._free = list(range(self.num_blocks - 1, -1, -1))  # popped from the end: block 0 goes first
        self._blocks = {}  # sequence -> its blocks

    def __deepcopy__(self, memo):
        """A cache of its own with the same rows and allocations: a copied Parameter would keep the name and be one with the old in a graph."""
        other = copy.copy(self)
        other.data = LatentKVCache(self.cfg, self.num_blocks, self.block_size, self.dtype).data
        memo[id(self.data)] = other.data
        dtypes.put(other.data, self.data.asnumpy().copy())
        other._free, other._blocks = list(self._free), {seq_id: list(blocks) for seq_id, blocks in self._blocks.items()}
        return other

    @property
    def num_free_blocks(self):
        """Blocks that no sequence holds."""
        return len(self._free)

    def allocate(self, seq_id, num_tokens):
        """Makes room for num_tokens tokens in total in sequence seq_id (any hashable); blocks it has stay its own, also when num_tokens shrinks.

        Raises RuntimeError, with nothing taken, when the pool has too few free blocks.
        """
        num_tokens = as_int("num_tokens", num_tokens, 0)
        held = self._blocks.get(seq_id, [])
        more = -(-num_tokens // self.block_size) - len(held)
        if more > len(self._free):
            raise RuntimeError(f"allocate: sequence {seq_id!r} needs {more} more blocks of {self.block_size} tokens to hold {num_tokens}, "
                               f"{len(self._free)} of {self.num_blocks} are free")
        self._blocks[seq_id] = held + [self._free.pop() for _ in range(max(more, 0))]

    def free(self, seq_id):
        """Gives the blocks of sequence seq_id back. ValueError for a sequence that was never allocated or is freed already."""
        self._free.extend(reversed(self._held(seq_id)))
        del self._blocks[seq_id]

    def block_table(self, seq_ids):
        """int32 Tensor [B, max_blocks] of the sequences' block ids, each row padded with -1; max_blocks is the longest row, at least 1.

        ValueError for a sequence that was never allocated.
        """
        rows = [self._held(seq_id) for seq_id in seq_ids]
        table = np.full((len(rows), max([1, *map(len, rows)])), -1, np.int32)
        for line, blocks in zip(table, rows):
            line[:len(blocks)] = blocks
        return ms.Tensor.from_numpy(table)

    def _held(self, seq_id):
        if seq_id not in self._blocks:
            raise ValueError(f"seq_id: {seq_id!r} is not allocated; allocate(seq_id, num_tokens) comes first")
        return self._blocks[seq_id]
