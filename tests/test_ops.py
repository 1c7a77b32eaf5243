"""fm.ops: attention over a paged cache and merging of two states, for MLA, MQA, GQA and MHA shapes."""
from dataclasses import replace

import numpy as np
import pytest

import mindspore as ms
from mindspore import nn
import ms_flashmla as fm
import reference
from cases import FLOATS, OpCase, assert_close, assert_lse, bits, to_ms, to_np

CASES = [
    OpCase("mla decode", (1, 17, 300), h_q=16, d=72, d_v=64),
    OpCase("mla 576/512", (70, 3), s_q=2, h_q=16, d=576, d_v=512, page=64, causal=True),
    OpCase("mla 128 heads", (65,), h_q=128, d=576, d_v=512, page=64),
    OpCase("mla several tokens", (40, 9, 128), s_q=3, causal=True),
    OpCase("mqa", (31, 64), s_q=2, h_q=12, h_kv=1, d=64, d_v=64),
    OpCase("gqa", (31, 64, 5), s_q=2, h_q=12, h_kv=4, d=64, d_v=64, causal=True),
    OpCase("gqa odd", (13, 50), h_q=9, h_kv=3, d=20, d_v=7),
    OpCase("mha", (33, 1, 16), s_q=4, h_q=8, h_kv=8, d=64, d_v=64, causal=True),
    OpCase("mha one head", (19,), h_q=1, h_kv=1, d=8, d_v=8),
    OpCase("prefill", (200, 150), s_q=150, h_q=3, d=40, d_v=24, causal=True),
    OpCase("not causal prefill", (200, 150), s_q=150, h_q=3, d=40, d_v=24),
    OpCase("long", (2100, 1), h_q=5, d=40, d_v=24, page=64),
    OpCase("empty sequences", (0, 12, 0, 1), s_q=2),
    OpCase("more queries than keys", (2, 5, 0), s_q=4, causal=True),
    OpCase("scale", (20, 30), scale=0.731),
    OpCase("large logits", (200, 3), gain=50.0),
    OpCase("d_v 1", (20,), d=16, d_v=1),
    OpCase("d 1", (20,), d=1, d_v=1),
    OpCase("d_v of d", (20, 4), d=33, d_v=33),
]
PAGES = [OpCase(f"page {page}", (130, 1, page), page=page, h_q=4) for page in (1, 2, 3, 16, 31, 64, 128)]


def named(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda c: f"{c.name} {c.dtype}")


def check(case, out, lse, arrays):
    q, k, table, seqlens = arrays
    out_ref, lse_ref, biggest = reference.flash_mla_with_kvcache(q, k, table, seqlens, case.d_v, case.scale, case.causal)
    assert str(out.dtype).lower() == case.dtype and str(lse.dtype).lower() == "float32"
    assert_close(to_np(out), out_ref, case.dtype, biggest)
    assert_lse(to_np(lse), lse_ref, biggest)


def tensors(case, arrays):
    q, k, table, seqlens = arrays
    return to_ms(q, case.dtype), to_ms(k, case.dtype), to_ms(table, "int32"), to_ms(seqlens, "int32")


@named([replace(case, dtype=dtype) for case in CASES for dtype in FLOATS] + PAGES)
def test_attention(case):
    arrays = case.arrays()
    check(case, *fm.ops.flash_mla_with_kvcache(*tensors(case, arrays), case.d_v, case.scale, case.causal), arrays)


def test_rows_without_keys_give_zero_and_plus_infinity():
    case = OpCase("no keys", (0, 2), s_q=3, causal=True)
    q, k, table, seqlens = tensors(case, case.arrays())
    out, lse = (to_np(x) for x in fm.ops.flash_mla_with_kvcache(q, k, table, seqlens, 32, causal=True))
    assert (out[0] == 0).all() and (lse[0] == np.inf).all()
    assert (out[1, 0] == 0).all() and (lse[1, :, 0] == np.inf).all()
    assert (out[1, 1:] != 0).any() and np.isfinite(lse[1, :, 1:]).all()


def test_default_scale_is_one_over_root_d():
    case = OpCase("scale", (20, 30), d=64)
    args = (*tensors(case, case.arrays()), 32)
    assert bits(fm.ops.flash_mla_with_kvcache(*args)[0]) == bits(fm.ops.flash_mla_with_kvcache(*args, softmax_scale=0.125)[0])


def test_the_latent_cache_is_read_as_one_head():
    case = OpCase("3-D", (20, 30))
    q, k, table, seqlens = tensors(case, case.arrays())
    four = fm.ops.flash_mla_with_kvcache(q, k, table, seqlens, 32)
    three = fm.ops.flash_mla_with_kvcache(q, k.reshape(k.shape[0], k.shape[1], k.shape[3]), table, seqlens, 32)
    assert [bits(x) for x in four] == [bits(x) for x in three]


def test_pages_may_be_shared():
    case = OpCase("shared", (40, 40), page=16)
    q, k, table, seqlens = case.arrays()
    table[1] = table[0]
    check(case, *fm.ops.flash_mla_with_kvcache(*tensors(case, (q, k, table, seqlens)), case.d_v), (q, k, table, seqlens))


@pytest.mark.parametrize("dtype", FLOATS)
def test_strided_inputs_are_read_right(dtype, mode):
    case = OpCase("strided", (20, 33), s_q=2, h_q=4, dtype=dtype)
    q, k, table, seqlens = arrays = case.arrays()
    q_view = to_ms(q.transpose(0, 2, 1, 3), dtype).transpose(0, 2, 1, 3)
    k_view = to_ms(np.concatenate([k, np.full_like(k, np.nan)], -1), dtype)[..., :case.d]
    table_view = to_ms(table.T, "int32").transpose(1, 0)
    lens_view = to_ms(np.stack([seqlens, seqlens * 0 - 7], 1), "int32")[:, 0]
    assert not q_view.is_contiguous() and not k_view.is_contiguous() and not table_view.is_contiguous()
    check(case, *fm.ops.flash_mla_with_kvcache(q_view, k_view, table_view, lens_view, case.d_v), arrays)


@pytest.mark.parametrize("k_dtype", FLOATS)
@pytest.mark.parametrize("q_dtype", FLOATS)
def test_q_and_cache_of_different_dtypes(q_dtype, k_dtype):
    q, _, table, seqlens = replace(OpCase("mixed", (20, 70)), dtype=q_dtype).arrays()
    _, k, _, _ = replace(OpCase("mixed", (20, 70)), dtype=k_dtype).arrays()
    out, lse = fm.ops.flash_mla_with_kvcache(to_ms(q, q_dtype), to_ms(k, k_dtype), to_ms(table, "int32"), to_ms(seqlens, "int32"), 32)
    check(OpCase("mixed", (20, 70), dtype=q_dtype), out, lse, (q, k, table, seqlens))


@pytest.mark.parametrize("dtype", FLOATS)
def test_sequences_that_a_group_cuts_give_the_bits_of_the_others(dtype):
    """Outputs by split end a group of sequences (32 MiB); what is left of one may be a few rows. All sequences here are the same."""
    batch, s_q, keys, d = 74, 7, 16384, 512
    rng = np.random.default_rng(3)
    k = to_ms(rng.standard_normal((keys // 64, 64, d), dtype=np.float32), dtype)
    q = to_ms(np.repeat(rng.standard_normal((1, s_q, 1, d), dtype=np.float32), batch, 0), dtype)
    table = np.repeat(np.arange(keys // 64, dtype=np.int32)[None], batch, 0)
    out, lse = fm.ops.flash_mla_with_kvcache(q, k, to_ms(table, "int32"), to_ms(np.full(batch, keys, np.int32), "int32"), d, causal=True)
    out, lse = to_np(out), to_np(lse)
    assert np.isfinite(out).all() and (out == out[:1]).all() and (lse == lse[:1]).all()


class Attention(nn.Cell):
    """The operator inside a graph."""

    def __init__(self, d_v, scale, causal):
        super().__init__()
        self.d_v, self.scale, self.causal = d_v, scale, causal

    def construct(self, q, k, table, seqlens):
        return fm.ops.flash_mla_with_kvcache(q, k, table, seqlens, self.d_v, self.scale, self.causal)


class SplitAttention(nn.Cell):
    """Both operators inside a graph: the keys in two halves, merged."""

    def construct(self, q, k, table_a, lens_a, table_b, lens_b):
        out_a, lse_a = fm.ops.flash_mla_with_kvcache(q, k, table_a, lens_a, 32)
        out_b, lse_b = fm.ops.flash_mla_with_kvcache(q, k, table_b, lens_b, 32)
        return fm.ops.merge_attention_states(out_a, lse_a, out_b, lse_b)


@named([case for case in CASES if case.name in ("mla decode", "gqa", "scale", "empty sequences")])
def test_attention_in_construct(case, mode):
    arrays = case.arrays()
    check(case, *Attention(case.d_v, case.scale, case.causal)(*tensors(case, arrays)), arrays)


def test_attention_in_a_dynamic_graph(graph):
    """Shapes unknown while compiling: one graph for every batch and number of queries."""
    def unknown(rank, dtype, last):
        return ms.Tensor(shape=[None] * (rank - 1) + [last], dtype=dtype)
    cell = Attention(32, None, True)
    cell.set_inputs(unknown(4, ms.float32, 48), unknown(4, ms.float32, 48), unknown(2, ms.int32, None), unknown(1, ms.int32, None))
    for case in (OpCase("a", (20, 30), s_q=2, causal=True), OpCase("b", (1, 0, 70), causal=True), OpCase("c", (9,), s_q=9, h_q=4, h_kv=2, causal=True)):
        arrays = case.arrays()
        check(case, *cell(*tensors(case, arrays)), arrays)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_halves_of_the_keys_merge_into_the_whole(dtype, mode):
    case = OpCase("halves", (48, 40, 16), s_q=2, h_q=4, dtype=dtype)
    q, k, table, seqlens = arrays = case.arrays()
    first = np.minimum(seqlens, 32)  # two pages; the last sequence leaves the second side empty
    parts = (table[:, :2], first, np.roll(table, -2, 1), seqlens - first)
    cell = SplitAttention()
    out, lse = cell(to_ms(q, dtype), to_ms(k, dtype), *(to_ms(x, "int32") for x in parts))
    out_ref, lse_ref, _ = reference.flash_mla_with_kvcache(q, k, table, seqlens, 32)
    assert_close(to_np(out), out_ref, dtype)
    assert_lse(to_np(lse), lse_ref)


# ---- merge_attention_states --------------------------------------------------------------------------------------------------------------------------

def states(seed, dtype, shape=(3, 2, 5, 24)):
    rng = np.random.default_rng(seed)
    batch, s_q, heads, _ = shape
    return reference.rounded(rng.standard_normal(shape), dtype), np.float32(rng.standard_normal((batch, heads, s_q)) * 3).astype(np.float64)


def merge(a, b, dtype):
    return fm.ops.merge_attention_states(to_ms(a[0], dtype), to_ms(a[1]), to_ms(b[0], dtype), to_ms(b[1]))


@pytest.mark.parametrize("dtype", FLOATS)
def test_merge(dtype):
    a, b = states(0, dtype), states(1, dtype)
    out, lse = merge(a, b, dtype)
    out_ref, lse_ref = reference.merge_attention_states(*a, *b)
    assert str(out.dtype).lower() == dtype
    assert_close(to_np(out), out_ref, dtype)
    assert_lse(to_np(lse), lse_ref)


def test_merge_of_two_dtypes_gives_that_of_the_first():
    a, b = states(0, "bfloat16"), states(1, "float32")
    out, lse = fm.ops.merge_attention_states(to_ms(a[0], "bfloat16"), to_ms(a[1]), to_ms(b[0]), to_ms(b[1]))
    out_ref, lse_ref = reference.merge_attention_states(*a, *b)
    assert out.dtype == ms.bfloat16
    assert_close(to_np(out), out_ref, "bfloat16")
    assert_lse(to_np(lse), lse_ref)


@pytest.mark.parametrize("empty", [np.inf, -np.inf])
def test_an_empty_side_does_not_count_even_as_nan(empty):
    a, b = states(0, "float32"), states(1, "float32")
    a[0][0], a[1][0] = np.nan, empty
    b[0][1], b[1][1] = np.inf, empty
    a[0][2], a[1][2], b[0][2], b[1][2] = np.nan, empty, np.nan, -empty
    out, lse = (to_np(x) for x in merge(a, b, "float32"))
    assert (out[0] == b[0][0]).all() and (lse[0] == b[1][0]).all()
    assert (out[1] == a[0][1]).all() and (lse[1] == a[1][1]).all()
    assert (out[2] == 0).all() and (lse[2] == np.inf).all()


@pytest.mark.parametrize("offset", [1e5, -1e5, 3e38, -3e38])
def test_merge_of_huge_lse(offset):
    a, b = states(0, "float32"), states(1, "float32")
    a = (a[0], np.full_like(a[1], np.float32(offset)))
    b = (b[0], a[1].copy())
    b[1][0] = np.float32(offset * 0.5)
    out, lse = merge(a, b, "float32")
    out_ref, lse_ref = reference.merge_attention_states(*a, *b)
    assert_close(to_np(out), out_ref, "float32")
    assert_lse(to_np(lse), lse_ref)


def test_merge_reads_strided_inputs(mode):
    a, b = states(0, "float32"), states(1, "float32")
    out_a = to_ms(a[0].transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    lse_a = to_ms(a[1].transpose(0, 2, 1)).transpose(0, 2, 1)
    assert not out_a.is_contiguous() and not lse_a.is_contiguous()
    out, lse = fm.ops.merge_attention_states(out_a, lse_a, to_ms(b[0]), to_ms(b[1]))
    out_ref, lse_ref = reference.merge_attention_states(*a, *b)
    assert_close(to_np(out), out_ref, "float32")
    assert_lse(to_np(lse), lse_ref)


def test_merge_of_nothing():
    a = states(0, "float32", (0, 1, 4, 8))
    out, lse = merge(a, a, "float32")
    assert out.shape == (0, 1, 4, 8) and lse.shape == (0, 4, 1)
