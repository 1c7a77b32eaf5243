"""Tune tables: which loop each projection takes by its rows, and which attention path, as measured (`python -m ms_flashmla tune`).

A YAML file:
    isa: avx512                      # the table holds for this one
    threads: 2                       # and was measured with so many
    gemm:                            # products with a packed weight, groups of [n, k]
      - {projection: w_o, n: 2048, k: 2048, weight: float32, gemv_rows: 6, flat_rows: 16}
    attention:                       # followed by layers with deterministic=False only
      - {num_heads: 16, kv_lora_rank: 512, qk_nope_head_dim: 128, qk_rope_head_dim: 64, v_head_dim: 128, weight: float32, cache: float32,
         points: [{context: 0, expanded_from: 96}]}
gemv_rows: rows up to which one register block holds all of them; flat_rows: rows up to which sums stay in registers over all of K; beyond, K is
cut into blocks. expanded_from: new tokens from which the expanded path is taken, with at least `context` tokens in the cache.
Rows that were measured stand beside these under `us`, for people. No choice under gemm changes a bit.
"""

import ctypes
import functools
import os
import warnings

from . import _lib
from ._check import as_int, one_of

DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2}
MOST_POINTS = 12
_INT_MAX = 2**31 - 1


class GemmChoice(ctypes.Structure):
    """struct GemmChoice of tiling/tiling_data.h."""

    _fields_ = [(name, ctypes.c_int32) for name in ("n", "k", "gemv_rows", "flat_rows")]


class GemmRule(ctypes.Structure):
    """struct GemmRule of tiling/tune.h."""

    _fields_ = [("weight_dtype", ctypes.c_int32), ("choice", GemmChoice)]


class PathPoint(ctypes.Structure):
    """struct PathPoint of tiling/tiling_data.h."""

    _fields_ = [("context", ctypes.c_int64), ("expanded_from", ctypes.c_int64)]


LAYER_FIELDS = ("num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class PathRule(ctypes.Structure):
    """struct PathRule of tiling/tune.h."""

    _fields_ = [(name, ctypes.c_int32) for name in (*LAYER_FIELDS, "weight_dtype", "cache_dtype", "count")] + [("points", PathPoint * MOST_POINTS)]


def _ints(where, entry, limits):
    """The integers of a mapping, each checked against (least, most); ValueError names file, entry and key."""
    return [as_int(f"{where}: {key}", entry.get(key), *limit) for key, limit in limits.items()]


def _gemm_rule(where, entry):
    dtype = DTYPES[one_of(f"{where}: weight", entry.get("weight"), tuple(DTYPES))]
    return GemmRule(dtype, GemmChoice(*_ints(where, entry, {"n": (1, _INT_MAX), "k": (1, _INT_MAX), "gemv_rows": (0, _INT_MAX), "flat_rows": (0, _INT_MAX)})))


def path_rule(where, entry):
    """PathRule of an entry under `attention`; `where` goes before the words of a ValueError."""
    sizes = _ints(where, entry, {name: (0 if name == "qk_rope_head_dim" else 1, _INT_MAX) for name in LAYER_FIELDS})
    types = [DTYPES[one_of(f"{where}: {key}", entry.get(key), tuple(DTYPES))] for key in ("weight", "cache")]
    points = [PathPoint(*_ints(f"{where}: points", point, {"context": (0, 2**40), "expanded_from": (0, 2**40)})) for point in entry.get("points") or []]
    contexts = [point.context for point in points]
    if not 1 <= len(points) <= MOST_POINTS or contexts != sorted(set(contexts)):
        raise ValueError(f"{where}: points must be 1 to {MOST_POINTS}, by ascending context")
    return PathRule(*sizes, *types, len(points), (PathPoint * MOST_POINTS)(*points))


def parse(text, name):
    """(isa, [GemmRule], [PathRule]) of a table's text; ValueError, naming file and entry, for anything else."""
    import yaml

    try:
        table = yaml.safe_load(text)
        isa, gemm, attention = (table.get(key) for key in ("isa", "gemm", "attention"))
        if unknown := sorted(map(str, set(table) - {"isa", "threads", "gemm", "attention"})):
            raise ValueError(f"{name}: unknown keys {', '.join(unknown)}")
        if not isinstance(isa, str):
            raise ValueError(f"{name}: isa is missing")
        return (isa, [_gemm_rule(f"{name}: gemm[{i}]", entry) for i, entry in enumerate(gemm or [])],
                [path_rule(f"{name}: attention[{i}]", entry) for i, entry in enumerate(attention or [])])
    except (yaml.YAMLError, AttributeError, TypeError) as error:
        raise ValueError(f"{name}: not a tune table: {error}") from error


def use(path):
    """Puts the choices of the table at path into force. ValueError as parse; OSError when it cannot be read; a warning and nothing else when
    it was measured on another ISA."""
    path = os.fspath(path)
    with open(path, encoding="utf-8") as file:
        try:
            text = file.read()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not a tune table: {error}") from error
    isa, gemm, attention = parse(text, path)
    if isa != _lib.isa():
        warnings.warn(f"{path}: measured with {isa}, here {_lib.isa()} runs; the table is left alone", stacklevel=3)
        return
    add(gemm, attention)


def add(gemm, attention):
    """Puts [GemmRule] and [PathRule] into force; the last one for the same weight or layer holds."""
    lib = _lib.library()
    for rule in gemm:
        lib.fm_add_gemm_rule(ctypes.byref(rule))
    for rule in attention:
        lib.fm_add_path_rule(ctypes.byref(rule))


def clear():
    """Back to the cost model's choices."""
    _lib.library().fm_clear_rules()


@functools.lru_cache(maxsize=None)
def use_environment():
    """Takes the table that MS_FLASHMLA_TUNE names, once. ValueError when there is none or it is wrong."""
    path = os.environ.get("MS_FLASHMLA_TUNE")
    if path:
        try:
            use(path)
        except OSError as error:
            raise ValueError(f"MS_FLASHMLA_TUNE: {path}: {error.strerror}") from error
