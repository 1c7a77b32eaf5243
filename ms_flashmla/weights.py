"""Hugging Face weights to the kernel's packed layout and back.

pack(W, groups): W [groups * N, K] as HF stores it ([out, in]). Each group is padded with zero rows to N16 = ceil(N / 16) * 16
outputs and cut into panels of 64 outputs (the last may be narrower, a multiple of 16); a panel of width w is stored transposed,
[K][w], so that the kernel reads w neighbouring outputs of one input at a time. Panels and groups follow each other in one 1-D array of
groups * N16 * K elements. The layout is the same for every ISA.
"""

from collections import namedtuple

import mindspore as ms
import numpy as np

from . import _lib, dtypes

Packed = namedtuple("Packed", "groups n k")  # a matrix [groups * n, k]
Vector = namedtuple("Vector", "n")


def padded(n):
    """Outputs of a group after padding: n rounded up to a multiple of 16."""
    align = _lib.packed_weights()["align"]
    return -(-n // align) * align


def size(spec):
    """Elements of a Packed or Vector parameter."""
    return spec.n if isinstance(spec, Vector) else spec.groups * padded(spec.n) * spec.k


def empty(spec, dtype):
    """A fresh 1-D numpy array, zero, for a Packed or Vector parameter of a MindSpore dtype."""
    return dtypes.zeros(size(spec), dtype)


def layout(cfg):
    """{parameter name: Packed or Vector} of a layer, in the operator's input order."""
    heads, rank = cfg.num_heads, cfg.kv_lora_rank
    out = {
        "w_q": Packed(heads, cfg.qk_head_dim, cfg.q_lora_rank or cfg.hidden_size),
        "w_kv_a": Packed(1, cfg.cache_dim, cfg.hidden_size),
        "kv_norm": Vector(rank),
        "w_uk": Packed(heads, rank, cfg.qk_nope_head_dim),
        "w_uv": Packed(heads, cfg.v_head_dim, rank),
        "w_o": Packed(1, cfg.hidden_size, heads * cfg.v_head_dim),
    }
    if cfg.q_lora_rank:
        out["w_q_a"] = Packed(1, cfg.q_lora_rank, cfg.hidden_size)
        out["q_norm"] = Vector(cfg.q_lora_rank)
        if cfg.attention_bias:
            out["b_q_a"] = Vector(cfg.q_lora_rank)
    if cfg.attention_bias:
        out["b_kv_a"] = Vector(cfg.cache_dim)
        out["b_o"] = Vector(cfg.hidden_size)
    return out


def hf_shapes(cfg):
    """{HF name without prefix: shape} of the layer's weights."""
    heads, hidden = cfg.num_heads, cfg.hidden_size
    out = {}
    if cfg.q_lora_rank:
        out["q_a_proj.weight"] = (cfg.q_lora_rank, hidden)
        if cfg.attention_bias:
            out["q_a_proj.bias"] = (cfg.q_lora_rank,)
        out["q_a_layernorm.weight"] = (cfg.q_lora_rank,)
        out["q_b_proj.weight"] = (heads * cfg.qk_head_dim, cfg.q_lora_rank)
    else:
        out["q_proj.weight"] = (heads * cfg.qk_head_dim, hidden)
    out["kv_a_proj_with_mqa.weight"] = (cfg.cache_dim, hidden)
    if cfg.attention_bias:
        out["kv_a_proj_with_mqa.bias"] = (cfg.cache_dim,)
    out["kv_a_layernorm.weight"] = (cfg.kv_lora_rank,)
    out["kv_b_proj.weight"] = (heads * (cfg.qk_nope_head_dim + cfg.v_head_dim), cfg.kv_lora_rank)
    out["o_proj.weight"] = (hidden, heads * cfg.v_head_dim)
    if cfg.attention_bias:
        out["o_proj.bias"] = (hidden,)
    return out


def _panels(n):
    """(first output, width) of each panel of a group."""
    panel = _lib.packed_weights()["panel"]
    return [(start, min(panel, padded(n) - start)) for start in range(0, padded(n), panel)]


def _words(array):
    """array seen as the unsigned integers of its width: numpy copies those fast whatever the float type."""
    return array.view(f"u{array.dtype.itemsize}")


def _pack_group(dest, matrix, convert):
    """Writes one group, matrix [N, K], into dest [N16 * K]; convert casts a panel to dest's dtype."""
    n, k = matrix.shape
    dest = _words(dest)
    for start, width in _panels(n):
        panel = dest[start * k:(start + width) * k].reshape(k, width)
        rows = min(width, n - start)
        panel[:, :rows] = _words(convert(matrix[start:start + rows])).T
        panel[:, rows:] = 0


def _unpack_group(packed, matrix):
    """Reads one group back into matrix [N, K] of packed's dtype."""
    n, k = matrix.shape
    packed, matrix = _words(packed), _words(matrix)
    for start, width in _panels(n):
        rows = min(width, n - start)
        matrix[start:start + rows] = packed[start * k:(start + width) * k].reshape(k, width)[:, :rows].T


def pack(matrix, groups=1):
    """matrix [groups * N, K] (any numpy dtype) -> 1-D packed array of groups * N16 * K elements of that dtype."""
    if matrix.ndim != 2 or matrix.shape[0] % groups:
        raise ValueError(f"matrix: shape {matrix.shape} is not allowed; it must be [{groups} * N, K]")
    n, k = matrix.shape[0] // groups, matrix.shape[1]
    out = np.zeros(groups * padded(n) * k, matrix.dtype)
    step = padded(n) * k
    for g in range(groups):
        _pack_group(out[g * step:(g + 1) * step], matrix[g * n:(g + 1) * n], np.ascontiguousarray)
    return out


def unpack(packed, groups, n, k):
    """The inverse of pack: 1-D packed array -> [groups * n, k]."""
    if packed.shape != (groups * padded(n) * k,):
        raise ValueError(f"packed: shape {packed.shape} is not allowed; it must be ({groups * padded(n) * k},)")
    out = np.empty((groups * n, k), packed.dtype)
    step = padded(n) * k
    for g in range(groups):
        _unpack_group(packed[g * step:(g + 1) * step], out[g * n:(g + 1) * n])
    return out


def half_split_order(dim):
    """Where half-split RoPE finds each dimension of an interleaved one: [0, 2, 4, ..., 1, 3, 5, ...]."""
    return np.concatenate([np.arange(0, dim, 2), np.arange(1, dim, 2)])


def _row_orders(cfg):
    """(rows of a q head, rows of kv_a, rows of a W_UK head): packed row i is HF row order[i]; None means unchanged."""
    if not cfg.rope_interleave:
        return None, None, None
    if cfg.rope_mode == "full":
        order = half_split_order(cfg.qk_nope_head_dim)
        return order, None, order

    def after(n):
        return np.concatenate([np.arange(n), n + half_split_order(cfg.qk_rope_head_dim)])

    return after(cfg.qk_nope_head_dim), after(cfg.kv_lora_rank), None


def _ordered(array, order):
    return array if order is None else array[order]


def _blocks(cfg, name, dest):
    """How an HF weight maps onto the layer's parameters: [(destination 1-D array or slice, HF rows or None, transposed)].

    dest: parameter name -> 1-D numpy view. One entry a group.
    """
    q_order, kv_order, uk_order = _row_orders(cfg)
    spec = layout(cfg)

    def groups(parameter, rows, transposed=False):
        step = padded(spec[parameter].n) * spec[parameter].k
        return [(dest[parameter][g * step:(g + 1) * step], rows(g), transposed) for g in range(spec[parameter].groups)]

    def rows(first, count, order=None):
        return slice(first, first + count) if order is None else first + order

    d_qk, d_n, d_v = cfg.qk_head_dim, cfg.qk_nope_head_dim, cfg.v_head_dim
    if name in ("q_proj.weight", "q_b_proj.weight"):
        return groups("w_q", lambda h: rows(h * d_qk, d_qk, q_order))
    if name == "kv_b_proj.weight":
        return (groups("w_uk", lambda h: rows(h * (d_n + d_v), d_n, uk_order), transposed=True)
                + groups("w_uv", lambda h: rows(h * (d_n + d_v) + d_n, d_v)))
    matrix = {"q_a_proj.weight": "w_q_a", "kv_a_proj_with_mqa.weight": "w_kv_a", "o_proj.weight": "w_o"}
    if name in matrix:
        order = kv_order if name == "kv_a_proj_with_mqa.weight" else None
        return groups(matrix[name], lambda _: rows(0, spec[matrix[name]].n, order))
    raise KeyError(name)


_VECTORS = {"q_a_proj.bias": "b_q_a", "q_a_layernorm.weight": "q_norm", "kv_a_proj_with_mqa.bias": "b_kv_a",
            "kv_a_layernorm.weight": "kv_norm", "o_proj.bias": "b_o"}


def _vector_order(cfg, name):
    return _row_orders(cfg)[1] if name == "kv_a_proj_with_mqa.bias" else None


def _prefixed(prefix):
    if not isinstance(prefix, str):
        raise TypeError(f"prefix: {prefix!r} is a {type(prefix).__name__}; a string is needed")
    return prefix + "." if prefix and not prefix.endswith(".") else prefix


def _as_numpy(name, value):
    """value (numpy array or Tensor) as a numpy array of a float type the layer takes."""
    if isinstance(value, ms.Tensor):
        if "float8" in str(value.dtype).lower() or "hifloat" in str(value.dtype).lower():
            raise ValueError(f"{name}: dtype {value.dtype} (fp8) is not allowed; it must be float64, float32, float16 or bfloat16")
        value = value.asnumpy()
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{name}: {type(value).__name__} is not allowed; it must be a numpy array or a Tensor")
    if value.dtype not in (np.float64, np.float32, np.float16) and not dtypes.is_bfloat16(value.dtype):
        raise TypeError(f"{name}: dtype {value.dtype} is not allowed; it must be float64, float32, float16 or bfloat16")
    return value


def _select(cfg, mapping, prefix):
    """{HF name without prefix: full name} of the layer's weights, after checking every name under prefix."""
    shapes = hf_shapes(cfg)
    found = {name[len(prefix):]: name for name in mapping.keys() if isinstance(name, str) and name.startswith(prefix)}
    for name, full in list(found.items()):
        if name.endswith(("weight_scale_inv", "weight_scale", "input_scale", "activation_scale")):
            raise ValueError(f"{full}: a quantized (fp8) checkpoint is not supported; weights must be float32, float16 or bfloat16")
        if name == "rotary_emb.inv_freq" or (cfg.index_topk is not None and name.startswith("indexer.")):
            del found[name]
    missing = [prefix + name for name in shapes if name not in found]
    unknown = [full for name, full in found.items() if name not in shapes]
    if missing or unknown:
        said = [f"{what} {', '.join(names)}" for what, names in (("missing", missing), ("unknown", unknown)) if names]
        raise ValueError(f"mapping: under prefix {prefix!r} {'; '.join(said)}; allowed: {', '.join(shapes)}")
    return {name: found[name] for name in shapes}


def load(cfg, mapping, prefix, dest, dtype):
    """Checks every weight of the layer in mapping (name -> numpy array or Tensor), then writes them, cast to dtype, into dest
    (parameter name -> 1-D numpy view of dtype). Nothing is written when anything is wrong (ValueError or TypeError)."""
    if not hasattr(mapping, "keys") or not hasattr(mapping, "__getitem__"):
        raise TypeError(f"mapping: {type(mapping).__name__} is not allowed; it must map names to numpy arrays or Tensors")
    names = _select(cfg, mapping, _prefixed(prefix))
    for name, shape in hf_shapes(cfg).items():
        was = _as_numpy(names[name], mapping[names[name]]).shape
        if was != shape:
            raise ValueError(f"{names[name]}: shape {tuple(was)} is not allowed; it must be {shape}")
    for name, full in names.items():
        value = _as_numpy(full, mapping[full])
        if name in _VECTORS:
            _words(dest[_VECTORS[name]])[:] = _words(dtypes.cast(_ordered(value, _vector_order(cfg, name)), dtype))
            continue
        for target, rows, transposed in _blocks(cfg, name, dest):
            part = value[rows]
            _pack_group(target, part.T if transposed else part, lambda panel: dtypes.cast(panel, dtype))


def export(cfg, prefix, source):
    """{prefix + HF name: numpy array} from the layer's parameters (source: parameter name -> 1-D numpy view), bit for bit."""
    prefix, out = _prefixed(prefix), {}
    for name, shape in hf_shapes(cfg).items():
        array = np.empty(shape, next(iter(source.values())).dtype)
        if name in _VECTORS:
            order = _vector_order(cfg, name)
            _words(array)[slice(None) if order is None else order] = _words(source[_VECTORS[name]])
        else:
            for packed, rows, transposed in _blocks(cfg, name, source):
                count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
                part = np.empty((shape[1], count) if transposed else (count, shape[1]), array.dtype)
                _unpack_group(packed, part)
                _words(array)[rows] = _words(part).T if transposed else _words(part)
        out[prefix + name] = array
    return out
