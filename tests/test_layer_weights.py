"""Weights as Parameters of the layer: names, checkpoints, reloading, memory."""
import os
import subprocess
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

import ms_flashmla as fm
from ms_flashmla import weights
from small_layer import BLOCKS, CFG, LENGTHS, PAGE, PREFIX, TABLE, hidden, make_layer, random_weights


def test_parameters_are_flat_without_gradient_and_named_for_good():
    layer = fm.MLALayer(CFG)
    names = [p.name for p in layer.get_parameters()]
    assert names == list(weights.layout(CFG))
    assert all(p.ndim == 1 and not p.requires_grad and not p.asnumpy().any() for p in layer.get_parameters())
    net = nn.SequentialCell(layer)
    assert [p.name for p in net.get_parameters()] == [f"0.{name}" for name in names]


@pytest.mark.parametrize("dtype", [ms.float32, ms.float16, ms.bfloat16])
def test_checkpoint_of_the_cell_and_export(mode, tmp_path, dtype):
    layer, other = make_layer(dtype=dtype, seed=1), make_layer(dtype=dtype, seed=2)
    caches = [fm.LatentKVCache(CFG, BLOCKS, PAGE) for _ in range(3)]
    expected = layer(hidden(5), caches[0].data, TABLE, *LENGTHS).asnumpy()
    assert not np.array_equal(other(hidden(5), caches[1].data, TABLE, *LENGTHS).asnumpy(), expected)
    ms.save_checkpoint(layer, str(tmp_path / "layer.ckpt"))
    missing, _ = ms.load_param_into_net(other, ms.load_checkpoint(str(tmp_path / "layer.ckpt")))
    assert not missing
    np.testing.assert_array_equal(other(hidden(5), caches[2].data, TABLE, *LENGTHS).asnumpy(), expected)
    exported, again = layer.export_hf_weights(PREFIX), other.export_hf_weights("a.b")
    assert [name.replace("a.b.", PREFIX) for name in again] == list(exported)
    assert all(a.tobytes() == b.tobytes() and a.dtype == b.dtype for a, b in zip(exported.values(), again.values()))


def test_weights_loaded_after_the_first_call_are_seen(mode):
    layer, other = make_layer(seed=1), make_layer(seed=2)
    run = lambda net: net(hidden(5), fm.LatentKVCache(CFG, BLOCKS, PAGE).data, TABLE, *LENGTHS).asnumpy()  # noqa: E731
    run(layer)
    layer.load_hf_weights(random_weights(seed=2))
    np.testing.assert_array_equal(run(layer), run(other))


def test_weights_are_held_once():
    """In a process of its own: what others of a long run leave to the allocator would count."""
    search = os.pathsep.join([str(Path(fm.__file__).parents[1]), str(Path(__file__).parent)])
    done = subprocess.run([sys.executable, "-c", HELD_ONCE], env={**os.environ, "PYTHONPATH": search}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


HELD_ONCE = """
import dataclasses, gc
import numpy as np
from small_layer import *
cfg = dataclasses.replace(CFG, hidden_size=2048, num_heads=16, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
                          q_lora_rank=None, attention_bias=False)
total = sum(weights.size(spec) for spec in weights.layout(cfg).values()) * 4 / 2**20
source = {PREFIX + name: np.zeros(shape, np.float16) for name, shape in weights.hf_shapes(cfg).items()}
fm.MLALayer(CFG)
before = resident_mib()
layer = fm.MLALayer(cfg)
assert resident_mib() - before < 0.2 * total + 8, "zeros are touched"
for _ in range(2):
    layer.load_hf_weights(source)
gc.collect()
assert resident_mib() - before < 1.15 * total + 16, f"{resident_mib() - before} MiB for {total}"
"""
