"""What public reports say goes wrong in MLA layers and kernels, one small test a symptom."""
import math
import mmap

import numpy as np
import pytest

import mindspore as ms
import ms_flashmla as fm
import reference
from cases import YARN, LayerCase, OpCase, assert_close, assert_lse, bits, to_ms, to_np
from driver import Driver


def attend(q, k, table, seqlens, d_v, dtype="float32", **how):
    """The operator on numpy arrays."""
    out, lse = fm.ops.flash_mla_with_kvcache(to_ms(q, dtype), to_ms(k, dtype), to_ms(table, "int32"), to_ms(seqlens, "int32"), d_v, **how)
    return out, lse


# ---- zero-length sequences ---------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("q_lens", [[0, 3, 2], [3, 0, 2], [3, 2, 0], [0, 0, 4], [4, 0, 0], [0, 5, 0]], ids=str)
def test_zero_length_sequences_anywhere_in_a_batch(q_lens):
    run = Driver(LayerCase("zero"))
    run.step(q_lens)
    run.step(q_lens[::-1])


def test_a_sequence_of_length_zero_needs_no_block_and_may_have_a_context():
    run = Driver(LayerCase("zero"))
    run.step([6, 5, 4])
    hidden, _, table, q_lens, contexts = run.inputs([2, 0, 2])
    before = to_np(run.cache.data)
    table[1] = -1
    contexts[1] = 0
    run.check(run.call(hidden, None, table, q_lens, contexts), before, hidden, None, table, q_lens, contexts)


# ---- memory that nobody owns -------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("tokens", [1, 40])
def test_values_in_unused_slots_and_foreign_pages_change_no_bit(tokens):
    outs = []
    for value in (0.0, np.nan, np.inf, -np.inf, 3e38):
        run = Driver(LayerCase("poison"))
        run.poison(value)
        run.step([21, 50])
        outs.append(bits(run.step([tokens, 1])))
    assert len(set(outs)) == 1


def test_operator_ignores_what_no_sequence_owns():
    q, k, table, seqlens = OpCase("poison", (5, 0, 33)).arrays()
    clean = attend(q, np.nan_to_num(k), table, seqlens, 32)
    for value in (np.nan, np.inf, -np.inf):
        out, lse = attend(q, np.where(np.isnan(k), value, k), table, seqlens, 32)
        assert bits(out) == bits(clean[0]) and bits(lse) == bits(clean[1])


@pytest.mark.parametrize("padding", [-1, 2147480000, -2147483648, 95])
def test_block_table_padding_is_never_dereferenced(padding):
    plain, padded = Driver(LayerCase("padding")), Driver(LayerCase("padding"))
    for q_lens in ([16, 3], [1, 1], [20, 0]):
        assert bits(plain.step(q_lens)) == bits(padded.step(q_lens, padding=padding))


def test_operator_never_dereferences_padding():
    q, k, table, seqlens = OpCase("padding", (16, 0, 3)).arrays()
    expected = attend(q, k, table, seqlens, 32)
    out, lse = attend(q, k, np.where(table < 0, 2147480000, table), seqlens, 32)
    assert bits(out) == bits(expected[0]) and bits(lse) == bits(expected[1])


# ---- rounding that adds up ---------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("phi", [None, 0.0])
def test_many_keys_of_like_weight_do_not_drift(phi):
    """Summed key by key, 131072 positive terms lose what the tolerance allows several times over."""
    keys, d = 131072, 16
    rng = np.random.default_rng(0)
    k = np.zeros((keys // 64, 64, 1, d), np.float32)
    k[..., 0], k[..., 1] = rng.choice([0.0, 0.3], k.shape[:3]).astype(np.float32), 1
    q, table = np.ones((1, 1, 1, d), np.float32), np.arange(keys // 64, dtype=np.int32)[None]
    out, lse = attend(q, k, table, np.array([keys], np.int32), d, softmax_scale=1.0, softmax_phi=phi)
    rows = k.reshape(keys, d).astype(np.float64)
    p = np.exp(rows.sum(1))
    assert_close(to_np(out)[0, 0, 0], p @ rows / p.sum(), "float32")
    assert_lse(to_np(lse).ravel(), np.log(p.sum(keepdims=True)))


# ---- the causal mask ---------------------------------------------------------------------------------------------------------------------------------

def test_causal_mask_is_bottom_right_when_a_prefix_is_cached():
    """A chunk over a prefix must give what its tokens give one by one."""
    at_once, one_by_one = Driver(LayerCase("causal")), Driver(LayerCase("causal"))
    prefix = at_once.inputs([20])[0]
    chunk = at_once.inputs([6], [0])[0]

    def feed(run, x):
        args = (x, None, run.table([0], [run.lengths[0] + len(x)]), np.array([len(x)]), run.lengths[:1].copy())
        before = to_np(run.cache.data)
        out = run.call(*args)
        run.check(out, before, *args)
        run.lengths[0] += len(x)
        return to_np(out)
    feed(at_once, prefix)
    feed(one_by_one, prefix)
    assert_close(feed(at_once, chunk), np.concatenate([feed(one_by_one, chunk[i:i + 1]) for i in range(6)]), "float32")


def test_operator_causal_mask_is_bottom_right():
    case = OpCase("causal", (9, 4, 4), s_q=4)
    q, k, table, seqlens = case.arrays()
    out, lse = attend(q, k, table, seqlens, 32, causal=True)
    for i in range(4):  # query i sees what a call without mask sees whose last 3 - i keys are gone
        row, row_lse = attend(q[:, i:i + 1], k, table, seqlens - (3 - i), 32)
        assert_close(to_np(out)[:, i], to_np(row)[:, 0], "float32")
        assert_lse(to_np(lse)[..., i], to_np(row_lse)[..., 0])


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("tokens", [6, 200])
def test_a_later_token_never_reaches_an_earlier_one(tokens, value):
    """Masking by 0 * V lets a NaN of the future through."""
    outs = []
    for last in (0.0, value):
        run = Driver(LayerCase("future"))
        hidden, _, *rest = run.inputs([tokens, 3])
        hidden[tokens - 1] += last
        outs.append(to_np(run.call(hidden, None, *rest)))
    earlier = np.arange(tokens + 3) != tokens - 1
    assert (outs[0][earlier] == outs[1][earlier]).all() and np.isfinite(outs[0]).all() and np.isnan(outs[1][tokens - 1]).all()


def test_operator_keeps_later_keys_from_earlier_queries():
    q, k, table, seqlens = OpCase("future", (9, 40), s_q=4).arrays()
    clean, _ = attend(q, k, table, seqlens, 32, causal=True)
    k[table[1, 2], 7] = np.nan  # position 39, which only the last query sees
    out, _ = attend(q, k, table, seqlens, 32, causal=True)
    same = (to_np(clean) == to_np(out)).all(-1).all(-1)
    assert same.tolist() == [[True] * 4, [True, True, True, False]]


# ---- log-sum-exp -------------------------------------------------------------------------------------------------------------------------------------

def test_lse_is_natural():
    q, k, table = np.ones((1, 1, 2, 16)), np.full((1, 4, 1, 16), 0.5), np.zeros((1, 1))
    for keys in (1, 2, 4):
        _, lse = attend(q, k, table, [keys], 16, softmax_scale=0.25)
        assert_lse(to_np(lse), np.full((1, 2, 1), 2.0 + math.log(keys)))


# ---- logits of any size ------------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("logits", [[-1e5, -1e5, -1e5], [1e5, -1e5, 0.0], [-5e4, -5e4, -1e5], [1e5, 1e5, -1e5], [-1e4]], ids=str)
def test_huge_logits_with_exact_inputs(logits, dtype):
    """A finite mask value (-1e4, -5e4) or an exp without its maximum breaks these. 1e5 = 3125 * 32 is exact, split over two factors."""
    n = len(logits)
    q, k = np.zeros((1, 1, 3, 8)), np.zeros((1, 4, 1, 8))
    q[..., 0] = 32.0
    k[0, :n, 0, 0] = reference.rounded(np.asarray(logits) / 32.0, dtype)
    k[0, :n, 0, 1] = np.arange(1, n + 1)  # what each key contributes to the output
    k[0, n:] = np.nan
    q = reference.rounded(q, dtype)
    args = (np.zeros((1, 1), np.int32), np.array([n]), 8)
    out_ref, lse_ref, biggest = reference.flash_mla_with_kvcache(q, k, *args, softmax_scale=1.0)
    out, lse = attend(q, k, *args, dtype, softmax_scale=1.0)
    assert_close(to_np(out), out_ref, dtype, biggest)
    assert_lse(to_np(lse), lse_ref, biggest)


@pytest.mark.parametrize("tokens", [1, 200])
def test_huge_logits_in_the_layer(tokens):
    run = Driver(LayerCase("huge logits", dict(softmax_scale=5e3)))
    run.step([30, 1])
    run.step([tokens, 3])


# ---- half precision ----------------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("tokens", [1, 200])
def test_absorbed_product_may_pass_65504_in_float16(tokens):
    """q_nope W_UK goes past 5e5 here while every input, logit and output is far inside float16's range."""
    case = LayerCase("overflow", dict(softmax_scale=1e-6), "float16", "float16", "float16")
    weights = {name: x * 400 if name in ("q_proj.weight", "kv_b_proj.weight") else x for name, x in case.weights().items()}
    weights = {name: reference.rounded(x, "float16").astype(np.float32) for name, x in weights.items()}
    weights["o_proj.weight"] = reference.rounded(weights["o_proj.weight"] / 512, "float16").astype(np.float32)
    q_nope, _, _ = reference.project(case.reference_config(), weights, run_hidden(case), np.arange(64))
    w_uk = weights["kv_b_proj.weight"].reshape(4, 32, 32)[:, :16]
    assert np.abs(np.einsum("thd,hdr->thr", q_nope, w_uk)).max() > 2 * 65504
    run = Driver(case, weights)
    run.step([30])
    run.step([tokens])


def run_hidden(case):
    return np.random.default_rng(case.seed).standard_normal((64, 48))


def test_float16_accumulation_of_a_long_projection():
    """4096 products near 1: a float16 sum stands still at 2048."""
    case = LayerCase("accumulation", dict(hidden_size=4096), "float16", "float16", "float16")
    weights = case.weights()
    rng = np.random.default_rng(3)
    weights["kv_a_proj_with_mqa.weight"] = reference.rounded(rng.uniform(0.5, 1.5, (40, 4096)), "float16").astype(np.float32)
    run = Driver(case, weights)
    hidden, residual, *rest = run.inputs([5])
    before = to_np(run.cache.data)
    hidden = reference.rounded(rng.uniform(0.5, 1.5, hidden.shape), "float16")
    run.check(run.call(hidden, residual, *rest), before, hidden, residual, *rest)


def test_float16_accumulation_over_many_keys():
    """5000 keys of equal weight 1/5000: a float16 sum of weights or of values drifts by percents."""
    n, page = 5000, 64
    rng = np.random.default_rng(4)
    k = reference.rounded(rng.uniform(0.5, 1.5, (79, page, 1, 32)), "float16")
    args = (np.arange(79, dtype=np.int32)[None], np.array([n]), 32)
    q = np.zeros((1, 1, 4, 32))
    out, lse = attend(q, k, *args, "float16")
    out_ref, lse_ref, _ = reference.flash_mla_with_kvcache(q, k, *args)
    assert_close(to_np(out), out_ref, "float16")
    assert_lse(to_np(lse), lse_ref)


# ---- YaRN and the order of RoPE pairs ----------------------------------------------------------------------------------------------------------------

def test_mscale_is_not_mscale_all_dim():
    """mscale scales cos and sin, mscale_all_dim the logits; position 0 cannot tell, so later positions are run."""
    for mscale, all_dim in ((1.0, 0.707), (0.707, 1.0)):
        run = Driver(LayerCase("mscale", dict(rope_scaling=YARN | dict(mscale=mscale, mscale_all_dim=all_dim), max_position_embeddings=1280)))
        run.step([100])
        run.step([1])
        run.step([30])


@pytest.mark.parametrize("all_dim, scale", [(1.0, 0.1352338), (0.707, 0.1147214), (None, 0.0721688)])
def test_known_softmax_scales(all_dim, scale):
    scaling = dict(rope_type="yarn", factor=40.0, mscale=0.9, original_max_position_embeddings=4096) | ({"mscale_all_dim": all_dim} if all_dim else {})
    case = LayerCase("scale", dict(qk_nope_head_dim=128, qk_rope_head_dim=64, rope_scaling=scaling))
    assert reference.softmax_scale(case.reference_config()) == pytest.approx(scale, rel=1e-6)
    explicit = LayerCase("scale", case.config | dict(softmax_scale=scale))
    outs = [Driver(c) for c in (case, explicit)]
    assert_close(to_np(outs[0].step([12])), to_np(outs[1].step([12])), "float32")


def test_interleaved_pairs_are_not_half_split_pairs():
    """The same weights rotate differently; weights reordered by hand make the two the same, cached bits included."""
    inter, half = LayerCase("interleaved"), LayerCase("half-split", dict(rope_interleave=False))
    order = np.r_[0:8:2, 1:8:2]
    w = inter.weights()
    reordered = dict(w)
    reordered["q_proj.weight"] = w["q_proj.weight"].reshape(4, 24, 48)[:, np.r_[0:16, 16 + order]].reshape(96, 48)
    reordered["kv_a_proj_with_mqa.weight"] = w["kv_a_proj_with_mqa.weight"][np.r_[0:32, 32 + order]]
    runs = [Driver(inter, w), Driver(half, reordered), Driver(half, w)]
    outs = [run.step([20]) for run in runs]
    assert bits(outs[0]) == bits(outs[1]) and runs[0].snapshot() == runs[1].snapshot()
    assert np.abs(to_np(outs[2]) - to_np(outs[0])).max() > 1e-3


# ---- 64-bit offsets ----------------------------------------------------------------------------------------------------------------------------------
BLOCKS, WIDTH = 58_300, 576  # 58300 * 64 slots of 576: the last ones start past 2^31 elements (at slot 3,728,271)


def lazy_cache(dtype):
    """Memory that costs nothing until it is touched, whatever the machine has: reserved pages without a reservation (MAP_NORESERVE, 0x4000)."""
    size = BLOCKS * 64 * WIDTH * np.dtype(dtype).itemsize
    assert (BLOCKS - 1) * 64 * WIDTH > 2 ** 31
    return np.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000), dtype).reshape(BLOCKS, 64, WIDTH)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_slots_beyond_32_bits_are_read_right(dtype):
    rng = np.random.default_rng(5)
    cache = lazy_cache(dtype)
    table = np.array([[BLOCKS - 1, 0, BLOCKS - 3]], np.int32)
    cache[table[0]] = rng.standard_normal((3, 64, WIDTH)).astype(dtype)
    q = reference.rounded(rng.standard_normal((1, 2, 16, WIDTH)), dtype)
    out, lse = fm.ops.flash_mla_with_kvcache(to_ms(q, dtype), ms.Tensor.from_numpy(cache), to_ms(table, "int32"), to_ms([180], "int32"), 512, causal=True)
    out_ref, lse_ref, _ = reference.flash_mla_with_kvcache(q, cache, table, [180], 512, causal=True)
    assert_close(to_np(out), out_ref, dtype)
    assert_lse(to_np(lse), lse_ref)


def test_slots_beyond_32_bits_are_written_right():
    case = LayerCase("64 bit", dict(num_heads=2, kv_lora_rank=512, qk_rope_head_dim=64), cache="float16", block_size=64)
    run = Driver(case, num_blocks=2)
    array = lazy_cache(np.float16)
    table = np.array([[BLOCKS - 1, BLOCKS - 2]], np.int32)
    hidden = run.inputs([70])[0]
    out = run.layer(to_ms(hidden), ms.Tensor.from_numpy(array), to_ms(table, "int32"), to_ms([70], "int32"), to_ms([0], "int32"))
    out = to_np(out)
    pages = np.full((2, 64, WIDTH), np.nan)
    out_ref, _ = reference.mla_layer(run.ref_cfg, run.w, hidden, pages, "float16", 1 - np.arange(2)[None], [70], [0],
                                     attend_to=array[-2:].astype(np.float64))
    assert_close(array[-1].astype(np.float64), pages[1], "float16", what="cache rows")
    assert_close(array[-2][:6].astype(np.float64), pages[0][:6], "float16", what="cache rows")
    assert_close(out, out_ref, "float32")
