"""What is checked before an operator runs: shapes and dtypes (also while a graph compiles), and on the host the lengths and block ids."""

import mindspore as ms
import numpy as np

from . import _lib, dtypes

FLOATS = "float32, float16 or bfloat16"


def require_tensor(name, value):
    """TypeError unless value is a Tensor."""
    if not isinstance(value, ms.Tensor):
        raise TypeError(f"{name}: {type(value).__name__} is not allowed; it must be a Tensor")


def require_float(name, dtype):
    """TypeError unless dtype is one the kernels store."""
    if dtype not in dtypes.DTYPES:
        raise TypeError(f"{name}: dtype {dtype} is not allowed; it must be {FLOATS}")


def require_int32(name, dtype):
    """TypeError unless dtype is int32."""
    if dtype != ms.int32:
        raise TypeError(f"{name}: dtype {dtype} is not allowed; it must be int32")


def require_shape(name, shape, allowed, spelled):
    """ValueError unless shape has the rank of allowed and its known dimensions; None or -1, on either side, is any size."""
    fits = len(shape) == len(allowed)
    if fits:
        for was, wanted in zip(shape, allowed):
            fits = fits and (was == wanted or was in (None, -1) or wanted in (None, -1))
    if not fits:
        raise ValueError(f"{name}: shape {tuple(shape)} is not allowed; it must be {spelled}")


def require_pages(name, shape):
    """ValueError for pages that hold no row; shape [num_blocks, page, ...], None or -1 is any size."""
    if shape[1] == 0:
        raise ValueError(f"{name}: shape {tuple(shape)} is not allowed; a page must hold at least 1 row")


def check_layer_call(hidden_size, cache_dim, hidden, hidden_dtype, cache, cache_dtype, table, table_dtype, q_lens, q_lens_dtype, context,
                     context_dtype, residual=None, residual_dtype=None):
    """Shapes and dtypes of a layer call; names as in MLALayer, residual None when there is none. Raises ValueError or TypeError."""
    for name, shape in (("hidden_states", hidden), ("kv_cache", cache), ("block_table", table), ("q_seq_lens", q_lens), ("context_lens", context)):
        if shape is None or tuple(shape) == (-2,):
            raise ValueError(f"{name}: an unknown rank is not allowed; its dimensions may be dynamic, their number must be known")
    require_float("hidden_states", hidden_dtype)
    if len(hidden) not in (2, 3):
        raise ValueError(f"hidden_states: shape {tuple(hidden)} is not allowed; it must be [T, {hidden_size}] or [B, S, {hidden_size}]")
    require_shape("hidden_states", hidden, (None,) * (len(hidden) - 1) + (hidden_size,), f"[T, {hidden_size}] or [B, S, {hidden_size}]")
    require_float("kv_cache", cache_dtype)
    require_shape("kv_cache", cache, (None, None, cache_dim), f"[num_blocks, block_size, {cache_dim}]")
    require_pages("kv_cache", cache)
    require_int32("block_table", table_dtype)
    require_shape("block_table", table, (None, None), "[B, max_blocks]")
    require_int32("q_seq_lens", q_lens_dtype)
    require_shape("q_seq_lens", q_lens, (table[0],), f"[B] with the B of block_table, {table[0]}")
    require_int32("context_lens", context_dtype)
    require_shape("context_lens", context, (table[0],), f"[B] with the B of block_table, {table[0]}")
    if len(hidden) == 3:
        require_shape("hidden_states", hidden, (table[0], None, hidden_size), f"[B, S, {hidden_size}] with the B of block_table, {table[0]}")
    if residual is not None:
        if residual_dtype != hidden_dtype:
            raise TypeError(f"residual: dtype {residual_dtype} is not allowed; it must be that of hidden_states, {hidden_dtype}")
        require_shape("residual", residual, hidden, f"that of hidden_states, {tuple(hidden)}")


def is_view(tensor):
    """True for a Tensor that shares the storage of another (slice, reshape, transpose): MindSpore hands an operator a copy of such a one,
    contiguous or not, and shows it by asnumpy(), which copies a view and nothing else."""
    return _lib.address(tensor.asnumpy()) != tensor.data_ptr()


def host_int32(tensor):
    """A Tensor of int32 as a contiguous numpy array."""
    array = tensor.asnumpy()
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def check_lengths(cache_shape, block_table, q_seq_lens, context_lens, num_tokens=-1, tokens_per_seq=-1, max_positions=-1, index_topk=0):
    """The kernel's own check of lengths and block ids, run on the host on numpy int32 arrays; RuntimeError with the kernel's words.

    num_tokens: rows of hidden_states; tokens_per_seq: S of [B, S, hidden]; max_positions: rows of the RoPE table; -1 leaves a check out.
    index_topk: the sparse indexer's limit, 0 for none.
    """
    if _lib.library().fm_check_batch(
        cache_shape[0], cache_shape[1], block_table.shape[0], block_table.shape[1], _lib.address(block_table), _lib.address(q_seq_lens),
        _lib.address(context_lens), num_tokens, tokens_per_seq, max_positions, index_topk):
        raise RuntimeError(_lib.last_error())


def check_batch(cache, block_table, q_seq_lens, context_lens):
    """The check of a batch for servers: lengths and block ids, before anything runs.

    cache: a LatentKVCache (its config's RoPE table length and index_topk are checked too) or the cache Tensor [num_blocks, block_size, d].
    block_table int32 [B, max_blocks], q_seq_lens and context_lens int32 [B]: Tensors or numpy arrays. Raises RuntimeError with the words
    the kernel would fail with, ValueError or TypeError for a wrong shape or dtype.
    """
    data = getattr(cache, "data", cache) if not isinstance(cache, ms.Tensor) else cache
    require_tensor("cache", data)
    cfg = getattr(cache, "cfg", None)
    require_shape("cache", data.shape, (None, None, None if cfg is None else cfg.cache_dim), "[num_blocks, block_size, d]")
    require_pages("cache", data.shape)
    arrays = []
    for name, value, rank in (("block_table", block_table, 2), ("q_seq_lens", q_seq_lens, 1), ("context_lens", context_lens, 1)):
        if isinstance(value, ms.Tensor):
            value = value.asnumpy()
        if not isinstance(value, np.ndarray):
            raise TypeError(f"{name}: {type(value).__name__} is not allowed; it must be a Tensor or a numpy array")
        if value.dtype != np.int32:
            raise TypeError(f"{name}: dtype {value.dtype} is not allowed; it must be int32")
        batch = arrays[0].shape[0] if arrays else None
        require_shape(name, value.shape, (batch, None)[:rank], "[B, max_blocks]" if rank == 2 else f"[B] with the B of block_table, {batch}")
        arrays.append(np.ascontiguousarray(value))
    limits = {} if cfg is None else {"max_positions": cfg.max_positions, "index_topk": cfg.index_topk or 0}
    check_lengths(data.shape, *arrays, **limits)
