"""The layer inside larger graphs: order of cache writes and reads, caches as attributes and as arguments, errors while compiling."""
import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

import ms_flashmla as fm
from small_layer import BLOCKS, CFG, DYNAMIC_BATCH, LENGTHS, PAGE, STEPS, TABLE, Compiles, dynamic, hidden, ints, make_layer


@pytest.fixture(scope="module")
def layer():
    return make_layer()


class TwoLayers(nn.Cell):
    """Two layers, each with its own cache; the second adds a residual and a reader looks at the first cache afterwards."""

    def __init__(self, first, second, cache_a, cache_b):
        super().__init__()
        self.first, self.second = first, second
        self.cache_a, self.cache_b = cache_a, cache_b

    def construct(self, x, table, q_lens, contexts):
        h = self.first(x, self.cache_a, table, q_lens, contexts)
        return self.second(h, self.cache_b, table, q_lens, contexts, residual=x)


class CacheArguments(nn.Cell):
    """The caches come as arguments."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def construct(self, x, cache_a, cache_b, table, q_lens, contexts):
        h = self.first(x, cache_a, table, q_lens, contexts)
        return self.second(h, cache_b, table, q_lens, contexts, residual=x)


class LayerThenReader(nn.Cell):
    """The layer writes the cache, an operator reads it, the layer writes it again, the operator reads again."""

    def __init__(self, layer, cache):
        super().__init__()
        self.layer, self.cache = layer, cache

    def construct(self, x, q, table, q_lens, contexts):
        self.layer(x, self.cache, table, q_lens, contexts)
        first, _ = fm.ops.flash_mla_with_kvcache(q, self.cache, table, contexts + q_lens, 32)
        self.layer(-x, self.cache, table, q_lens, contexts + q_lens)
        second, _ = fm.ops.flash_mla_with_kvcache(q, self.cache, table, contexts + q_lens + q_lens, 32)
        return first, second


def expected_two_layers(a, b, steps):
    caches = [fm.LatentKVCache(CFG, BLOCKS, PAGE) for _ in range(2)]
    return [b(a(x, caches[0].data, TABLE, *lengths), caches[1].data, TABLE, *lengths, residual=x).asnumpy() for x, *lengths in steps]


def test_two_layers_in_one_graph(mode, monkeypatch):
    a, b = make_layer(seed=1), make_layer(seed=2)
    expected = expected_two_layers(a, b, STEPS)
    compiles = Compiles(monkeypatch)
    caches = [fm.LatentKVCache(CFG, BLOCKS, PAGE).data for _ in range(2)]
    net = TwoLayers(a, b, *caches)
    if mode == "graph":
        net.set_inputs(dynamic(None, 48), *DYNAMIC_BATCH)
    for (x, *lengths), out in zip(STEPS, expected):
        np.testing.assert_array_equal(net(x, TABLE, *lengths).asnumpy(), out)
    assert compiles.count == (mode == "graph")
    assert not np.array_equal(*[cache.asnumpy() for cache in caches])


def test_caches_as_arguments_of_a_larger_graph(mode):
    a, b = make_layer(seed=1), make_layer(seed=2)
    expected = expected_two_layers(a, b, STEPS)
    caches = [fm.LatentKVCache(CFG, BLOCKS, PAGE).data for _ in range(2)]
    net = CacheArguments(a, b)
    if mode == "graph":
        net.set_inputs(dynamic(None, 48), *caches, *DYNAMIC_BATCH)
    for (x, *lengths), out in zip(STEPS, expected):
        np.testing.assert_array_equal(net(x, *caches, TABLE, *lengths).asnumpy(), out)


def test_writers_and_readers_of_a_cache_keep_their_order(mode, layer):
    x, q = hidden(5), Tensor(np.random.default_rng(7).standard_normal((2, 1, 4, 40)).astype(np.float32))
    cache = fm.LatentKVCache(CFG, BLOCKS, PAGE)
    layer(x, cache.data, TABLE, *LENGTHS).asnumpy()
    first = fm.ops.flash_mla_with_kvcache(q, cache.data, TABLE, ints(3, 2), 32)[0].asnumpy()
    layer(-x, cache.data, TABLE, ints(3, 2), ints(3, 2)).asnumpy()
    second = fm.ops.flash_mla_with_kvcache(q, cache.data, TABLE, ints(6, 4), 32)[0].asnumpy()
    net = LayerThenReader(layer, fm.LatentKVCache(CFG, BLOCKS, PAGE).data)
    for _ in range(2):
        out = net(x, q, TABLE, *LENGTHS)
        np.testing.assert_array_equal(out[0].asnumpy(), first)
        np.testing.assert_array_equal(out[1].asnumpy(), second)


@pytest.mark.parametrize("args, words", [
    ((hidden(5)[:, 1:], TABLE, *LENGTHS), "hidden_states"),
    ((hidden(5)[0], TABLE, *LENGTHS), "hidden_states"),
    ((hidden(5), TABLE[0], *LENGTHS), "block_table"),
    ((hidden(5), TABLE.astype(ms.int64), *LENGTHS), "block_table"),
    ((hidden(5), TABLE, ints(3, 2, 1), ints(0, 0)), "q_seq_lens"),
])
def test_wrong_arguments_inside_a_larger_graph_fail_while_it_compiles(args, words, mode):
    net = TwoLayers(make_layer(), make_layer(), *[fm.LatentKVCache(CFG, BLOCKS, PAGE).data for _ in range(2)])
    with pytest.raises((ValueError, TypeError), match=words):
        net(*args)
