"""The MLA layer in float64 numpy, one sequence, straight from its definition: expanded K and V, a plain softmax, RoPE computed in place.

    q = x W_q;  [c | k_pe] = x W_kva;  k_nope, v = rmsnorm(c) W_kvb;  s = (q_nope.k_nope + q_pe.k_pe) * scale;  y = softmax(s) v W_o + residual
"""

import mindspore as ms
import numpy as np

from .. import dtypes, rope

ROW_BLOCK = 256  # tokens projected at a time: bounds the float64 temporaries


def rounded(x, dtype):
    """x (float numpy array) rounded once to a MindSpore float dtype, as float64."""
    return dtypes.cast(dtypes.cast(np.asarray(x), dtype), ms.float32).astype(np.float64)


class Float64MLA:
    """One sequence through one layer.

    cfg: MLAConfig. weights: HF name (without prefix) -> array [out, in], as the checkpoint has it.
    dtype: MindSpore float dtype to which the layer rounds its weights and its cached rows.
    """

    def __init__(self, cfg, weights, dtype=ms.float32):
        self.cfg = cfg
        self.dtype = dtype
        self.w = {name: rounded(array, dtype) for name, array in weights.items()}
        self.rows = np.zeros((0, cfg.cache_dim))  # cached so far: [c after norm | k_pe after RoPE]

    def step(self, hidden, residual, check_last):
        """hidden, residual [t, hidden_size] follow what was seen before. Returns the last min(t, check_last) rows of the output, float64:
        every token enters the cache, only these are attended for."""
        hidden, residual = np.asarray(hidden, np.float64), np.asarray(residual, np.float64)
        start = len(self.rows)
        new = [self._cache_rows(hidden[i:i + ROW_BLOCK], start + i) for i in range(0, len(hidden), ROW_BLOCK)]
        self.rows = np.concatenate([self.rows, *new])
        last = min(len(hidden), check_last)
        positions = np.arange(len(self.rows) - last, len(self.rows))
        return self._attend(hidden[-last:], positions) @ self.w["o_proj.weight"].T + self.w.get("o_proj.bias", 0.0) + residual[-last:]

    def _rotate(self, x, positions):
        """x [t, heads, rope_dim], pairs as the checkpoint orders them -> rotated, half-split order."""
        cfg = self.cfg
        inv_freq = rope.inverse_frequencies(cfg.rope_dim, cfg.rope_theta, cfg.rope_scaling, cfg.use_long_factors)
        angle = positions[:, None, None] * inv_freq
        factor = rope.attention_factor(cfg.rope_scaling)
        cos, sin = np.cos(angle) * factor, np.sin(angle) * factor
        half = cfg.rope_dim // 2
        a, b = (x[..., 0::2], x[..., 1::2]) if cfg.rope_interleave else (x[..., :half], x[..., half:])
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def _rmsnorm(self, x, name, eps):
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * self.w[name]

    def _cache_rows(self, x, start):
        cfg, w = self.cfg, self.w
        kv = x @ w["kv_a_proj_with_mqa.weight"].T + w.get("kv_a_proj_with_mqa.bias", 0.0)
        c = self._rmsnorm(kv[:, :cfg.kv_lora_rank], "kv_a_layernorm.weight", cfg.kv_norm_eps) * cfg.kv_lora_scale
        if cfg.rope_mode == "full":
            return rounded(c, self.dtype)
        k_pe = self._rotate(kv[:, None, cfg.kv_lora_rank:], np.arange(start, start + len(x)))[:, 0]
        return rounded(np.concatenate([c, k_pe], -1), self.dtype)

    def _query(self, x):
        cfg, w = self.cfg, self.w
        if cfg.q_lora_rank is None:
            q = x @ w["q_proj.weight"].T
        else:
            c_q = x @ w["q_a_proj.weight"].T + w.get("q_a_proj.bias", 0.0)
            q = self._rmsnorm(c_q, "q_a_layernorm.weight", cfg.q_norm_eps) * cfg.q_lora_scale @ w["q_b_proj.weight"].T
        return np.split(q.reshape(len(x), cfg.num_heads, cfg.qk_head_dim), [cfg.qk_nope_head_dim], -1)

    def _attend(self, x, positions):
        """x [t, hidden_size] at positions [t] over every cached row up to each -> [t, heads * d_v]."""
        cfg = self.cfg
        d_n, d_v = cfg.qk_nope_head_dim, cfg.v_head_dim
        q_nope, q_pe = self._query(x)
        c, k_pe = self.rows[:, :cfg.kv_lora_rank], self.rows[:, cfg.kv_lora_rank:]
        all_positions = np.arange(len(self.rows))
        if cfg.rope_mode == "full":
            q_nope = self._rotate(q_nope, positions)
        else:
            q_pe = self._rotate(q_pe, positions)
        future = all_positions > positions[:, None]  # [t, n]
        out = np.empty((len(x), cfg.num_heads, d_v))
        for h in range(cfg.num_heads):  # one head's K and V at a time: all of them would be gigabytes at 128 heads
            w_k, w_v = np.split(self.w["kv_b_proj.weight"][h * (d_n + d_v):(h + 1) * (d_n + d_v)], [d_n])
            k = c @ w_k.T
            if cfg.rope_mode == "full":
                k = self._rotate(k[:, None], all_positions)[:, 0]
            s = (q_nope[:, h] @ k.T + q_pe[:, h] @ k_pe.T) * cfg.softmax_scale
            s[future] = -np.inf
            p = np.exp(s - s.max(-1, keepdims=True))
            out[:, h] = p / p.sum(-1, keepdims=True) @ c @ w_v.T
        return out.reshape(len(x), cfg.num_heads * d_v)
