"""Times the layer against the same layer composed of MindSpore primitives in graph mode: `bash build.sh bench [--json FILE] [--case REGEX]`.

The systems of a case take turns, so that a slow second of the machine meets all of them; medians are shown. Every output is compared before a
case is timed. Weights and caches are the same buffers in every call and the systems' together exceed the last-level cache of a small machine.
"""

import argparse
import json
import os
import re
import statistics
import sys
import time
from pathlib import Path

THREADS = 2


def pin(threads):
    """Keeps the whole process on that many processors: MindSpore has no one setting that all of its threads obey."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    os.environ["OMP_NUM_THREADS"] = os.environ["MS_FLASHMLA_NUM_THREADS"] = str(threads)


if __name__ == "__main__":
    pin(THREADS)  # before MindSpore starts its threads

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import mindspore as ms  # noqa: E402  (after pinning)
import numpy as np  # noqa: E402

import cases  # noqa: E402
import memory  # noqa: E402
import systems  # noqa: E402

SECONDS_PER_CASE = 12.0
ROUNDS = (7, 60)  # at least, at most


def time_in_turns(runs):
    """{key: function} -> {key: median microseconds}; each round calls every function once."""
    def one_round():
        taken = {}
        for key, run in runs.items():
            start = time.perf_counter()
            run()
            taken[key] = (time.perf_counter() - start) * 1e6
        return taken

    one_round()
    rounds = [one_round()]
    for _ in range(min(max(int(SECONDS_PER_CASE / (sum(rounds[0].values()) / 1e6)), ROUNDS[0]), ROUNDS[1])):
        rounds.append(one_round())
    return {key: statistics.median(taken[key] for taken in rounds) for key in runs}


def run_case(case, weights):
    """Result objects of one case, after every system gave the same output as float32 within its dtype's tolerance."""
    hidden, residual = case.inputs()
    built = systems.build(case, weights)
    outputs = {key: system.run_once(hidden, residual) for key, system in built.items()}
    base = outputs["mindspore", "float32"]
    for (name, dtype), out in outputs.items():
        error = np.abs(out - base).max() / np.abs(base).max()
        if not error <= systems.TOLERANCE[dtype]:
            raise RuntimeError(f"{case.name}: {name} in {dtype} differs from the composition by {error:.1e} of the largest output, "
                               f"allowed {systems.TOLERANCE[dtype]:.1e}")
    median_us = time_in_turns({key: system.bind(hidden, residual) for key, system in built.items()})
    return [{"case": case.name, "system": name, "dtype": dtype, "threads": THREADS, "us": us, "gflops": case.flops() / us / 1e3,
             "gb_per_s": case.bytes(dtype) / us / 1e3} for (name, dtype), us in median_us.items()]


def print_case(results):
    peer = next(result["us"] for result in results if result["system"] == "mindspore")
    for result in results:
        print(f"{result['case']:26} {result['system']:12} {result['dtype']:9} {result['us']:10.0f} us {result['gflops']:7.1f} GFLOP/s "
              f"{result['gb_per_s']:6.1f} GB/s {peer / result['us']:6.2f}x mindspore", flush=True)


def main(argv=None):
    parser = argparse.ArgumentParser(prog="bash build.sh bench")
    parser.add_argument("--json", metavar="FILE", help="write a list of result objects")
    parser.add_argument("--case", metavar="REGEX", default="", help="run the cases whose id matches anywhere")
    args = parser.parse_args(argv)
    try:
        chosen = [case for case in cases.CASES if re.search(args.case, case.name)]
    except re.error as error:
        parser.error(f"--case: {error}")
    if not chosen:
        parser.error(f"--case {args.case!r} matches none of {', '.join(case.name for case in cases.CASES)}")
    ms.set_context(mode=ms.GRAPH_MODE)
    weights = cases.random_weights()
    results = []
    for case in chosen:
        of_case = run_case(case, weights)
        print_case(of_case)
        results += of_case
    if any(case.name == memory.CASE for case in chosen):
        for name in ("ms_flashmla", "mindspore"):
            print(f"{memory.CASE:26} {name:12} float32   extra memory {memory.extra_bytes(name) / 1e6:.0f} MB (output included)", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
