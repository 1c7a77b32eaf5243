"""Four layers computed by HF transformers, through the public API: from_hf, load_hf_weights, LatentKVCache, every step, and what the cache holds at the end."""
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import mindspore as ms
import ms_flashmla as fm
import reference
from cases import LayerCase, assert_close, to_ms, to_np
from driver import Driver

FOLDER = Path(__file__).parent / "hf_cases"
CASES = ["v2_lite", "v3_yarn", "minicpm3", "longcat_flash"]
FORMS = ["config.json", "config_legacy.json"]
STEPS = ["prefill", "dec0", "dec1", "dec2", "dec3", "chunk"]
TOKENS = 18


def prefix_of(case):
    return "model.layers.0.self_attn." + ("0." if case == "longcat_flash" else "")


def attention_weights(case):
    prefix = prefix_of(case)
    return {name[len(prefix):]: x for name, x in load_file(FOLDER / case / "model.safetensors").items() if name.startswith(prefix)}


def expected_rows(case, ref):
    """[2, 18, r + rope] in this project's order."""
    k_pe = ref["cache.kpe"]
    if case == "v2_lite":
        k_pe = np.concatenate([k_pe[..., 0::2], k_pe[..., 1::2]], -1)
    return np.concatenate([ref["cache.kv"], k_pe], -1)


def rows_of(data, table, tokens):
    at = np.arange(tokens)
    return np.stack([data[row[at // data.shape[1]], at % data.shape[1]] for row in table])


@pytest.mark.parametrize("case", CASES)
def test_the_reference_itself(case):
    ref = load_file(FOLDER / case / "ref.safetensors")
    cfg = fm.MLAConfig.from_hf(str(FOLDER / case / "config.json"))
    cache = np.full((10, 4, cfg.kv_lora_rank + cfg.qk_rope_head_dim), np.nan)
    table, done = np.array([[3, 1, 7, 0, 9], [5, 2, 4, 6, 8]]), 0
    for step in STEPS:
        t = ref[f"{step}.hidden"].shape[1]
        out, _ = reference.mla_layer(cfg, attention_weights(case), ref[f"{step}.hidden"], cache, "float32", table, [t, t], [done, done])
        assert_close(out, ref[f"{step}.out"], "float32")
        done += t
    assert_close(rows_of(cache, table, TOKENS), expected_rows(case, ref), "float32")


@pytest.mark.parametrize("packed", [False, True], ids=["[B,S,hidden]", "packed"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_every_step_and_the_cache(case, form, packed, mode):
    ref = load_file(FOLDER / case / "ref.safetensors")
    cfg = fm.MLAConfig.from_hf(str(FOLDER / case / form))
    layer = fm.MLALayer(cfg, dtype=ms.float32)
    layer.load_hf_weights(load_file(FOLDER / case / "model.safetensors"), prefix=prefix_of(case))
    cache, done = fm.LatentKVCache(cfg, num_blocks=12, block_size=4), 0
    for step in STEPS:
        hidden = ref[f"{step}.hidden"]
        t = hidden.shape[1]
        for sequence in (0, 1):
            cache.allocate(sequence, done + t)
        x = hidden.reshape(2 * t, -1) if packed else hidden
        out = layer(to_ms(x), cache.data, cache.block_table([0, 1]), to_ms([t, t], "int32"), to_ms([done, done], "int32"))
        assert_close(to_np(out).reshape(hidden.shape), ref[f"{step}.out"], "float32", what=step)
        done += t
    rows = rows_of(to_np(cache.data), cache.block_table([0, 1]).asnumpy(), TOKENS)
    assert_close(rows, expected_rows(case, ref), "float32", what="cache")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_half_precision(case, dtype, mode):
    cfg = fm.MLAConfig.from_hf(json.loads((FOLDER / case / "config.json").read_text()))
    weights = {name: reference.rounded(x, dtype).astype(np.float32) for name, x in attention_weights(case).items()}
    run = Driver(LayerCase(case, {}, dtype, dtype, dtype, block_size=4), weights, cfg)
    run.step([11, 11], batched=True)
    run.step([1, 1])
    run.step([3, 3], residual=True)
