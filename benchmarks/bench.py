"""Times the layer and its attention core against the machine's roof and against other implementations: `bash build.sh bench`.

One line a case, system and dtype: shape, time, GFLOP/s, GB/s, share of the measured roof (roof.py), times the MindSpore composition and times
torch in the same dtype. The layer and the core are called in PyNative (the layer in GRAPH_MODE as a second figure); "kernel" is the operator alone,
called through its AOT entry. Every output is compared before a case is timed.
"""

import argparse
import json
import os
import re
import sys
from pathlib import Path


def arguments():
    parser = argparse.ArgumentParser(prog="bash build.sh bench", description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write a list of result objects")
    parser.add_argument("--case", metavar="REGEX", help="run the cases whose id matches anywhere, those of --full included")
    parser.add_argument("--full", action="store_true", help="run every case (about three times as long)")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the roofline (needs matplotlib)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="threads of every system (default 2)")
    parser.add_argument("--no-peers", action="store_true", help="time ms_flashmla only")
    parser.add_argument("--seconds", type=float, default=4.0, metavar="S", help="time for the measurements of a case (default 4)")
    parser.add_argument("--switches", action="store_true", help="time the kernel without each of its parts that can be switched off, and nothing else")
    parser.add_argument("--markdown", metavar="FILE", help="write the table as docs/performance.md holds it")
    return parser


def pin(threads):
    """Keeps the whole process on that many processors: MindSpore has no one setting that all of its threads obey."""
    allowed = sorted(os.sched_getaffinity(0))
    if not 1 <= threads <= len(allowed):
        raise SystemExit(f"--threads {threads} is not allowed; this machine gives 1 to {len(allowed)}")
    os.sched_setaffinity(0, allowed[:threads])
    os.environ["OMP_NUM_THREADS"] = os.environ["MS_FLASHMLA_NUM_THREADS"] = str(threads)


if __name__ == "__main__":
    ARGUMENTS = arguments().parse_args()
    pin(ARGUMENTS.threads)  # before MindSpore starts its threads

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import mindspore as ms  # noqa: E402  (after pinning)

import cases  # noqa: E402
import ceilings  # noqa: E402
import memory  # noqa: E402
import overhead  # noqa: E402
import report  # noqa: E402
import roof  # noqa: E402
import switches  # noqa: E402
import systems  # noqa: E402
import timing  # noqa: E402
from ms_flashmla import _lib  # noqa: E402

LEAST_ROUNDS = 3
SLOW_FACTOR = 3  # a prefill takes seconds a round, and gets this much more time


def prepare(system, threads):
    """MindSpore's mode and ms_flashmla's threads for a system's calls."""
    ms.set_context(mode=ms.PYNATIVE_MODE if system.pynative else ms.GRAPH_MODE)
    _lib.set_num_threads(system.threads or threads)


def run_case(case, threads, measured, seconds, peers):
    """Result objects of one case, one for each system, dtype and number of threads."""
    built = systems.build(case, threads, peers)
    systems.check(case, built, lambda system: prepare(system, threads))
    slow = SLOW_FACTOR if case.phase == "prefill" else 1
    median_us, peak, one_thread = timing.run(built, measured, seconds * slow, LEAST_ROUNDS, lambda system: prepare(system, threads))
    results = []
    for (name, dtype, variant), us in median_us.items():
        if variant in ("kernel", "graph"):
            continue
        single = variant == "1 thread"
        work, ceiling = roof.stages(case, dtype), one_thread if single else peak
        roof_us = roof.roof_us(work, *ceiling)
        result = {"case": case.name, "system": name, "dtype": dtype, "threads": 1 if single else threads, "us": us,
                  "gflops": sum(stage.flops for stage in work) / us / 1e3, "gb_per_s": sum(stage.bytes for stage in work) / us / 1e3,
                  "roof_us": roof_us, "roof_share": roof_us / us, "shape": case.shape, "fma_gflops": ceiling.fma_gflops,
                  "read_gb_per_s": ceiling.read_gb_per_s}
        for other in ("kernel", "graph"):
            if not single and (name, dtype, other) in median_us:
                result[f"{other}_us"] = median_us[name, dtype, other]
        if built[name, dtype, variant].pages:
            result["pages"] = built[name, dtype, variant].pages
        results.append(result)
    return results


def choose(args):
    if args.case is None:
        return [case for case in cases.CASES if args.full or not case.full]
    try:
        chosen = [case for case in cases.CASES if re.search(args.case, case.name)]
    except re.error as error:
        raise SystemExit(f"--case: {error}") from None
    if not chosen and not re.search(args.case, overhead.NAME):
        raise SystemExit(f"--case {args.case!r} matches none of {', '.join([case.name for case in cases.CASES] + [overhead.NAME])}")
    return chosen


def main(args):
    chosen = choose(args)
    for path in filter(None, (args.json, args.plot, args.markdown)):
        if not Path(path).resolve().parent.is_dir():
            raise SystemExit(f"{path}: its folder does not exist")
    if args.plot:
        import plot  # a missing matplotlib shows before the measurements, not after
    ms.set_context(mode=ms.GRAPH_MODE)
    measured = ceilings.Ceilings(_lib.isa(), args.threads)
    measured.sample_small_pages()
    machine = report.machine(args.threads, measured)
    print("\n".join(machine), flush=True)
    if args.switches:
        for line in switches.lines(args.threads, measured, args.seconds):
            print(line, flush=True)
        return
    results = []
    for case in chosen:
        systems.release(case)
        of_case = run_case(case, args.threads, measured, args.seconds, not args.no_peers)
        report.print_case(of_case)
        results += of_case
        if args.json:  # after each case: a run that is stopped keeps what it has
            Path(args.json).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if any(case.name == memory.CASE for case in chosen):
        report.print_memory(memory)
    if args.case is None or re.search(args.case, overhead.NAME):
        for line in overhead.lines():
            print(line, flush=True)
    measured.sample_small_pages()
    closing = report.ceilings_line(measured) + report.ratios(results)
    print("\n".join(closing), flush=True)
    if args.markdown and results:
        Path(args.markdown).write_text(report.markdown(results, machine + closing), encoding="utf-8")
    if args.plot and results:
        plot.draw(results, ceilings.median(measured.samples), args.plot)


if __name__ == "__main__":
    main(ARGUMENTS)
