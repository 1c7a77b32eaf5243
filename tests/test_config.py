"""MLAConfig: what it accepts, what it refuses and with which words, and how it reads Hugging Face configs."""
import dataclasses
import json
import math
from pathlib import Path

import pytest

import ms_flashmla as fm

HF_CASES = Path(__file__).parent / "hf_cases"
SIZES = dict(hidden_size=48, num_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
HF = dict(model_type="deepseek_v3", hidden_size=7168, num_attention_heads=128, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128,
          qk_rope_head_dim=64, v_head_dim=128, max_position_embeddings=163840, rope_theta=10000)
YARN = dict(type="yarn", factor=40, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0)
LONGROPE = dict(rope_type="longrope", original_max_position_embeddings=64, short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[1.0, 2.0, 3.0, 4.0])


def config(**changes):
    return fm.MLAConfig(**{**SIZES, **changes})


def from_hf(**changes):
    return fm.MLAConfig.from_hf({**HF, **changes})


@pytest.mark.parametrize("case", ["v2_lite", "v3_yarn", "minicpm3", "longcat_flash"])
def test_both_forms_of_a_config_are_equal(case):
    new, old = (fm.MLAConfig.from_hf(HF_CASES / case / name) for name in ("config.json", "config_legacy.json"))
    assert new == old
    assert fm.MLAConfig.from_hf(str(HF_CASES / case)) == new
    assert fm.MLAConfig.from_hf(json.loads((HF_CASES / case / "config.json").read_text())) == new


def test_an_object_with_to_dict_and_a_nested_text_config_are_read():
    class Object:
        def to_dict(self):
            return {"model_type": "multimodal", "hidden_size": 1, "text_config": dict(HF)}

    assert fm.MLAConfig.from_hf(Object()) == from_hf()


@pytest.mark.parametrize("mscale_all_dim, scale", [(1.0, 0.1352338), (0.707, 0.1147214), (None, 0.0721688)])
def test_softmax_scale_takes_mscale_all_dim_squared(mscale_all_dim, scale):
    assert from_hf(rope_scaling={**YARN, "mscale_all_dim": mscale_all_dim}).softmax_scale == pytest.approx(scale, abs=5e-8)


def test_replace_computes_the_scale_again_and_keeps_a_given_one():
    yarn = from_hf(rope_scaling=YARN)
    assert dataclasses.replace(yarn, rope_scaling=None).softmax_scale == pytest.approx(192**-0.5)
    assert dataclasses.replace(config(softmax_scale=0.5), rope_theta=5e4).softmax_scale == 0.5


def test_longcat_scales_its_latents_unless_told_otherwise():
    cfg = from_hf(model_type="longcat_flash")
    assert cfg.q_lora_scale == pytest.approx(math.sqrt(7168 / 1536)) and cfg.kv_lora_scale == pytest.approx(math.sqrt(7168 / 512))
    cfg = from_hf(model_type="longcat_flash", mla_scale_q_lora=False, mla_scale_kv_lora=False)
    assert (cfg.q_lora_scale, cfg.kv_lora_scale) == (1.0, 1.0)


def test_from_hf_defaults():
    cfg = from_hf(rms_norm_eps=1e-5)
    assert cfg.rope_interleave and cfg.q_norm_eps == cfg.kv_norm_eps == 1e-6 and not cfg.attention_bias
    assert not from_hf(model_type="minicpm3").rope_interleave
    assert from_hf(model_type="minicpm3", rope_interleave=True).rope_interleave
    assert not from_hf(rope_interleave=False).rope_interleave
    assert from_hf(q_lora_rank=None).q_lora_rank is None
    assert from_hf(attention_bias=True).attention_bias


def test_overrides():
    cfg = fm.MLAConfig.from_hf(HF, num_heads=16)
    assert cfg.num_heads == 16 and cfg == dataclasses.replace(from_hf(), num_heads=16)


def test_a_sparse_indexer_is_kept_with_a_warning():
    with pytest.warns(UserWarning, match="index_topk"):
        cfg = from_hf(index_topk=2048, index_n_heads=64, index_head_dim=128)
    assert cfg.index_topk == 2048


def test_rope_scaling_default_is_plain_rope():
    assert config(rope_scaling={"rope_type": "default"}) == config(rope_scaling=None)
    assert from_hf(rope_parameters={"rope_theta": 10000, "rope_type": "default"}, rope_theta=None) == from_hf()


@pytest.mark.parametrize("changes, words", [
    (dict(quantization_config={"quant_method": "fp8"}), "quantization_config"),
    (dict(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "dynamic"),
    (dict(rope_scaling={"type": "llama3", "factor": 2.0}), "llama3"),
    (dict(rope_scaling={"factor": 2.0}), "rope_type"),
    (dict(rope_scaling={"type": "yarn", "rope_type": "linear", "factor": 2.0}), "differ"),
    (dict(rope_scaling={"type": "linear"}), "factor"),
    (dict(rope_scaling={**YARN, "llama_4_scaling_beta": 0.1}), "llama_4_scaling_beta"),
    (dict(rope_scaling={**YARN, "factor": -1}), "factor"),
    (dict(rope_scaling={**YARN, "factor": math.nan}), "factor"),
    (dict(rope_scaling="yarn"), "rope_scaling"),
    (dict(rope_parameters={"full_attention": {"rope_type": "default"}}), "layer type"),
    (dict(rope_scaling=YARN, rope_parameters={"rope_type": "default"}), "rope_parameters"),
    (dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
    (dict(sliding_window=4096), "sliding_window"),
    (dict(mla_use_nope=True), "mla_use_nope"),
    (dict(use_qk_norm=True), "use_qk_norm"),
    (dict(num_key_value_heads=8), "num_key_value_heads"),
    (dict(num_attention_heads=256), "num_heads"),
    (dict(kv_lora_rank=None), "kv_lora_rank"),
    (dict(text_config=[1]), "text_config"),
])
def test_from_hf_refuses(changes, words):
    with pytest.raises(ValueError, match=words):
        from_hf(**changes)


def test_from_hf_of_another_model_and_of_another_thing(tmp_path):
    with pytest.raises(ValueError, match="kv_lora_rank.*llama"):
        fm.MLAConfig.from_hf({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4})
    with pytest.raises(ValueError, match="kv_lora_rank"):
        fm.MLAConfig.from_hf({})
    with pytest.raises(TypeError, match="source"):
        fm.MLAConfig.from_hf(3)
    with pytest.raises(FileNotFoundError):
        fm.MLAConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="JSON"):
        fm.MLAConfig.from_hf(tmp_path)


@pytest.mark.parametrize("changes, error, words", [
    (dict(num_heads=0), ValueError, "num_heads: 0"),
    (dict(num_heads=129), ValueError, "num_heads: 129 .* 1 to 128"),
    (dict(num_heads=True), TypeError, "num_heads"),
    (dict(num_heads=4.0), TypeError, "num_heads"),
    (dict(hidden_size="48"), TypeError, "hidden_size"),
    (dict(hidden_size=-1), ValueError, "hidden_size"),
    (dict(hidden_size=2**20 + 1), ValueError, "hidden_size: 1048577 .* 1 to 1048576"),
    (dict(kv_lora_rank=2**21), ValueError, "kv_lora_rank"),
    (dict(q_norm_eps=1e-50), ValueError, "q_norm_eps: 1e-50 .* above 0 in float32"),
    (dict(softmax_scale=1e-60), ValueError, "softmax_scale"),
    (dict(kv_lora_scale=1e39), ValueError, "kv_lora_scale"),
    (dict(rope_theta=10**400), ValueError, "rope_theta: inf"),
    (dict(index_topk=2**70), ValueError, "index_topk"),
    (dict(rope_scaling={"rope_type": "yarn", 1: 2, "b": 3}), ValueError, "rope_scaling: '1', 'b'"),
    (dict(kv_lora_rank=0), ValueError, "kv_lora_rank"),
    (dict(v_head_dim=0), ValueError, "v_head_dim"),
    (dict(qk_nope_head_dim=0), ValueError, "qk_nope_head_dim"),
    (dict(qk_rope_head_dim=7), ValueError, "qk_rope_head_dim: 7 .* even"),
    (dict(qk_rope_head_dim=0), ValueError, "qk_rope_head_dim"),
    (dict(qk_rope_head_dim=-2), ValueError, "qk_rope_head_dim"),
    (dict(rope_mode="full"), ValueError, "qk_rope_head_dim: 8 .* must be 0"),
    (dict(rope_mode="full", qk_rope_head_dim=0, qk_nope_head_dim=15), ValueError, "qk_nope_head_dim: 15 .* even"),
    (dict(rope_mode="half"), ValueError, "rope_mode: 'half'"),
    (dict(q_lora_rank=0), ValueError, "q_lora_rank"),
    (dict(q_lora_rank=False), TypeError, "q_lora_rank"),
    (dict(index_topk=0), ValueError, "index_topk"),
    (dict(max_position_embeddings=0), ValueError, "max_position_embeddings"),
    (dict(rope_theta=0.0), ValueError, "rope_theta"),
    (dict(rope_theta=math.nan), ValueError, "rope_theta"),
    (dict(rope_theta=True), TypeError, "rope_theta"),
    (dict(q_norm_eps=-1e-6), ValueError, "q_norm_eps"),
    (dict(kv_norm_eps=None), TypeError, "kv_norm_eps"),
    (dict(kv_lora_scale=math.inf), ValueError, "kv_lora_scale"),
    (dict(q_lora_scale=2.0), ValueError, "q_lora_scale"),
    (dict(softmax_scale=math.nan), ValueError, "softmax_scale"),
    (dict(softmax_scale=True), TypeError, "softmax_scale"),
    (dict(rope_interleave=1), TypeError, "rope_interleave"),
    (dict(attention_bias="no"), TypeError, "attention_bias"),
    (dict(use_long_factors=1), TypeError, "use_long_factors"),
    (dict(rope_scaling=[]), TypeError, "rope_scaling"),
    (dict(rope_scaling={"rope_type": "ntk"}), ValueError, "ntk"),
    (dict(rope_scaling={**LONGROPE, "short_factor": [1.0] * 3}), ValueError, "short_factor"),
    (dict(rope_scaling={**LONGROPE, "long_factor": None}), ValueError, "long_factor"),
    (dict(rope_scaling={**LONGROPE, "long_factor": [1.0, 2.0, 3.0, -4.0]}), ValueError, r"long_factor\[3\]"),
])
def test_config_refuses(changes, error, words):
    with pytest.raises(error, match=words):
        config(**changes)


def test_longrope_reaches_original_positions_only_unless_long_factors_are_asked_for():
    cfg = config(rope_scaling=LONGROPE, max_position_embeddings=256)
    assert cfg.max_positions == 64
    assert dataclasses.replace(cfg, use_long_factors=True).max_positions == 256
