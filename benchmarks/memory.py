"""Extra memory of a call: how far the resident set rises above what it was before, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

CASE = "v2-lite/prefill/B1/S2048"
TOKENS = 2048


def _status_bytes(field):
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def extra_bytes(system):
    """Peak RSS growth of CASE in `system`, bytes."""
    done = subprocess.run([sys.executable, __file__, system], check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, "GLOG_v": "3"})
    return int(done.stdout.splitlines()[-1])


def _composed(cfg, weights):
    from ms_flashmla.reference.composed import ComposedMLA, composed_weights

    return ComposedMLA(cfg, composed_weights(cfg, weights), 1, 0, TOKENS)


def _fused(cfg, weights):
    import mindspore as ms

    from ms_flashmla.cache import LatentKVCache
    from ms_flashmla.layer import MLALayer

    layer = MLALayer(cfg)
    layer.load_hf_weights(weights, prefix="")
    cache = LatentKVCache(cfg, TOKENS // 64)
    cache.allocate(0, TOKENS)
    table, context = cache.block_table([0]), ms.Tensor([0], ms.int32)

    def run(hidden, residual):
        return layer(hidden, cache.data, table, ms.Tensor([hidden.shape[0]], ms.int32), context, residual=residual)
    return run


def _measure(system):
    import mindspore as ms

    import cases

    ms.set_context(mode=ms.GRAPH_MODE)
    case = next(case for case in cases.CASES if case.name == CASE)
    hidden, residual = map(ms.Tensor.from_numpy, case.hidden_and_residual())
    weights = cases.random_weights(case.model)
    if system == "mindspore":
        run = _composed(case.cfg, weights)
        run.compile(hidden, residual)
    else:
        run = _fused(case.cfg, weights)
        run(hidden[:1], residual[:1]).asnumpy()  # starts the threads and what the first graph of a process takes
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets the peak
    before = _status_bytes("VmRSS")
    run(hidden, residual).asnumpy()
    return _status_bytes("VmHWM") - before


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    print(_measure(sys.argv[1]))
