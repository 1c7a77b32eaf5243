"""MLAConfig: everything the layer must know of a model, checked once."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

from . import rope
from ._check import as_bool, as_float, as_int, one_of

MAX_HEADS = 128
MAX_DIM = 2**20  # far beyond any model: products of sizes stay within 63 bits


class _DerivedScale(float):
    """A softmax_scale computed from the other fields, so that dataclasses.replace computes it again."""


@dataclass(frozen=True)
class MLAConfig:
    """Shapes and constants of one MLA layer.

    hidden_size, num_heads (1..128, those of this rank under tensor parallel), kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim,
    v_head_dim: sizes. q_lora_rank: None when q is one projection.
    rope_mode: "decoupled" (DeepSeek: RoPE on qk_rope_head_dim extra dimensions) or "full" (RoPE over the whole head of q and of the
    decompressed k; qk_rope_head_dim must be 0).
    rope_interleave: True when the weights pair dimensions (2i, 2i+1), False for (i, i + d/2).
    rope_scaling: None or HF's rope_scaling dict; kept in one normalized form, so equal models compare equal.
    max_position_embeddings: positions the RoPE table covers. use_long_factors: longrope takes long_factor from the first token on.
    attention_bias: biases on q_a_proj, kv_a_proj_with_mqa and o_proj. q_norm_eps, kv_norm_eps: RMSNorm of the latents.
    q_lora_scale, kv_lora_scale: factors after those norms (LongCat-Flash).
    softmax_scale: None means (qk_nope_head_dim + qk_rope_head_dim)^-0.5 * m^2, m as in rope.softmax_mscale; the field then holds that value.
    index_topk: a sparse indexer's limit; sequences up to it are computed densely (the same result), longer ones are an error.

    Raises TypeError for a wrong type, ValueError for a value out of range; the message names the field.
    """

    hidden_size: int
    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    rope_mode: str = "decoupled"
    rope_interleave: bool = True
    rope_theta: float = 10000.0
    rope_scaling: dict | None = field(default=None, hash=False)
    max_position_embeddings: int = 4096
    attention_bias: bool = False
    q_norm_eps: float = 1e-6
    kv_norm_eps: float = 1e-6
    q_lora_scale: float = 1.0
    kv_lora_scale: float = 1.0
    softmax_scale: float | None = None
    index_topk: int | None = None
    use_long_factors: bool = False

    def __post_init__(self):
        def put(name, value):
            object.__setattr__(self, name, value)  # the dataclass is frozen

        put("num_heads", as_int("num_heads", self.num_heads, 1, MAX_HEADS))
        for name in ("hidden_size", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "max_position_embeddings"):
            put(name, as_int(name, getattr(self, name), 1, rope.MAX_POSITIONS if name == "max_position_embeddings" else MAX_DIM))
        put("qk_rope_head_dim", as_int("qk_rope_head_dim", self.qk_rope_head_dim, 0, MAX_DIM))
        for name, most in (("q_lora_rank", MAX_DIM), ("index_topk", 2**31 - 1)):
            if getattr(self, name) is not None:
                put(name, as_int(name, getattr(self, name), 1, most))
        if self.index_topk is not None:
            warnings.warn(f"index_topk: the sparse indexer is not computed; sequences up to {self.index_topk} keys give the same result "
                          "densely, longer ones are an error", stacklevel=3)
        for name in ("rope_interleave", "attention_bias", "use_long_factors"):
            as_bool(name, getattr(self, name))
        for name in ("rope_theta", "q_norm_eps", "kv_norm_eps", "q_lora_scale", "kv_lora_scale"):
            put(name, as_float(name, getattr(self, name)))
        if self.q_lora_rank is None and self.q_lora_scale != 1.0:
            raise ValueError(f"q_lora_scale: {self.q_lora_scale} without q_lora_rank has nothing to scale; it must be 1.0")
        self._check_rope_dims()
        put("rope_scaling", rope.normalize_rope_scaling(self.rope_scaling, self.rope_dim, self.max_position_embeddings))
        if self.rope_scaling is not None and self.rope_scaling["rope_type"] == "yarn" and self.rope_theta <= 1.0:
            raise ValueError(f"rope_theta: {self.rope_theta} is not allowed for yarn; it must be above 1")
        if self.softmax_scale is None or isinstance(self.softmax_scale, _DerivedScale):
            m = rope.softmax_mscale(self.rope_scaling)
            put("softmax_scale", _DerivedScale(self.qk_head_dim**-0.5 * m * m))
        else:
            put("softmax_scale", as_float("softmax_scale", self.softmax_scale))

    def _check_rope_dims(self):
        one_of("rope_mode", self.rope_mode, ("decoupled", "full"))
        if self.rope_mode == "full":
            if self.qk_rope_head_dim != 0:
                raise ValueError(f"qk_rope_head_dim: {self.qk_rope_head_dim} is not allowed with rope_mode 'full'; it must be 0")
            if self.qk_nope_head_dim % 2:
                raise ValueError(f"qk_nope_head_dim: {self.qk_nope_head_dim} is not allowed with rope_mode 'full'; it must be even")
        elif self.qk_rope_head_dim < 2 or self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim: {self.qk_rope_head_dim} is not allowed with rope_mode 'decoupled'; it must be even and at least 2")

    @property
    def qk_head_dim(self):
        """d_qk = qk_nope_head_dim + qk_rope_head_dim."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def rope_dim(self):
        """Rotated dimensions of a head: qk_rope_head_dim, or the whole head under rope_mode "full"."""
        return self.qk_nope_head_dim if self.rope_mode == "full" else self.qk_rope_head_dim

    @property
    def cache_dim(self):
        """Width of a cache row: kv_lora_rank + qk_rope_head_dim."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def max_positions(self):
        """Positions a sequence may reach: the rows of the RoPE table."""
        return rope.table_length(self.max_position_embeddings, self.rope_scaling, self.use_long_factors)

    @classmethod
    def from_hf(cls, source, **overrides):
        """The config of a Hugging Face model.

        source: a dict, the path of a config.json or of its folder, or an object with to_dict(). Both the rope_parameters form
        (transformers >= 5) and the rope_theta + rope_scaling form are read, and a nested text_config.
        overrides: fields of MLAConfig that replace what the source says (num_heads under tensor parallel, use_long_factors, ...).
        Raises ValueError for a config without MLA keys, for fp8 (quantization_config), an unknown rope type and any other key that
        changes the result and is not supported; FileNotFoundError for a path that is not there; TypeError for another source.
        """
        from .hf_config import fields_from_hf

        fields = fields_from_hf(source)
        fields.update(overrides)
        return cls(**fields)


def check_config(cfg):
    """cfg if it is an MLAConfig, else TypeError."""
    if not isinstance(cfg, MLAConfig):
        raise TypeError(f"cfg: {type(cfg).__name__} is not allowed; it must be an MLAConfig")
    return cfg
