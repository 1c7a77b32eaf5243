"""float32, float16 and bfloat16 between numpy and MindSpore, each cast rounded once (to nearest, ties to even)."""

import math
import mmap

import mindspore as ms
import numpy as np
from mindspore.common import np_dtype

DTYPES = (ms.float32, ms.float16, ms.bfloat16)
NUMPY = {ms.float32: np.dtype(np.float32), ms.float16: np.dtype(np.float16), ms.bfloat16: np.dtype(np_dtype.bfloat16)}


def check_dtype(name, dtype):
    """dtype if it is ms.float32, ms.float16 or ms.bfloat16, else TypeError."""
    if not any(dtype is allowed or dtype == allowed for allowed in DTYPES):
        raise TypeError(f"{name}: {dtype} is not allowed; it must be float32, float16 or bfloat16")
    return dtype


def is_bfloat16(dtype):
    """True for a numpy bfloat16, MindSpore's or ml_dtypes' (numpy itself has none)."""
    return dtype.name == "bfloat16" and dtype.itemsize == 2


def _bf16_bits(x):
    """uint16 bfloat16 bits of a float32 or float64 array, rounded once."""
    if x.dtype == np.float64:
        # Round to odd first: float32 keeps 16 bits more than bfloat16, so the second rounding then sees every discarded bit.
        with np.errstate(over="ignore"):
            near = x.astype(np.float32)
        bits = near.view(np.uint32).copy()
        wide = near.astype(np.float64)
        bits -= np.abs(wide) > np.abs(x)
        bits |= wide != x
        bits[np.isnan(x)] = 0x7FC00000
    else:
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    nan = np.isnan(x)
    if nan.any():
        rounded[nan] = ((bits[nan] >> 16) | 0x40).astype(np.uint16)  # stays a NaN, made quiet
    return rounded


def cast(array, dtype):
    """array (float64, float32, float16 or bfloat16 numpy) as a contiguous numpy array of the MindSpore dtype."""
    if is_bfloat16(array.dtype):
        bits = np.ascontiguousarray(array).view(np.uint16)
        if dtype == ms.bfloat16:
            return bits.view(NUMPY[ms.bfloat16])
        array = (bits.astype(np.uint32) << 16).view(np.float32)  # exact
    if dtype == ms.bfloat16:
        wide = array if array.dtype == np.float64 else array.astype(np.float32, copy=False)
        return _bf16_bits(wide).view(NUMPY[ms.bfloat16])
    with np.errstate(over="ignore"):  # past float16's range is inf, as every cast gives it
        return np.ascontiguousarray(array, NUMPY[dtype])


HUGE_PAGE = 2 << 20
_HUGE_FROM = 2 * HUGE_PAGE  # below, a stream of weights or cache rows gains nothing


def zeros(shape, dtype):
    """A zero numpy array of the MindSpore dtype. It costs no memory until it is written. From 4 MiB on it asks for huge pages, from which
    weights and cache rows are read a third faster (34 GB/s against 25 with 2 cores); where the system has none nothing changes. RuntimeError
    for more memory than the system gives."""
    size = math.prod(shape if isinstance(shape, tuple) else (shape,)) * NUMPY[dtype].itemsize
    if size < _HUGE_FROM:
        return np.zeros(shape, f"u{NUMPY[dtype].itemsize}").view(NUMPY[dtype])
    try:
        pages = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise RuntimeError(f"{shape} of {dtype} takes {size / 2**30:.1f} GiB, more than this system gives") from error
    start = -np.frombuffer(pages, np.uint8).ctypes.data % HUGE_PAGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            pages.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a system without them
            pass
    return np.frombuffer(pages, np.uint8, size, start).view(f"u{NUMPY[dtype].itemsize}").view(NUMPY[dtype]).reshape(shape)


def zeros_parameter(name, shape, dtype):
    """A zero Parameter that needs no gradient, on the memory of zeros(): one made from a Tensor would copy (and so touch) all of it."""
    parameter = ms.Parameter(ms.Tensor.from_numpy(zeros(1, dtype)), name=name, requires_grad=False)
    put(parameter, zeros(shape, dtype))
    return parameter


def put(parameter, array):
    """Makes array the storage of parameter, without a copy."""
    parameter.set_data(ms.Tensor.from_numpy(array), slice_shape=True)
