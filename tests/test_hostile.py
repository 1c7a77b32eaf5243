"""Thousands of random calls. Each gives the right answer or a clean error and leaves the cache as it was; nothing ends the process.

Whether a call is legal is decided here, from the contract, independently of the package's own checks.
"""
import numpy as np
import pytest

import mindspore as ms
import ms_flashmla as fm
import reference
from cases import FLOATS, LayerCase, OpCase, assert_close, assert_lse, to_ms, to_np
from driver import Driver

CLEAN = (ValueError, TypeError, RuntimeError)
DTYPES = [*FLOATS, "int32", "int64", "float64", "bool_", "uint8"]
ODD_INTS = [-2 ** 31, -1, 0, 1, 2, 5, 63, 64, 65, 95, 96, 97, 2147480000, 2 ** 31 - 1]


def tensor(x, dtype):
    return to_ms(x, dtype) if dtype in (*FLOATS, "int32") else ms.Tensor(np.asarray(x)).astype(getattr(ms, dtype))


def random_tensor(rng):
    shape = rng.integers(0, 6, rng.integers(0, 6))
    return tensor(rng.integers(-3, 100, shape), str(rng.choice(DTYPES)))


def disturb(rng, x):
    """One argument made wrong, or at least strange: another value, shape, rank, dtype, or no tensor at all."""
    kind = rng.integers(0, 8)
    if kind == 0:
        return random_tensor(rng)
    if kind == 1 and x.ndim and x.size:
        return x[tuple(slice(int(rng.integers(0, 2)), n) for n in x.shape)]
    if kind == 2:
        return x.astype(getattr(ms, str(rng.choice(DTYPES))))
    if kind == 3:
        return x.reshape(*x.shape, 1) if rng.integers(2) else x.reshape(-1)
    if kind == 4 and x.ndim > 1:
        return x.swapaxes(0, 1)  # strided, and legal where the two sizes agree
    if kind == 5:
        return [None, 3, x.asnumpy(), "x"][rng.integers(4)]
    if x.dtype == ms.int32 and x.size:
        values = x.asnumpy().copy()
        values.flat[rng.integers(values.size)] = rng.choice(ODD_INTS)
        return to_ms(values, "int32")
    return x


def disturb_cache(rng, cache):
    """(another cache, whether it is a view): other dtypes, ranks and sizes, which the layer may take when they fit; views, which lose writes."""
    kind = rng.integers(0, 6)
    if kind == 0:
        return random_tensor(rng), False
    if kind == 1:
        return cache.astype(getattr(ms, str(rng.choice([*FLOATS, "int32", "float64"])))), False
    if kind == 2:
        first = rng.integers(0, 2, 3) * (rng.random(3) < 0.5)
        return to_ms(to_np(cache)[tuple(slice(int(i), None) for i in first)].copy(), str(cache.dtype).lower()), False
    if kind == 3:
        return [None, 3, to_np(cache), "x"][rng.integers(4)], False
    tensor = cache.astype(cache.dtype).copy()
    return (tensor[1:] if kind == 4 else tensor.swapaxes(0, 1)), True


def is_tensor(x, ranks, dtypes):
    return isinstance(x, ms.Tensor) and x.ndim in ranks and str(x.dtype).lower() in dtypes


# ---- the layer ---------------------------------------------------------------------------------------------------------------------------------------
CONFIGS = [LayerCase("a", dict(hidden_size=12, num_heads=2, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, max_position_embeddings=64),
                     block_size=4),
           LayerCase("b", dict(hidden_size=8, num_heads=3, kv_lora_rank=20, qk_nope_head_dim=10, qk_rope_head_dim=4, v_head_dim=6, q_lora_rank=5,
                               attention_bias=True, max_position_embeddings=40), "bfloat16", "bfloat16", "float16", block_size=3),
           LayerCase("c", dict(hidden_size=16, num_heads=1, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=0, v_head_dim=8, rope_mode="full",
                               max_position_embeddings=50), "float16", "float32", "float32", block_size=7)]


def is_legal(case, cache, hidden, table, q_lens, contexts, residual):
    cfg = case.reference_config()
    if not (is_tensor(cache, (3,), FLOATS) and cache.shape[1] > 0 and cache.shape[2] == cfg.kv_lora_rank + cfg.qk_rope_head_dim):
        return False
    if not (is_tensor(hidden, (2, 3), FLOATS) and hidden.shape[-1] == cfg.hidden_size and is_tensor(table, (2,), ["int32"])
            and is_tensor(q_lens, (1,), ["int32"]) and is_tensor(contexts, (1,), ["int32"])):
        return False
    if residual is not None and not (is_tensor(residual, (2, 3), FLOATS) and residual.shape == hidden.shape and residual.dtype == hidden.dtype):
        return False
    if not len(table) == len(q_lens) == len(contexts):
        return False
    table, q, c = (x.asnumpy().astype(np.int64) for x in (table, q_lens, contexts))
    if hidden.ndim == 3 and (hidden.shape[0] != len(q) or (q != hidden.shape[1]).any()):
        return False
    blocks, size = cache.shape[:2]
    if (q < 0).any() or (c < 0).any() or q.sum() != np.prod(hidden.shape[:-1]):
        return False
    read, written = set(), []
    for row, t, start in zip(table, q, c):
        if t == 0:
            continue
        if start + t > min(cfg.max_position_embeddings, len(row) * size):
            return False
        at = np.arange(start + t)
        if ((row[at // size] < 0) | (row[at // size] >= blocks)).any():
            return False
        slots = row[at // size] * size + at % size
        read |= set(slots[:start])
        written += list(slots[start:])
    return len(written) == len(set(written)) and not read & set(written)


@pytest.mark.parametrize("seed", range(6))
def test_layer_under_random_calls(seed):
    random_layer_calls(seed, 250)


@pytest.mark.parametrize("seed", range(6, 9))
def test_layer_under_random_calls_in_graph_mode(seed, graph):
    random_layer_calls(seed, 150)


def random_layer_calls(seed, calls):
    rng = np.random.default_rng(seed)
    run = Driver(CONFIGS[seed % 3], num_blocks=24)
    size, limit = run.case.block_size, run.ref_cfg.max_position_embeddings
    run.poison(0.25)
    legal = other_caches = 0
    for _ in range(calls):
        batch = int(rng.integers(0, 5))
        q = rng.integers(0, 6, batch) if rng.integers(3) else np.full(batch, rng.integers(0, 4))
        c = np.minimum(rng.integers(0, 2 * size + 2, batch), limit - q)
        need = [-(-int(n) // size) for n in c + q]
        table = np.full((batch, max(need, default=0) + int(rng.integers(0, 3))), rng.choice([-1, 2147480000, 0]), np.int32)
        pages = rng.permutation(24)
        for row, n in zip(table, need):
            row[:n], pages = pages[:n], pages[n:]
        lead = (batch, int(q[0])) if batch and len(set(q)) == 1 and rng.integers(2) else (int(q.sum()),)

        def activations():
            return to_ms(reference.rounded(rng.standard_normal((*lead, run.ref_cfg.hidden_size)), run.case.act), run.case.act)
        args = {"hidden_states": activations(), "block_table": to_ms(table, "int32"), "q_seq_lens": to_ms(q, "int32"), "context_lens": to_ms(c, "int32"),
                "residual": activations() if rng.integers(2) else None}
        for _ in range(rng.integers(0, 3)):
            name = str(rng.choice([name for name, x in args.items() if isinstance(x, ms.Tensor)] or ["residual"]))
            if isinstance(args[name], ms.Tensor):
                args[name] = disturb(rng, args[name])
        cache, is_view = disturb_cache(rng, run.cache.data) if rng.integers(8) == 0 else (run.cache.data, False)
        ok = not is_view and is_legal(run.case, cache, *args.values())
        other_caches += ok and cache is not run.cache.data
        before = to_np(cache) if isinstance(cache, ms.Tensor) else None
        try:
            out = to_np(run.layer(args["hidden_states"], cache, args["block_table"], args["q_seq_lens"], args["context_lens"], residual=args["residual"]))
        except CLEAN as error:
            assert not ok, f"a legal call failed: {error}"
            assert str(error), "an error without words"
            assert before is None or (to_np(cache) == before).all()
            continue
        assert ok, {name: (x.shape, x.dtype, x) if isinstance(x, ms.Tensor) else x for name, x in args.items()}
        legal += 1
        hidden, table, q, c, residual = (x if x is None else x.astype(ms.float32).asnumpy() if x.dtype != ms.int32 else x.asnumpy() for x in args.values())
        expected = before.copy()
        stored = str(cache.dtype).lower()
        out_ref, biggest = reference.mla_layer(run.ref_cfg, run.w, hidden, expected, stored, table, q, c, residual, attend_to=to_np(cache))
        assert_close(to_np(cache), expected, stored, what="cache")
        assert_close(out, out_ref, str(args["hidden_states"].dtype).lower(), biggest, layer=True)
    assert 0.2 < legal / calls < 0.9 and other_caches  # both sides were tried


# ---- the operators -----------------------------------------------------------------------------------------------------------------------------------

def op_is_legal(q, k, table, seqlens, d_v):
    if not (is_tensor(q, (4,), FLOATS) and is_tensor(k, (3, 4), FLOATS) and is_tensor(table, (2,), ["int32"])
            and is_tensor(seqlens, (1,), ["int32"])):
        return False
    h_kv = k.shape[2] if k.ndim == 4 else 1
    if not (len(q) == len(table) == len(seqlens) and q.shape[3] == k.shape[-1] and h_kv > 0 and q.shape[2] > 0 and q.shape[2] % h_kv == 0
            and k.shape[1] > 0 and 1 <= d_v <= q.shape[3]):
        return False
    table, n = table.asnumpy().astype(np.int64), seqlens.asnumpy().astype(np.int64)
    need = -(-n // k.shape[1])
    return bool((n >= 0).all() and (need <= table.shape[1]).all()
                and all(((row[:m] >= 0) & (row[:m] < k.shape[0])).all() for row, m in zip(table, need)))


@pytest.mark.parametrize("seed", range(4))
def test_attention_under_random_calls(seed):
    rng = np.random.default_rng(100 + seed)
    legal = 0
    for i in range(400):
        h_kv = int(rng.choice([1, 1, 2, 3]))
        d = int(rng.integers(1, 40))
        case = OpCase("random", tuple(rng.integers(0, 40, rng.integers(0, 4)).tolist()), int(rng.integers(1, 5)), h_kv * int(rng.integers(1, 5)), h_kv, d,
                      int(rng.integers(1, d + 1)), int(rng.integers(1, 20)), str(rng.choice(FLOATS)), bool(rng.integers(2)), seed=i)
        q, k, table, seqlens = case.arrays()
        k = np.nan_to_num(k, nan=0.25)  # a disturbed table or length may legally reach any row
        args = {"q": to_ms(q, case.dtype), "k_cache": to_ms(k, case.dtype), "block_table": to_ms(table, "int32"), "cache_seqlens": to_ms(seqlens, "int32")}
        d_v = case.d_v
        if rng.integers(2):
            name = str(rng.choice([*args, "d_v"]))
            if name == "d_v":
                d_v = int(rng.integers(-2, d + 6))
            else:
                args[name] = disturb(rng, args[name])
        ok = op_is_legal(*args.values(), d_v)
        try:
            out, lse = fm.ops.flash_mla_with_kvcache(*args.values(), d_v, causal=case.causal)
            out, lse = to_np(out), to_np(lse)
        except CLEAN as error:
            assert not ok, f"a legal call failed: {error}"
            assert str(error), "an error without words"
            continue
        assert ok, {name: (x.shape, x.dtype, x) if isinstance(x, ms.Tensor) else x for name, x in args.items()} | {"d_v": d_v}
        q, k, table, seqlens = (x.asnumpy() if x.dtype == ms.int32 else to_np(x) for x in args.values())
        out_ref, lse_ref, biggest = reference.flash_mla_with_kvcache(q, k, table, seqlens, d_v, causal=case.causal)
        legal += 1
        assert_close(out, out_ref, str(args["q"].dtype).lower(), biggest)
        assert_lse(lse, lse_ref, biggest)
    assert 150 < legal < 350


@pytest.mark.parametrize("seed", range(2))
def test_merge_under_random_calls(seed):
    rng = np.random.default_rng(200 + seed)
    for _ in range(300):
        shape = tuple(rng.integers(0, 5, 4).tolist())
        dtype = str(rng.choice(FLOATS))
        args = []
        for _ in range(2):
            lse = rng.standard_normal((shape[0], shape[2], shape[1])) * 5
            out = reference.rounded(rng.standard_normal(shape), dtype)
            lse[rng.random(lse.shape) < 0.2] = rng.choice([np.inf, -np.inf])
            args += [to_ms(out, dtype), to_ms(lse)]
        if rng.integers(2):
            at = int(rng.integers(4))
            args[at] = disturb(rng, args[at])
        ok = (is_tensor(args[0], (4,), FLOATS) and is_tensor(args[2], (4,), FLOATS) and args[0].shape == args[2].shape
              and all(is_tensor(x, (3,), ["float32"]) and x.shape == (args[0].shape[0], args[0].shape[2], args[0].shape[1]) for x in args[1::2]))
        try:
            out, lse = (to_np(x) for x in fm.ops.merge_attention_states(*args))
        except CLEAN as error:
            assert not ok, f"a legal call failed: {error}"
            assert str(error)
            continue
        assert ok, [(x.shape, x.dtype) if isinstance(x, ms.Tensor) else x for x in args]
        out_ref, lse_ref = reference.merge_attention_states(*(to_np(x) for x in args))
        assert_close(out, out_ref, str(args[0].dtype).lower())
        assert_lse(lse, lse_ref)
