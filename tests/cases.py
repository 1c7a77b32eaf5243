"""Cases, the limits a result is held to, and how arrays travel between numpy and MindSpore."""
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import mindspore as ms

import reference

# ---- limits: "Rules of the result" of the design ----------------------------------------------------------------------------------------------------
# dtype -> (relative, one rounding of the element; absolute, as a share of the largest output; cosine distance)
LIMITS = {"float32": (0.0, 2e-5, 5e-6), "float16": (2.0 ** -11, 2.0 ** -11, 5e-6), "bfloat16": (2.0 ** -8, 2.0 ** -8, 5e-6)}
LAYER_BF16_COSINE = 2e-5
LSE_ABS = 1e-5
HUGE_LOGIT = 64.0  # from here on the last place of a float32 logit alone is near 1e-5, and 2^-20 of the largest logit is allowed on top


def on_top(biggest_logit):
    return 2.0 ** -20 * biggest_logit if biggest_logit >= HUGE_LOGIT else 0.0


def assert_close(actual, expected, dtype, biggest_logit=0.0, layer=False, what="out"):
    """Hold actual to the float64 reference: absolute, relative and cosine limits of dtype."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    if expected.size == 0:
        return
    assert np.isfinite(actual).all(), f"{what}: {np.count_nonzero(~np.isfinite(actual))} of {actual.size} elements are not finite"
    rel, share, cosine = LIMITS[dtype]
    largest = np.abs(expected).max()
    error = np.abs(actual - expected)
    over = error - (rel * np.abs(expected) + (share + on_top(biggest_logit)) * largest)
    worst = np.unravel_index(over.argmax(), over.shape)
    assert over[worst] <= 0, (f"{what}: error {error[worst]:.3g} at {tuple(map(int, worst))}, got {actual[worst]:.9g}, expected {expected[worst]:.9g}, "
                              f"largest {largest:.3g}, {np.count_nonzero(over > 0)} of {over.size} elements over the limit of {dtype}")
    if largest > 0:
        distance = 1 - actual.ravel() @ expected.ravel() / (np.linalg.norm(actual) * np.linalg.norm(expected))
        limit = (LAYER_BF16_COSINE if layer and dtype == "bfloat16" else cosine) + on_top(biggest_logit) ** 2
        assert distance <= limit, f"{what}: cosine distance {distance:.3g} > {limit}"


def assert_lse(actual, expected, biggest_logit=0.0):
    """lse within 1e-5 absolute; infinities must be the same ones."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"lse: shape {actual.shape}, expected {expected.shape}"
    keyless = np.isinf(expected)
    assert (actual[keyless] == expected[keyless]).all(), "lse of rows without keys"
    error = np.abs(actual[~keyless] - expected[~keyless]).max(initial=0.0)
    # float32 cannot hold a large lse to 1e-5: half a unit in the last place of the value itself is the floor.
    limit = max(LSE_ABS, 2.0 ** -24 * np.abs(expected[~keyless]).max(initial=0.0)) + on_top(biggest_logit)
    assert error <= limit, f"lse: error {error:.3g} > {limit:.3g}"


# ---- numpy <-> MindSpore ----------------------------------------------------------------------------------------------------------------------------

def to_ms(x, dtype="float32"):
    """A Tensor of dtype; x must already be exact in it where that matters."""
    x = np.ascontiguousarray(x)
    if dtype == "int32":
        return ms.Tensor(x.astype(np.int32))
    tensor = ms.Tensor(x.astype(np.float32))
    return tensor if dtype == "float32" else tensor.astype(getattr(ms, dtype))


def to_np(tensor):
    """float64 values of a float Tensor."""
    return tensor.astype(ms.float32).asnumpy().astype(np.float64)


def bits(tensor):
    """The raw bytes, for comparisons that NaN must not disturb."""
    return tensor.asnumpy().tobytes()


# ---- layers -----------------------------------------------------------------------------------------------------------------------------------------
CONFIG_DEFAULTS = dict(hidden_size=48, num_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, q_lora_rank=None,
                       rope_mode="decoupled", rope_interleave=True, rope_theta=10000.0, rope_scaling=None, max_position_embeddings=512,
                       attention_bias=False, q_norm_eps=1e-6, kv_norm_eps=1e-6, q_lora_scale=1.0, kv_lora_scale=1.0, softmax_scale=None,
                       index_topk=None, use_long_factors=False)


@dataclass(frozen=True)
class LayerCase:
    """One layer configuration with the three dtypes it is run in."""
    name: str
    config: dict = field(default_factory=dict)  # what differs from CONFIG_DEFAULTS
    act: str = "float32"
    weight: str = "float32"
    cache: str = "float32"
    block_size: int = 16
    seed: int = 0

    def kwargs(self):
        return CONFIG_DEFAULTS | self.config

    def reference_config(self):
        return SimpleNamespace(**self.kwargs())

    def weights(self):
        """HF name -> float32 array, exact in the weight dtype; logits come out in the ones."""
        rng = np.random.default_rng(self.seed)
        out = {}
        for name, shape in reference.weight_shapes(self.reference_config()).items():
            x = rng.standard_normal(shape)
            if name.endswith("layernorm.weight"):
                x = 1 + 0.2 * x
            elif name.endswith(".weight"):
                x = x / np.sqrt(shape[1])
            out[name] = reference.rounded(x, self.weight).astype(np.float32)
        return out


YARN = dict(rope_type="yarn", factor=40.0, mscale=1.0, mscale_all_dim=0.707, beta_fast=32, beta_slow=1, original_max_position_embeddings=32)
LONGROPE = dict(rope_type="longrope", short_factor=[1.05, 1.1, 1.3, 1.7], long_factor=[1.1, 1.4, 2.0, 3.0], original_max_position_embeddings=256)
ODD = dict(hidden_size=27, num_heads=3, kv_lora_rank=20, qk_rope_head_dim=4, qk_nope_head_dim=10, v_head_dim=6)
FULL = dict(rope_mode="full", qk_rope_head_dim=0, rope_interleave=False)

VARIANTS = [
    LayerCase("plain"),
    LayerCase("q_lora", dict(q_lora_rank=24)),
    LayerCase("bias", dict(q_lora_rank=24, attention_bias=True)),
    LayerCase("bias without q_lora", dict(attention_bias=True)),
    LayerCase("half-split", dict(rope_interleave=False, q_lora_rank=24)),
    LayerCase("half-split bias", dict(rope_interleave=False, attention_bias=True)),
    LayerCase("linear", dict(rope_scaling=dict(rope_type="linear", factor=4.0))),
    LayerCase("yarn", dict(rope_scaling=YARN, max_position_embeddings=1280)),
    LayerCase("yarn without mscale", dict(rope_scaling={k: v for k, v in YARN.items() if "mscale" not in k}, max_position_embeddings=1280)),
    LayerCase("yarn attention_factor", dict(rope_scaling=YARN | dict(attention_factor=0.8), max_position_embeddings=1280)),
    LayerCase("longrope", dict(rope_scaling=LONGROPE, rope_interleave=False, max_position_embeddings=1024)),
    LayerCase("longrope long", dict(rope_scaling=LONGROPE, max_position_embeddings=1024, use_long_factors=True)),
    LayerCase("lora scales", dict(q_lora_rank=24, q_lora_scale=2 ** 0.5, kv_lora_scale=1.5 ** 0.5)),
    LayerCase("two eps", dict(q_lora_rank=24, q_norm_eps=0.5, kv_norm_eps=0.02)),
    LayerCase("softmax_scale", dict(softmax_scale=0.37)),
    LayerCase("theta", dict(rope_theta=50.0)),
    LayerCase("odd sizes", ODD),
    LayerCase("odd sizes q_lora bias", ODD | dict(q_lora_rank=7, attention_bias=True)),
    LayerCase("one head", dict(num_heads=1)),
    LayerCase("22 heads", dict(num_heads=22)),
    LayerCase("128 heads", dict(num_heads=128)),
    LayerCase("d_n 192 d_v 256", dict(num_heads=5, qk_nope_head_dim=192, v_head_dim=256, qk_rope_head_dim=64, kv_lora_rank=128)),
    LayerCase("latent 512", dict(num_heads=3, qk_nope_head_dim=128, v_head_dim=128, qk_rope_head_dim=64, kv_lora_rank=512, q_lora_rank=96)),
    LayerCase("full", FULL),
    LayerCase("full interleaved", FULL | dict(rope_interleave=True)),
    LayerCase("full article heads", FULL | dict(num_heads=12, qk_nope_head_dim=128, v_head_dim=128, kv_lora_rank=64)),
    LayerCase("full yarn q_lora", FULL | dict(q_lora_rank=24, rope_scaling=YARN, max_position_embeddings=1280)),
]

FLOATS = ("float32", "float16", "bfloat16")
MIXES = [LayerCase(f"act {act} weight {weight} cache {cache}", dict(q_lora_rank=24, attention_bias=True), act, weight, cache)
         for act in FLOATS for weight in FLOATS for cache in FLOATS]


# ---- operators --------------------------------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class OpCase:
    """One call of flash_mla_with_kvcache."""
    name: str
    seqlens: tuple  # keys of each sequence
    s_q: int = 1
    h_q: int = 16
    h_kv: int = 1
    d: int = 48
    d_v: int = 32
    page: int = 16
    dtype: str = "float32"
    causal: bool = False
    scale: float = None
    gain: float = 1.0  # of q, so of the logits
    seed: int = 0

    def arrays(self):
        """q, k_cache (NaN where no sequence owns a row), block_table (padded with -1), seqlens; floats exact in dtype."""
        rng = np.random.default_rng(self.seed)
        q = reference.rounded(rng.standard_normal((len(self.seqlens), self.s_q, self.h_q, self.d)) * self.gain, self.dtype)
        table, num_blocks = scattered_pages(rng, self.seqlens, self.page)
        k = np.full((num_blocks, self.page, self.h_kv, self.d), np.nan)
        for b, n in enumerate(self.seqlens):
            at = np.arange(n)
            k[table[b, at // self.page], at % self.page] = reference.rounded(rng.standard_normal((n, self.h_kv, self.d)), self.dtype)
        return q, k, table, np.asarray(self.seqlens, np.int32)


def scattered_pages(rng, lengths, page, spare=2):
    """A block table [B, m] of pages in random order, -1 where a sequence needs none, and the number of pages in the pool (some belong to nobody)."""
    need = [-(-n // page) for n in lengths]
    order = rng.permutation(sum(need) + spare)
    table = np.full((len(lengths), max(need, default=0) + 1), -1, np.int32)
    taken = 0
    for row, n in zip(table, need):
        row[:n] = order[taken:taken + n]
        taken += n
    return table, len(order)
