"""Extra memory of a call: how far the resident set rises above what it was before, in a process of its own."""

import subprocess
import sys
from pathlib import Path

CASE = "v2-lite/prefill/B1/S2048"


def _status_bytes(field):
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def extra_bytes(system):
    """Peak RSS growth of CASE in `system`, bytes."""
    done = subprocess.run([sys.executable, __file__, system], check=True, stdout=subprocess.PIPE, text=True)
    return int(done.stdout.splitlines()[-1])


def _measure(system):
    import mindspore as ms
    import numpy as np

    import cases
    import systems

    ms.set_context(mode=ms.GRAPH_MODE)
    case = next(case for case in cases.CASES if case.name == CASE)
    weights = cases.random_weights()
    hidden, residual = (ms.Tensor.from_numpy(x) for x in case.inputs())
    if system == "mindspore":
        built = systems.composed(case, weights)
        built.function.compile(hidden, residual)
    else:
        built = systems.fused(case, weights, "float32")
        one = systems.fused(cases.Case("decode", 1, 1, 1), weights, "float32")  # starts the threads and what the first graph of a process takes
        one.run_once(*(np.zeros((1, cases.CFG.hidden_size), np.float32) for _ in range(2)))
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets the peak
    before = _status_bytes("VmRSS")
    built.function(hidden, residual).asnumpy()
    return _status_bytes("VmHWM") - before


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    print(_measure(sys.argv[1]))
