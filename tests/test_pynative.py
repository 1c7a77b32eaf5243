"""Calls from PyNative through the library of pynative.cc: results, order and errors are those of ops.Custom, and it may be missing."""
import copy
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

import ms_flashmla as fm
from cases import OpCase, to_ms
from ms_flashmla import layer as layer_module
from ms_flashmla import pynative
from small_layer import BLOCKS, CFG, LENGTHS, PAGE, TABLE, hidden, ints, make_layer

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def in_pynative():
    ms.set_context(mode=ms.PYNATIVE_MODE)
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        pytest.skip("no Python.h: the library for PyNative calls cannot be built here, calls go through ops.Custom")
    assert pynative.module() is not None, "the library for PyNative calls was not built"


@pytest.fixture(scope="module")
def layer():
    return make_layer()


@pytest.fixture
def through_custom(monkeypatch):
    """Makes every call from here on take ops.Custom."""
    def switch():
        monkeypatch.setattr(layer_module.ops._Operator, "direct", None)
    return switch


def new_cache():
    return fm.LatentKVCache(CFG, BLOCKS, PAGE)


def history(layer, residual=False):
    cache, out = new_cache(), []
    for x, q_lens, contexts in ((hidden(5), *LENGTHS), (hidden(2, seed=5), ints(1, 1), ints(3, 2)), (hidden(0), ints(0, 0), ints(4, 3))):
        out.append(layer(x, cache.data, TABLE, q_lens, contexts, residual=x if residual else None))
    return [o.asnumpy().tobytes() for o in out] + [cache.data.asnumpy().tobytes()]


@pytest.mark.parametrize("residual", [False, True])
def test_a_layer_gives_the_bits_of_custom(layer, through_custom, residual):
    direct = history(layer, residual)
    through_custom()
    assert history(layer, residual) == direct


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_operators_give_the_bits_of_custom(through_custom, dtype):
    q, k, table, seqlens = OpCase("ops", (20, 7)).arrays()

    def run():
        out, lse = fm.ops.flash_mla_with_kvcache(to_ms(q, dtype), to_ms(k, dtype), to_ms(table, "int32"), to_ms(seqlens, "int32"), 32, causal=True)
        merged = fm.ops.merge_attention_states(out, lse, out, lse)
        return [t.astype(ms.float32).asnumpy().tobytes() for t in (out, lse, *merged)]

    direct = run()
    through_custom()
    assert run() == direct


def test_what_was_queued_before_and_after_keeps_its_order(layer):
    """Inputs may be results that the framework has not computed yet, and the next operator may read the output at once."""
    x = hidden(5)
    expected = (layer(x, new_cache().data, TABLE, *LENGTHS).asnumpy() * np.float32(2)).tobytes()
    busy = Tensor(np.ones((700, 700), np.float32))
    for _ in range(10):
        cache = new_cache()
        ms.ops.matmul(busy, busy)  # keeps the queues occupied
        late = (x + 1.0) - 1.0
        late = ms.ops.where(late == late, x, late)
        out = layer(late, cache.data, TABLE, LENGTHS[0] + 0, LENGTHS[1]) * 2.0
        copied = cache.data + 0.0
        assert out.asnumpy().tobytes() == expected and copied.asnumpy().tobytes() == cache.data.asnumpy().tobytes()
        assert np.abs(copied.asnumpy()).max() > 0


def test_slices_are_read_where_they_lie(layer):
    x, more = hidden(5), hidden(9)
    expected = layer(x, new_cache().data, TABLE, *LENGTHS).asnumpy().tobytes()
    sliced = Tensor(np.concatenate([more.asnumpy(), x.asnumpy()]))[9:]
    table = Tensor(np.concatenate([TABLE.asnumpy() + 90, TABLE.asnumpy()]))[2:]
    lengths = Tensor(np.array([9, 9, 9, 3, 2], np.int32))[3:]
    assert layer(sliced, new_cache().data, table, lengths, LENGTHS[1]).asnumpy().tobytes() == expected


def test_lengths_may_change_in_place(layer):
    """The check may have read them before; a step later they hold other numbers."""
    cache, q_lens, contexts = new_cache(), ints(1, 1), ints(0, 0)
    for step in range(4):
        layer(hidden(2), cache.data, TABLE, q_lens, contexts)
        contexts += 1
    with pytest.raises(RuntimeError, match="sequence 0 needs"):
        contexts += 100
        layer(hidden(2), cache.data, TABLE, q_lens, contexts).asnumpy()
    contexts -= 100
    q_lens += 1
    layer(hidden(4), cache.data, TABLE, q_lens, contexts).asnumpy()


def test_errors_have_the_same_words(layer, through_custom):
    def words():
        with pytest.raises(RuntimeError) as of_layer:
            layer(hidden(5), new_cache().data, TABLE, ints(3, 3), LENGTHS[1])
        q, k, table, seqlens = OpCase("errors", (20, 7)).arrays()
        with pytest.raises(RuntimeError) as of_operator:
            fm.ops.flash_mla_with_kvcache(to_ms(q), to_ms(k), to_ms(table, "int32"), to_ms(seqlens + 10**6, "int32"), 32)[0].asnumpy()
        return [str(error.value).splitlines()[0] for error in (of_layer, of_operator)] + [fm.last_error()]

    direct = words()
    assert direct[0] == "q_seq_lens sum to 6, but hidden_states holds 5 tokens" and direct[1] == direct[2]
    through_custom()
    custom = words()
    assert all(there.endswith(here) for here, there in zip(direct, custom))  # ops.Custom puts the library's path before an operator's words


def test_gradients_are_refused_as_ever(layer):
    with pytest.raises(RuntimeError, match="bprop not defined"):
        ms.grad(lambda x: layer(x * 2, new_cache().data, TABLE, *LENGTHS).sum())(hidden(5))


def test_a_layer_can_be_copied(layer):
    twin = copy.deepcopy(layer)
    assert history(twin) == history(layer)


CALL = """
import warnings
import numpy as np
from small_layer import *
layer, cache = make_layer(), fm.LatentKVCache(CFG, BLOCKS, PAGE)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    outs = [layer(hidden(5), cache.data, TABLE, *LENGTHS).asnumpy() for _ in range(2)]
print(len([w for w in caught if "ops.Custom" in str(w.message)]), np.abs(outs[0]).max() > 0 and (outs[0] == outs[1]).all())
"""


def call(tmp_path, **environment):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), **environment}
    done = subprocess.run([sys.executable, "-c", CALL], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


def test_without_the_library_one_warning_and_the_same_result(tmp_path):
    """A package folder without the library, a cache that is a file: it cannot be built anywhere."""
    assert call(tmp_path, MS_FLASHMLA_PYNATIVE="custom") == ["0", "True"]
    package = tmp_path / "ms_flashmla"
    package.mkdir()
    for path in (ROOT / "ms_flashmla").glob("*.[pc]*"):
        (package / path.name).symlink_to(path)
    (package / "lib").mkdir()
    (package / "lib" / "libms_flashmla.so").symlink_to(ROOT / "ms_flashmla" / "lib" / "libms_flashmla.so")
    search = os.pathsep.join([str(tmp_path), str(ROOT / "tests")])
    # small_layer puts nothing before PYTHONPATH, so this package is the one imported; its compiler fails.
    assert call(tmp_path, PYTHONPATH=search, CXX="false", XDG_CACHE_HOME=str(tmp_path / "cache")) == ["1", "True"]


def test_an_unknown_way_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("MS_FLASHMLA_PYNATIVE", "fast")
    pynative.module.cache_clear()
    try:
        with pytest.raises(ValueError, match="MS_FLASHMLA_PYNATIVE: 'fast'"):
            pynative.module()
    finally:
        monkeypatch.delenv("MS_FLASHMLA_PYNATIVE")
        pynative.module.cache_clear()
        pynative.module()
