"""The `tune` sub-command: measures the loops of every projection and both attention paths on this machine, and writes a tune table."""

import ctypes
import os
import time

import mindspore as ms
import numpy as np

from . import _lib, dtypes, tune_table, weights
from .cache import LatentKVCache
from .config import MLAConfig
from .demo_models import MODELS, load_config
from .layer import MLALayer

ROWS = (1, 2, 4, 6, 7, 8, 12, 16, 24, 32, 48, 64)
NEW_TOKENS = (8, 16, 32, 64, 96, 128, 192, 256, 384)
CONTEXTS = (0, 1024, 4096, 16384)
ROTATED_BYTES = 512 << 20  # copies of a weight pass by in turn, so that it comes from memory as in a model of many layers
BLOCK_SIZE = 64
_TIE = 1.03
_ALL = 2**31 - 1  # a limit that no call reaches
# loop -> (gemv_rows, flat_rows) that choose it
LOOPS = {"gemv": (_ALL, 0), "flat": (0, _ALL), "tiled": (0, 0)}
_DTYPES = {"float32": ms.float32, "float16": ms.float16, "bfloat16": ms.bfloat16}


def add_arguments(parser):
    parser.add_argument("--model", choices=sorted(MODELS), help="dimensions of a built-in model (default: v2-lite)")
    parser.add_argument("--config", metavar="PATH", help="dimensions of a checkpoint: its folder or config.json")
    parser.add_argument("--hidden", type=int, help="hidden size; with --heads, --latent, --head-dim")
    parser.add_argument("--heads", type=int, help="query heads")
    parser.add_argument("--latent", type=int, help="kv_lora_rank")
    parser.add_argument("--head-dim", type=int, help="head dimension without its decoupled RoPE part")
    parser.add_argument("--rope-dim", type=int, default=64, help="decoupled RoPE dimension; 0: RoPE over the whole head (default 64)")
    parser.add_argument("--v-head-dim", type=int, help="default: --head-dim")
    parser.add_argument("--q-lora", type=int, help="q_lora_rank (default: none)")
    parser.add_argument("--dtype", default="float32", choices=sorted(_DTYPES), help="of weights and cache")
    parser.add_argument("--only", choices=("gemm", "attention"), help="measure one of the two")
    parser.add_argument("--repeats", type=int, default=9, help="calls of which the fastest counts (default 9)")
    parser.add_argument("--out", metavar="FILE.yaml", help="where the table goes (default: standard output)")


def _config(args):
    own = {"hidden": args.hidden, "heads": args.heads, "latent": args.latent, "head-dim": args.head_dim}
    if sum([args.model is not None, args.config is not None, any(value is not None for value in own.values())]) > 1:
        raise ValueError("--model, --config and --hidden with --heads, --latent, --head-dim exclude each other")
    if any(value is not None for value in own.values()):
        missing = [f"--{name}" for name, value in own.items() if value is None]
        if missing:
            raise ValueError(f"{', '.join(missing)} is missing")
        return MLAConfig(args.hidden, args.heads, args.latent, args.head_dim, args.rope_dim, args.v_head_dim or args.head_dim, args.q_lora,
                         rope_mode="decoupled" if args.rope_dim else "full", max_position_embeddings=131072)
    return MLAConfig.from_hf(args.config) if args.config else load_config(MODELS[args.model or "v2-lite"])


def _random(count, dtype, rng):
    """1-D array of a MindSpore dtype, small normal numbers: random bits would hold NaN and denormals, which take longer."""
    out = dtypes.zeros(count, dtype)
    block = dtypes.cast(rng.standard_normal(min(count, 1 << 20), dtype=np.float32) * np.float32(0.02), dtype)
    for start in range(0, count, len(block)):
        out[start:start + len(block)] = block[:count - start]
    return out


def _best_us(calls, repeats):
    """Least times in microseconds of the functions in calls, run in turn: what else the machine does only adds to a time."""
    best = [float("inf")] * len(calls)
    for repeat in range(repeats + 1):
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            if repeat:
                best[i] = min(best[i], (time.perf_counter() - start) * 1e6)
    return best


def _gemm_call(spec, dtype, rows, copies, rng):
    """call(loop): one product of that many rows with the next copy of the weight."""
    lib = _lib.library()
    pointer = ctypes.c_void_p
    lib.fm_gemm.argtypes = [ctypes.c_int64] * 4 + [pointer, pointer, ctypes.c_int, pointer, ctypes.c_int, ctypes.c_int]
    a = _random(rows * spec.k, ms.float32, rng)
    c = dtypes.zeros(rows * spec.groups * weights.padded(spec.n), ms.float32)
    code, turn = tune_table.DTYPES[dtype], [0]

    def call(loop):
        turn[0] = (turn[0] + 1) % len(copies)
        if lib.fm_gemm(rows, spec.groups, spec.n, spec.k, _lib.address(a), _lib.address(copies[turn[0]]), code, _lib.address(c), *LOOPS[loop]):
            raise RuntimeError(_lib.last_error())
    return call


def thresholds(measured):
    """(gemv_rows, flat_rows) of {rows: {loop: us}}: each loop as far as it is within 3 % of the fastest at every measured number of rows."""
    limits, last = [], 0
    for loop in ("gemv", "flat"):
        limit = last
        for rows in sorted(rows for rows in measured if rows > last):
            if measured[rows].get(loop, float("inf")) > _TIE * min(measured[rows].values()):
                break
            limit = rows
        limits.append(limit)
        last = limit
    return limits[0], limits[1] if limits[1] > limits[0] else 0


def measure_gemm(name, spec, dtype, repeats, rng):
    """An entry under `gemm` of the table, for one projection."""
    size = weights.size(spec)
    copies = [_random(size, _DTYPES[dtype], rng) for _ in range(max(1, min(64, -(-ROTATED_BYTES // (size * dtypes.NUMPY[_DTYPES[dtype]].itemsize)))))]
    measured = {}
    for rows in ROWS:
        call = _gemm_call(spec, dtype, rows, copies, rng)
        loops = [loop for loop in LOOPS if loop != "gemv" or rows <= 8]
        measured[rows] = dict(zip(loops, _best_us([lambda loop=loop: call(loop) for loop in loops], repeats)))
    gemv_rows, flat_rows = thresholds(measured)
    return {"projection": name, "n": spec.n, "groups": spec.groups, "k": spec.k, "weight": dtype, "gemv_rows": gemv_rows, "flat_rows": flat_rows,
            "us": {rows: {loop: round(us, 1) for loop, us in loops.items()} for rows, loops in measured.items()}}


class _Attention:
    """A layer of random weights whose attention path a rule forces."""

    def __init__(self, cfg, dtype, rng):
        self.cfg, self.dtype = cfg, dtype
        self.layer = MLALayer(cfg, _DTYPES[dtype], deterministic=False)
        for name, spec in weights.layout(cfg).items():
            dtypes.put(getattr(self.layer, name), _random(weights.size(spec), _DTYPES[dtype], rng))
        self.cache = LatentKVCache(cfg, -(-(CONTEXTS[-1] + NEW_TOKENS[-1]) // BLOCK_SIZE), BLOCK_SIZE, _DTYPES[dtype])
        dtypes.put(self.cache.data, _random(int(np.prod(self.cache.data.shape)), _DTYPES[dtype], rng).reshape(self.cache.data.shape))
        self.cache.allocate(0, CONTEXTS[-1] + NEW_TOKENS[-1])
        self.table = self.cache.block_table([0])
        self.rng = rng

    def rule(self, points):
        fields = {name: getattr(self.cfg, name) for name in tune_table.LAYER_FIELDS}
        return {**fields, "weight": self.dtype, "cache": self.dtype, "points": points}

    def call(self, new, context):
        hidden = ms.Tensor.from_numpy(_random(new * self.cfg.hidden_size, ms.float32, self.rng).reshape(new, self.cfg.hidden_size))
        lengths = ms.Tensor([new], ms.int32), ms.Tensor([context], ms.int32)

        def run(expanded_from):
            tune_table.add([], [tune_table.path_rule("attention", self.rule([{"context": 0, "expanded_from": expanded_from}]))])
            self.layer(hidden, self.cache.data, self.table, *lengths).asnumpy()
        return run


def measure_attention(cfg, dtype, repeats, rng):
    """The entry under `attention` of the table: new tokens from which expanded is the faster path, by context."""
    attention, points, measured = _Attention(cfg, dtype, rng), [], {}
    for context in (c for c in CONTEXTS if c + NEW_TOKENS[-1] <= cfg.max_positions):
        by_rows, expanded_from = {}, 2**31 - 1
        for new in NEW_TOKENS:
            run = attention.call(new, context)
            latent, expanded = _best_us([lambda: run(2**31 - 1), lambda: run(0)], repeats)
            by_rows[new] = {"latent": round(latent, 1), "expanded": round(expanded, 1)}
            if expanded < latent:
                expanded_from = new
                break
        points.append({"context": context, "expanded_from": expanded_from})
        measured[context] = by_rows
    tune_table.clear()
    return {**attention.rule(points), "us": measured}


def run(args):
    """Measures and writes the table; 0."""
    import yaml

    if args.repeats < 1:
        raise ValueError(f"--repeats: {args.repeats} is not allowed; it must be at least 1")
    if args.out is not None and not os.path.isdir(os.path.dirname(os.path.abspath(args.out))):
        raise ValueError(f"--out: {args.out}: its folder does not exist")
    cfg, rng = _config(args), np.random.default_rng(1)
    ms.set_context(mode=ms.PYNATIVE_MODE)
    table = {"isa": _lib.isa(), "threads": _lib.num_threads()}
    if args.only != "attention":
        matrices = {name: spec for name, spec in weights.layout(cfg).items() if isinstance(spec, weights.Packed)}
        table["gemm"] = [measure_gemm(name, spec, args.dtype, args.repeats, rng) for name, spec in matrices.items()]
    if args.only != "gemm":
        table["attention"] = [measure_attention(cfg, args.dtype, args.repeats, rng)]
    text = yaml.safe_dump(table, sort_keys=False, width=140, default_flow_style=None)
    if args.out is None:
        print(text, end="")
    else:
        with open(args.out, "w", encoding="utf-8") as file:
            file.write(text)
    return 0
