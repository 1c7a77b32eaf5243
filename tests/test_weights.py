"""Packing, loading and exporting weights: every name and shape checked, one rounding, the same bits back."""
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore.common import np_dtype
from safetensors.numpy import load_file

import ms_flashmla as fm
from ms_flashmla import dtypes, weights

HF_CASES = Path(__file__).parent / "hf_cases"
DTYPES = {"float32": ms.float32, "float16": ms.float16, "bfloat16": ms.bfloat16}
PREFIX = "model.layers.0.self_attn."
ODD = dict(hidden_size=50, num_heads=3, kv_lora_rank=20, qk_nope_head_dim=10, qk_rope_head_dim=4, v_head_dim=6)
CONFIGS = {
    "plain": fm.MLAConfig(**ODD),
    "q_lora": fm.MLAConfig(**ODD, q_lora_rank=70, attention_bias=True),
    "half_split": fm.MLAConfig(**ODD, rope_interleave=False, attention_bias=True),
    "full": fm.MLAConfig(**{**ODD, "qk_rope_head_dim": 0}, rope_mode="full"),
}


def same_bits(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


def random_weights(cfg, dtype=np.float32, prefix=PREFIX):
    rng = np.random.default_rng(0)
    return {prefix + name: rng.standard_normal(shape).astype(dtype) for name, shape in weights.hf_shapes(cfg).items()}


def layer_arrays(cfg, dtype):
    return {name: weights.empty(spec, dtype) for name, spec in weights.layout(cfg).items()}


def loaded(cfg, mapping, dtype=ms.float32, prefix=PREFIX):
    arrays = layer_arrays(cfg, dtype)
    weights.load(cfg, mapping, prefix, arrays, dtype)
    return arrays


# ---- the layout -------------------------------------------------------------------------------------------------------------------------------------

def pack_by_definition(matrix, groups):
    out, n = [], matrix.shape[0] // groups
    for g in range(groups):
        group = np.zeros((-(-n // 16) * 16, matrix.shape[1]), matrix.dtype)
        group[:n] = matrix[g * n:(g + 1) * n]
        out += [group[start:start + 64].T.ravel() for start in range(0, len(group), 64)]
    return np.concatenate(out)


@pytest.mark.parametrize("groups, n, k", [(1, 1, 1), (1, 64, 5), (1, 65, 3), (3, 14, 20), (2, 130, 7), (5, 16, 1), (1, 80, 9)])
def test_pack_is_panels_of_64_and_unpack_undoes_it(groups, n, k):
    matrix = np.random.default_rng(1).standard_normal((groups * n, k)).astype(np.float32)
    packed = weights.pack(matrix, groups)
    assert same_bits(packed, pack_by_definition(matrix, groups))
    assert same_bits(weights.unpack(packed, groups, n, k), matrix)


def test_pack_shapes_are_checked():
    with pytest.raises(ValueError, match="matrix"):
        weights.pack(np.zeros((5, 2)), 2)
    with pytest.raises(ValueError, match="packed"):
        weights.unpack(np.zeros(5), 1, 5, 2)


def test_parameters_hold_what_the_kernel_reads():
    cfg = CONFIGS["plain"]
    w = random_weights(cfg)
    arrays = loaded(cfg, w)
    to_half_split = [0, 2, 1, 3]
    q = w[PREFIX + "q_proj.weight"].reshape(3, 14, 50)
    q = np.concatenate([q[:, :10], q[:, 10:][:, to_half_split]], axis=1).reshape(42, 50)
    assert same_bits(arrays["w_q"], pack_by_definition(q, 3))
    kv_a = w[PREFIX + "kv_a_proj_with_mqa.weight"]
    assert same_bits(arrays["w_kv_a"], pack_by_definition(np.concatenate([kv_a[:20], kv_a[20:][to_half_split]]), 1))
    kv_b = w[PREFIX + "kv_b_proj.weight"].reshape(3, 16, 20)
    assert same_bits(arrays["w_uk"], pack_by_definition(kv_b[:, :10].transpose(0, 2, 1).reshape(60, 10), 3))
    assert same_bits(arrays["w_uv"], pack_by_definition(kv_b[:, 10:].reshape(18, 20), 3))
    assert same_bits(arrays["w_o"], pack_by_definition(w[PREFIX + "o_proj.weight"], 1))


# ---- there and back ---------------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_export_gives_the_same_bits_as_cast(name, dtype):
    cfg, w = CONFIGS[name], random_weights(CONFIGS[name], np.float64)
    out = weights.export(cfg, PREFIX, loaded(cfg, w, DTYPES[dtype]))
    assert list(out) == list(w)
    for key, array in w.items():
        assert same_bits(out[key], dtypes.cast(array, DTYPES[dtype])), key


@pytest.mark.parametrize("case", ["v2_lite", "v3_yarn", "minicpm3", "longcat_flash"])
def test_whole_checkpoints_are_taken_by_prefix(case):
    cfg = fm.MLAConfig.from_hf(HF_CASES / case)
    w = load_file(HF_CASES / case / "model.safetensors")
    for prefix in ("model.layers.0.self_attn.0.", "model.layers.0.self_attn.1.") if case == "longcat_flash" else (PREFIX,):
        out = weights.export(cfg, prefix, loaded(cfg, w, prefix=prefix))
        assert all(same_bits(array, w[name]) for name, array in out.items())


def test_tensors_and_strided_arrays_and_bfloat16_are_taken():
    cfg = CONFIGS["q_lora"]
    w = random_weights(cfg)
    expected = loaded(cfg, w)
    strided = {name: np.asfortranarray(array) for name, array in w.items()}
    tensors = {name: ms.Tensor(array) for name, array in w.items()}
    for mapping in (strided, tensors):
        assert all(same_bits(array, expected[name]) for name, array in loaded(cfg, mapping).items())
    bf16 = {name: dtypes.cast(array, ms.bfloat16) for name, array in w.items()}
    out = weights.export(cfg, PREFIX, loaded(cfg, {name: ms.Tensor.from_numpy(array) for name, array in bf16.items()}, ms.bfloat16))
    assert all(same_bits(out[name], array) for name, array in bf16.items())


def test_a_prefix_is_whole_words():
    cfg = CONFIGS["plain"]
    w = {**random_weights(cfg, prefix="model.layers.1.self_attn."), **random_weights(cfg, prefix="model.layers.10.self_attn.")}
    loaded(cfg, w, prefix="model.layers.1.self_attn")
    with pytest.raises(ValueError, match="missing"):
        loaded(cfg, w, prefix="model.layers.1")


def test_ignored_names():
    cfg = CONFIGS["plain"]
    w = {**random_weights(cfg), PREFIX + "rotary_emb.inv_freq": np.zeros(2, np.float32), "lm_head.weight": np.zeros(3, np.int8)}
    loaded(cfg, w)
    w[PREFIX + "indexer.wq_b.weight"] = np.zeros(3, np.float32)
    with pytest.raises(ValueError, match="unknown.*indexer"):
        loaded(cfg, w)
    with pytest.warns(UserWarning, match="index_topk"):
        sparse = fm.MLAConfig(**ODD, index_topk=64)
    loaded(sparse, w)


# ---- casts ------------------------------------------------------------------------------------------------------------------------------------------

def bf16_bits(x):
    return dtypes.cast(np.asarray([x], np.float64), ms.bfloat16).view(np.uint16)[0]


def test_float64_to_bfloat16_rounds_once():
    tie = 1 + 2.0**-8  # halfway between 1 and the next bfloat16: even wins
    assert bf16_bits(tie) == bf16_bits(1.0)
    assert bf16_bits(tie + 2.0**-40) == bf16_bits(1.0) + 1  # float32 in between would lose the last bit and tie
    assert bf16_bits(tie - 2.0**-40) == bf16_bits(1.0)
    assert bf16_bits(1 + 3 * 2.0**-8) == bf16_bits(1.0) + 2
    assert bf16_bits(-tie - 2.0**-40) == bf16_bits(-1.0) + 1


def test_bfloat16_of_special_values():
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3.5e38, 1e-45], np.float64)
    with np.errstate(over="ignore"):
        narrow = x.astype(np.float32)
    for array in (x, narrow):
        bits = dtypes.cast(array, ms.bfloat16).view(np.uint16)
        assert list(bits[:4]) == [0, 0x8000, 0x7F80, 0xFF80] and np.isnan(ms.Tensor.from_numpy(bits.view(np_dtype.bfloat16)).float().asnumpy()[4])
        assert bits[5] == 0x7F80 and bits[6] == 0
    with np.errstate(all="raise"):
        assert bf16_bits(np.nan) & 0x7FFF > 0x7F80


def test_bfloat16_rounds_as_mindspore_does():
    x = np.random.default_rng(2).standard_normal(10000).astype(np.float32)
    assert same_bits(dtypes.cast(x, ms.bfloat16), ms.Tensor(x).astype(ms.bfloat16).asnumpy())
    assert same_bits(dtypes.cast(dtypes.cast(x, ms.bfloat16), ms.float32), ms.Tensor(x).astype(ms.bfloat16).float().asnumpy())


# ---- refusals ---------------------------------------------------------------------------------------------------------------------------------------

def broken(cfg, name, value):
    w = random_weights(cfg)
    if value is None:
        del w[PREFIX + name]
    else:
        w[PREFIX + name] = value
    return w


@pytest.mark.parametrize("name, value, error, words", [
    ("o_proj.weight", None, ValueError, "missing model.layers.0.self_attn.o_proj.weight"),
    ("q_a_proj.weight", np.zeros((2, 2), np.float32), ValueError, "unknown model.layers.0.self_attn.q_a_proj.weight"),
    ("o_proj.bias", np.zeros(50, np.float32), ValueError, "unknown .*o_proj.bias"),
    ("o_proj.weight", np.zeros((50, 17), np.float32), ValueError, r"o_proj.weight: shape \(50, 17\) .* must be \(50, 18\)"),
    ("o_proj.weight", np.zeros((18, 50), np.float32), ValueError, "o_proj.weight: shape"),
    ("kv_a_layernorm.weight", np.zeros((20, 1), np.float32), ValueError, "kv_a_layernorm.weight: shape"),
    ("o_proj.weight", np.zeros((50, 18), np.int8), TypeError, "o_proj.weight: dtype int8"),
    ("o_proj.weight", np.zeros((50, 18), np.uint16), TypeError, "o_proj.weight: dtype uint16"),
    ("o_proj.weight", np.zeros((50, 18), np.complex64), TypeError, "o_proj.weight: dtype complex64"),
    ("o_proj.weight", [[0.0]], TypeError, "o_proj.weight: list"),
    ("o_proj.weight_scale_inv", np.zeros((1, 1), np.float32), ValueError, "weight_scale_inv.*fp8"),
])
def test_load_refuses_and_changes_nothing(name, value, error, words):
    cfg = CONFIGS["plain"]
    arrays = layer_arrays(cfg, ms.float32)
    for array in arrays.values():
        array[:] = 7
    with pytest.raises(error, match=words):
        weights.load(cfg, broken(cfg, name, value), PREFIX, arrays, ms.float32)
    assert all((array == 7).all() for array in arrays.values())


def test_load_refuses_what_is_no_mapping():
    with pytest.raises(TypeError, match="mapping"):
        loaded(CONFIGS["plain"], [1, 2])
    with pytest.raises(TypeError, match="prefix"):
        loaded(CONFIGS["plain"], random_weights(CONFIGS["plain"]), prefix=None)
