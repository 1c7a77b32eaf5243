"""Reading a Hugging Face config into MLAConfig fields."""

import json
import math
import os
from collections.abc import Mapping

_REQUIRED = {  # HF key -> MLAConfig field
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_heads",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
_OPTIONAL = ("q_lora_rank", "rope_mode", "max_position_embeddings", "attention_bias", "rope_interleave", "index_topk")
_FP8 = ("quantization_config", "compression_config")


def _quantized(key, value):
    return f"{key}: {value!r}; quantized (fp8) checkpoints are not supported, only float32, float16 and bfloat16 weights"


# Keys that change what an MLA layer computes and that the operator does not have: key -> is this value harmless?
_UNSUPPORTED = {
    "mla_use_nope": lambda v: v is False,
    "attn_logit_softcapping": lambda v: not v,
    "attn_logit_softcap": lambda v: not v,
    "attention_multiplier": lambda v: v == 1,
    "use_qk_norm": lambda v: v is False,
    "qk_layernorm": lambda v: v is False,
    "attn_output_gate": lambda v: v is False,
    "llama_4_scaling": lambda v: not v,
    "partial_rotary_factor": lambda v: v == 1,
    "attention_method": lambda v: v == "MLA",
}


def _read(source):
    if isinstance(source, Mapping):
        return dict(source)
    if isinstance(source, (str, os.PathLike)):
        path = os.fspath(source)
        if os.path.isdir(path):
            path = os.path.join(path, "config.json")
        with open(path, encoding="utf-8") as file:
            try:
                config = json.load(file)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"source: {path} is not JSON: {error}") from error
        if not isinstance(config, dict):
            raise ValueError(f"source: {path} holds a {type(config).__name__}; a JSON object is needed")
        return config
    if hasattr(source, "to_dict"):
        config = source.to_dict()
        if not isinstance(config, Mapping):
            raise TypeError(f"source: its to_dict() gives a {type(config).__name__}; a dict is needed")
        return dict(config)
    raise TypeError(f"source: {type(source).__name__} is not allowed; give a dict, a path or an object with to_dict()")


def _text_config(config):
    """The language model's part of a multimodal config; a quantization_config outside counts for it too."""
    for key in _FP8:
        if config.get(key):
            raise ValueError(_quantized(key, config[key]))
    nested = config.get("text_config")
    if nested is None:
        return config
    nested = dict(nested.to_dict()) if hasattr(nested, "to_dict") else nested
    if not isinstance(nested, Mapping):
        raise ValueError(f"text_config: a {type(nested).__name__} is not allowed; it must be a dict")
    return _text_config(dict(nested))


def _check_supported(config):
    missing = [key for key in _REQUIRED if config.get(key) is None]
    if missing:
        raise ValueError(f"source: {', '.join(missing)} missing; this is not the config of an MLA model (model_type "
                         f"{config.get('model_type')!r})")
    for key, harmless in _UNSUPPORTED.items():
        if config.get(key) is not None and not harmless(config[key]):
            raise ValueError(f"{key}: {config[key]!r} changes the result and is not supported")
    if config.get("sliding_window") is not None and config.get("use_sliding_window") is not False:
        raise ValueError(f"sliding_window: {config['sliding_window']!r} changes the result and is not supported")
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    if kv_heads is not None and kv_heads != heads:
        raise ValueError(f"num_key_value_heads: {kv_heads!r} is not allowed; MLA has one per query head, {heads!r}")


def _rope(config):
    """(rope_theta, rope_scaling or None) from either form; None values count as absent."""
    forms = {}
    for name in ("rope_parameters", "rope_scaling"):
        form = config.get(name)
        if form is None or form == {}:
            continue
        if not isinstance(form, Mapping):
            raise ValueError(f"{name}: a {type(form).__name__} is not allowed; it must be a dict")
        if any(isinstance(value, Mapping) for value in form.values()):
            raise ValueError(f"{name}: RoPE per layer type ({', '.join(form)}) is not supported")
        forms[name] = {key: value for key, value in form.items() if value is not None}
    theta = config.get("rope_theta")
    for name, form in forms.items():
        theta = form.pop("rope_theta", theta)
        if form.pop("partial_rotary_factor", 1) != 1:
            raise ValueError(f"{name}: partial_rotary_factor changes the result and is not supported")
        kind = form.pop("type", None)
        form.setdefault("rope_type", kind if kind is not None or name == "rope_scaling" else "default")
        if kind is not None and kind != form["rope_type"]:
            raise ValueError(f"{name}: type {kind!r} and rope_type {form['rope_type']!r} differ")
    if len(forms) == 2 and forms["rope_parameters"] != forms["rope_scaling"]:
        raise ValueError(f"rope_parameters: {forms['rope_parameters']!r} and rope_scaling {forms['rope_scaling']!r} differ; give one")
    scaling = next(iter(forms.values()), None)
    if scaling is not None and scaling["rope_type"] != "default" and config.get("original_max_position_embeddings") is not None:
        scaling.setdefault("original_max_position_embeddings", config["original_max_position_embeddings"])
    return (10000.0 if theta is None else theta), scaling


def fields_from_hf(source):
    """MLAConfig keyword arguments from a Hugging Face config (see MLAConfig.from_hf)."""
    config = _text_config(_read(source))
    _check_supported(config)
    fields = {field: config[key] for key, field in _REQUIRED.items()}
    fields.update({key: config[key] for key in _OPTIONAL if config.get(key) is not None})
    model_type = str(config.get("model_type", ""))
    if model_type == "minicpm3":
        fields.setdefault("rope_interleave", False)
    fields["rope_theta"], fields["rope_scaling"] = _rope(config)
    # LongCat-Flash: its modelling code scales the latents unless these keys say otherwise.
    longcat = model_type.startswith("longcat")
    for flag, field, rank in (("mla_scale_q_lora", "q_lora_scale", fields.get("q_lora_rank")),
                              ("mla_scale_kv_lora", "kv_lora_scale", fields["kv_lora_rank"])):
        wanted = config.get(flag)
        if (longcat if wanted is None else wanted) and rank:
            fields[field] = math.sqrt(fields["hidden_size"] / rank)
    return fields
