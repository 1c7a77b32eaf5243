"""Checks of plain Python values, with one wording: the argument, what it was, what is allowed."""

import math
import numbers

FLOAT32_MAX, FLOAT32_TINY = 3.4028234663852886e38, 1.1754943508222875e-38  # largest, and smallest normal, above 0


def as_int(name, value, minimum=1, maximum=None):
    """value as an int in [minimum, maximum]; TypeError for anything that is no integer (bool too), ValueError outside."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}: {value!r} is a {type(value).__name__}; an integer is needed")
    value = int(value)
    if value < minimum or (maximum is not None and value > maximum):
        allowed = f"at least {minimum}" if maximum is None else f"{minimum} to {maximum}"
        raise ValueError(f"{name}: {value} is not allowed; it must be {allowed}")
    return value


def as_float(name, value, positive=True):
    """value as a float that is finite, and above zero if positive, in float32 too, which the kernels compute with; TypeError for bool and
    non-numbers, ValueError for NaN, inf, <= 0."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: {value!r} is a {type(value).__name__}; a number is needed")
    try:
        value = float(value)
    except OverflowError:  # an integer beyond float64
        value = math.inf
    if not math.isfinite(value) or abs(value) > FLOAT32_MAX or (positive and value < FLOAT32_TINY):
        allowed = "finite and above 0 in float32" if positive else "finite in float32"
        raise ValueError(f"{name}: {value} is not allowed; it must be {allowed}")
    return value


def as_bool(name, value):
    """value if it is a bool, else TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: {value!r} is a {type(value).__name__}; True or False is needed")
    return value


def one_of(name, value, allowed):
    """value if it is one of allowed, else ValueError."""
    if value not in allowed:
        raise ValueError(f"{name}: {value!r} is not allowed; it must be one of {', '.join(map(repr, allowed))}")
    return value
