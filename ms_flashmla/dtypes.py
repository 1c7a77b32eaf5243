"""float32, float16 and bfloat16 between numpy and MindSpore, each cast rounded once (to nearest, ties to even)."""

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


def zeros_parameter(name, shape, dtype):
    """A zero Parameter that needs no gradient. It sits on numpy's own pages, which cost no memory until they are written: a Parameter made
    from a Tensor would copy (and so touch) all of it."""
    words = np.dtype(f"u{NUMPY[dtype].itemsize}")
    parameter = ms.Parameter(ms.Tensor.from_numpy(np.zeros(1, words).view(NUMPY[dtype])), name=name, requires_grad=False)
    put(parameter, np.zeros(shape, words).view(NUMPY[dtype]))
    return parameter


def put(parameter, array):
    """Makes array the storage of parameter, without a copy."""
    parameter.set_data(ms.Tensor.from_numpy(array), slice_shape=True)
