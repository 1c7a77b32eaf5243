"""`python -m ms_flashmla doctor`: what is installed here and what would run."""

import json
import os
import platform
import shutil
import sys

from . import __version__, _lib, pynative

_CANN_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_OPP_PATH")
_CANN_FOLDERS = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann", "/usr/local/Ascend/latest")
_ISA_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_fp16", "amx_tile")


def add_arguments(parser):
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def cann_home():
    """Folder of the CANN toolkit, or None: CANN's own environment variables, then its usual places."""
    for folder in (*(os.environ.get(name) for name in _CANN_VARIABLES), *_CANN_FOLDERS):
        if folder and os.path.isdir(folder):
            return folder
    return None


def _processor():
    """(model name, the vector extensions that matter here) from /proc/cpuinfo; architecture and nothing where there is none."""
    model, flags = platform.machine(), []
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    model = value.strip()
                elif key.strip() == "flags":
                    flags = [flag for flag in _ISA_FLAGS if flag in value.split()]
                    break
    except OSError:
        pass
    return model, flags


def _ask(function, problems):
    """function(), or None with the reason in problems."""
    try:
        return function()
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        problems.append(str(error))
        return None


def _mindspore():
    import mindspore
    import numpy

    if int(numpy.__version__.split(".")[0]) >= 2:
        raise RuntimeError(f"numpy {numpy.__version__}: some MindSpore operators fail with numpy 2; install numpy<2")
    return mindspore.__version__, mindspore.get_context("device_target")


def report():
    """The facts as a dict that JSON takes; "problems" lists in words what keeps the operators from running."""
    problems = []
    mindspore, device = _ask(_mindspore, problems) or (None, None)
    model, flags = _processor()
    library = _ask(_lib.library_path, problems)
    facts = {
        "ms_flashmla": __version__,
        "mindspore": mindspore,
        "python": platform.python_version(),
        "device": device,
        "processor": model,
        "processor_extensions": flags,
        "processors": len(os.sched_getaffinity(0)),
        "library": library,
        "library_built": library is not None and os.path.exists(library),
        "isa": _ask(_lib.isa, problems),
        "threads": _ask(_lib.num_threads, problems),
        "pynative_library": None if mindspore is None or library is None else pynative.find(),
        "implementation": os.environ.get("MS_FLASHMLA_IMPL", "cpu"),
        "compiler": shutil.which(os.environ.get("CXX", "g++")),
        "cann": cann_home(),
    }
    if mindspore is not None:
        _ask(_lib.require_backend, problems)
    facts["problems"] = list(dict.fromkeys(problems))
    kernel = "the Ascend kernel on the twin of a chip" if facts["isa"] == "twin" else f"the CPU kernel, {facts['isa']}, {facts['threads']} threads"
    facts["runs"] = kernel if not problems else None
    return facts


def run(args):
    """Prints the report; 0 when the operators can run here, else 1."""
    facts = report()
    if args.json:
        print(json.dumps(facts, indent=2))
        return int(bool(facts["problems"]))
    for key, value in facts.items():
        if key == "problems":
            continue
        shown = "none" if value is None else ", ".join(value) if isinstance(value, list) else value
        print(f"{key.replace('_', ' '):22} {shown}")
    for problem in facts["problems"]:
        print(f"problem: {problem}", file=sys.stderr)
    return int(bool(facts["problems"]))
