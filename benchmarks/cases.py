"""The benchmark's cases: what is computed, and the least work that computing it takes."""

from dataclasses import dataclass

import numpy as np

from ms_flashmla import demo_models

CFG = demo_models.load_config(demo_models.MODELS["v2-lite"])
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def random_weights():
    """HF name -> float32 array, the same in every run."""
    return demo_models.random_weights(CFG, np.random.default_rng(1))


@dataclass(frozen=True)
class Case:
    """`batch` sequences that hold `context` tokens take `tokens` new ones each."""

    phase: str
    batch: int
    context: int
    tokens: int

    @property
    def name(self):
        length = f"S{self.tokens}" if self.phase == "prefill" else f"L{self.length}"
        return f"v2-lite/{self.phase}/B{self.batch}/{length}"

    @property
    def length(self):
        return self.context + self.tokens

    def inputs(self):
        """hidden_states and residual, float32 [batch * tokens, hidden_size]."""
        rng = np.random.default_rng(2)
        return [rng.standard_normal((self.batch * self.tokens, CFG.hidden_size), dtype=np.float32) for _ in range(2)]

    def cached_rows(self):
        """Rows of the context, float32 [batch, context, width]."""
        return np.random.default_rng(3).standard_normal((self.batch, self.context, CFG.cache_dim), dtype=np.float32)

    def flops(self):
        """Absorbed for decode, expanded for prefill; the masked half of a prefill's scores is not counted."""
        rows, heads = self.batch * self.tokens, CFG.num_heads
        per_row = CFG.hidden_size * (heads * (CFG.qk_head_dim + CFG.v_head_dim) + CFG.cache_dim) + heads * CFG.kv_lora_rank * (
            CFG.qk_nope_head_dim + CFG.v_head_dim)
        per_pair = CFG.cache_dim + CFG.kv_lora_rank if self.phase == "decode" else CFG.qk_head_dim + CFG.v_head_dim
        pairs = self.batch * sum(self.context + i + 1 for i in range(self.tokens))
        return 2 * (rows * per_row + pairs * heads * per_pair)

    def bytes(self, dtype):
        """Weights, cached rows and hidden states in, residual in, output out, each once."""
        weights = sum(int(np.prod(shape)) for shape in demo_models.weights.hf_shapes(CFG).values())
        return DTYPE_BYTES[dtype] * (weights + self.batch * self.length * CFG.cache_dim + 3 * self.batch * self.tokens * CFG.hidden_size)


CASES = [*(Case("decode", batch, length - 1, 1) for batch in (1, 8) for length in (2048, 8192)),
         *(Case("prefill", 1, 0, tokens) for tokens in (512, 2048))]
