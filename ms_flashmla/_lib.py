"""The shared library through ctypes, and which backend runs. tune.py, tiling_report.py and profile.py declare the functions that they alone call."""

import ctypes
import functools
import glob
import json
import os

from ._check import as_bool, as_int

MOST_THREADS = 256  # ThreadPool::kMaxThreads
_INT64, _POINTER = ctypes.c_int64, ctypes.c_void_p


IMPLEMENTATIONS = {"cpu": ("libms_flashmla.so", "lib"), "twin": ("libms_flashmla_twin.so", "twin")}  # -> file, entry of build.sh that makes it


def implementation():
    """"cpu" or "twin", as MS_FLASHMLA_IMPL says. ValueError when it says something else."""
    name = os.environ.get("MS_FLASHMLA_IMPL") or "cpu"
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"MS_FLASHMLA_IMPL: {name!r} is not allowed; it must be 'cpu' or 'twin'")
    return name


def _path(name):
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib", IMPLEMENTATIONS[name][0])


def library_path():
    """Absolute path of the library that runs, beside this package; it may not exist yet."""
    return _path(implementation())


@functools.lru_cache(maxsize=None)
def load(name):
    """The loaded library of an implementation (ctypes.CDLL). RuntimeError when it was not built."""
    path = _path(name)
    if not os.path.exists(path):
        raise RuntimeError(f"{path} is missing; build it with `bash build.sh {IMPLEMENTATIONS[name][1]}`")
    lib = ctypes.CDLL(path)
    for name in ("fm_last_error", "fm_isa", "fm_proto_json", "fm_switches_error"):
        getattr(lib, name).restype = ctypes.c_char_p
        getattr(lib, name).argtypes = []
    lib.fm_set_num_threads.argtypes = [ctypes.c_int]
    # num_blocks, block_size, batch, max_blocks, block_table, q_seq_lens, context_lens, num_tokens, tokens_per_seq, max_positions, index_topk
    lib.fm_check_batch.argtypes = [_INT64] * 4 + [_POINTER] * 3 + [_INT64] * 4
    # names, values, count
    lib.fm_new_attrs.argtypes = [ctypes.POINTER(ctypes.c_char_p), ctypes.POINTER(ctypes.c_double), ctypes.c_int]
    lib.fm_new_attrs.restype = ctypes.c_void_p
    return lib


def library():
    """The library that runs: MS_FLASHMLA_IMPL's. Both hold the operators' lists, checks and the tiling."""
    return load(implementation())


def last_error():
    """Text of the last failure of a kernel or a check, "" before any."""
    return library().fm_last_error().decode("utf-8", "replace")


def set_num_threads(n):
    """Threads the kernels use from the next call on, 1 to 256. Raises TypeError for another type, ValueError for another number.

    The start value is MS_FLASHMLA_NUM_THREADS, or the number of processors.
    """
    if library().fm_set_num_threads(as_int("n", n, 1, MOST_THREADS)):
        raise ValueError(f"n: {last_error()}")


def num_threads():
    """Threads the kernels use. ValueError when MS_FLASHMLA_NUM_THREADS is not a number of threads."""
    threads = library().fm_num_threads()
    if threads < 1:
        raise ValueError(last_error())
    return threads


def isa():
    """"avx512", "avx2" or "generic": what the kernels run with; "twin" for the twin. ValueError when MS_FLASHMLA_ISA names one that is unknown or that this
    processor lacks."""
    name = library().fm_isa()
    if name is None:
        raise ValueError(last_error())
    return name.decode()


@functools.lru_cache(maxsize=None)
def _contract():  # the same in both libraries
    return json.loads(library().fm_proto_json().decode())


def proto(op):
    """{"name", "inputs", "outputs", "attrs"} of an operator: the C++ list, the only one there is."""
    return {entry["name"]: entry for entry in _contract()["ops"]}[op]


def packed_weights():
    """{"panel", "align"} of packed weights: outputs of a panel, and the multiple that each group's outputs are padded to."""
    return _contract()["packed_weights"]


def _holds_operator(package):
    """Whether a CANN package folder (vendors/<name>) has FlashMLA for ascend950."""
    for path in glob.glob(os.path.join(glob.escape(package), "op_impl", "ai_core", "tbe", "config", "ascend950", "*.json")):
        with open(path, encoding="utf-8", errors="replace") as f:
            if '"FlashMLA"' in f.read():
                return True
    return False


def require_ascend_package():
    """RuntimeError, with what to set, unless ASCEND_CUSTOM_OPP_PATH holds the package that `bash build.sh ascend` builds."""
    paths = [path for path in os.environ.get("ASCEND_CUSTOM_OPP_PATH", "").split(":") if path]
    if not any(_holds_operator(path) for path in paths):
        where = f"is {':'.join(paths)}, where no FlashMLA for ascend950 is" if paths else "is not set"
        raise RuntimeError(f"device_target Ascend: ASCEND_CUSTOM_OPP_PATH {where}. Build and install the package with `bash build.sh ascend --install DIR`, "
                           "then set ASCEND_CUSTOM_OPP_PATH=DIR/vendors/ms_flashmla before MindSpore is imported")


def require_backend():
    """Checks that the backend which the environment and MindSpore's device_target ask for is here.

    Returns the library path for ops.Custom, or None when the operator is CANN's, known by its name. ValueError for an unknown MS_FLASHMLA_IMPL,
    MS_FLASHMLA_ISA, MS_FLASHMLA_NUM_THREADS or MS_FLASHMLA_OFF, RuntimeError for a backend that is not installed.
    """
    from mindspore import get_context

    target = get_context("device_target")
    load(implementation())
    if target == "Ascend":
        require_ascend_package()
        return None
    if target != "CPU":
        raise RuntimeError(f"device_target {target}: ms_flashmla runs on 'CPU' and 'Ascend'")
    isa(), num_threads(), _check_switches()  # their environment variables fail here, before anything is built
    return library_path()


def _check_switches():
    """ValueError when MS_FLASHMLA_OFF names a switch that is none."""
    error = library().fm_switches_error().decode()
    if error:
        raise ValueError(error)


def set_switch(name, on):
    """Switches a part of the CPU kernel (tiling/switches.h) for the calls to come, to time it with and without. ValueError for another name."""
    if library().fm_set_switch(name.encode(), int(as_bool("on", on))):
        raise ValueError(f"name: {name!r} is no switch of tiling/switches.h")


def address(array):
    """Where a numpy array's data starts, as an int for a pointer argument."""
    return array.__array_interface__["data"][0]
