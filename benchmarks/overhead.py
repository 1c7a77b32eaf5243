"""What a call of the layer costs beside the kernel, on a layer so small that its kernel takes microseconds."""

import statistics
import time

import mindspore as ms
import numpy as np
from mindspore import nn

import fused
import kernel
import timing
from ms_flashmla import MLAConfig, dtypes
from ms_flashmla.cache import LatentKVCache
from ms_flashmla.layer import MLALayer
from ms_flashmla.weights import hf_shapes

NAME = "overhead"
CHAIN = 8  # layers more in the longer graph
ROUNDS, CALLS = 15, 20


class _Net(nn.Cell):
    """The same layer `count` times, one after the other."""

    def __init__(self, layer, count):
        super().__init__()
        self.layer, self.count = layer, count
        self.phase = "increment"

    def construct(self, hidden, cache, table, new, context):
        for _ in range(self.count):
            hidden = self.layer(hidden, cache, table, new, context)
        return hidden


def _small_layer():
    cfg = MLAConfig(hidden_size=64, num_heads=2, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16)
    rng = np.random.default_rng(1)
    layer = MLALayer(cfg)
    layer.load_hf_weights({name: 0.1 * rng.standard_normal(shape, dtype=np.float32) for name, shape in hf_shapes(cfg).items()}, prefix="")
    cache = LatentKVCache(cfg, 1)
    dtypes.put(cache.data, rng.standard_normal(cache.data.shape, dtype=np.float32))
    cache.allocate(0, 64)
    hidden = ms.Tensor.from_numpy(rng.standard_normal((1, cfg.hidden_size), dtype=np.float32))
    return layer, (hidden, cache.data, cache.block_table([0]), ms.Tensor([1], ms.int32), ms.Tensor([31], ms.int32))


def _median_us(run):
    taken = []
    for _ in range(CALLS):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken) * 1e6


def measure():
    """{what: microseconds}: "kernel", "graph call", "pynative call" (from Python, host check and reading the output included), "graph op"."""
    layer, call = _small_layer()
    hidden, cache, table, *lengths = call
    out, out_argument = kernel.output(hidden.shape, "float32", 4)
    alone = fused.layer_kernel(layer, hidden, cache, table, lengths, None, out_argument)
    nets = [_Net(layer, count) for count in (1, 1 + CHAIN)]
    runs = {
        "kernel": (ms.GRAPH_MODE, alone.call),
        "graph call": (ms.GRAPH_MODE, lambda: layer(*call).asnumpy()),
        "short graph": (ms.GRAPH_MODE, lambda: nets[0](*call).asnumpy()),
        "long graph": (ms.GRAPH_MODE, lambda: nets[1](*call).asnumpy()),
        "pynative call": (ms.PYNATIVE_MODE, lambda: layer(*call).asnumpy()),
    }
    taken = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, (mode, run) in runs.items():
            ms.set_context(mode=mode)
            time.sleep(timing.REST_SECONDS)
            run()
            taken[name].append(_median_us(run))
    ms.set_context(mode=ms.GRAPH_MODE)
    us = {name: statistics.median(values) for name, values in taken.items()}
    us["graph op"] = statistics.median((long - short) / CHAIN for long, short in zip(taken["long graph"], taken["short graph"]))
    return us


def lines():
    us = measure()
    alone = us["kernel"]
    return [
        f"overhead   one more op inside a graph  {us['graph op'] - alone:6.0f} us beside the kernel's {alone:.0f} us",
        f"overhead   layer called, PyNative      {us['pynative call'] - alone:6.0f} us beside the kernel, host check and reading the output included",
        f"overhead   layer called, GRAPH_MODE    {us['graph call'] - alone:6.0f} us beside the kernel, host check and reading the output included",
    ]
