"""The operators: ops.Custom primitives registered from the C++ lists, and the two operator-level functions."""

import functools

import numpy as np
from mindspore import Tensor
from mindspore import ops as ms_ops
from mindspore.ops import CustomRegOp, DataType
from mindspore.ops.primitive import constexpr

from . import _lib, checks, pynative, tune_table
from ._check import as_bool, as_float, as_int


# Operators of the CANN package: the outputs' shapes and dtypes as those of an input.
_ASCEND_OPERATORS = {"FlashMLA": 0}


def _registration(name, target="CPU"):
    """MindSpore's reg_info of an operator, from the library's own list."""
    proto = _lib.proto(name)
    reg = CustomRegOp(name)
    for i, entry in enumerate(proto["inputs"]):
        reg.input(i, entry["name"], "required" if entry["required"] else "optional")
    for i, entry in enumerate(proto["outputs"]):
        reg.output(i, entry["name"] if isinstance(entry, dict) else entry, "required")
    for entry in proto["attrs"]:
        reg.attr(entry["name"], "required", entry["type"])
    reg.dtype_format(*[DataType.None_None] * (len(proto["inputs"]) + len(proto["outputs"])))
    return reg.target(target).get_op_info()


@functools.lru_cache(maxsize=None)
def _direct(implementation, name, attributes):
    return pynative.operator(implementation, name, attributes)


class _Operator(ms_ops.Custom):
    """ops.Custom where a graph is compiled; a call from Python goes to the library for PyNative calls where there is one."""

    def __init__(self, path, name, attributes):
        if path is not None:
            super().__init__(f"{path}:{name}", out_shape=None, out_dtype=None, func_type="aot", reg_info=_registration(name))
        else:  # CANN's, known by its name
            like = _ASCEND_OPERATORS.get(name)
            if like is None:
                raise RuntimeError(f"device_target Ascend: {name} is not in the Ascend package; use device_target 'CPU'")
            super().__init__(f"aclnn{name}", out_shape=lambda *shapes: shapes[like], out_dtype=lambda *dtypes: dtypes[like], func_type="aot",
                             reg_info=_registration(name, "Ascend"))
        self.implementation = _lib.implementation()  # the library that it was made for, whatever the environment says later
        self._key = None if path is None else (self.implementation, name, attributes)

    @property
    def direct(self):
        """The operator without ops.Custom (pynative.operator), or None."""
        return None if self._key is None else _direct(*self._key)

    def __deepcopy__(self, memo):
        return self  # constant, and shared by all cells with these attributes

    def __call__(self, *args):
        direct = self.direct
        out = None if direct is None else direct(*args)
        return super().__call__(*args) if out is None else out


@functools.lru_cache(maxsize=None)
def _custom(path, name, attributes):
    op = _Operator(path, name, attributes)
    # Without it GRAPH_MODE reorders readers and writers of the same cache Parameter, and drops an operator whose output is unused.
    op.add_prim_attr("side_effect_mem", True)
    for key, value in attributes:
        op.add_prim_attr(key, value)
    return op


def primitive(name, **attributes):
    """The ops.Custom of an operator, one for each set of attribute values.

    Raises TypeError when the attributes are not those of the operator, and what _lib.require_backend raises.
    """
    wanted = [entry["name"] for entry in _lib.proto(name)["attrs"]]
    if sorted(attributes) != sorted(wanted):
        raise TypeError(f"{name}: attributes {sorted(attributes)} are not allowed; they must be {sorted(wanted)}")
    path = _lib.require_backend()
    tune_table.use_environment()
    return _custom(path, name, tuple((key, attributes[key]) for key in wanted))


def _remember_last(check):
    """check(*args), whose result is kept for a call with equal arguments of the same types: the steps of a decode are such calls."""
    last = (None, None, None)

    @functools.wraps(check)
    def remembered(*args):
        nonlocal last
        types, values, result = last
        now = tuple(map(type, args))
        if now != types or args != values:
            result = check(*args)
            last = (now, args, result)
        return result

    return remembered


@constexpr(check=False)  # unknown dimensions arrive as None
@_remember_last
def _flash_mla_scale(q, q_dtype, k, k_dtype, table, table_dtype, seqlens, seqlens_dtype, head_dim_v, softmax_scale, causal):
    """Checks the call and returns (softmax_scale, default_scale); runs while a graph compiles too, with None for unknown dimensions."""
    checks.require_float("q", q_dtype)
    checks.require_shape("q", q, (None,) * 4, "[B, s_q, h_q, d]")
    checks.require_float("k_cache", k_dtype)
    if len(k) == 3:
        checks.require_shape("k_cache", k, (None, None, q[3]), f"[num_blocks, page, d] with the d of q, {q[3]}")
    else:
        checks.require_shape("k_cache", k, (None, None, None, q[3]), f"[num_blocks, page, h_kv, d] with the d of q, {q[3]}")
        known = q[2] not in (None, -1) and k[2] not in (None, -1)
        if known and (k[2] < 1 or q[2] % k[2]):
            raise ValueError(f"q: {q[2]} heads are not allowed; the number must be a multiple of k_cache's {k[2]}")
    if q[2] == 0:
        raise ValueError(f"q: shape {tuple(q)} is not allowed; it must have at least 1 head")
    checks.require_pages("k_cache", k)
    checks.require_int32("block_table", table_dtype)
    checks.require_shape("block_table", table, (q[0], None), f"[B, max_blocks] with the B of q, {q[0]}")
    checks.require_int32("cache_seqlens", seqlens_dtype)
    checks.require_shape("cache_seqlens", seqlens, (q[0],), f"[B] with the B of q, {q[0]}")
    as_int("head_dim_v", head_dim_v, 1, None if q[3] in (None, -1) else q[3])
    as_bool("causal", causal)
    if softmax_scale is None:
        return 0.0, 1
    return as_float("softmax_scale", softmax_scale, positive=False), 0


@functools.lru_cache(maxsize=None)  # the graph compiler calls a cached function as it is; it would try to compile a plain one
def _flash_mla_primitive(head_dim_v, scale, causal, softmax_phi):
    return primitive("FlashMLAWithKVCache", head_dim_v=head_dim_v, softmax_scale=scale[0], default_scale=scale[1], causal=int(causal),
                     unified_max=int(softmax_phi is not None), phi=0.0 if softmax_phi is None else as_float("softmax_phi", softmax_phi, positive=False))


@constexpr(check=False)  # unknown dimensions arrive as None
def _check_merge(out_a, out_a_dtype, lse_a, lse_a_dtype, out_b, out_b_dtype, lse_b, lse_b_dtype):
    checks.require_float("out_a", out_a_dtype)
    checks.require_float("out_b", out_b_dtype)
    checks.require_shape("out_a", out_a, (None,) * 4, "[B, s_q, h, d]")
    checks.require_shape("out_b", out_b, out_a, f"that of out_a, {tuple(out_a)}")
    for name, shape, dtype in (("lse_a", lse_a, lse_a_dtype), ("lse_b", lse_b, lse_b_dtype)):
        if str(dtype) != "Float32":
            raise TypeError(f"{name}: dtype {dtype} is not allowed; it must be float32")
        checks.require_shape(name, shape, (out_a[0], out_a[2], out_a[1]), f"[B, h, s_q] = {(out_a[0], out_a[2], out_a[1])}")


@functools.lru_cache(maxsize=None)
def _merge_primitive():
    return primitive("MergeAttentionStates")


def _require_tensors(names, values):
    for name, value in zip(names, values):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: {type(value).__name__} is not allowed; it must be a Tensor")


def flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale=None, causal=False, softmax_phi=None):
    """Attention of new queries over a paged cache; usable from Python and inside construct().

    q: [B, s_q, h_q, d]. k_cache: [num_blocks, page, h_kv, d], or [num_blocks, page, d] for h_kv = 1; h_kv divides h_q and query head i reads
    kv head i // (h_q / h_kv). V is k_cache[..., :head_dim_v]. Both float32, float16 or bfloat16, each its own.
    block_table: int32 [B, max_blocks]; entries past a sequence's last page are never read. cache_seqlens: int32 [B], all keys of a sequence, its s_q new
    ones included. head_dim_v: 1..d. softmax_scale: None means d ** -0.5. causal: bottom-right aligned, query i sees keys
    0 .. cache_seqlens - s_q + i. softmax_phi: None, or one maximum for all rows, as MLALayer takes it.
    Returns (out [B, s_q, h_q, head_dim_v] in q's dtype, lse float32 [B, h_q, s_q], natural logarithm); a row without keys gives out 0 and lse +inf.
    Raises ValueError or TypeError, naming the argument, for a wrong rank, shape, dtype or number; RuntimeError from the kernel for what
    only the data tells (a needed block id outside the cache, a negative length, a sequence longer than its table).
    """
    _require_tensors(("q", "k_cache", "block_table", "cache_seqlens"), (q, k_cache, block_table, cache_seqlens))
    scale = _flash_mla_scale(q.shape, q.dtype, k_cache.shape, k_cache.dtype, block_table.shape, block_table.dtype, cache_seqlens.shape,
                             cache_seqlens.dtype, head_dim_v, softmax_scale, causal)
    return _flash_mla_primitive(head_dim_v, scale, causal, softmax_phi)(q, k_cache, block_table, cache_seqlens)


def merge_attention_states(out_a, lse_a, out_b, lse_b):
    """Attention over the union of two disjoint key sets, from the results over each; usable from Python and inside construct().

    out_a, out_b: [B, s_q, h, d], float32, float16 or bfloat16. lse_a, lse_b: float32 [B, h, s_q], natural logarithm; +inf or -inf marks a side without
    keys, whose out does not count, NaN included. Returns (out in out_a's dtype, lse float32) in the same layouts; two empty sides give 0 and +inf.
    out = (out_a e^lse_a + out_b e^lse_b) / (e^lse_a + e^lse_b), computed with the larger lse taken out.
    Raises ValueError or TypeError, naming the argument, for a wrong rank, shape or dtype.
    """
    _require_tensors(("out_a", "lse_a", "out_b", "lse_b"), (out_a, lse_a, out_b, lse_b))
    _check_merge(out_a.shape, out_a.dtype, lse_a.shape, lse_a.dtype, out_b.shape, out_b.dtype, lse_b.shape, lse_b.dtype)
    return _merge_primitive()(out_a, lse_a, out_b, lse_b)


def calibrate_phi(lse):
    """A softmax_phi for calls like those that gave lse: float32 Tensor or numpy array of any shape, as flash_mla_with_kvcache returns it.

    The median of the finite values. A row's largest logit lies between lse - ln(keys) and lse, so that logits spread by less than
    about 40 around it stay within the window phi - 40 .. phi + 60. Raises ValueError when no value is finite.
    """
    values = lse.asnumpy() if isinstance(lse, Tensor) else np.asarray(lse)
    values = values[np.isfinite(values)]
    if values.size == 0:
        raise ValueError("lse: no value is finite; it must hold at least one row with keys")
    return float(np.median(values))
