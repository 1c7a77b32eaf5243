"""Every rule a call must keep: what is raised, with which words, and that nothing was written and everything still works afterwards."""
import warnings

import numpy as np
import pytest

import mindspore as ms
from mindspore import nn
import ms_flashmla as fm
from cases import LayerCase, bits, to_ms, to_np
from driver import Driver
from small_layer import Compiles

NAMES = ["hidden_states", "kv_cache", "block_table", "q_seq_lens", "context_lens", "residual"]


@pytest.fixture(scope="module")
def runs():
    """One layer a mode, 20 and 3 tokens in the cache; tests with errors leave it as it was."""
    return {}


@pytest.fixture
def run(mode, runs):
    if mode not in runs:
        runs[mode] = Driver(LayerCase("errors", dict(max_position_embeddings=128)), num_blocks=12)
        runs[mode].step([20, 3])
        runs[mode].step([2, 2], residual=True)
    return runs[mode]


def good_args(run):
    """hidden, cache, table, q_lens, contexts, residual as Tensors: 2 and 3 new tokens."""
    hidden, residual, table, q_lens, contexts = run.inputs([2, 3], residual=True)
    return [to_ms(hidden), run.cache.data, to_ms(table, "int32"), to_ms(q_lens, "int32"), to_ms(contexts, "int32"), to_ms(residual)]


def expect_error(run, args, kind, words):
    """The error, no byte of the cache changed, and the next good call of the same graph is right."""
    before = run.snapshot()
    with pytest.raises(kind, match=words):
        run.layer(*args[:5], residual=args[5]).asnumpy()
    assert run.snapshot() == before
    run_next = run.inputs([1, 1], residual=True)
    content = to_np(run.cache.data)
    run.check(run.call(*run_next), content, *run_next)
    run.cache.data.set_data(to_ms(content))


# ---- what the arguments themselves tell --------------------------------------------------------------------------------------------------------------
WRONG = {
    "hidden of rank 1": (0, lambda x: x[0], ValueError, "hidden_states"),
    "hidden of rank 4": (0, lambda x: x.reshape(1, 1, *x.shape), ValueError, "hidden_states"),
    "hidden too narrow": (0, lambda x: x[:, 1:], ValueError, "hidden_states"),
    "hidden of int32": (0, lambda x: x.astype(ms.int32), (ValueError, TypeError), "hidden_states"),
    "hidden of float64": (0, lambda x: x.astype(ms.float64), (ValueError, TypeError), "hidden_states"),
    "hidden as numpy": (0, lambda x: x.asnumpy(), (ValueError, TypeError), "hidden_states"),
    "hidden missing": (0, lambda x: None, (ValueError, TypeError), "hidden_states"),
    "cache of rank 2": (1, lambda x: x[0], ValueError, "kv_cache"),
    "cache of rank 4": (1, lambda x: x.reshape(*x.shape, 1), ValueError, "kv_cache"),
    "cache too narrow": (1, lambda x: x[..., 1:].copy(), ValueError, "kv_cache"),
    "cache of empty blocks": (1, lambda x: to_ms(np.zeros((12, 0, 40))), ValueError, "kv_cache"),
    "cache of int32": (1, lambda x: x.astype(ms.int32), (ValueError, TypeError), "kv_cache"),
    "table of int64": (2, lambda x: x.astype(ms.int64), (ValueError, TypeError), "block_table"),
    "table of float": (2, lambda x: x.astype(ms.float32), (ValueError, TypeError), "block_table"),
    "table of rank 1": (2, lambda x: x[0], ValueError, "block_table"),
    "table of another batch": (2, lambda x: x[:1], ValueError, "block_table|q_seq_lens"),
    "q_seq_lens of rank 2": (3, lambda x: x.reshape(1, -1), ValueError, "q_seq_lens"),
    "q_seq_lens of another batch": (3, lambda x: x[:1], ValueError, "q_seq_lens"),
    "q_seq_lens of int64": (3, lambda x: x.astype(ms.int64), (ValueError, TypeError), "q_seq_lens"),
    "q_seq_lens as a list": (3, lambda x: [2, 3], (ValueError, TypeError), "q_seq_lens"),
    "context_lens of another batch": (4, lambda x: x[:1], ValueError, "context_lens"),
    "context_lens of rank 0": (4, lambda x: x[0], ValueError, "context_lens"),
    "context_lens of float": (4, lambda x: x.astype(ms.float32), (ValueError, TypeError), "context_lens"),
    "residual of another shape": (5, lambda x: x[1:], ValueError, "residual"),
    "residual of another rank": (5, lambda x: x.reshape(1, *x.shape), ValueError, "residual"),
    "residual of another dtype": (5, lambda x: x.astype(ms.float16), (ValueError, TypeError), "residual"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_arguments(fault, run):
    at, change, kind, words = WRONG[fault]
    args = good_args(run)
    args[at] = change(args[at])
    expect_error(run, args, kind, words)


def test_batched_hidden_of_another_batch_than_the_table(run):
    args = good_args(run)
    args[0], args[5] = args[0][:3].reshape(3, 1, -1), None
    expect_error(run, args, (ValueError, RuntimeError), "hidden_states|q_seq_lens|block_table")


# ---- what only the data can tell ---------------------------------------------------------------------------------------------------------------------

def set_at(index, value):
    def change(x):
        x = x.asnumpy().copy()
        x[index] = value
        return to_ms(x, "int32")
    return change


DATA = {
    "block past the cache": (2, set_at((0, 1), 12), "block_table"),
    "block far past the cache": (2, set_at((0, 0), 2147480000), "block_table"),
    "negative block": (2, set_at((0, 0), -1), "block_table"),
    "most negative block": (2, set_at((1, 0), -2 ** 31), "block_table"),
    "negative q_seq_len": (3, set_at(0, -1), "q_seq_lens"),
    "negative context": (4, set_at(1, -1), "context_lens"),
    "more tokens than rows": (3, set_at(1, 4), "q_seq_lens"),
    "fewer tokens than rows": (3, set_at(0, 0), "q_seq_lens"),
    "lengths that overflow int32": (4, set_at(0, 2 ** 31 - 1), "context_lens|block_table|max_position"),
    "q_seq_lens that overflow int32": (3, set_at(slice(None), 2 ** 31 - 1), "q_seq_lens"),
    "table too short": (2, lambda x: x[:, :1], "block_table"),
    "table of no columns": (2, lambda x: to_ms(np.zeros((2, 0)), "int32"), "block_table"),
    "context past the rope table": (4, set_at(1, 126), "max_position|block_table|rope"),
}


@pytest.mark.parametrize("fault", DATA)
def test_wrong_data(fault, run):
    at, change, words = DATA[fault]
    args = good_args(run)
    args[at] = change(args[at])
    expect_error(run, args, RuntimeError, words)
    assert any(word in fm.last_error() for word in words.split("|"))


def test_batched_hidden_needs_equal_lengths(run):
    args = good_args(run)
    args[0] = to_ms(np.zeros((2, 2, 48)))
    args[3], args[5] = to_ms([1, 3], "int32"), None
    expect_error(run, args, RuntimeError, "q_seq_lens")


def test_positions_end_with_the_rope_table(mode):
    run = Driver(LayerCase("positions", dict(max_position_embeddings=32)))
    run.step([31])
    run.step([1])
    args = run.inputs([1])
    before = run.snapshot()
    with pytest.raises(RuntimeError, match="32"):
        run.call(*args).asnumpy()
    assert run.snapshot() == before


def test_two_sequences_must_not_write_one_row(run):
    args = good_args(run)
    table = args[2].asnumpy().copy()
    table[1] = table[0]
    args[2], args[4] = to_ms(table, "int32"), to_ms([22, 22], "int32")
    expect_error(run, args, RuntimeError, "row")


def test_one_sequence_must_not_write_one_row_twice(run):
    table = np.full((1, 3), 5, np.int32)
    args = [to_ms(np.zeros((20, 48))), run.cache.data, to_ms(table, "int32"), to_ms([20], "int32"), to_ms([0], "int32"), None]
    expect_error(run, args, RuntimeError, "row")


def test_blocks_that_are_only_read_may_be_shared(run):
    """Both sequences stand on the 16 tokens of the first page of sequence 0."""
    table = np.array([[run.pages[0][0], run.free[0]], [run.pages[0][0], run.free[1]]], np.int32)
    hidden, content = np.ones((3, 48)), to_np(run.cache.data)
    args = (hidden, None, table, np.array([2, 1]), np.array([16, 16]))
    run.check(run.call(*args), content, *args)
    run.cache.data.set_data(to_ms(content))


def test_a_row_must_not_be_read_by_one_sequence_and_written_by_another(run):
    """Sequence 1 would read, as its prefix, a row that sequence 0 writes in the same call: the order would decide."""
    page = run.pages[0][1]
    table = np.array([[run.pages[0][0], page], [page, run.free[0]]], np.int32)
    args = [to_ms(np.ones((2, 48))), run.cache.data, to_ms(table, "int32"), to_ms([1, 1], "int32"), to_ms([20, 16], "int32"), None]
    expect_error(run, args, RuntimeError, "row")


def test_index_topk_bounds_the_keys(mode):
    with pytest.warns(UserWarning, match="index_topk"):
        run = Driver(LayerCase("topk", dict(index_topk=24)))
    run.step([20])
    run.step([4])
    args = run.inputs([1])
    before = run.snapshot()
    with pytest.raises(RuntimeError, match="index_topk"):
        run.call(*args).asnumpy()
    assert run.snapshot() == before


# ---- inside a larger graph ---------------------------------------------------------------------------------------------------------------------------

class Outer(nn.Cell):
    """A model around the layer: the kernel itself has to find what is wrong."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def construct(self, hidden, cache, table, q_lens, contexts):
        return self.layer(hidden * 1.0, cache, table, q_lens, contexts) + 0.0


@pytest.mark.parametrize("fault", ["block past the cache", "negative q_seq_len", "more tokens than rows", "table too short"])
def test_kernel_fails_with_the_same_words_and_writes_nothing(fault, graph):
    at, change, _ = DATA[fault]
    run = Driver(LayerCase("outer"), num_blocks=12)
    run.step([20, 3])
    outer = Outer(run.layer)
    args = good_args(run)
    args[at] = change(args[at])
    with pytest.raises(RuntimeError):
        run.layer(*args[:5])
    words = fm.last_error()
    before = run.snapshot()
    with pytest.raises(RuntimeError) as error:
        outer(*args[:5]).asnumpy()
    assert words in str(error.value) and fm.last_error() == words
    assert run.snapshot() == before


def test_layer_inside_a_larger_graph_is_right_for_every_batch(graph, monkeypatch):
    """Dynamic in T and B: one graph for all of them."""
    run = Driver(LayerCase("outer"))
    outer = Outer(run.layer)
    free, batch = (lambda *shape: ms.Tensor(shape=shape, dtype=ms.float32)), (lambda *shape: ms.Tensor(shape=shape, dtype=ms.int32))
    outer.set_inputs(free(None, run.ref_cfg.hidden_size), run.cache.data, batch(None, None), batch(None), batch(None))
    compiles = Compiles(monkeypatch)
    for q_lens in ([3, 0, 20], [1, 1, 1], [2], [1, 4]):
        args = run.inputs(q_lens)
        before = to_np(run.cache.data)
        hidden, _, table, lens, contexts = args
        out = outer(to_ms(hidden), run.cache.data, *(to_ms(x, "int32") for x in (table, lens, contexts)))
        run.check(out, before, *args)
        run.lengths[:len(q_lens)] += q_lens
    assert compiles.count == 1


# ---- fm.check_batch -------------------------------------------------------------------------------------------------------------

def test_check_batch_is_the_same_check(run):
    good = good_args(run)
    assert fm.check_batch(run.cache.data, *good[2:5]) is None
    for fault in ("block past the cache", "negative q_seq_len", "negative context", "table too short"):
        at, change, words = DATA[fault]
        args = good_args(run)
        args[at] = change(args[at])
        with pytest.raises(RuntimeError, match=words):
            fm.check_batch(run.cache.data, *args[2:5])
    with pytest.raises((ValueError, RuntimeError), match="cache|block"):
        fm.check_batch(to_ms(np.zeros((12, 0, 40))), *good[2:5])


def test_check_batch_of_a_cache_knows_its_table_and_indexer():
    for config, length, words in ((dict(max_position_embeddings=40), 41, "40"), (dict(index_topk=30), 31, "index_topk")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the indexer is not computed
            cfg = fm.MLAConfig(**LayerCase("check", config).kwargs())
        cache = fm.LatentKVCache(cfg, 4, block_size=16)
        table = np.array([[0, 1, 2]], np.int32)
        lengths = [np.array([n], np.int32) for n in (length, 0)]
        assert fm.check_batch(cache, table, lengths[0] - 1, lengths[1]) is None
        with pytest.raises(RuntimeError, match=words):
            fm.check_batch(cache, table, *lengths)
        assert fm.check_batch(cache.data, table, *lengths) is None  # the bare Tensor says nothing of a model


@pytest.mark.parametrize("at, change, words", [
    (0, lambda x: x.tolist(), "block_table"), (0, lambda x: x.astype(np.int64), "block_table"), (0, lambda x: x[0], "block_table"),
    (1, lambda x: x.astype(np.float32), "q_seq_lens"), (1, lambda x: x[None], "q_seq_lens"), (2, lambda x: np.concatenate([x, x]), "context_lens"),
])
def test_wrong_arguments_of_check_batch(at, change, words):
    cache = fm.LatentKVCache(fm.MLAConfig(**LayerCase("check").kwargs()), 4, block_size=16)
    args = [np.array([[0]], np.int32), np.array([3], np.int32), np.array([2], np.int32)]
    args[at] = change(args[at])
    with pytest.raises((ValueError, TypeError), match=words):
        fm.check_batch(cache, *args)
    with pytest.raises((ValueError, TypeError), match="cache"):
        fm.check_batch(np.zeros((4, 16, 40)), *args)


def test_bits_of_the_arguments_are_left_alone(run):
    args = good_args(run)
    content, before = to_np(run.cache.data), [bits(x) for x in (args[0], *args[2:])]
    run.layer(*args[:5], residual=args[5])
    assert [bits(x) for x in (args[0], *args[2:])] == before
    run.cache.data.set_data(to_ms(content))


def test_unknown_rank_names_the_argument(graph):
    """Ranks are part of a graph's signature: a spec without one says which argument it was."""
    run = Driver(LayerCase("outer"))
    outer = Outer(run.layer)
    args = good_args(run)
    free = ms.Tensor(shape=None, dtype=ms.float32)
    outer.set_inputs(free, run.cache.data, *args[2:5])
    with pytest.raises((ValueError, TypeError), match="hidden_states.*rank"):
        outer(args[0], run.cache.data, *args[2:5])
