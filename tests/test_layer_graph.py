"""The layer called from Python: one compiled graph per signature, caches, strided inputs, in both modes."""
import gc
import subprocess
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

import ms_flashmla as fm
from small_layer import BLOCKS, CFG, LENGTHS, PAGE, TABLE, Compiles, hidden, ints, make_layer, resident_mib


@pytest.fixture(scope="module")
def layer():
    return make_layer()


@pytest.fixture
def cache():
    return fm.LatentKVCache(CFG, BLOCKS, PAGE)


def test_one_graph_serves_every_number_of_tokens_and_sequences(graph, monkeypatch):
    compiles, layer = Compiles(monkeypatch), make_layer()
    caches = [fm.LatentKVCache(CFG, BLOCKS, PAGE) for _ in range(2)]
    for cache in caches:
        layer(hidden(5), cache.data, TABLE, *LENGTHS).asnumpy()
        for step in range(4):
            layer(hidden(2), cache.data, TABLE, ints(1, 1), ints(3 + step, 2 + step)).asnumpy()
        layer(hidden(3), cache.data, TABLE[:1], ints(3), ints(7)).asnumpy()
        layer(hidden(0), cache.data, TABLE, ints(0, 0), ints(7, 6)).asnumpy()
    assert compiles.count == 1
    for lead in ((2, 2), (2, 1), (1, 3)):
        layer(hidden(*lead), cache.data, TABLE[:lead[0]], ints(*[lead[1]] * lead[0]), ints(*[0] * lead[0])).asnumpy()
    assert compiles.count == 2
    for x in (hidden(5), hidden(5, seed=4)):
        layer(x, cache.data, TABLE, *LENGTHS, residual=x).asnumpy()
    assert compiles.count == 3
    layer(hidden(5, dtype=ms.float16), cache.data, TABLE, *LENGTHS)
    layer(hidden(5), fm.LatentKVCache(CFG, BLOCKS + 1, PAGE).data, TABLE, *LENGTHS).asnumpy()
    assert compiles.count == 5
    layer(hidden(4), cache.data, TABLE, ints(2, 2), ints(0, 0)).asnumpy()
    assert compiles.count == 5


def test_decode_equals_prefill_in_every_form(mode, layer):
    """The same tokens at once, one by one, with a residual, and as [B, S, hidden] give the same rows."""
    x = hidden(6, seed=9)
    whole = layer(x, fm.LatentKVCache(CFG, BLOCKS, PAGE).data, TABLE, ints(3, 3), ints(0, 0)).asnumpy()
    cache = fm.LatentKVCache(CFG, BLOCKS, PAGE)
    for t in range(3):
        step = x.reshape(2, 3, -1)[:, t]
        out = layer(step, cache.data, TABLE, ints(1, 1), ints(t, t), residual=step).asnumpy()
        np.testing.assert_allclose(out - step.asnumpy(), whole.reshape(2, 3, -1)[:, t], atol=2e-5 * np.abs(whole).max())
    batched = layer(x.reshape(2, 3, -1), fm.LatentKVCache(CFG, BLOCKS, PAGE).data, TABLE, ints(3, 3), ints(0, 0))
    assert batched.shape == (2, 3, 48) and batched.asnumpy().tobytes() == whole.tobytes()


THREADS = """
import sys, threading
sys.path[:0] = sys.argv[1:3]
import mindspore as ms
import ms_flashmla as fm
from small_layer import BLOCKS, CFG, PAGE, STEPS, TABLE, make_layer
ms.set_context(mode=ms.GRAPH_MODE)
layer, wrong = make_layer(), []

def serve():
    cache = fm.LatentKVCache(CFG, BLOCKS, PAGE)
    return [layer(x, cache.data, TABLE, *lengths, residual=x).asnumpy().tobytes() for x, *lengths in STEPS]

def work():
    for _ in range(20):
        if serve() != expected:
            wrong.append(1)

expected = serve()
threads = [threading.Thread(target=work) for _ in range(3)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
assert not wrong
"""


def test_threads_share_a_graph():
    """MindSpore's graphs do not stand two callers at once; a server has them."""
    here = Path(__file__).resolve().parent
    done = subprocess.run([sys.executable, "-c", THREADS, str(here), str(here.parent)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def test_modes_and_repeats_give_the_same_bits(layer):
    outs = []
    for mode in (ms.GRAPH_MODE, ms.PYNATIVE_MODE, ms.GRAPH_MODE):
        ms.set_context(mode=mode)
        cache = fm.LatentKVCache(CFG, BLOCKS, PAGE)
        outs.append(layer(hidden(5), cache.data, TABLE, *LENGTHS).asnumpy().tobytes() + cache.data.asnumpy().tobytes())
    ms.set_context(mode=ms.PYNATIVE_MODE)
    assert outs[0] == outs[1] == outs[2]


def test_a_dropped_cache_is_not_kept_by_the_graph(graph):
    layer, mib = make_layer(), 2**20 // (CFG.cache_dim * 4)

    def run():
        cache = fm.LatentKVCache(CFG, 64 * mib, 1)
        cache.data.asnumpy()[:] = 1
        layer(hidden(5), cache.data, ints(*[[0, 1, 2], [3, 4, 5]]), *LENGTHS).asnumpy()

    run()
    gc.collect()
    base = resident_mib()
    for _ in range(3):
        run()
    gc.collect()
    assert resident_mib() < base + 40


def test_a_cache_may_be_a_plain_tensor(mode, layer, cache):
    tensor = Tensor(np.zeros(cache.data.shape, np.float32))
    for _ in range(2):
        a = layer(hidden(5), cache.data, TABLE, *LENGTHS).asnumpy()
        b = layer(hidden(5), tensor, TABLE, *LENGTHS).asnumpy()
        assert a.tobytes() == b.tobytes() and tensor.asnumpy().tobytes() == cache.data.asnumpy().tobytes()


@pytest.mark.parametrize("view", [lambda t: t[1], lambda t: t[0], lambda t: t[:, ::2][0], lambda t: t[0].transpose(0, 2, 1).transpose(0, 2, 1),
                                  lambda t: t.reshape(2 * BLOCKS, PAGE, -1)])
def test_a_view_as_cache_is_refused(mode, layer, view):
    """MindSpore would hand the operator a copy of it, and the written rows would be lost."""
    with pytest.raises(ValueError, match="kv_cache: a view"):
        layer(hidden(5), view(Tensor(np.zeros((2, BLOCKS, PAGE, CFG.cache_dim), np.float32))), TABLE, *LENGTHS)


def test_strided_inputs_are_read_right(mode, layer):
    x, other = hidden(5), hidden(5, seed=4)
    plain, strided = fm.LatentKVCache(CFG, BLOCKS, PAGE), fm.LatentKVCache(CFG, BLOCKS, PAGE)
    expected = layer(x, plain.data, TABLE, *LENGTHS, residual=other).asnumpy()
    transposed = Tensor(np.ascontiguousarray(x.asnumpy().T)).T
    sliced = Tensor(np.repeat(other.asnumpy(), 2, axis=1))[:, ::2]
    table = Tensor(np.ascontiguousarray(TABLE.asnumpy().T)).T
    lengths = Tensor(np.array([[3, 9], [2, 9]], np.int32))[:, 0]
    assert not any(t.is_contiguous() for t in (transposed, table))
    out = layer(transposed, strided.data, table, lengths, LENGTHS[1], residual=sliced).asnumpy()
    assert out.tobytes() == expected.tobytes() and strided.data.asnumpy().tobytes() == plain.data.asnumpy().tobytes()
