"""The demo's built-in models: random weights of real sizes, written as Hugging Face checkpoints so that one path loads everything."""

import json
import os

import mindspore as ms
import numpy as np

from . import dtypes, weights
from .checkpoint import write_checkpoint
from .config import MLAConfig

_YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}

MODELS = {  # name -> config.json
    "v2-lite": {"model_type": "deepseek_v2", "hidden_size": 2048, "num_attention_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512,
                "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_theta": 10000, "max_position_embeddings": 163840,
                "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
    # DeepSeek-V3 as one of 8 tensor-parallel ranks sees it: 16 of its 128 heads.
    "v3-tp8": {"model_type": "deepseek_v3", "hidden_size": 7168, "num_attention_heads": 16, "q_lora_rank": 1536, "kv_lora_rank": 512,
               "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_theta": 10000, "max_position_embeddings": 163840,
               "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    # Not decoupled: RoPE over the whole head of q and of the decompressed k, the cache row is the latent alone.
    "seed": {"model_type": "mla_full_rope", "hidden_size": 1536, "num_attention_heads": 12, "q_lora_rank": None, "kv_lora_rank": 512,
             "qk_nope_head_dim": 128, "qk_rope_head_dim": 0, "v_head_dim": 128, "rope_theta": 10000, "max_position_embeddings": 2048,
             "rope_interleave": False},
}


def load_config(source):
    """MLAConfig of a config dict or a checkpoint folder. Heads without extra dimensions for RoPE are rotated as a whole."""
    if not isinstance(source, dict):
        with open(os.path.join(source, "config.json"), encoding="utf-8") as file:
            source = json.load(file)
    return MLAConfig.from_hf(source, **({"rope_mode": "full"} if source.get("qk_rope_head_dim") == 0 else {}))


def random_weights(cfg, rng, scale=1.0):
    """HF name (without prefix) -> float32 array. Matrices have variance scale^2 / fan-in, so that every activation stays near 1; norms near 1."""
    out = {}
    for name, shape in weights.hf_shapes(cfg).items():
        array = rng.standard_normal(shape, dtype=np.float32)
        out[name] = 1 + array / 10 if "layernorm" in name else array * np.float32(scale / np.sqrt(shape[-1]))
    return out


def write_model(name, folder, rng):
    """A random checkpoint of MODELS[name] in folder: bfloat16, two shards, as published checkpoints come."""
    tensors = random_weights(load_config(MODELS[name]), rng)
    prefix = "model.layers.0.self_attn."
    write_checkpoint(folder, MODELS[name], {prefix + key: dtypes.cast(array, ms.bfloat16) for key, array in tensors.items()}, shards=2)
