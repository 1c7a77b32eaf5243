"""The MLA layer composed of MindSpore primitives, compiled in graph mode: what a careful MindSpore user would run without the fused op.

Measured on two x86 cores with MindSpore 2.10, each against its alternatives: one cache tensor [c | k_pe] and one product for QK beats
two; PV over the whole row, cut to the latent after, beats a copy of the latents; ScatterUpdate whose returned value is read on
beats reading the Parameter again (that copies it); one masked product beats a loop over causal blocks, though it does twice the flops;
weights stay [out, in] ([in, out] takes 2.6 times as long for 2048 tokens of q_proj), W_UK and W_UV by head for the absorbed form.
float32 only: the CPU backend's MatMul takes no bfloat16.
"""

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from .. import dtypes
from ..rope import rope_table


def composed_weights(cfg, weights):
    """HF name (without prefix) -> array [out, in] becomes name -> float32 Parameter, made once and shared by every ComposedMLA.

    Interleaved rope rows are put in half-split order here, so that no step pays for it. The lora scales go into the norm weights.
    """
    w = {name: dtypes.cast(array, ms.float32) for name, array in weights.items()}
    heads, r, d_n, d_r = cfg.num_heads, cfg.kv_lora_rank, cfg.qk_nope_head_dim, cfg.qk_rope_head_dim
    order = np.arange(cfg.rope_dim)
    if cfg.rope_interleave:
        order = np.concatenate([order[0::2], order[1::2]])
    in_head = np.concatenate([order, np.arange(cfg.rope_dim, d_n + d_r)] if cfg.rope_mode == "full" else [np.arange(d_n), d_n + order])

    q_name = "q_proj.weight" if cfg.q_lora_rank is None else "q_b_proj.weight"
    q = w.pop(q_name).reshape(heads, d_n + d_r, -1)[:, in_head]
    k, v = np.split(w.pop("kv_b_proj.weight").reshape(heads, d_n + cfg.v_head_dim, r), [d_n], 1)
    latent_order = np.arange(r + d_r)
    if cfg.rope_mode == "full":
        k = k[:, order]
    else:
        latent_order[r:] = r + order
    for name in ("kv_a_proj_with_mqa.weight", "kv_a_proj_with_mqa.bias"):
        if name in w:
            w[name] = w[name][latent_order]
    w |= {"q.weight": q.reshape(heads * (d_n + d_r), -1), "k.weight": k.reshape(heads * d_n, r), "v.weight": v.reshape(-1, r)}
    w |= {"k_by_head.weight": k, "v_by_head.weight": v.transpose(0, 2, 1)}  # [heads, d_n, r], [heads, r, d_v]
    w["kv_a_layernorm.weight"] = w["kv_a_layernorm.weight"] * np.float32(cfg.kv_lora_scale)
    if cfg.q_lora_rank is not None:
        w["q_a_layernorm.weight"] = w["q_a_layernorm.weight"] * np.float32(cfg.q_lora_scale)
    return {name: Parameter(Tensor(np.ascontiguousarray(array)), name="composed." + name, requires_grad=False) for name, array in w.items()}


class ComposedMLA(nn.Cell):
    """One step of fixed shape: `tokens` new tokens for each of `batch` sequences that hold `context` tokens each.

    construct(hidden, residual), both float32 [batch * tokens, hidden_size] -> the same shape. The cache is a contiguous Parameter
    [batch * (context + tokens), kv_lora_rank + qk_rope_head_dim]; set_context fills its old rows.
    absorb_k, absorb_v: fold W_UK into q, W_UV into the output; None takes what needs fewer flops (decode absorbs, prefill expands).
    """

    def __init__(self, cfg, weights, batch, context, tokens, absorb_k=None, absorb_v=None):
        super().__init__(auto_prefix=False)
        self.w_q_a = weights.get("q_a_proj.weight")
        self.b_q_a = weights.get("q_a_proj.bias")
        self.q_norm = weights.get("q_a_layernorm.weight")
        self.w_q, self.w_o = weights["q.weight"], weights["o_proj.weight"]
        self.w_kv_a, self.b_kv_a = weights["kv_a_proj_with_mqa.weight"], weights.get("kv_a_proj_with_mqa.bias")
        self.kv_norm, self.b_o = weights["kv_a_layernorm.weight"], weights.get("o_proj.bias")
        self.q_lora, self.q_bias, self.kv_bias, self.o_bias = (x is not None for x in (self.w_q_a, self.b_q_a, self.b_kv_a, self.b_o))

        self.batch, self.context, self.tokens, self.length = batch, context, tokens, context + tokens
        self.heads, self.r, self.d_n, self.d_r = cfg.num_heads, cfg.kv_lora_rank, cfg.qk_nope_head_dim, cfg.qk_rope_head_dim
        self.d_v, self.width, self.scale = cfg.v_head_dim, cfg.cache_dim, cfg.softmax_scale
        self.q_eps, self.kv_eps = cfg.q_norm_eps, cfg.kv_norm_eps
        self.full, self.half = cfg.rope_mode == "full", cfg.rope_dim // 2
        self.absorb_k = not self.full and self._absorbing_is_cheaper(self.d_n) if absorb_k is None else absorb_k
        self.absorb_v = self._absorbing_is_cheaper(self.d_v) if absorb_v is None else absorb_v

        self.w_k = weights["k_by_head.weight" if self.absorb_k else "k.weight"]
        self.w_v = weights["v_by_head.weight" if self.absorb_v else "v.weight"]

        table = rope_table(cfg)[:self.length]
        new = np.tile(table[context:], (batch, 1))[:, None]  # [batch * tokens, 1, rope_dim]
        self.cos, self.sin = Tensor(new[..., :self.half]), Tensor(new[..., self.half:])
        self.cos_all, self.sin_all = Tensor(table[:, :self.half]), Tensor(table[:, self.half:])
        future = np.arange(self.length) > context + np.arange(tokens)[:, None]
        self.mask = Tensor(np.where(future, np.float32(-np.inf), np.float32(0)))
        slots = np.arange(batch)[:, None] * self.length + context + np.arange(tokens)
        self.slots = Tensor(slots.reshape(-1).astype(np.int32))
        self.cache = Parameter(Tensor(np.zeros((batch * self.length, self.width), np.float32)), name="composed.cache", requires_grad=False)

        self.matmul, self.bmm, self.bmm_t = ops.MatMul(transpose_b=True), ops.BatchMatMul(), ops.BatchMatMul(transpose_b=True)
        self.write, self.softmax = ops.ScatterUpdate(), ops.Softmax(-1)

    def _absorbing_is_cheaper(self, d):
        """Multiply-adds per key and head: t * r absorbed; t * d, and r * d to decompress, expanded."""
        return self.tokens * self.r < self.tokens * d + self.r * d

    def set_context(self, rows):
        """rows: array [batch, context, width] of cached rows (after norm and RoPE)."""
        filled = np.zeros((self.batch, self.length, self.width), np.float32)
        filled[:, :self.context] = rows
        self.cache.set_data(Tensor(filled.reshape(-1, self.width)))

    def rmsnorm(self, x, weight, eps):
        return x * ops.rsqrt((x * x).mean(-1, keep_dims=True) + eps) * weight

    def rotate(self, x, cos, sin):
        a, b = x[..., :self.half], x[..., self.half:]
        return ops.concat((a * cos - b * sin, b * cos + a * sin), -1)

    def query(self, x):
        """[batch * tokens, hidden] -> q_nope [T, heads, d_n], q_pe [T, heads, d_r], scaled and rotated."""
        if self.q_lora:
            x = self.matmul(x, self.w_q_a)
            if self.q_bias:
                x = x + self.b_q_a
            x = self.rmsnorm(x, self.q_norm, self.q_eps)
        q = self.matmul(x, self.w_q).reshape(-1, self.heads, self.d_n + self.d_r) * self.scale
        if self.full:
            return self.rotate(q, self.cos, self.sin), None
        return q[:, :, :self.d_n], self.rotate(q[:, :, self.d_n:], self.cos, self.sin)

    def new_rows(self, x):
        """[batch * tokens, hidden] -> [batch * tokens, width], the rows to cache."""
        kv = self.matmul(x, self.w_kv_a)
        if self.kv_bias:
            kv = kv + self.b_kv_a
        if self.full:
            return self.rmsnorm(kv, self.kv_norm, self.kv_eps)
        c = self.rmsnorm(kv[:, :self.r], self.kv_norm, self.kv_eps)
        k_pe = self.rotate(kv[:, self.r:].reshape(-1, 1, self.d_r), self.cos, self.sin).reshape(-1, self.d_r)
        return ops.concat((c, k_pe), -1)

    def by_sequence(self, x):
        """[batch * tokens, heads, d] -> [batch, heads, tokens, d]."""
        return x.reshape(self.batch, self.tokens, self.heads, -1).transpose(0, 2, 1, 3)

    def decompress(self, latents, weight):
        """[batch * length, r] -> [batch, heads, length, d]."""
        return self.matmul(latents, weight).reshape(self.batch, self.length, self.heads, -1).transpose(0, 2, 1, 3)

    def scores(self, q_nope, q_pe, rows, latents):
        """-> [batch, heads, tokens, length]."""
        if self.absorb_k:
            q = self.bmm(q_nope.transpose(1, 0, 2), self.w_k).transpose(1, 0, 2)
            q = self.by_sequence(ops.concat((q, q_pe), -1)).reshape(self.batch, self.heads * self.tokens, self.width)
            s = self.bmm_t(q, rows.reshape(self.batch, self.length, self.width))
            return s.reshape(self.batch, self.heads, self.tokens, self.length)
        k = self.decompress(latents, self.w_k)
        if self.full:
            return self.bmm_t(self.by_sequence(q_nope), self.rotate(k, self.cos_all, self.sin_all))
        k_pe = rows[:, self.r:].reshape(self.batch, 1, self.length, self.d_r)
        k_pe = ops.broadcast_to(k_pe, (self.batch, self.heads, self.length, self.d_r))
        return self.bmm_t(self.by_sequence(ops.concat((q_nope, q_pe), -1)), ops.concat((k, k_pe), -1))

    def weighted_values(self, p, rows, latents):
        """p [batch, heads, tokens, length] -> [batch * tokens, heads * d_v]."""
        if not self.absorb_v:
            o = self.bmm(p, self.decompress(latents, self.w_v))
            return o.transpose(0, 2, 1, 3).reshape(-1, self.heads * self.d_v)
        p = p.reshape(self.batch, self.heads * self.tokens, self.length)
        o = self.bmm(p, rows.reshape(self.batch, self.length, self.width))[:, :, :self.r]
        o = o.reshape(self.batch, self.heads, self.tokens, self.r).transpose(1, 0, 2, 3).reshape(self.heads, -1, self.r)
        o = self.bmm(o, self.w_v)
        return o.transpose(1, 0, 2).reshape(-1, self.heads * self.d_v)

    def construct(self, hidden, residual):
        q_nope, q_pe = self.query(hidden)
        new_rows = self.new_rows(hidden)
        rows = self.write(self.cache, self.slots, new_rows)
        if self.context == 0:
            rows = ops.depend(new_rows, rows)
        latents = rows
        if not self.full and not (self.absorb_k and self.absorb_v):
            latents = rows[:, :self.r]
        s = self.scores(q_nope, q_pe, rows, latents)
        if self.tokens > 1:
            s = s + self.mask
        o = self.matmul(self.weighted_values(self.softmax(s), rows, latents), self.w_o)
        if self.o_bias:
            o = o + self.b_o
        return o + residual
