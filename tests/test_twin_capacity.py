"""Every stage of the Ascend kernel, run by the twin's clock for shapes of the tiling's grid on every SKU: an address beyond UB, L1, L0A, L0B or L0C is a
fault of the twin, whatever the tiling has counted."""
from dataclasses import replace

import pytest

from ms_flashmla import profile
from test_twin_layer import twin_library  # noqa: F401  (builds the library)
from tiling_cases import ASCENDS, MODELS, Case

SHAPES = [
    *[replace(model, batch=2, s_q=s_q, s_kv=s_kv, page=page) for model in MODELS for s_q, s_kv, page in ((1, 300, 64), (40, 170, 16))],
    *[Case(heads=heads, batch=3, s_kv=520, page=128) for heads in (1, 17, 40, 96, 128)],
    *[Case(heads=2, latent=latent, nope=nope, rope=rope, v=v, hidden=200, q_lora=q_lora, batch=2, s_q=9, s_kv=90)
      for latent, nope, rope, v, q_lora in ((1024, 256, 64, 256, 0), (1000, 192, 64, 6, 1536), (512, 256, 128, 256, 8192), (1, 10, 4, 6, 1), (100, 128, 2, 128, 64))],
    Case(heads=2, batch=2, s_q=300, s_kv=300), Case(heads=3, nope=256, rope=0, v=200, mode="full", s_q=70, s_kv=200),
]


@pytest.mark.parametrize("machine", ASCENDS)
def test_no_memory_is_exceeded(machine):
    for shape in SHAPES:
        for dtype in ("float16", "bfloat16"):
            assert profile.simulate(machine, replace(shape, dtype=dtype).problem())["us"] > 0


WIDEST = dict(heads=2, hidden=200, batch=2, s_kv=300)
AT_THE_LIMIT = [
    Case(**WIDEST, latent=2032, nope=512, rope=224, v=2032), Case(**WIDEST, latent=512, nope=512, rope=224, v=64, q_lora=8192),
    Case(**{**WIDEST, "s_kv": 400}, latent=16, nope=512, rope=224, v=2032, s_q=300), Case(**WIDEST, latent=2032, nope=384, rope=0, v=2032, mode="full"),
    Case(**WIDEST, latent=512, nope=384, rope=0, v=128, mode="full"), Case(**WIDEST, latent=256, nope=16, rope=224, v=16),
]


@pytest.mark.parametrize("shape", AT_THE_LIMIT)
def test_widest_shapes_fit(shape):
    assert profile.simulate("ascend950pr_950z", shape.problem())["us"] > 0


@pytest.mark.parametrize("changes, words", [
    ({"latent": 2048}, "kv_lora_rank is 2048, expected at most 2032"), ({"v": 2048}, "v_head_dim is 2048"), ({"rope": 226}, "qk_rope_head_dim is 226, expected at most 224"),
    ({"nope": 513}, "qk_nope_head_dim is 513"), ({"nope": 386, "rope": 0, "mode": "full"}, "qk_nope_head_dim, all of it rotated, is 386"), ({"q_lora": 8193}, "q_lora_rank is 8193"),
    ({"hidden": 65536}, "hidden_size is 65536")])
def test_wider_shapes_are_refused_by_name(changes, words):
    with pytest.raises(ValueError, match=words):
        profile.simulate("ascend950pr_950z", Case(**{**WIDEST, **changes}).problem())
