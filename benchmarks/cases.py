"""The benchmark's cases: which shapes, in which dtypes, against which peers."""

import functools
from dataclasses import dataclass

import numpy as np

from ms_flashmla import demo_models

BLOCK = 64  # tokens of a cache block; every length is a multiple, so that a sequence's rows are one piece of the pool
ALL = ("float32", "bfloat16", "float16")
TWO = ("float32", "bfloat16")


@functools.lru_cache(maxsize=None)
def config(model):
    return demo_models.load_config(demo_models.MODELS[model])


@functools.lru_cache(maxsize=None)
def random_weights(model):
    """HF name -> float32 array, the same in every run."""
    return demo_models.random_weights(config(model), np.random.default_rng(1))


@dataclass(frozen=True)
class Case:
    """`batch` sequences take `tokens` new tokens each and hold `length` after them.

    heads: of decode_core, where they are not the model's. full: only with --full or when --case names it. transformers: whether that layer is timed too.
    """

    model: str
    phase: str
    batch: int
    length: int
    tokens: int = 1
    heads: int = 0
    dtypes: tuple = TWO
    full: bool = False
    transformers: bool = False
    scaling: bool = False  # timed on one thread as well

    @property
    def name(self):
        length = f"S{self.length}" if self.phase == "prefill" else f"L{self.length}"
        heads = f"/H{self.heads}" if self.heads not in (0, self.cfg.num_heads) else ""
        queries = f"/Q{self.tokens}" if self.phase != "prefill" and self.tokens != 1 else ""
        return f"{self.model}/{self.phase}/B{self.batch}/{length}{heads}{queries}"

    @property
    def cfg(self):
        return config(self.model)

    @property
    def num_heads(self):
        return self.heads or self.cfg.num_heads

    @property
    def context(self):
        return self.length - self.tokens

    @property
    def shape(self):
        """What goes in, for the printed line."""
        if self.phase == "decode_core":
            return f"q[{self.batch},{self.tokens},{self.num_heads},{self.cfg.cache_dim}] kv[{self.batch},{self.length},{self.cfg.cache_dim}]"
        return f"x[{self.batch * self.tokens},{self.cfg.hidden_size}] h{self.num_heads} kv[{self.batch},{self.length},{self.cfg.cache_dim}]"

    def hidden_and_residual(self):
        """float32 [batch * tokens, hidden_size] each."""
        rng = np.random.default_rng(2)
        return [rng.standard_normal((self.batch * self.tokens, self.cfg.hidden_size), dtype=np.float32) for _ in range(2)]

    def queries(self):
        """float32 [batch, tokens, heads, cache_dim]."""
        return np.random.default_rng(3).standard_normal((self.batch, self.tokens, self.num_heads, self.cfg.cache_dim), dtype=np.float32)


def prefill(model, length, **how):
    return Case(model, "prefill", 1, length, length, **how)


def decode(model, batch, length, tokens=1, **how):
    return Case(model, "decode", batch, length, tokens, **how)


def core(model, batch, length, tokens=1, heads=0, **how):
    return Case(model, "decode_core", batch, length, tokens, heads, **how)


CASES = [
    *(core("v2-lite", 1, length, dtypes=ALL) for length in (2048, 8192, 32768)),
    core("v2-lite", 8, 2048, dtypes=ALL),
    core("v2-lite", 8, 8192, dtypes=ALL, scaling=True),
    core("v2-lite", 8, 32768, dtypes=ALL, full=True),
    core("v2-lite", 1, 131072),
    *(core("v2-lite", 1, 8192, heads=heads, dtypes=ALL) for heads in (1, 3, 12, 20, 128)),
    *(core("v2-lite", 1, 8192, tokens) for tokens in (2, 4, 8)),
    decode("v2-lite", 1, 2048, transformers=True),
    decode("v2-lite", 1, 8192),
    decode("v2-lite", 1, 32768),
    decode("v2-lite", 8, 2048),
    decode("v2-lite", 8, 8192),
    *(decode("v2-lite", 1, 8192, tokens, full=tokens not in (2, 4, 8)) for tokens in range(2, 9)),
    decode("v2-lite", 1, 131072, full=True),
    prefill("v2-lite", 512, dtypes=ALL, transformers=True, scaling=True),
    prefill("v2-lite", 2048, dtypes=ALL),
    core("v3-tp8", 1, 8192, full=True),
    decode("v3-tp8", 1, 2048, full=True),
    decode("v3-tp8", 1, 8192),
    decode("v3-tp8", 8, 8192, full=True),
    prefill("v3-tp8", 512),
    prefill("v3-tp8", 2048, full=True),
    decode("seed", 1, 2048),
    decode("seed", 8, 2048, full=True),
    prefill("seed", 512, full=True),
    prefill("seed", 2048, full=True),
]
