"""RoPE tables, computed once: float64 arithmetic, float32 result.

Formulas: Su et al., RoFormer (default); Peng et al., YaRN, as in HF transformers' _compute_yarn_parameters; Ding et al., LongRoPE,
as in _compute_longrope_parameters. "linear" divides every frequency by factor.
"""

import math
import weakref
from collections.abc import Mapping

import numpy as np

from ._check import as_bool, as_float, as_int, one_of

MAX_POSITIONS = 2**24  # of a table; far beyond any model
ROPE_TYPES = ("default", "linear", "yarn", "longrope")

_KEYS = {  # keys each rope type knows, beside rope_type
    "default": ("original_max_position_embeddings",),
    "linear": ("factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "attention_factor", "mscale", "mscale_all_dim", "beta_fast",
             "beta_slow", "truncate"),
    "longrope": ("factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"),
}


def normalize_rope_scaling(rope_scaling, rope_dim, max_position_embeddings):
    """The one form of a rope_scaling dict: None for plain RoPE, else {"rope_type": ..., every key the type needs}.

    rope_scaling: None or a mapping with rope_type (or type) and the keys of HF's rope_scaling; a key with value None counts as absent.
    rope_dim: the number of rotated dimensions d (even). max_position_embeddings: what original_max_position_embeddings and
    factor default from. Raises TypeError for a wrong type and ValueError, naming it, for an unknown rope type, an unknown key, a
    missing key or a value out of range.
    """
    if rope_scaling is None:
        return None
    if not isinstance(rope_scaling, Mapping):
        raise TypeError(f"rope_scaling: {rope_scaling!r} is a {type(rope_scaling).__name__}; None or a dict is needed")
    given = {key: value for key, value in rope_scaling.items() if value is not None}
    kinds = [given.pop(key) for key in ("rope_type", "type") if key in given]
    if not kinds or any(kind != kinds[0] for kind in kinds):
        raise ValueError(f"rope_scaling: rope_type is {kinds or 'missing'}; give one of {', '.join(ROPE_TYPES)}")
    kind = one_of("rope_scaling rope_type", kinds[0], ROPE_TYPES)
    unknown = sorted(map(str, set(given) - set(_KEYS[kind])))
    if unknown:
        raise ValueError(f"rope_scaling: {', '.join(map(repr, unknown))} is not supported for rope_type {kind!r}; allowed keys: "
                         f"{', '.join(_KEYS[kind])}")
    if kind == "default":
        return None
    return {"rope_type": kind, **_NORMALIZERS[kind](given, rope_dim, max_position_embeddings)}


def _linear(given, rope_dim, max_position_embeddings):
    if "factor" not in given:
        raise ValueError("rope_scaling: factor is missing for rope_type 'linear'")
    return {"factor": as_float("rope_scaling factor", given["factor"])}


def _original_length(given, max_position_embeddings):
    return as_int("rope_scaling original_max_position_embeddings",
                  given.get("original_max_position_embeddings", max_position_embeddings), 1, MAX_POSITIONS)


def _yarn(given, rope_dim, max_position_embeddings):
    original = _original_length(given, max_position_embeddings)
    out = {
        "original_max_position_embeddings": original,
        "factor": as_float("rope_scaling factor", given.get("factor", max_position_embeddings / original)),
        "beta_fast": as_float("rope_scaling beta_fast", given.get("beta_fast", 32)),
        "beta_slow": as_float("rope_scaling beta_slow", given.get("beta_slow", 1)),
        "truncate": as_bool("rope_scaling truncate", given.get("truncate", True)),
    }
    for key in ("mscale", "mscale_all_dim"):
        value = as_float(f"rope_scaling {key}", given.get(key, 0.0), positive=False)
        if value < 0.0:
            raise ValueError(f"rope_scaling {key}: {value} is not allowed; it must be 0 or above")
        if value:  # HF reads 0 as not set
            out[key] = value
    if "attention_factor" in given:
        out["attention_factor"] = as_float("rope_scaling attention_factor", given["attention_factor"])
    return out


def _longrope(given, rope_dim, max_position_embeddings):
    original = _original_length(given, max_position_embeddings)
    if original < 2:  # the attention factor divides by ln(original)
        raise ValueError(f"rope_scaling original_max_position_embeddings: {original} is not allowed for longrope; it must be at least 2")
    out = {
        "original_max_position_embeddings": original,
        "factor": as_float("rope_scaling factor", given.get("factor", max_position_embeddings / original)),
    }
    for key in ("short_factor", "long_factor"):
        factors = given.get(key)
        if not isinstance(factors, (list, tuple, np.ndarray)) or len(factors) != rope_dim // 2:
            was = "missing" if factors is None else f"{factors!r}"
            raise ValueError(f"rope_scaling {key}: {was}; longrope needs a list of {rope_dim // 2} numbers (half the rope dimension)")
        out[key] = tuple(as_float(f"rope_scaling {key}[{i}]", value) for i, value in enumerate(factors))
    if "attention_factor" in given:
        out["attention_factor"] = as_float("rope_scaling attention_factor", given["attention_factor"])
    return out


_NORMALIZERS = {"linear": _linear, "yarn": _yarn, "longrope": _longrope}


def get_mscale(factor, mscale=1.0):
    """YaRN's 0.1 * mscale * ln(factor) + 1, and 1 for factor <= 1."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def softmax_mscale(rope_scaling):
    """m of softmax_scale = d_qk^-0.5 * m^2 (DeepSeek): get_mscale(factor, mscale_all_dim) for YaRN with mscale_all_dim, else 1."""
    if rope_scaling is None or rope_scaling["rope_type"] != "yarn" or "mscale_all_dim" not in rope_scaling:
        return 1.0
    return get_mscale(rope_scaling["factor"], rope_scaling["mscale_all_dim"])


def attention_factor(rope_scaling):
    """What cos and sin are multiplied by; rope_scaling in the normalized form."""
    if rope_scaling is None or rope_scaling["rope_type"] == "linear":
        return 1.0
    if "attention_factor" in rope_scaling:
        return rope_scaling["attention_factor"]
    factor = rope_scaling["factor"]
    if rope_scaling["rope_type"] == "longrope":
        return 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(rope_scaling["original_max_position_embeddings"]))
    if "mscale" in rope_scaling and "mscale_all_dim" in rope_scaling:
        return get_mscale(factor, rope_scaling["mscale"]) / get_mscale(factor, rope_scaling["mscale_all_dim"])
    return get_mscale(factor)


def inverse_frequencies(rope_dim, rope_theta, rope_scaling, use_long_factors=False):
    """float64 [rope_dim / 2], radians per position; rope_scaling in the normalized form."""
    exponent = np.arange(0, rope_dim, 2, dtype=np.float64) / rope_dim
    inv_freq = 1.0 / rope_theta**exponent
    if rope_scaling is None:
        return inv_freq
    kind = rope_scaling["rope_type"]
    if kind == "linear":
        return inv_freq / rope_scaling["factor"]
    if kind == "longrope":
        return inv_freq / np.asarray(rope_scaling["long_factor" if use_long_factors else "short_factor"], np.float64)
    keep = 1.0 - _yarn_ramp(rope_dim, rope_theta, rope_scaling)
    return inv_freq / rope_scaling["factor"] * (1.0 - keep) + inv_freq * keep


def _yarn_ramp(rope_dim, rope_theta, rope_scaling):
    """0 where a dimension turns often enough to be kept, 1 where it is interpolated: float64 [rope_dim / 2]."""
    original = rope_scaling["original_max_position_embeddings"]

    def correction_dim(rotations):
        return rope_dim * math.log(original / (rotations * 2.0 * math.pi)) / (2.0 * math.log(rope_theta))

    low, high = correction_dim(rope_scaling["beta_fast"]), correction_dim(rope_scaling["beta_slow"])
    if rope_scaling["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope_dim - 1)
    if low == high:
        high += 0.001  # HF's guard against the division by zero
    return np.clip((np.arange(rope_dim // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)


def table_length(max_position_embeddings, rope_scaling, use_long_factors=False):
    """Rows of the table: max_position_embeddings; under longrope the short factors hold up to original_max_position_embeddings only."""
    if rope_scaling is not None and rope_scaling["rope_type"] == "longrope" and not use_long_factors:
        return min(max_position_embeddings, rope_scaling["original_max_position_embeddings"])
    return max_position_embeddings


def rope_table(cfg):
    """The table of a config: float32 [cfg.max_positions, cfg.rope_dim], row p = [cos(p f_i), i < d/2 | sin(p f_i), i < d/2], each
    times the attention factor. ValueError where these are not finite."""
    half = cfg.rope_dim // 2
    inv_freq = inverse_frequencies(cfg.rope_dim, cfg.rope_theta, cfg.rope_scaling, cfg.use_long_factors)
    factor = attention_factor(cfg.rope_scaling)
    if not (np.isfinite(inv_freq * cfg.max_positions).all() and math.isfinite(factor)):
        raise ValueError(f"rope_scaling: {cfg.rope_scaling!r} with rope_theta {cfg.rope_theta} gives angles or an attention factor that are not finite")
    table = np.empty((cfg.max_positions, cfg.rope_dim), np.float32)
    rows = 16384  # a slice at a time keeps the float64 temporaries under 10 MB
    for start in range(0, cfg.max_positions, rows):
        angle = np.arange(start, min(start + rows, cfg.max_positions), dtype=np.float64)[:, None] * inv_freq
        table[start:start + rows, :half] = np.cos(angle) * factor
        table[start:start + rows, half:] = np.sin(angle) * factor
    return table


_TABLES = weakref.WeakValueDictionary()


def shared_rope_table(cfg):
    """rope_table(cfg) as a float32 Tensor that all layers with the same rotation share: DeepSeek-V3's is 42 MB, once instead of 61 times."""
    from mindspore import Tensor

    scaling = None if cfg.rope_scaling is None else tuple(sorted(cfg.rope_scaling.items()))
    key = (cfg.rope_dim, cfg.rope_theta, scaling, cfg.max_positions, cfg.use_long_factors)
    table = _TABLES.get(key)
    if table is None:
        table = Tensor.from_numpy(rope_table(cfg))
        _TABLES[key] = table
    return table
