"""`python -m ms_flashmla demo`: one layer of a checkpoint through the paged cache, each step held to a float64 reference and timed beside the
same layer composed of MindSpore primitives."""

import contextlib
import json
import os
import statistics
import sys
import tempfile
import time

import mindspore as ms
import numpy as np

from . import _lib, dtypes, weights
from .cache import LatentKVCache
from .checkpoint import Checkpoint, attention_prefix
from .demo_models import MODELS, load_config, write_model
from .layer import MLALayer
from .reference.composed import ComposedMLA, composed_weights
from .reference.float64 import Float64MLA

LENGTH, CHUNK, DECODE = 2048, 120, 8  # tokens in all, in the chunk, one by one; the prefill takes the rest
CHECKED_TOKENS = 32  # of the longer steps, the last ones: they see the whole context
REPEATS, DECODE_REPEATS = 3, 9  # a step rewrites the same cache rows, so it may run again; medians are shown
SEED = 20

# Largest error allowed, as a share of the largest output: float32's 2e-5; for 16 bit half a unit in the last place of the largest output, and 2^-8 (2^-11).
TOLERANCE = {ms.float32: 2e-5, ms.bfloat16: 2.0**-8 + 2.0**-9, ms.float16: 2.0**-11 + 2.0**-12}
_NAMES = {"float32": ms.float32, "float16": ms.float16, "bfloat16": ms.bfloat16}


def add_arguments(parser):
    parser.add_argument("--checkpoint", metavar="DIR", help="folder with config.json and safetensors; without it a random built-in model")
    parser.add_argument("--layer", type=int, default=0, help="layer of the checkpoint (default 0)")
    parser.add_argument("--model", choices=MODELS, default="v2-lite", help="built-in model (default v2-lite)")
    parser.add_argument("--dtype", choices=_NAMES, default="float32", help="of weights, activations and cache (default float32)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


class _Progress:
    """A bar on stderr while something long runs; nothing when stderr is no terminal."""

    def __init__(self, total):
        self.done, self.total, self.shown = 0, total, sys.stderr.isatty()

    def step(self, text):
        if self.shown:
            filled = 30 * self.done // self.total
            print(f"\r[{'#' * filled}{'.' * (30 - filled)}] {text:50.50}", end="", file=sys.stderr, flush=True)
        self.done += 1

    def close(self):
        if self.shown:
            print(f"\r{' ' * 84}\r", end="", file=sys.stderr, flush=True)


def _steps(cfg):
    """[(name, tokens)], shorter for a model whose contexts are."""
    length = min(LENGTH, cfg.max_positions, cfg.index_topk or LENGTH)
    chunk, decode = min(CHUNK, length // 4), min(DECODE, length // 4)
    steps = [("prefill", length - chunk - decode), ("chunk", chunk), *[("decode", 1)] * decode]
    return [(name, tokens) for name, tokens in steps if tokens]


class _Fused:
    """The layer under test with one sequence in its paged cache."""

    def __init__(self, cfg, checkpoint, prefix, dtype, capacity, block_size=64):
        self.layer = MLALayer(cfg, dtype=dtype)
        self.layer.load_hf_weights(checkpoint, prefix=prefix)
        self.cache = LatentKVCache(cfg, num_blocks=-(-capacity // block_size) + 1, block_size=block_size, dtype=dtype)
        self.length = 0

    def prepare(self, tokens):
        """Room for the next tokens; returns what runs the step."""
        self.cache.allocate("sequence", self.length + tokens)
        table = self.cache.block_table(["sequence"])
        lengths = ms.Tensor([tokens], ms.int32), ms.Tensor([self.length], ms.int32)
        self.length += tokens
        return lambda hidden, residual: self.layer(hidden, self.cache.data, table, *lengths, residual=residual)


def _timed(functions, hidden, residual):
    """Runs functions in turn after one unmeasured call each: [(median seconds, last output float64)]."""
    repeats = DECODE_REPEATS if len(hidden) == 1 else REPEATS
    seconds, outputs = [[] for _ in functions], [None] * len(functions)
    for repeat in range(repeats + 1):
        for i, (function, dtype) in enumerate(functions):
            arguments = [ms.Tensor.from_numpy(dtypes.cast(x, dtype)) for x in (hidden, residual)]
            start = time.perf_counter()
            out = function(*arguments).asnumpy()
            if repeat:
                seconds[i].append(time.perf_counter() - start)
            outputs[i] = dtypes.cast(out, ms.float32).astype(np.float64)
    return [(statistics.median(s), out) for s, out in zip(seconds, outputs)]


def _error(out, expected):
    """Largest difference over the checked (last) rows as a share of the largest output."""
    return float(np.abs(out[-len(expected):] - expected).max() / np.abs(expected).max())


def run_steps(cfg, checkpoint, prefix, dtype):
    """A row per step: dict(step, tokens, context, ms, tokens_per_s, max_error, mindspore_ms, mindspore_max_error).

    checkpoint: HF name -> array, of which names under prefix count. context counts the tokens after the step. Sets GRAPH_MODE.
    """
    ms.set_context(mode=ms.GRAPH_MODE)
    steps = _steps(cfg)
    progress = _Progress(2 + 2 * len(steps))
    progress.step("packing the weights")
    fused = _Fused(cfg, checkpoint, prefix, dtype, sum(tokens for _, tokens in steps))
    progress.step("preparing the MindSpore composition and the reference")
    hf_weights = {name: checkpoint[prefix + name] for name in weights.hf_shapes(cfg)}
    # The composition holds the same rounded weights; the CPU backend multiplies them in float32 only.
    composed = composed_weights(cfg, {name: dtypes.cast(array, dtype) for name, array in hf_weights.items()})
    reference = Float64MLA(cfg, hf_weights, dtype)
    rng = np.random.default_rng(SEED)
    rows = []
    for name, tokens in steps:
        hidden, residual = (dtypes.cast(rng.standard_normal((tokens, cfg.hidden_size), dtype=np.float32), dtype) for _ in range(2))
        context, old_rows = len(reference.rows), reference.rows
        progress.step(f"{name}: float64 reference")
        expected = reference.step(dtypes.cast(hidden, ms.float32), dtypes.cast(residual, ms.float32), CHECKED_TOKENS)
        peer = ComposedMLA(cfg, composed, 1, context, tokens)
        peer.set_context(old_rows[None])
        progress.step(f"{name}: fused operator and MindSpore primitives")
        (seconds, out), (peer_seconds, peer_out) = _timed([(fused.prepare(tokens), dtype), (peer, ms.float32)], hidden, residual)
        rows.append({"step": name, "tokens": tokens, "context": context + tokens, "ms": seconds * 1e3, "tokens_per_s": tokens / seconds,
                     "max_error": _error(out, expected), "mindspore_ms": peer_seconds * 1e3, "mindspore_max_error": _error(peer_out, expected)})
    progress.close()
    return rows


def _print_table(rows):
    print(f"{'step':8} {'tokens':>6} {'context':>7} {'ms':>9} {'tokens/s':>9} {'max error':>9} {'MindSpore ms':>12} {'faster':>7}")
    for row in rows:
        print(f"{row['step']:8} {row['tokens']:6} {row['context']:7} {row['ms']:9.2f} {row['tokens_per_s']:9.0f} {row['max_error']:9.1e} "
              f"{row['mindspore_ms']:12.2f} {row['mindspore_ms'] / row['ms']:6.1f}x")


def run(args):
    """Runs the demo; 0 when every step is within its tolerance, else 1."""
    with contextlib.ExitStack() as stack:
        folder = args.checkpoint
        if folder is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ms_flashmla_"))
            write_model(args.model, folder, np.random.default_rng(SEED))
        cfg = load_config(folder)
        checkpoint = Checkpoint(folder)
        prefix = attention_prefix(checkpoint, args.layer)
        rows = run_steps(cfg, checkpoint, prefix, _NAMES[args.dtype])
    tolerance = TOLERANCE[_NAMES[args.dtype]]
    within = all(row["max_error"] <= tolerance for row in rows)
    facts = {"source": os.fspath(args.checkpoint or f"built-in {args.model}"), "layer": args.layer, "prefix": prefix, "dtype": args.dtype,
             "isa": _lib.isa(), "threads": _lib.num_threads(), "hidden_size": cfg.hidden_size, "num_heads": cfg.num_heads,
             "kv_lora_rank": cfg.kv_lora_rank, "qk_nope_head_dim": cfg.qk_nope_head_dim, "qk_rope_head_dim": cfg.qk_rope_head_dim,
             "v_head_dim": cfg.v_head_dim, "q_lora_rank": cfg.q_lora_rank, "rope_mode": cfg.rope_mode, "tolerance": tolerance, "checked_tokens": CHECKED_TOKENS, "passed": within}
    if args.json:
        print(json.dumps({**facts, "steps": rows}, indent=2))
    else:
        print(f"{facts['source']}, layer {args.layer}: hidden {cfg.hidden_size}, {cfg.num_heads} heads, latent {cfg.kv_lora_rank}, "
              f"d_n {cfg.qk_nope_head_dim}, d_r {cfg.qk_rope_head_dim}, d_v {cfg.v_head_dim}; {args.dtype}, {facts['isa']}, "
              f"{facts['threads']} threads, GRAPH_MODE")
        _print_table(rows)
        print(f"max error is against float64, over the last {CHECKED_TOKENS} tokens of a step, as a share of the largest output; allowed {tolerance:.1e}: {'passed' if within else 'FAILED'}")
    return 0 if within else 1
