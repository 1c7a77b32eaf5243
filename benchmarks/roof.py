"""The least time a case can take: a sum over the stages that depend on each other of max(bytes / bandwidth, flops / FMA peak).

Stages are the projections and the attention core, which needs their result. Bytes are the weights and the cached rows, each once; hidden
states are a thousandth of that. Flops are those of the cheaper way to each result, absorbed or decompressed, and without the masked scores.
"""

import math
from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Stage:
    """Work that is done before the next stage can start."""

    flops: int
    bytes: int

    def us(self, fma_gflops, read_gb_per_s):
        return max(self.flops / fma_gflops, self.bytes / read_gb_per_s) / 1e3


def pairs(batch, context, tokens):
    """(query, key) pairs of `batch` sequences that take `tokens` causal queries each behind `context` keys."""
    return batch * (tokens * context + tokens * (tokens + 1) // 2)


def core(cfg, batch, context, tokens, itemsize, heads=None):
    """The absorbed core alone: q [batch, tokens, heads, cache_dim] over the cached rows, whose first kv_lora_rank are the values."""
    heads = heads or cfg.num_heads
    return Stage(2 * heads * pairs(batch, context, tokens) * (cfg.cache_dim + cfg.kv_lora_rank),
                 batch * (context + tokens) * cfg.cache_dim * itemsize)


def weight_elements(cfg):
    """Elements of a layer's weights, as HF stores them."""
    from ms_flashmla import weights
    return sum(math.prod(shape) for shape in weights.hf_shapes(cfg).values())


def layer(cfg, batch, context, tokens, itemsize):
    """[projections, core] of a layer call.

    A token's projections take two flops a weight: W_UK and W_UV are applied to its query and output (absorbed) or to its latent
    (decompressed) alike. Decompressing the rows of the context comes on top, in the core, where it is the cheaper way or, as with W_UK
    in rope_mode full, the only one.
    """
    heads, rank, scores = cfg.num_heads, cfg.kv_lora_rank, pairs(batch, context, tokens)
    elements = weight_elements(cfg)
    projections = Stage(2 * batch * tokens * (elements - _vector_elements(cfg)), elements * itemsize)
    old_rows = batch * context
    keys = scores * cfg.qk_head_dim + old_rows * rank * cfg.qk_nope_head_dim
    if cfg.rope_mode != "full":
        keys = min(keys, scores * cfg.cache_dim)
    values = min(scores * rank, scores * cfg.v_head_dim + old_rows * rank * cfg.v_head_dim)
    return [projections, Stage(2 * heads * (keys + values), batch * (context + tokens) * cfg.cache_dim * itemsize)]


def _vector_elements(cfg):
    from ms_flashmla import weights
    return sum(math.prod(shape) for shape in weights.hf_shapes(cfg).values() if len(shape) == 1)


def stages(case, dtype):
    """The stages of a case (cases.py) in a dtype."""
    itemsize = DTYPE_BYTES[dtype]
    if case.phase == "decode_core":
        return [core(case.cfg, case.batch, case.context, case.tokens, itemsize, case.num_heads)]
    return layer(case.cfg, case.batch, case.context, case.tokens, itemsize)


def roof_us(work, fma_gflops, read_gb_per_s):
    """Microseconds below which no machine with these two ceilings gets. work: list of Stage."""
    return sum(stage.us(fma_gflops, read_gb_per_s) for stage in work)
