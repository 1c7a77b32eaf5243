"""The operators' errors: each names its argument before anything runs, and what only the data tells fails in the kernel with words."""
import numpy as np
import pytest

import mindspore as ms
from mindspore import nn
import ms_flashmla as fm
from cases import OpCase, to_ms, to_np
from test_errors import set_at


def op_args(**how):
    q, k, table, seqlens = OpCase("errors", (20, 7), **how).arrays()
    return dict(q=to_ms(q), k_cache=to_ms(k), block_table=to_ms(table, "int32"), cache_seqlens=to_ms(seqlens, "int32"), head_dim_v=32)


WRONG_OP = {
    "q of rank 3": dict(q=lambda x: x[0]),
    "q of int": dict(q=lambda x: x.astype(ms.int32)),
    "q of float64": dict(q=lambda x: x.astype(ms.float64)),
    "q as numpy": dict(q=lambda x: x.asnumpy()),
    "q of another width": dict(q=lambda x: x[..., 1:]),
    "q of another batch": dict(q=lambda x: x[:1]),
    "k_cache of rank 2": dict(k_cache=lambda x: x[0, :, 0]),
    "k_cache of rank 5": dict(k_cache=lambda x: x.reshape(*x.shape, 1)),
    "heads that do not divide": dict(k_cache=lambda x: ms.ops.concat([x] * 3, 2)),
    "no query heads": dict(q=lambda x: to_ms(np.zeros((2, 1, 0, 48)))),
    "k_cache of empty pages": dict(k_cache=lambda x: to_ms(np.zeros((5, 0, 1, 48)))),
    "no kv heads": dict(k_cache=lambda x: to_ms(np.zeros((4, 16, 0, 48)))),
    "block_table of int64": dict(block_table=lambda x: x.astype(ms.int64)),
    "block_table of rank 1": dict(block_table=lambda x: x[0]),
    "cache_seqlens of rank 2": dict(cache_seqlens=lambda x: x.reshape(1, -1)),
    "cache_seqlens of another batch": dict(cache_seqlens=lambda x: x[:1]),
    "cache_seqlens of float": dict(cache_seqlens=lambda x: x.astype(ms.float32)),
    "head_dim_v 0": dict(head_dim_v=lambda x: 0),
    "head_dim_v negative": dict(head_dim_v=lambda x: -4),
    "head_dim_v above d": dict(head_dim_v=lambda x: 49),
    "head_dim_v of float": dict(head_dim_v=lambda x: 32.0),
    "softmax_scale of text": dict(softmax_scale=lambda x: "small"),
    "softmax_scale nan": dict(softmax_scale=lambda x: float("nan")),
    "causal of text": dict(causal=lambda x: "yes"),
    "causal of int": dict(causal=lambda x: 0),
}


@pytest.mark.parametrize("fault", WRONG_OP)
def test_wrong_arguments_of_the_operator(fault):
    args = op_args()
    fm.ops.flash_mla_with_kvcache(**args)  # a right call before it, which is remembered
    (name, change), = WRONG_OP[fault].items()
    args[name] = change(args.get(name))
    with pytest.raises((ValueError, TypeError), match="head" if "divide" in fault or "heads" in fault else rf"\b{name}\b"):
        fm.ops.flash_mla_with_kvcache(**args)


DATA_OP = {
    "block past the cache": dict(block_table=set_at((0, 1), 5)),
    "negative block": dict(block_table=set_at((0, 0), -1)),
    "negative length": dict(cache_seqlens=set_at(0, -1)),
    "length past the table": dict(cache_seqlens=set_at(1, 49)),
    "huge length": dict(cache_seqlens=set_at(1, 2 ** 31 - 1)),
}


@pytest.mark.parametrize("fault", DATA_OP)
def test_wrong_data_of_the_operator(fault):
    args = op_args()
    (name, change), = DATA_OP[fault].items()
    args[name] = change(args[name])
    with pytest.raises(RuntimeError, match="block_table|cache_seqlens"):
        fm.ops.flash_mla_with_kvcache(**args)[0].asnumpy()
    assert name in fm.last_error() or "block_table" in fm.last_error()
    good = op_args()
    assert np.isfinite(to_np(fm.ops.flash_mla_with_kvcache(**good)[0])).all()


WRONG_MERGE = {
    "out_a of rank 3": (0, lambda x: x[0]),
    "out_a of int": (0, lambda x: x.astype(ms.int32)),
    "lse_a of another shape": (1, lambda x: x[:, 1:]),
    "lse_a of float16": (1, lambda x: x.astype(ms.float16)),
    "out_b of another shape": (2, lambda x: x[..., 1:]),
    "out_b of int": (2, lambda x: x.astype(ms.int64)),
    "lse_b of rank 4": (3, lambda x: x.reshape(*x.shape, 1)),
    "lse_b as numpy": (3, lambda x: x.asnumpy()),
}


@pytest.mark.parametrize("fault", WRONG_MERGE)
def test_wrong_arguments_of_merge(fault):
    out, lse = to_ms(np.ones((2, 3, 4, 8))), to_ms(np.ones((2, 4, 3)))
    args = [out, lse, out, lse]
    at, change = WRONG_MERGE[fault]
    args[at] = change(args[at])
    with pytest.raises((ValueError, TypeError), match=rf"\b{fault.split()[0]}\b"):
        fm.ops.merge_attention_states(*args)


class OuterAttention(nn.Cell):
    def construct(self, q, k_cache, table, seqlens):
        out, lse = fm.ops.flash_mla_with_kvcache(q * 1.0, k_cache, table, seqlens, 32)
        return out + 0.0, lse


@pytest.mark.parametrize("fault", ["block past the cache", "negative length", "length past the table"])
def test_attention_inside_a_larger_graph_fails_with_its_words(fault, graph):
    args = op_args()
    (name, change), = DATA_OP[fault].items()
    args[name] = change(args[name])
    with pytest.raises(RuntimeError, match="block_table|cache_seqlens") as error:
        OuterAttention()(*list(args.values())[:4])[0].asnumpy()
    assert fm.last_error() and fm.last_error() in str(error.value)
