"""A small layer, its inputs and a counter of compiled graphs, for the tests of the layer inside MindSpore."""
import resource
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor

import ms_flashmla as fm
from ms_flashmla import weights

PREFIX = "model.layers.0.self_attn."
CFG = fm.MLAConfig(hidden_size=48, num_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, q_lora_rank=24,
                   attention_bias=True)
BLOCKS, PAGE = 12, 4


def random_weights(cfg=CFG, seed=0):
    rng = np.random.default_rng(seed)
    return {PREFIX + name: 0.3 * rng.standard_normal(shape) for name, shape in weights.hf_shapes(cfg).items()}


def make_layer(cfg=CFG, dtype=ms.float32, seed=0):
    layer = fm.MLALayer(cfg, dtype)
    layer.load_hf_weights(random_weights(cfg, seed))
    return layer


def ints(*values):
    return Tensor(np.asarray(values, np.int32))


def hidden(*lead, seed=3, dtype=ms.float32):
    return Tensor(np.random.default_rng(seed).standard_normal((*lead, CFG.hidden_size)).astype(np.float32)).astype(dtype)


def dynamic(*shape, dtype=ms.float32):
    return Tensor(shape=list(shape), dtype=dtype)


TABLE = Tensor(np.array([[3, 1, 7], [0, 9, 4]], np.int32))
LENGTHS = (ints(3, 2), ints(0, 0))
DYNAMIC_BATCH = (dynamic(None, None, dtype=ms.int32), dynamic(None, dtype=ms.int32), dynamic(None, dtype=ms.int32))
# hidden_states, q_seq_lens, context_lens of a prefill, a decode step and a ragged chunk
STEPS = [(hidden(5), *LENGTHS), (hidden(2, seed=5), ints(1, 1), ints(3, 2)), (hidden(3, seed=6), ints(0, 3), ints(4, 3))]


class Compiles:
    """Counts the graphs MindSpore compiles."""

    def __init__(self, monkeypatch):
        from mindspore.common.api import _cell_graph_executor as executor
        self.count, compile_graph = 0, executor._graph_executor.compile

        class Counting:
            def __getattr__(_, name):
                return getattr(inner, name)

            def __call__(_, *args):
                return inner(*args)

            def compile(_, *args):
                self.count += 1
                return compile_graph(*args)

        inner = executor._graph_executor
        monkeypatch.setattr(executor, "_graph_executor", Counting())


def resident_mib():
    """Memory of this process in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 2**20
