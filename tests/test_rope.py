"""RoPE tables against what the models themselves computed, and against the formulas where no model is at hand."""
import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

import ms_flashmla as fm
from ms_flashmla import rope

HF_CASES = Path(__file__).parent / "hf_cases"
SIZES = dict(hidden_size=48, num_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
STEPS = ("prefill", "dec0", "dec1", "dec2", "dec3", "chunk")


@pytest.mark.parametrize("case", ["v2_lite", "v3_yarn", "minicpm3", "longcat_flash"])
def test_table_and_scale_are_the_models_own(case):
    cfg = fm.MLAConfig.from_hf(HF_CASES / case)
    table, half = rope.rope_table(cfg), cfg.rope_dim // 2
    with safe_open(str(HF_CASES / case / "ref.safetensors"), "np") as ref:
        assert cfg.softmax_scale == pytest.approx(float(ref.metadata()["softmax_scale"]), rel=1e-12)
        names = ("freqs_re", "freqs_im") if case == "v2_lite" else ("cos", "sin")
        for step in STEPS:
            rows = table[ref.get_tensor(f"{step}.position_ids")]
            cos, sin = (ref.get_tensor(f"{step}.{name}")[..., :half] for name in names)
            # The model's angles are float32: position 17 times half a unit in the last place of a frequency near 1.
            np.testing.assert_allclose(rows[..., :half], cos, atol=2e-6, rtol=0)
            np.testing.assert_allclose(rows[..., half:], sin, atol=2e-6, rtol=0)


def config(**changes):
    return fm.MLAConfig(**{**SIZES, **changes})


def test_default_and_linear():
    plain, linear = config(), config(rope_scaling={"type": "linear", "factor": 4.0})
    assert rope.rope_table(plain).dtype == np.float32 and rope.rope_table(plain).shape == (4096, 8)
    np.testing.assert_allclose(rope.inverse_frequencies(8, 1e4, None), [1, 0.1, 0.01, 0.001], rtol=1e-15)
    np.testing.assert_array_equal(rope.rope_table(linear)[::4], rope.rope_table(plain)[:1024])
    np.testing.assert_array_equal(rope.rope_table(plain)[0], [1, 1, 1, 1, 0, 0, 0, 0])


def test_yarn_interpolates_slow_dimensions_and_keeps_fast_ones():
    scaling = rope.normalize_rope_scaling(
        dict(type="yarn", factor=40, original_max_position_embeddings=4096), 64, 163840)
    plain, yarn = rope.inverse_frequencies(64, 1e4, None), rope.inverse_frequencies(64, 1e4, scaling)
    # DeepSeek-V3: beta_fast 32 and beta_slow 1 give dimensions 10 and 23.
    np.testing.assert_allclose(yarn[:11], plain[:11], rtol=1e-15)
    np.testing.assert_allclose(yarn[23:], plain[23:] / 40, rtol=1e-15)
    assert ((yarn[11:23] < plain[11:23]) & (yarn[11:23] > plain[11:23] / 40)).all()


def test_yarn_without_truncation_has_a_ramp_between_whole_dimensions():
    form = dict(type="yarn", factor=40, original_max_position_embeddings=4096)
    cut, smooth = (rope.inverse_frequencies(64, 1e4, rope.normalize_rope_scaling({**form, "truncate": t}, 64, 163840)) for t in (True, False))
    low = 64 * math.log(4096 / (32 * 2 * math.pi)) / (2 * math.log(1e4))
    high = 64 * math.log(4096 / (2 * math.pi)) / (2 * math.log(1e4))
    keep = 1 - np.clip((np.arange(32) - low) / (high - low), 0, 1)
    plain = rope.inverse_frequencies(64, 1e4, None)
    np.testing.assert_allclose(smooth, plain / 40 * (1 - keep) + plain * keep, rtol=1e-14)
    assert (cut != smooth).any()


@pytest.mark.parametrize("keys, expected", [
    (dict(), 0.1 * math.log(40) + 1),
    (dict(mscale=0.707, mscale_all_dim=0.707), 1.0),
    (dict(mscale=1.0, mscale_all_dim=0.5), (0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1)),
    (dict(mscale=0.5), 0.1 * math.log(40) + 1),
    (dict(mscale_all_dim=0.5), 0.1 * math.log(40) + 1),
    (dict(mscale=1.0, mscale_all_dim=0.5, attention_factor=0.9), 0.9),
])
def test_yarn_attention_factor(keys, expected):
    cfg = config(rope_scaling=dict(type="yarn", factor=40.0, original_max_position_embeddings=32, **keys))
    assert rope.attention_factor(cfg.rope_scaling) == pytest.approx(expected, rel=1e-14)
    assert rope.rope_table(cfg)[0, 0] == np.float32(expected)


def test_yarn_factor_from_the_lengths():
    cfg = config(rope_scaling=dict(type="yarn", original_max_position_embeddings=1024))
    assert cfg.rope_scaling["factor"] == 4.0


def test_longrope_takes_short_or_long_factors():
    form = dict(type="longrope", original_max_position_embeddings=64, short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[1.0, 2.0, 3.0, 4.0])
    short = config(rope_scaling=form, max_position_embeddings=256)
    long = dataclasses.replace(short, use_long_factors=True)
    m = math.sqrt(1 + math.log(4) / math.log(64))
    plain = rope.inverse_frequencies(8, 1e4, None)
    for cfg, factors in ((short, form["short_factor"]), (long, form["long_factor"])):
        angle = np.arange(cfg.max_positions)[:, None] * (plain / factors)
        np.testing.assert_allclose(rope.rope_table(cfg), m * np.hstack([np.cos(angle), np.sin(angle)]), atol=1e-7)
    assert len(rope.rope_table(short)) == 64 and len(rope.rope_table(long)) == 256


def test_full_mode_rotates_the_whole_head():
    assert rope.rope_table(config(rope_mode="full", qk_rope_head_dim=0)).shape == (4096, 16)


def test_layers_share_one_table():
    a, b = rope.shared_rope_table(config()), rope.shared_rope_table(config(num_heads=3))
    assert a is b
    assert rope.shared_rope_table(config(rope_theta=5e4)) is not a
