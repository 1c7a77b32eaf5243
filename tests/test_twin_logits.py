"""Logits of +-1e5 and an absorbed query beyond the range of float16, on the Ascend kernel, from inputs that are exact in fp16 and bf16.

Head 0's absorbed query is 125 x 1024 = 128000 in its first column (float16 ends at 65504) and zero elsewhere; a key of 25 there and a softmax scale of 2^-5 make
a logit of 1e5. Head 1 has the opposite sign, head 2 sees every key alike, head 3 is an ordinary one."""
import numpy as np
import pytest

import reference
from cases import LayerCase, assert_close, to_ms, to_np
from driver import Driver
from test_twin_layer import on_the_twin, twin_library  # noqa: F401  (the library, and that it runs)

SCALE, QUERY, UP = 2.0 ** -5, 125.0, 1024.0
D_N, D_R, D_V = 16, 8, 16


def case_of(dtype, own):
    """The layer; `own`: the logit's sign of the new tokens' keys, whose first latent column is large with it, or zero."""
    case = LayerCase(f"huge logits {dtype}", dict(softmax_scale=SCALE, max_position_embeddings=1024), dtype, dtype, dtype)
    w = case.weights()
    q, kv_a, norm, kv_b = (w[next(name for name in w if key in name)] for key in ("q_proj.weight", "kv_a_proj_with_mqa.weight", "kv_a_layernorm.weight", "kv_b_proj.weight"))
    for head, gain in ((0, QUERY), (1, -QUERY), (2, 0.0)):
        q[head * (D_N + D_R):(head + 1) * (D_N + D_R)] = 0
        q[head * (D_N + D_R), 0] = gain
        keys = kv_b[head * (D_N + D_V):head * (D_N + D_V) + D_N]
        keys[:] = 0
        keys[0, 0] = UP
    kv_b[3 * (D_N + D_V):3 * (D_N + D_V) + D_N, 0] = 0  # the ordinary head does not see that column
    kv_a[0] = 0
    kv_a[0, 0] = 64.0 * abs(own)
    norm[0] = 4.0 * (own or 1)
    return case, w


def run(dtype, logits, new=1, own=0):
    """`new` tokens after a context of these logits, held to the float64 reference."""
    case, weights = case_of(dtype, own)
    driver = Driver(case, weights=weights)
    driver.lengths[0] = len(logits)
    args = driver.inputs([new], sequences=[0])
    hidden, table = args[0], args[2]
    hidden[:, 0] = 1.0
    rng = np.random.default_rng(5)
    first = np.asarray(logits) / (SCALE * QUERY * UP)
    assert (reference.rounded(first, dtype) == first).all()
    rows = reference.rounded(rng.standard_normal((len(logits), 32 + D_R)), dtype)
    rows[:, 0] = first
    cache = to_np(driver.cache.data)
    at = np.arange(len(logits))
    cache.reshape(-1, 32 + D_R)[table[0][at // 16].astype(np.int64) * 16 + at % 16] = rows
    driver.cache.data.set_data(to_ms(cache, dtype))
    out = driver.call(*args)
    driver.check(out, cache, *args)
    # These logits are exact in float32, so that nothing is allowed on top for their size.
    hidden, residual, table, q_lens, contexts = args
    after = to_np(driver.cache.data)
    expected, biggest = reference.mla_layer(driver.ref_cfg, driver.w, hidden, cache.copy(), dtype, table, q_lens, contexts, residual, attend_to=after)
    assert biggest >= max(np.abs(logits))
    assert_close(to_np(out), expected, dtype, layer=True)


def mixed(n):
    """1e5, -1e5, half of them, zero, and the neighbours of the largest that bfloat16 still tells from it."""
    return np.random.default_rng(n).choice([1e5, 1e5, 99500.0, -1e5, 5e4, 0.0], n)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("logits", [[-1e5] * 3, [1e5, -1e5, 0.0], [1e5] * 17 + [-1e5], [-5e4, -5e4, -1e5], [-1e5] * 64 + [1e5] * 64 + [-1e5] * 70], ids=len)
def test_few_keys(dtype, logits):
    run(dtype, logits)
    run(dtype, logits, own=-1)  # every key of head 0 far below zero: a finite mask value would win


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_many_tiles_and_a_causal_chunk(dtype):
    run(dtype, mixed(700))                # split over cores
    run(dtype, mixed(131), new=5)
    run(dtype, mixed(131), new=5, own=1)  # each new token sees a key above all others


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_prefill_beside_huge_keys(dtype):
    run(dtype, mixed(40), new=300)
    run(dtype, mixed(40), new=300, own=-1)
