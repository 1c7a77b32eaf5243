"""The same work composed of MindSpore primitives, float32, in graph mode."""

import mindspore as ms
import numpy as np
from mindspore import nn, ops

import cases
import roof
import timing
from ms_flashmla.reference.composed import ComposedMLA, composed_weights
from pool import Pool

LAYER_COPIES = 2  # a cell takes a second to compile; the other systems' data pass between its turns

_weights = {}  # model -> composed_weights, one a copy


def _weights_of(model):
    if model not in _weights:
        _weights[model] = [composed_weights(cases.config(model), cases.random_weights(model)) for _ in range(LAYER_COPIES)]
    return _weights[model]


def release(case):
    for model in [model for model in _weights if model != case.model]:
        del _weights[model]


class ComposedCore(nn.Cell):
    """q [B, s_q * heads, d] over rows [B, L, d] -> [B, s_q * heads, head_dim_v]; mask [s_q * heads, L] is added where s_q > 1."""

    def __init__(self, scale, head_dim_v, mask):
        super().__init__()
        self.scale, self.head_dim_v, self.mask = scale, head_dim_v, mask
        self.bmm, self.bmm_t, self.softmax = ops.BatchMatMul(), ops.BatchMatMul(transpose_b=True), ops.Softmax(-1)

    def construct(self, q, rows):
        s = self.bmm_t(q * self.scale, rows)
        if self.mask is not None:
            s = s + self.mask
        return self.bmm(self.softmax(s), rows)[:, :, :self.head_dim_v]


def causal_mask(case):
    """float32 [tokens * heads, length] of 0 and -inf, None for one token."""
    if case.tokens == 1:
        return None
    future = np.arange(case.length) > case.context + np.arange(case.tokens)[:, None]
    return np.repeat(np.where(future, np.float32(-np.inf), np.float32(0)), case.num_heads, 0)


def build(case):
    return _core(case) if case.phase == "decode_core" else _layer(case)


def _core(case):
    pool = Pool.of(case.cfg, "float32")
    mask = causal_mask(case)
    cell = ComposedCore(case.cfg.cache_dim ** -0.5, case.cfg.kv_lora_rank, None if mask is None else ms.Tensor(mask))
    q = ms.Tensor.from_numpy(case.queries().reshape(case.batch, -1, case.cfg.cache_dim))
    rows = [ms.Tensor.from_numpy(pool.view(case, place).view(np.float32)) for place in pool.places(case)]
    calls = [lambda x=x: cell(q, x).asnumpy() for x in rows]
    return timing.System(calls, calls[0])


def _layer(case):
    cells = []
    for weights in _weights_of(case.model):
        cell = ComposedMLA(case.cfg, weights, case.batch, case.context, case.tokens)
        cell.set_context(Pool.of(case.cfg, "float32").rows_float32(case)[:, :case.context])
        cells.append(cell)
    hidden, residual = map(ms.Tensor.from_numpy, case.hidden_and_residual())
    calls = [lambda cell=cell: cell(hidden, residual).asnumpy() for cell in cells]
    nbytes = roof.weight_elements(case.cfg) * 4 + case.batch * case.length * case.cfg.cache_dim * 4
    return timing.System(calls, calls[0], copies=len(cells) >= timing.copies_for(nbytes))
