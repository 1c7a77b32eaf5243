"""What the benchmark prints, and the table of docs/performance.md."""

import datetime
import platform
import statistics
from collections import defaultdict
from importlib import metadata
from pathlib import Path

import ceilings
from ms_flashmla import _lib


def _cpu():
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _versions():
    found = []
    for name in ("mindspore", "torch", "transformers"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def machine(threads, measured):
    """Lines that say what was measured on."""
    return [f"{_cpu()}, {_lib.isa()}, {threads} threads, {datetime.date.today().isoformat()}; {_versions()}",
            f"ceilings: float32 FMA out of registers, and a read of {ceilings.STREAM_BYTES >> 30} GiB of which {100 * measured.huge_share:.0f} % lies on huge "
            "pages; sampled before, between and after the turns of every case, medians"]


def _spread(values, unit):
    values = sorted(values)
    return f"{statistics.median(values):.1f} {unit} (10th to 90th percentile {values[len(values) // 10]:.1f} to {values[-1 - len(values) // 10]:.1f})"


def ceilings_line(measured):
    """Lines with the ceilings of the whole run."""
    if not measured.samples:
        return [f"read on 4K pages {statistics.median(measured.small_page_gb_per_s):.1f} GB/s"]
    fma, read = zip(*measured.samples)
    return [f"ceilings of the run: {_spread(fma, 'GFLOP/s')}, {_spread(read, 'GB/s')}; on 4K pages "
            f"{statistics.median(measured.small_page_gb_per_s):.1f} GB/s"]


def _peers(results):
    """{(system, dtype): us} of a case on all threads."""
    most = max(result["threads"] for result in results)
    return {(result["system"], result["dtype"]): result["us"] for result in results if result["threads"] == most}


def _times(us, peer_us):
    return f"{peer_us / us:5.2f}x" if peer_us else "     -"


def print_case(results):
    peers = _peers(results)
    for r in results:
        extra = "".join(f", {name} {r[f'{name}_us']:.0f} us {100 * r['roof_us'] / r[f'{name}_us']:.0f} %" for name in ("kernel", "graph")
                        if f"{name}_us" in r)
        threads = "" if r["threads"] == max(x["threads"] for x in results) else f", on {r['threads']} thread"
        print(f"{r['case']:30} {r['shape']:44} {r['system']:12} {r['dtype']:8} {r['us']:9.0f} us {r['gflops']:6.1f} GFLOP/s {r['gb_per_s']:5.1f} GB/s "
              f"{100 * r['roof_share']:4.0f} % of roof  {_times(r['us'], peers.get(('mindspore', 'float32')))} mindspore "
              f"{_times(r['us'], peers.get(('torch', r['dtype'])))} torch{threads}{extra}", flush=True)
    pages = dict.fromkeys(r["pages"] for r in results if "pages" in r)
    if pages:
        print(f"{results[0]['case']:30} on huge pages: {'; '.join(pages)}", flush=True)


def print_memory(memory):
    for name in ("ms_flashmla", "mindspore"):
        print(f"{memory.CASE:30} {name:12} float32   extra memory {memory.extra_bytes(name) / 1e6:.0f} MB (output included)", flush=True)


def ratios(results):
    """Lines that compare cases: threads, context, queries."""
    ours = {(r["case"], r["dtype"], r["threads"]): r for r in results if r["system"] == "ms_flashmla"}
    most = max((r["threads"] for r in results), default=1)
    lines = []
    for (case, dtype, threads), r in ours.items():
        if threads == 1 and (case, dtype, most) in ours and most > 1:
            lines.append(f"1 -> {most} threads: {case} {dtype} {r['us'] / ours[case, dtype, most]['us']:.2f}x")
    for phase in ("decode_core", "decode"):
        long, short = (f"v2-lite/{phase}/B1/L{length}" for length in (131072, 8192))
        for dtype in ("float32", "bfloat16"):
            if (long, dtype, most) in ours and (short, dtype, most) in ours:
                ratio = ours[long, dtype, most]["us"] / 131072 / (ours[short, dtype, most]["us"] / 8192)
                lines.append(f"time per cached token, context 131072 against 8192: {phase} {dtype} {ratio:.2f}x")
    for phase in ("decode_core", "decode"):
        for dtype in ("float32", "bfloat16"):
            per_token = [(q, ours[name, dtype, most]["us"] / q) for q in range(1, 9)
                         if (name := f"v2-lite/{phase}/B1/L8192" + (f"/Q{q}" if q > 1 else ""), dtype, most) in ours]
            if len(per_token) > 1:
                lines.append(f"us per token by q_len at L8192: {phase} {dtype} " + ", ".join(f"{q}: {us:.0f}" for q, us in per_token))
    return lines


def markdown(results, lines):
    """docs/performance.md's table: a row per case and dtype."""
    by_case = defaultdict(dict)
    for r in results:
        if r["threads"] == max(x["threads"] for x in results if x["case"] == r["case"]):
            by_case[r["case"], r["dtype"]][r["system"]] = r
    out = ["| case | dtype | roof ms | ms | share of roof | kernel alone | in GRAPH_MODE | GFLOP/s | GB/s | x MindSpore | torch ms | x torch | x transformers |",
           "|---|---|---|---|---|---|---|---|---|---|---|---|---|"]
    for (case, dtype), row in by_case.items():
        ours = row.get("ms_flashmla")
        if ours is None:
            continue
        mindspore = by_case[case, "float32"].get("mindspore")
        cells = [case, dtype, f"{ours['roof_us'] / 1e3:.2f}", f"{ours['us'] / 1e3:.2f}", f"{100 * ours['roof_share']:.0f} %",
                 f"{100 * ours['roof_us'] / ours['kernel_us']:.0f} %",
                 f"{100 * ours['roof_us'] / ours['graph_us']:.0f} %" if "graph_us" in ours else "", f"{ours['gflops']:.0f}", f"{ours['gb_per_s']:.1f}",
                 f"{mindspore['us'] / ours['us']:.1f}" if mindspore else ""]
        torch, hf = row.get("torch"), row.get("transformers")
        cells += [f"{torch['us'] / 1e3:.2f}" if torch else "", f"{torch['us'] / ours['us']:.1f}" if torch else "",
                  f"{hf['us'] / ours['us']:.1f}" if hf else ""]
        out.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *out]) + "\n"
