"""The attention layer of Hugging Face transformers, as its users get it: latents in a DynamicCache, expanded in every call, SDPA."""

import torch
from transformers import DynamicCache
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as hf
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config

import cases
import timing
from ms_flashmla import demo_models
from peers.torch_mla import DTYPES, tensor
from pool import Pool, to_dtype

COPIES = 2  # its own temporaries exceed the caches


def _config(model):
    """A V3 configuration with the model's sizes: that class computes V2's attention too."""
    known = ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
             "rope_theta", "rope_scaling", "max_position_embeddings")
    source = demo_models.MODELS[model]
    config = DeepseekV3Config(**{key: source[key] for key in known}, num_key_value_heads=source["num_attention_heads"], attention_bias=False)
    config._attn_implementation = "sdpa"
    return config


def build(case, dtype):
    with torch.no_grad():
        return _layer(case, dtype)


def _layer(case, dtype):
    config, torch_dtype, rank = _config(case.model), DTYPES[dtype], case.cfg.kv_lora_rank
    rows = tensor(Pool.of(case.cfg, dtype).view(case, 0), dtype)[:, None, :case.context]
    hidden, residual = (tensor(to_dtype(x, dtype), dtype).view(case.batch, case.tokens, -1) for x in case.hidden_and_residual())
    positions = torch.arange(case.context, case.length)[None]
    embeddings = hf.DeepseekV3RotaryEmbedding(config)(hidden, positions)
    steps = []
    for _ in range(COPIES):
        layer = hf.DeepseekV3Attention(config, 0).to(torch_dtype).eval()
        layer.load_state_dict({name: torch.from_numpy(array).to(torch_dtype) for name, array in cases.random_weights(case.model).items()})
        cache = DynamicCache()
        if case.context:
            cache.update(rows[..., :rank].contiguous(), rows[..., rank:].contiguous(), 0)
        steps.append((layer, cache))

    def call(layer, cache):
        with torch.inference_mode():
            return layer(hidden, embeddings, None, cache)[0] + residual

    def seconds(i):
        layer, cache = steps[i]
        taken = timing.System([lambda: call(layer, cache)], None).step()
        _forget(cache, case)
        return taken

    def output():
        layer, cache = steps[0]
        out = call(layer, cache).float().numpy()
        _forget(cache, case)
        return out

    return timing.System([lambda: None] * COPIES, output, seconds=seconds)


def _forget(cache, case):
    """Takes the rows of the last call out again."""
    if case.context:
        cache.crop(-case.tokens)
    else:
        cache.layers.clear()
