"""Calls from PyNative without ops.Custom: a small library against the framework's headers (pynative.cc), built once, and None where it cannot be."""

import ctypes
import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import warnings

from . import _lib
from ._check import one_of

_MODULE = "ms_flashmla_pynative"
_SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "pynative.cc")


def file_name():
    """Name of the library for this interpreter and this MindSpore. importlib.metadata.PackageNotFoundError without MindSpore."""
    version = importlib.metadata.version("mindspore")
    with open(_SOURCE, "rb") as file:
        source = hashlib.sha256(file.read()).hexdigest()[:12]
    return f"pynative-{version}-{sys.implementation.cache_tag}-{source}.so"


def _folders():
    """Where the library may lie: beside the kernels, else in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.dirname(_lib.library_path()), os.path.join(cache, "ms_flashmla")


def _compile(target):
    """Compiles and links into target. RuntimeError with the compiler's words."""
    from mindspore.ops import CustomOpBuilder

    builder = CustomOpBuilder(_MODULE, _SOURCE, backend="CPU")  # for its flags; its own build needs ninja and a folder for its files
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    includes = [f"-I{path}" for path in (*builder.get_include_paths(), sysconfig.get_path("include"))]
    command = [*compiler, *builder.get_cflags(), "-w", *includes, _SOURCE, *builder.get_ldflags(), "-o", target]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise RuntimeError(f"{compiler[0]}: {error.strerror}") from error
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-2000:] or f"{compiler[0]} exits with {done.returncode}")


def build(folder):
    """Builds the library into folder, about 40 s, unless it is there; returns its path. RuntimeError or OSError when that fails."""
    path = os.path.join(folder, file_name())
    if os.path.exists(path):
        return path
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, ".pynative.lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes one builds, the others wait for it
        if not os.path.exists(path):
            print("ms_flashmla: building the library for PyNative calls, once, about 40 s", file=sys.stderr)
            handle, new = tempfile.mkstemp(suffix=".so", dir=folder)
            os.close(handle)
            try:
                _compile(new)
                os.chmod(new, 0o755)
                os.replace(new, path)
            finally:
                if os.path.exists(new):
                    os.remove(new)
    return path


def find():
    """Path of the library, or None where it was not built yet."""
    paths = [os.path.join(folder, file_name()) for folder in _folders()]
    return next((path for path in paths if os.path.exists(path)), None)


def _find_or_build():
    package, cache = _folders()
    return find() or build(package if os.access(package, os.W_OK) else cache)


@functools.lru_cache(maxsize=None)
def module():
    """The loaded library, built at the first call; None, with one warning, when that fails, or when MS_FLASHMLA_PYNATIVE is "custom"."""
    if one_of("MS_FLASHMLA_PYNATIVE", os.environ.get("MS_FLASHMLA_PYNATIVE") or "direct", ("direct", "custom")) == "custom":
        return None
    try:
        spec = importlib.util.spec_from_file_location(_MODULE, _find_or_build())
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        return loaded
    except (RuntimeError, OSError, ImportError) as error:
        warnings.warn(f"PyNative calls go through ops.Custom, which takes 0.1 to 0.5 ms more each: {error}", RuntimeWarning, stacklevel=2)
        return None


def _address(library, name):
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value


@functools.lru_cache(maxsize=None)
def batch_check(implementation):
    """The host check of a layer call as the library's call_layer takes it; implementation: "cpu" or "twin"."""
    library = _lib.load(implementation)
    return module().BatchCheck(_address(library, "fm_check_batch"), _address(library, "fm_last_error"))


def operator(implementation, name, attributes):
    """A callable for operator `name` of the "cpu" or "twin" library with ((attribute, value), ...), or None without the library for PyNative calls.

    It takes the operator's inputs in order, None for an absent one, and returns its output or a tuple of them; None when gradients are
    recorded, which the operators do not give. What the kernel refuses is a RuntimeError, from the call or, where the framework still
    had work to do before it, from the next thing that waits for it.
    """
    if module() is None:
        return None
    library, proto = _lib.load(implementation), _lib.proto(name)
    names = (ctypes.c_char_p * len(attributes))(*(key.encode() for key, _ in attributes))
    values = (ctypes.c_double * len(attributes))(*(value for _, value in attributes))
    extra = library.fm_new_attrs(names, values, len(attributes))
    return module().Operator(name, _address(library, name), _address(library, f"{name}InferShape"), _address(library, f"{name}InferType"), extra,
                             len(proto["inputs"]), len(proto["outputs"]))
