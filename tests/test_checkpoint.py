"""Checkpoint folders: what the safetensors package reads and writes, sharded, bfloat16, damaged."""
import json
import shutil
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ms_flashmla import dtypes
from ms_flashmla.checkpoint import Checkpoint, attention_prefix, write_checkpoint

HF_CASES = Path(__file__).resolve().parent / "hf_cases"
RNG = np.random.default_rng(5)


@pytest.mark.parametrize("case", sorted(path.name for path in HF_CASES.iterdir() if path.is_dir()))
def test_reads_what_safetensors_reads(case, tmp_path):
    shutil.copy(HF_CASES / case / "model.safetensors", tmp_path)
    expected, checkpoint = load_file(tmp_path / "model.safetensors"), Checkpoint(tmp_path)
    assert set(checkpoint) == set(expected) and len(checkpoint) == len(expected)
    for name, array in expected.items():
        assert checkpoint[name].dtype == array.dtype and np.array_equal(checkpoint[name], array)


@pytest.mark.parametrize("shards", [1, 3])
def test_writes_what_safetensors_reads(shards, tmp_path):
    tensors = {f"t{i}": RNG.standard_normal((3, i)).astype(dtype) for i, dtype in enumerate([np.float32, np.float16, np.float64, np.float32])}
    write_checkpoint(tmp_path, {"a": 1}, tensors, shards)
    read = {name: array for path in tmp_path.glob("*.safetensors") for name, array in load_file(path).items()}
    assert json.loads((tmp_path / "config.json").read_text()) == {"a": 1}
    assert len(list(tmp_path.glob("*.safetensors"))) == shards
    for name, array in Checkpoint(tmp_path).items():
        assert np.array_equal(array, tensors[name]) and np.array_equal(read[name], tensors[name])


def test_bfloat16_keeps_its_bits_and_mindspore_reads_them(tmp_path):
    array = dtypes.cast(RNG.standard_normal((5, 7), dtype=np.float32), ms.bfloat16)
    write_checkpoint(tmp_path, {}, {"w": array})
    assert Checkpoint(tmp_path)["w"].tobytes() == array.tobytes()
    loaded = ms.load_checkpoint(str(tmp_path / "model.safetensors"), format="safetensors")["w"]
    assert loaded.dtype == ms.bfloat16 and np.array_equal(loaded.float().asnumpy(), dtypes.cast(array, ms.float32))


def test_only_files_of_the_index_count(tmp_path):
    write_checkpoint(tmp_path, {}, {"a": np.zeros(2, np.float32), "b": np.ones(2, np.float32)}, shards=2)
    save_file({"a": np.full(2, 9, np.float32)}, tmp_path / "another.safetensors")
    assert np.array_equal(Checkpoint(tmp_path)["a"], np.zeros(2))


def test_folder_without_tensors(tmp_path):
    with pytest.raises(FileNotFoundError, match="safetensors"):
        Checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError):
        Checkpoint(tmp_path / "missing")


def with_header(header, data=bytes(16)):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


@pytest.mark.parametrize("content", [
    b"", b"\x01", b"\xff" * 64, b"\x08" + b"\x00" * 7 + b"not json",
    *map(with_header, [None, "text", [1], {"w": None}, {"w": 3}, {"w": {}}, {"w": {**ENTRY, "data_offsets": [-8, 8]}}, {"w": {**ENTRY, "data_offsets": [0.0, 16.0]}},
                       {"w": {**ENTRY, "data_offsets": [8, 24]}}, {"w": {**ENTRY, "shape": [2**70]}}, {"w": {**ENTRY, "shape": [-2, -2]}}, {"w": {**ENTRY, "shape": "4"}},
                       {"w": {**ENTRY, "dtype": ["F32"]}}, {"w": {**ENTRY, "shape": [2, 3]}}])])
def test_file_that_is_no_safetensors(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="model.safetensors is not a safetensors file"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"{}", b"[]", b"\xff", b'{"weight_map": ["a"]}', b'{"weight_map": {"a": 3}}', b"[" * 100000])
def test_index_that_is_none(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(ValueError, match="index.json is not the index of a checkpoint"):
        Checkpoint(tmp_path)


def test_file_cut_off_in_its_data(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"w": np.zeros((64, 64), np.float32)}, path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match="model.safetensors is not a safetensors file, or it is damaged"):
        Checkpoint(tmp_path)


def test_fp8_is_named(tmp_path):
    header = json.dumps({"w": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ValueError, match="F8_E4M3"):
        Checkpoint(tmp_path)["w"]


@pytest.mark.parametrize("prefix", ["model.layers.3.self_attn.", "layers.3.self_attn.", "model.language_model.layers.3.self_attn.", "model.layers.3.self_attn.0."])
def test_attention_prefix(prefix):
    names = [prefix + "kv_a_proj_with_mqa.weight", "model.layers.13.self_attn.kv_a_proj_with_mqa.weight", "model.layers.3.self_attn.1.kv_a_proj_with_mqa.weight"]
    assert attention_prefix(names, 3) == prefix
    with pytest.raises(ValueError, match="layer 4"):
        attention_prefix(names, 4)
