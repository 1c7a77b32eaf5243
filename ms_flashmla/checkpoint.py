"""Checkpoint folders as Hugging Face writes them: config.json and one or more safetensors files, with an index when sharded.

A safetensors file is a little-endian uint64 n, n bytes of JSON {name: {dtype, shape, data_offsets: [first, end)}} and the data, whose
offsets start after the JSON. The safetensors package checks it; the values are mapped here because its numpy reader refuses bfloat16.
"""

import json
import os
import re
import struct
from collections.abc import Mapping

import numpy as np
from mindspore.common import np_dtype
from safetensors import SafetensorError, safe_open

_INDEX = "model.safetensors.index.json"
_DTYPES = {"F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(np_dtype.bfloat16),
           "I64": np.dtype(np.int64), "I32": np.dtype(np.int32), "I16": np.dtype(np.int16), "I8": np.dtype(np.int8), "U8": np.dtype(np.uint8),
           "BOOL": np.dtype(np.bool_)}


def _read_header(path):
    """(name -> entry, offset of the data in bytes) of a safetensors file. ValueError, naming it, for a file that is none or is damaged."""
    try:
        with safe_open(path, framework="np"):  # checks the header against the file, entry by entry
            pass
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file, or it is damaged: {error}") from error
    with open(path, "rb") as file:
        size = struct.unpack("<Q", file.read(8))[0]
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return header, 8 + size


def _read_index(path):
    """The files that a sharded checkpoint's index names, sorted. ValueError, naming it, for anything else than an index."""
    try:
        with open(path, encoding="utf-8") as file:
            files = json.load(file)["weight_map"].values()
        return sorted({os.fspath(name) for name in files})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not the index of a checkpoint: {type(error).__name__} {error}") from error


class Checkpoint(Mapping):
    """Name -> numpy array over all safetensors files of a folder, mapped from disk: a tensor costs memory when its values are read.

    Raises FileNotFoundError for a folder without safetensors files, ValueError for a damaged file and, on access, for a dtype that
    has no numpy form (fp8).
    """

    def __init__(self, folder):
        folder = os.fspath(folder)
        index = os.path.join(folder, _INDEX)
        if os.path.exists(index):
            files = _read_index(index)
        else:
            files = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))
        if not files:
            raise FileNotFoundError(f"{folder} holds no .safetensors file")
        self._where = {}  # name -> (path, entry, data offset)
        for name in files:
            path = os.path.join(folder, name)
            header, offset = _read_header(path)
            self._where.update({tensor: (path, entry, offset) for tensor, entry in header.items()})

    def __getitem__(self, name):
        path, entry, offset = self._where[name]
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{name}: dtype {entry['dtype']} in {path} is not supported; it must be one of {', '.join(_DTYPES)}")
        dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
        first, end = entry["data_offsets"]
        if first == end:
            return np.empty(shape, dtype)
        return np.asarray(np.memmap(path, np.uint8, "r", offset + first, end - first)).view(dtype).reshape(shape)

    def __iter__(self):
        return iter(self._where)

    def __len__(self):
        return len(self._where)


def attention_prefix(names, layer):
    """The prefix of an MLA layer's weights: "model.layers.3.self_attn." for layer 3, also under a longer path ("language_model....") and,
    where a layer has two attentions (LongCat-Flash), of its first. ValueError when there is none."""
    pattern = re.compile(rf"(?:.*\.)?layers\.{layer}\.self_attn\.(?:0\.)?(?=kv_a_proj_with_mqa\.weight$)")
    found = sorted(match.group() for match in map(pattern.match, names) if match)
    if not found:
        raise ValueError(f"layer {layer}: the checkpoint has no MLA layer of that number (no layers.{layer}.self_attn.kv_a_proj_with_mqa.weight)")
    return found[0]


def write_checkpoint(folder, config, tensors, shards=1):
    """Writes config.json (from a dict) and tensors (name -> float32, float16 or bfloat16 array), in `shards` safetensors files with an index
    when there is more than one."""
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file, indent=2)
    names = list(tensors)
    weight_map = {}
    for i in range(shards):
        file_name = "model.safetensors" if shards == 1 else f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i::shards]
        _write_file(os.path.join(folder, file_name), {name: tensors[name] for name in part})
        weight_map.update(dict.fromkeys(part, file_name))
    if shards > 1:
        with open(os.path.join(folder, _INDEX), "w", encoding="utf-8") as file:
            json.dump({"metadata": {}, "weight_map": weight_map}, file)


def _write_file(path, tensors):
    codes = {dtype: code for code, dtype in _DTYPES.items()}
    header, first = {}, 0
    for name, array in tensors.items():
        header[name] = {"dtype": codes[array.dtype], "shape": list(array.shape), "data_offsets": [first, first + array.nbytes]}
        first += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in tensors.values():
            file.write(np.ascontiguousarray(array).view(np.uint8).data)
