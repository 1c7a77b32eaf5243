"""MLA written by hand in torch, the way that is fastest on a CPU: absorbed products or SDPA over the cached rows for decode, SDPA over
decompressed keys and zero-padded values for prefill (torch's CPU flash kernel wants one head size)."""

import os

import numpy as np
import torch
import torch.nn.functional as F

import cases
import roof
import timing
from ms_flashmla.reference.composed import composed_weights
from ms_flashmla.rope import rope_table
from pool import Pool, to_dtype

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))


def tensor(array, dtype):
    """A torch tensor on the memory of a numpy array whose elements are those of dtype."""
    if dtype == "float32":
        return torch.from_numpy(array.view(np.float32))
    return torch.from_numpy(array.view(np.int16)).view(DTYPES[dtype])


def build(case, dtype):
    with torch.no_grad():
        return _core(case, dtype) if case.phase == "decode_core" else _layer(case, dtype)


def _system(calls, copies=True):
    def in_inference(call):
        def run():
            with torch.inference_mode():
                return call()
        return run
    calls = [in_inference(call) for call in calls]
    return timing.System(calls, lambda: calls[0]().float().numpy(), copies=copies)


def _causal_mask(case, dtype, repeat):
    """[tokens * repeat, length] of 0 and -inf, None for one token."""
    if case.tokens == 1:
        return None
    future = np.arange(case.length) > case.context + np.arange(case.tokens)[:, None]
    return torch.from_numpy(np.repeat(np.where(future, np.float32(-np.inf), np.float32(0)), repeat, 0)).to(DTYPES[dtype])


def attend_products(q, rows, rank, scale, mask):
    """q [B, s_q * heads, d] over rows [B, L, d] -> [B, s_q * heads, rank]."""
    s = torch.bmm(q * scale, rows.transpose(1, 2))
    if mask is not None:
        s = s + mask
    return torch.bmm(torch.softmax(s, -1), rows)[..., :rank]


def attend_sdpa(q, rows, rank, scale, mask):
    return F.scaled_dot_product_attention(q[:, None], rows[:, None], rows[:, None], attn_mask=mask, scale=scale)[:, 0, :, :rank]


def _fastest(forms, *arguments):
    """The form that takes the least time on these arguments, each tried three times."""
    def seconds(form):
        return min(timing.System([lambda: form(*arguments)], None).step() for _ in range(3))
    with torch.inference_mode():
        return min(forms, key=seconds)


def _core(case, dtype):
    pool, rank, scale = Pool.of(case.cfg, dtype), case.cfg.kv_lora_rank, case.cfg.cache_dim ** -0.5
    q = tensor(to_dtype(case.queries().reshape(case.batch, -1, case.cfg.cache_dim), dtype), dtype)
    rows = [tensor(pool.view(case, place), dtype) for place in pool.places(case)]
    mask = _causal_mask(case, dtype, case.num_heads)
    attend = _fastest((attend_products, attend_sdpa), q, rows[0], rank, scale, mask)
    return _system([lambda x=x: attend(q, x, rank, scale, mask) for x in rows])


class TorchMLA:
    """One step of fixed shape; w: name -> tensor, those of composed_weights; rows [B, length, cache_dim] is written in place."""

    def __init__(self, case, dtype, w, rows):
        cfg = self.cfg = case.cfg
        self.case, self.w, self.rows, self.dtype = case, w, rows, DTYPES[dtype]
        self.full, self.half = cfg.rope_mode == "full", cfg.rope_dim // 2
        table = torch.from_numpy(rope_table(cfg)[:case.length]).to(self.dtype)
        self.cos_all, self.sin_all = table[:, None, :self.half], table[:, None, self.half:]
        self.cos, self.sin = self.cos_all[case.context:], self.sin_all[case.context:]
        self.absorbed = case.phase == "decode"
        self.mask = _causal_mask(case, dtype, cfg.num_heads) if self.absorbed else None
        self.attend = attend_products

    def rotate(self, x, cos, sin):
        a, b = x[..., :self.half], x[..., self.half:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def rmsnorm(self, x, weight, eps):
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def queries(self, x):
        """[B, T, hidden] -> [B, T, heads, d_n + d_r], rotated."""
        if "q_a_proj.weight" in self.w:
            x = self.rmsnorm(F.linear(x, self.w["q_a_proj.weight"]), self.w["q_a_layernorm.weight"], self.cfg.q_norm_eps)
        q = F.linear(x, self.w["q.weight"]).unflatten(-1, (self.cfg.num_heads, -1))
        if self.full:
            return self.rotate(q, self.cos, self.sin)
        return torch.cat((q[..., :self.cfg.qk_nope_head_dim], self.rotate(q[..., self.cfg.qk_nope_head_dim:], self.cos, self.sin)), -1)

    def append(self, x):
        kv, rank = F.linear(x, self.w["kv_a_proj_with_mqa.weight"]), self.cfg.kv_lora_rank
        new = self.rows[:, self.case.context:]
        new[..., :rank] = self.rmsnorm(kv[..., :rank], self.w["kv_a_layernorm.weight"], self.cfg.kv_norm_eps)
        if not self.full:
            new[..., rank:] = self.rotate(kv[..., None, rank:], self.cos, self.sin)[..., 0, :]

    def decompressed_keys(self):
        """[B, L, heads, d_n + d_r]."""
        cfg = self.cfg
        k = F.linear(self.rows[..., :cfg.kv_lora_rank], self.w["k.weight"]).unflatten(-1, (cfg.num_heads, -1))
        if self.full:
            return self.rotate(k, self.cos_all, self.sin_all)
        k_pe = self.rows[..., None, cfg.kv_lora_rank:].expand(-1, -1, cfg.num_heads, -1)
        return torch.cat((k, k_pe), -1)

    def absorbed_attention(self, q):
        """[B, T, heads, d] -> [B, T, heads, d_v]."""
        cfg, (batch, tokens, heads, _) = self.cfg, q.shape
        if self.full:
            s = torch.einsum("bthd,blhd->bthl", q * cfg.softmax_scale, self.decompressed_keys())
            if self.mask is not None:
                s = s + self.mask.view(tokens, heads, -1)
            o = torch.bmm(torch.softmax(s, -1).reshape(batch, tokens * heads, -1), self.rows)[..., :cfg.kv_lora_rank]
        else:
            nope = q[..., :cfg.qk_nope_head_dim].reshape(batch * tokens, heads, -1).transpose(0, 1)
            absorbed = torch.bmm(nope, self.w["k_by_head.weight"]).transpose(0, 1).reshape(batch, tokens, heads, -1)
            q = torch.cat((absorbed, q[..., cfg.qk_nope_head_dim:]), -1).reshape(batch, tokens * heads, -1)
            o = self.attend(q, self.rows, cfg.kv_lora_rank, cfg.softmax_scale, self.mask)
        o = torch.bmm(o.reshape(batch * tokens, heads, -1).transpose(0, 1), self.w["v_by_head.weight"])
        return o.transpose(0, 1)

    def expanded_attention(self, q):
        cfg = self.cfg
        v = F.linear(self.rows[..., :cfg.kv_lora_rank], self.w["v.weight"]).unflatten(-1, (cfg.num_heads, -1))
        v = F.pad(v, (0, cfg.qk_head_dim - cfg.v_head_dim))
        q, k, v = (x.transpose(1, 2) for x in (q, self.decompressed_keys(), v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=cfg.softmax_scale)
        return o[..., :cfg.v_head_dim].transpose(1, 2)

    def __call__(self, hidden, residual):
        self.append(hidden)
        q = self.queries(hidden)
        o = self.absorbed_attention(q) if self.absorbed else self.expanded_attention(q)
        return F.linear(o.reshape(*hidden.shape[:2], -1), self.w["o_proj.weight"]) + residual


_weights = {}  # (model, dtype) -> copies of {name: tensor}


def release(case):
    for key in [key for key in _weights if key[0] != case.model]:
        del _weights[key]


def _weights_of(model, dtype, count):
    copies = _weights.setdefault((model, dtype), [])
    if len(copies) < count:
        arrays = {name: to_dtype(parameter.asnumpy(), dtype)
                  for name, parameter in composed_weights(cases.config(model), cases.random_weights(model)).items()}
        copies += [{name: tensor(array.copy(), dtype) for name, array in arrays.items()} for _ in range(count - len(copies))]
    return copies[:count]


def _layer(case, dtype):
    cfg, pool, itemsize = case.cfg, Pool.of(case.cfg, dtype), roof.DTYPE_BYTES[dtype]
    nbytes = roof.weight_elements(cfg) * itemsize + case.batch * case.length * cfg.cache_dim * itemsize
    copies = 2 if case.phase == "prefill" else max(timing.copies_for(nbytes), 2)
    hidden, residual = (tensor(to_dtype(x, dtype), dtype).view(case.batch, case.tokens, -1) for x in case.hidden_and_residual())
    places = pool.places(case)
    layers = [TorchMLA(case, dtype, weights, tensor(pool.view(case, places[i % len(places)]), dtype))
              for i, weights in enumerate(_weights_of(case.model, dtype, copies))]
    if layers[0].absorbed and not layers[0].full:
        q = torch.zeros(case.batch, case.tokens * cfg.num_heads, cfg.cache_dim, dtype=DTYPES[dtype])
        attend = _fastest((attend_products, attend_sdpa), q, layers[0].rows, cfg.kv_lora_rank, cfg.softmax_scale, layers[0].mask)
        for layer in layers:
            layer.attend = attend
    return _system([lambda layer=layer: layer(hidden, residual) for layer in layers])
