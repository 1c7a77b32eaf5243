"""The operators of the library called through their AOT entry, without MindSpore around them."""

import ctypes

import numpy as np

import ceilings
from ms_flashmla import _lib

NAMES = {"Float32": "float32", "Float16": "float16", "BFloat16": "bfloat16", "Int32": "int32"}


def argument(tensor):
    """(address, shape, dtype name) of a MindSpore Tensor or Parameter, None for an absent one."""
    if tensor is None:
        return None
    return tensor.data_ptr(), tuple(tensor.shape), NAMES[str(tensor.dtype)]


def output(shape, dtype, itemsize):
    """(numpy bytes, argument) of a fresh output."""
    buffer = np.zeros(int(np.prod(shape)) * itemsize, np.uint8)
    return buffer, (_lib.address(buffer), tuple(shape), dtype)


class KernelCall:
    """call() runs the operator once and returns its seconds.

    arguments: inputs, then outputs, as argument() gives them; the caller keeps their memory. attributes: name -> int or float, 0 where the
    operator has one that is not named.
    """

    _native = None

    def __init__(self, name, arguments, attributes):
        if KernelCall._native is None:
            KernelCall._native = ceilings.native()
        lib, library = KernelCall._native, _lib.library()
        self._attributes = lib.bench_attributes()
        for attribute in _lib.proto(name)["attrs"]:
            set_attribute = lib.bench_set_float if attribute["type"] == "float" else lib.bench_set_int
            set_attribute(self._attributes, attribute["name"].encode(), attributes.get(attribute["name"], 0))
        count = len(arguments)
        shapes = [(ctypes.c_int64 * max(len(x[1]), 1))(*x[1]) if x else (ctypes.c_int64 * 1)() for x in arguments]
        self._kept = shapes
        self._count = count
        self._data = (ctypes.c_void_p * count)(*(x[0] if x else None for x in arguments))
        self._ndims = (ctypes.c_int * count)(*(len(x[1]) if x else 0 for x in arguments))
        self._shapes = (ctypes.c_void_p * count)(*(ctypes.addressof(shape) for shape in shapes))
        self._dtypes = (ctypes.c_char_p * count)(*(x[2].encode() if x else b"none" for x in arguments))
        self._kernel = ctypes.cast(getattr(library, name), ctypes.c_void_p)
        init = ctypes.cast(getattr(library, name + "Init"), ctypes.c_void_p)
        if lib.bench_init(init, self._ndims, self._shapes, self._dtypes, self._attributes):
            raise RuntimeError(f"{name}Init failed")

    def call(self):
        seconds = KernelCall._native.bench_call(self._kernel, self._count, self._data, self._ndims, self._shapes, self._dtypes, self._attributes)
        if seconds < 0:
            raise RuntimeError(_lib.last_error())
        return seconds
