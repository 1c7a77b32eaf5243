"""The float64 reference of everything the package computes, in plain numpy.

Nothing of the package is used here. A config is any object with the argument names of fm.MLAConfig, weights are HF names -> arrays in HF layout [out, in].
Inputs are taken as they are (round them to their dtype first, `rounded`); the only rounding inside is that of cached rows to the cache's dtype, which the
contract asks for.
"""
import math

import numpy as np


def rounded(x, dtype):
    """x as float64 after rounding to dtype ("float32" | "float16" | "bfloat16"), to nearest even."""
    x = np.asarray(x, np.float32)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float64)
    if dtype == "bfloat16":
        bits = x.view(np.uint32)
        bits = bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)
        near = (bits & np.uint32(0xFFFF0000)).view(np.float32)
        return np.where(np.isnan(x), x, near).astype(np.float64)
    return x.astype(np.float64)


# ---- RoPE -------------------------------------------------------------------------------------------------------------------------------------------

def get_mscale(factor, mscale):
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_dim(cfg):
    return cfg.qk_nope_head_dim if cfg.rope_mode == "full" else cfg.qk_rope_head_dim


def inverse_frequencies(cfg):
    """[rope_dim / 2] inverse frequencies and the factor on cos and sin (HF modeling_rope_utils)."""
    scaling = dict(cfg.rope_scaling or {})
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    d = rope_dim(cfg)
    powers = cfg.rope_theta ** (np.arange(0, d, 2) / d)
    if kind == "default":
        return 1 / powers, 1.0
    if kind == "linear":
        return 1 / (scaling["factor"] * powers), 1.0
    original = scaling.get("original_max_position_embeddings") or cfg.max_position_embeddings
    factor = scaling.get("factor") or cfg.max_position_embeddings / original
    attention = scaling.get("attention_factor")
    if kind == "longrope":
        if attention is None:
            attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        return 1 / (np.asarray(scaling["long_factor" if cfg.use_long_factors else "short_factor"], np.float64) * powers), attention
    assert kind == "yarn", kind
    if attention is None:
        mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention = get_mscale(factor, mscale) / get_mscale(factor, all_dim) if mscale and all_dim else get_mscale(factor, 1.0)

    def correction_dim(rotations):
        return d * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(cfg.rope_theta))

    low, high = correction_dim(scaling.get("beta_fast") or 32), correction_dim(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    ramp = np.clip((np.arange(d // 2) - low) / ((high - low) or 0.001), 0, 1)
    return ramp / (factor * powers) + (1 - ramp) / powers, attention


def softmax_scale(cfg):
    if cfg.softmax_scale is not None:
        return cfg.softmax_scale
    scaling = dict(cfg.rope_scaling or {})
    m = 1.0
    if scaling.get("rope_type", scaling.get("type")) == "yarn" and scaling.get("mscale_all_dim"):
        original = scaling.get("original_max_position_embeddings") or cfg.max_position_embeddings
        m = get_mscale(scaling.get("factor") or cfg.max_position_embeddings / original, scaling["mscale_all_dim"])
    return (cfg.qk_nope_head_dim + cfg.qk_rope_head_dim) ** -0.5 * m * m


def rotate(cfg, x, positions):
    """x [t, heads, rope_dim] in the checkpoint's pair order -> rotated, in half-split order."""
    frequencies, attention = inverse_frequencies(cfg)
    angle = positions[:, None, None] * frequencies
    cos, sin = np.cos(angle) * attention, np.sin(angle) * attention
    half = x.shape[-1] // 2
    a, b = (x[..., 0::2], x[..., 1::2]) if cfg.rope_interleave else (x[..., :half], x[..., half:])
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


# ---- the layer --------------------------------------------------------------------------------------------------------------------------------------

def rmsnorm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * weight


def weight_shapes(cfg):
    """HF name -> shape of every tensor of one attention layer."""
    heads, r, d_n, d_r, d_v = cfg.num_heads, cfg.kv_lora_rank, cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim
    shapes = {"kv_a_proj_with_mqa.weight": (r + d_r, cfg.hidden_size), "kv_a_layernorm.weight": (r,),
              "kv_b_proj.weight": (heads * (d_n + d_v), r), "o_proj.weight": (cfg.hidden_size, heads * d_v)}
    if cfg.q_lora_rank:
        shapes |= {"q_a_proj.weight": (cfg.q_lora_rank, cfg.hidden_size), "q_a_layernorm.weight": (cfg.q_lora_rank,),
                   "q_b_proj.weight": (heads * (d_n + d_r), cfg.q_lora_rank)}
    else:
        shapes |= {"q_proj.weight": (heads * (d_n + d_r), cfg.hidden_size)}
    if cfg.attention_bias:
        shapes |= {"kv_a_proj_with_mqa.bias": (r + d_r,), "o_proj.bias": (cfg.hidden_size,)}
        if cfg.q_lora_rank:
            shapes |= {"q_a_proj.bias": (cfg.q_lora_rank,)}
    return shapes


def project(cfg, w, x, positions):
    """x [t, hidden] -> q_nope [t, h, d_n], q_pe [t, h, d_r], cache rows [t, r + d_r] before rounding."""
    heads, r, d_n, d_r = cfg.num_heads, cfg.kv_lora_rank, cfg.qk_nope_head_dim, cfg.qk_rope_head_dim
    if cfg.q_lora_rank:
        c_q = x @ w["q_a_proj.weight"].T + w.get("q_a_proj.bias", 0.0)
        q = rmsnorm(c_q, w["q_a_layernorm.weight"], cfg.q_norm_eps) * cfg.q_lora_scale @ w["q_b_proj.weight"].T
    else:
        q = x @ w["q_proj.weight"].T
    q_nope, q_pe = np.split(q.reshape(len(x), heads, d_n + d_r), [d_n], -1)
    kv = x @ w["kv_a_proj_with_mqa.weight"].T + w.get("kv_a_proj_with_mqa.bias", 0.0)
    c = rmsnorm(kv[:, :r], w["kv_a_layernorm.weight"], cfg.kv_norm_eps) * cfg.kv_lora_scale
    if cfg.rope_mode == "full":
        return rotate(cfg, q_nope, positions), q_pe, c
    k_pe = rotate(cfg, kv[:, None, r:], positions)[:, 0]
    return q_nope, rotate(cfg, q_pe, positions), np.concatenate([c, k_pe], -1)


def softmax(scores):
    """Softmax over the last axis and its natural log-sum-exp; a row of -inf only gives zeros and +inf."""
    top = np.max(scores, -1, keepdims=True, initial=-np.inf)
    p = np.exp(scores - np.where(np.isfinite(top), top, 0.0))
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, top + np.log(total), np.inf)[..., 0]
    return p / np.where(total > 0, total, 1.0), lse


def attend(cfg, w, q_nope, q_pe, rows, start):
    """Attention of t queries at positions start.. over cached rows [n, r + d_r], expanded path -> [t, h * d_v], largest |logit|."""
    heads, r, d_n, d_v = cfg.num_heads, cfg.kv_lora_rank, cfg.qk_nope_head_dim, cfg.v_head_dim
    c, k_pe = rows[:, :r], rows[:, r:]
    k_nope, v = np.split((c @ w["kv_b_proj.weight"].T).reshape(len(rows), heads, d_n + d_v), [d_n], -1)
    if cfg.rope_mode == "full":
        k_nope = rotate(cfg, k_nope, np.arange(len(rows)))
    s = np.einsum("thd,nhd->htn", q_nope, k_nope, optimize=True)
    s = (s + np.einsum("thd,nd->htn", q_pe, k_pe, optimize=True)) * softmax_scale(cfg)
    t = np.arange(len(q_nope))
    p, _ = softmax(np.where(np.arange(len(rows)) <= start + t[:, None], s, -np.inf))
    o = np.einsum("htn,nhd->thd", p, v, optimize=True)
    return o.reshape(len(t), heads * d_v), np.abs(s).max(initial=0.0)


def mla_layer(cfg, w, hidden, cache, cache_dtype, block_table, q_seq_lens, context_lens, residual=None, attend_to=None):
    """One call of the layer.

    hidden, residual [T, hidden] or [B, S, hidden]; cache [num_blocks, block_size, r + d_r] float64, the new rows are written into it; block_table [B, m].
    attend_to, when given, is a cache whose rows attention reads instead: a row within rounding of a tie may round either way, and an output is held to the
    rows that were really stored.
    Returns out (shape of hidden, float64) and the largest |logit| that was met.
    """
    w = {name: np.asarray(x, np.float64) for name, x in w.items()}
    x = np.asarray(hidden, np.float64).reshape(-1, cfg.hidden_size)
    flat = cache.reshape(-1, cache.shape[-1])
    out, first, biggest = np.zeros_like(x), 0, 0.0
    plan = []
    for table, t, context in zip(np.asarray(block_table, np.int64), q_seq_lens, context_lens):
        if t == 0:
            continue
        at = np.arange(context + t)
        slots = table[at // cache.shape[1]] * cache.shape[1] + at % cache.shape[1]
        q_nope, q_pe, rows = project(cfg, w, x[first:first + t], at[context:])
        flat[slots[context:]] = rounded(rows, cache_dtype)
        plan.append((first, t, context, slots, q_nope, q_pe))
        first += t
    stored = flat if attend_to is None else attend_to.reshape(flat.shape)
    for first, t, context, slots, q_nope, q_pe in plan:
        o, top = attend(cfg, w, q_nope, q_pe, stored[slots], context)
        out[first:first + t] = o @ w["o_proj.weight"].T + w.get("o_proj.bias", 0.0)
        biggest = max(biggest, top)
    out = out.reshape(np.shape(hidden))
    return (out if residual is None else out + residual), biggest


# ---- the operators ----------------------------------------------------------------------------------------------------------------------------------

def flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale=None, causal=False):
    """q [B, s_q, h_q, d], k_cache [num_blocks, page, h_kv, d] or 3-D -> out [B, s_q, h_q, head_dim_v], lse [B, h_q, s_q], largest |logit|."""
    q = np.asarray(q, np.float64)
    batch, s_q, h_q, d = q.shape
    pages = np.reshape(k_cache, (k_cache.shape[0], k_cache.shape[1], -1, d))
    page, h_kv = pages.shape[1:3]
    scale = d ** -0.5 if softmax_scale is None else softmax_scale
    out, lse, biggest = np.zeros((batch, s_q, h_q, head_dim_v)), np.full((batch, h_q, s_q), np.inf), 0.0
    for b, n in enumerate(cache_seqlens):
        if n == 0:
            continue
        at = np.arange(n)
        k = np.asarray(pages[np.asarray(block_table)[b, at // page], at % page], np.float64)  # [n, h_kv, d]
        k = np.repeat(k, h_q // h_kv, 1)
        s = np.einsum("thd,nhd->htn", q[b], k, optimize=True) * scale
        biggest = max(biggest, np.abs(s).max(initial=0.0))
        if causal:
            s = np.where(at <= n - s_q + np.arange(s_q)[:, None], s, -np.inf)
        p, lse[b] = softmax(s)
        out[b] = np.einsum("htn,nhd->thd", p, k[..., :head_dim_v], optimize=True)
    return out, lse, biggest


def merge_attention_states(out_a, lse_a, out_b, lse_b):
    """out [B, s_q, h, d], lse [B, h, s_q]; an infinite lse marks an empty side."""
    lse = np.stack([np.asarray(lse_a, np.float64), np.asarray(lse_b, np.float64)], -1)
    share, merged = softmax(np.where(np.isinf(lse), -np.inf, lse))
    share = np.swapaxes(share, 1, 2)[..., None, :]  # [B, s_q, h, 1, 2]
    sides = np.stack([np.asarray(out_a, np.float64), np.asarray(out_b, np.float64)], -1)
    return np.where(share > 0, sides * share, 0.0).sum(-1), merged
