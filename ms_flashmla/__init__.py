"""ms_flashmla: a fused multi-head latent attention (MLA) operator and layer for MindSpore.

    import ms_flashmla as fm
    cfg = fm.MLAConfig.from_hf("path/of/checkpoint")
    layer = fm.MLALayer(cfg)
    layer.load_hf_weights(weights, prefix="model.layers.0.self_attn.")
    cache = fm.LatentKVCache(cfg, num_blocks=64)
    out = layer(hidden_states, cache.data, block_table, q_seq_lens, context_lens)

Names are imported at first use: the command line's tables need no MindSpore.
"""

import importlib

__version__ = "0.1.0"

_WHERE = {
    "MLAConfig": "config",
    "MLALayer": "layer",
    "LatentKVCache": "cache",
    "set_num_threads": "_lib",
    "last_error": "_lib",
    "check_batch": "checks",
    "relocate_mindir": "mindir",
}
_MODULES = ("ops",)

__all__ = [*_WHERE, *_MODULES]


def __getattr__(name):
    if name in _MODULES:
        value = importlib.import_module(f"{__name__}.{name}")
    elif name in _WHERE:
        value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__():
    return sorted([*globals(), *__all__])
