"""MindIR: export, load, relocate."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

import ms_flashmla as fm
from ms_flashmla import _lib
from small_layer import BLOCKS, CFG, DYNAMIC_BATCH, PAGE, STEPS, TABLE, dynamic, make_layer
from test_determinism import NEEDS, flags_of_this_processor


@pytest.fixture(scope="module")
def layer():
    return make_layer()


@pytest.fixture
def cache():
    return fm.LatentKVCache(CFG, BLOCKS, PAGE)


class OneLayer(nn.Cell):
    def __init__(self, layer, cache):
        super().__init__()
        self.layer, self.cache = layer, cache

    def construct(self, x, table, q_lens, contexts):
        return self.layer(x, self.cache, table, q_lens, contexts, residual=x)


def run_steps(net):
    return [net(x, TABLE, *lengths).asnumpy() for x, *lengths in STEPS]


def test_mindir_gives_the_same_numbers(graph, tmp_path):
    layer = make_layer()
    expected = run_steps(OneLayer(layer, fm.LatentKVCache(CFG, BLOCKS, PAGE).data))
    path = str(tmp_path / "layer.mindir")
    ms.export(OneLayer(layer, fm.LatentKVCache(CFG, BLOCKS, PAGE).data), dynamic(None, 48), *DYNAMIC_BATCH, file_name=path, file_format="MINDIR")
    for out, wanted in zip(run_steps(nn.GraphCell(ms.load(path))), expected):
        np.testing.assert_array_equal(out, wanted)


def test_the_layer_itself_is_exported_with_the_cache_as_an_argument(graph, tmp_path, layer, cache):
    path = str(tmp_path / "layer.mindir")
    ms.export(layer, dynamic(None, 48), cache.data, *DYNAMIC_BATCH, file_name=path, file_format="MINDIR")
    net, other = nn.GraphCell(ms.load(path)), fm.LatentKVCache(CFG, BLOCKS, PAGE)
    for x, *lengths in STEPS:
        out = net(x, cache.data, TABLE, *lengths).asnumpy()
        np.testing.assert_array_equal(out, layer(x, other.data, TABLE, *lengths).asnumpy())
    np.testing.assert_array_equal(cache.data.asnumpy(), other.data.asnumpy())


def test_a_moved_mindir_is_pointed_at_the_library(graph, tmp_path, layer, monkeypatch):
    expected = run_steps(OneLayer(layer, fm.LatentKVCache(CFG, BLOCKS, PAGE).data))
    elsewhere = tmp_path / "other machine" / "libms_flashmla.so"
    elsewhere.parent.mkdir()
    shutil.copy(_lib.library_path(), elsewhere)
    src, dst = str(tmp_path / "src.mindir"), str(tmp_path / "sub" / "dst.mindir")
    os.mkdir(tmp_path / "sub")
    with monkeypatch.context() as patch:
        patch.setattr(_lib, "library_path", lambda: str(elsewhere))
        there = make_layer()
        ms.export(OneLayer(there, fm.LatentKVCache(CFG, BLOCKS, PAGE).data), dynamic(None, 48), *DYNAMIC_BATCH, file_name=src, file_format="MINDIR")
    os.remove(elsewhere)
    fm.relocate_mindir(src, dst)
    assert str(elsewhere).encode() in Path(src).read_bytes() and str(elsewhere).encode() not in Path(dst).read_bytes()
    for out, wanted in zip(run_steps(nn.GraphCell(ms.load(dst))), expected):
        np.testing.assert_array_equal(out, wanted)
    fm.relocate_mindir(src, src)
    assert str(elsewhere).encode() not in Path(src).read_bytes()


def test_weights_beside_a_graph_move_with_it(graph, tmp_path):
    """MindSpore writes the parameters of a large graph to files of their own; the format names them by paths relative to the MindIR file."""
    from mindspore.train.mind_ir_pb2 import ModelProto

    src, dst = tmp_path / "src", tmp_path / "dst"
    src.mkdir()
    dst.mkdir()
    ms.export(OneLayer(make_layer(), fm.LatentKVCache(CFG, BLOCKS, PAGE).data), dynamic(None, 48), *DYNAMIC_BATCH, file_name=str(src / "net.mindir"), file_format="MINDIR")
    model = ModelProto()
    model.ParseFromString((src / "net.mindir").read_bytes())
    first = model.graph.parameter[0]
    (src / "net_variables").mkdir()
    (src / "net_variables" / "data_0").write_bytes(first.raw_data)
    first.external_data.location, first.external_data.offset, first.external_data.length = "net_variables/data_0", 0, len(first.raw_data)
    (src / "net.mindir").chmod(0o600)
    (src / "net.mindir").write_bytes(model.SerializeToString())
    fm.relocate_mindir(src / "net.mindir", dst / "net.mindir")
    assert (dst / "net_variables" / "data_0").read_bytes() == first.raw_data


def test_relocate_refuses_other_files(graph, tmp_path):
    with pytest.raises(FileNotFoundError):
        fm.relocate_mindir(tmp_path / "none.mindir", tmp_path / "out.mindir")
    (tmp_path / "text.mindir").write_text("no MindIR file at all")
    with pytest.raises(ValueError, match="src"):
        fm.relocate_mindir(tmp_path / "text.mindir", tmp_path / "out.mindir")
    ms.export(nn.ReLU(), Tensor(np.ones(2, np.float32)), file_name=str(tmp_path / "relu.mindir"), file_format="MINDIR")
    with pytest.raises(ValueError, match="no operator of ms_flashmla"):
        fm.relocate_mindir(tmp_path / "relu.mindir", tmp_path / "out.mindir")
    assert not (tmp_path / "out.mindir").exists()


LOAD = """
import sys
import mindspore as ms, numpy as np
from mindspore import nn
sys.path[:0] = sys.argv[1:3]
import ms_flashmla
from ms_flashmla import _lib
from small_layer import STEPS, TABLE
ms.set_context(mode=ms.GRAPH_MODE)
net = nn.GraphCell(ms.load(sys.argv[3]))
np.savez(sys.argv[4], *[net(x, TABLE, *lengths).asnumpy() for x, *lengths in STEPS], isa=_lib.isa())
"""


@pytest.mark.parametrize("isa", [isa for isa, flags in NEEDS.items() if flags <= flags_of_this_processor()])
def test_a_mindir_runs_on_every_isa(graph, tmp_path, isa):
    """It is written by a server with one ISA and may be loaded by one with another: the packed weights inside are the same."""
    layer, path, results = make_layer(), str(tmp_path / "layer.mindir"), str(tmp_path / "out.npz")
    expected = run_steps(OneLayer(layer, fm.LatentKVCache(CFG, BLOCKS, PAGE).data))
    ms.export(OneLayer(layer, fm.LatentKVCache(CFG, BLOCKS, PAGE).data), dynamic(None, 48), *DYNAMIC_BATCH, file_name=path, file_format="MINDIR")
    here = Path(__file__).resolve().parent
    subprocess.run([sys.executable, "-c", LOAD, str(here), str(here.parent), path, results], check=True, env={**os.environ, "MS_FLASHMLA_ISA": isa})
    with np.load(results) as loaded:
        assert str(loaded["isa"]) == isa
        for i, wanted in enumerate(expected):
            assert np.abs(loaded[f"arr_{i}"] - wanted).max() <= 2e-5 * np.abs(wanted).max()
