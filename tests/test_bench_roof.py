"""The roof that benchmarks compare with, against values worked out by hand for a V2-Lite layer: milliseconds at 353 GFLOP/s and 34 GB/s."""
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))

import roof  # noqa: E402  (after the path)
from ms_flashmla import MLAConfig  # noqa: E402

V2_LITE = MLAConfig(hidden_size=2048, num_heads=16, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
SEED = MLAConfig(hidden_size=1536, num_heads=12, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=0, v_head_dim=128, rope_mode="full")
PEAK = (353.0, 34.0)  # GFLOP/s, GB/s


def in_ms(work):
    return roof.roof_us(work, *PEAK) / 1e3


@pytest.mark.parametrize("batch, length, itemsize, expected", [(1, 8192, 4, 0.81), (1, 8192, 2, 0.81), (1, 32768, 4, 3.23), (8, 8192, 4, 6.46)])
def test_decode_core(batch, length, itemsize, expected):
    assert round(in_ms([roof.core(V2_LITE, batch, length - 1, 1, itemsize)]), 2) == expected


def test_core_of_one_head_is_bound_by_memory():
    stage = roof.core(V2_LITE, 1, 8191, 1, 4, heads=1)
    assert stage.bytes == 8192 * 576 * 4 and stage.us(*PEAK) == pytest.approx(stage.bytes / 34e3)


@pytest.mark.parametrize("batch, length, itemsize, expected", [(1, 2048, 4, 1.82), (1, 2048, 2, 1.01), (1, 32768, 4, 4.85), (1, 32768, 2, 4.04),
                                                               (8, 8192, 4, 8.08), (8, 8192, 2, 7.27)])
def test_decode_layer(batch, length, itemsize, expected):
    assert round(in_ms(roof.layer(V2_LITE, batch, length - 1, 1, itemsize)), 2) == expected


@pytest.mark.parametrize("tokens, expected", [(512, 43.7), (2048, 221)])
def test_prefill(tokens, expected):
    assert in_ms(roof.layer(V2_LITE, 1, 0, tokens, 4)) == pytest.approx(expected, abs=0.05 if expected < 100 else 0.5)


def test_not_decoupled_decode_decompresses_every_key():
    core = roof.layer(SEED, 1, 2047, 1, 4)[1]
    assert core.flops == 2 * 12 * (2048 * 128 + 2047 * 512 * 128 + 2048 * 512)


def test_pairs_count_the_causal_triangle():
    assert roof.pairs(3, 5, 4) == 3 * (6 + 7 + 8 + 9)


@pytest.mark.parametrize("tokens", [1, 4])
def test_more_queries_never_take_less(tokens):
    fewer, more = (sum(stage.flops for stage in roof.layer(V2_LITE, 1, 4096, t, 4)) for t in (tokens, tokens + 1))
    assert more > fewer
