"""The `profile` sub-command: the Ascend kernel's time on the twin of a chip, where it goes, and how it stands against the lower bound.

Every figure is predicted by the twin from the constants of tiling/machines, never measured."""

import ctypes
import json
import sys

from . import tiling_report
from ._lib import load

MODELS = {  # name -> options that it stands for
    "seed": dict(heads=12, head_dim=128, kv_lora=512, rope_dim=0, hidden=1536, q_lora=0),
    "v2-lite": dict(heads=16, head_dim=128, kv_lora=512, rope_dim=64, hidden=2048, q_lora=0),
    "v3": dict(heads=128, head_dim=128, kv_lora=512, rope_dim=64, hidden=7168, q_lora=1536),
}
_LIMIT = 2.0  # times the bound, from which on a warning says where bytes or time come from


def simulate(machine, problem, *, scale="", sample=0, check=False, trace=None, rows=0, kv_tile=0, kv_buffers=0):
    """Runs the kernel for a tiling_report.Problem on a machine's twin; what twin_profile.h says, as a dict.

    scale: assumed constants multiplied, "startup_cube=0.5,barrier_cycles=2". rows, kv_tile, kv_buffers: attention's blocks in place of the selected ones
    where not 0; kv_buffers 1 loads nothing ahead. ValueError with the twin's words when the call is illegal or the
    twin finds a fault.
    """
    function = load("twin").fm_twin_profile
    function.restype = ctypes.c_int64
    function.argtypes = [ctypes.c_char_p, ctypes.POINTER(tiling_report.Problem), ctypes.c_char_p, ctypes.c_int32, ctypes.c_int32,
                         ctypes.POINTER(ctypes.c_int32), ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64]
    size = 1 << 20
    buffer = ctypes.create_string_buffer(size)
    needs = function(machine.encode(), ctypes.byref(problem), scale.encode(), sample, int(check), (ctypes.c_int32 * 3)(rows, kv_tile, kv_buffers), (trace or "").encode(), buffer, size)
    if needs < 0:
        raise ValueError(buffer.value.decode())
    return json.loads(buffer.value.decode())


def profile(machine, problem, **how):
    """The run and the bound side by side, as the JSON of the sub-command; `how` goes to simulate()."""
    run = simulate(machine, problem, **how)
    bound = tiling_report.report(machine, problem)
    # Published peaks of the machine file: MACs of the cube, bytes of memory.
    peak_macs_per_us = bound["peak_gflops"] * 1e3 / 2
    busiest = max(run["pipes"], key=lambda pipe: pipe["busy_us"])
    moved = {t["name"]: t["read_bytes"] + t["written_bytes"] for t in run["tensors"]}
    vector = [pipe for pipe in run["pipes"] if pipe["pipe"] == "V"]
    return {
        "machine": machine, "dtype": next(n for n, code in tiling_report.DTYPES.items() if code == problem.act_dtype), "path": bound["seq"]["path"],
        "us": run["us"], "bound_us": bound["bound_us"], "launch_us": run["launch_us"], "barrier_us": run["barrier_us"],
        "cores": run["cores"], "simulated_cores": run["simulated_cores"],
        "cube_utilisation": bound["flops"] / 2 / (run["us"] * peak_macs_per_us),
        "vector_utilisation": sum(pipe["busy_us"] for pipe in vector) / len(vector) / run["us"] if vector else 0.0,
        "bubble_us": run["us"] - busiest["busy_us"], "busiest_pipe": f"{busiest['core']} {busiest['pipe']}",
        "hbm_bytes": sum(moved.values()), "min_hbm_bytes": bound["least_bytes"],
        "macs": bound["flops"] / 2, "issued_macs": run["issued_macs"],
        "bound_stages": {s["name"]: s["us"] for s in bound["stages"]},
        "stage_us": [end - start for start, end in zip([0.0, *run["stage_ends_us"]], [*run["stage_ends_us"], run["us"]])],
        "pipes": run["pipes"], "tensors": run["tensors"],
        "source": "predicted by the twin from tiling/machines, not measured",
    }


def warnings(result):
    """Lines that say what exceeds twice the bound, and where it comes from."""
    lines = []
    if result["hbm_bytes"] > _LIMIT * result["min_hbm_bytes"]:
        most = sorted(result["tensors"], key=lambda t: -(t["read_bytes"] + t["written_bytes"]))[:3]
        parts = ", ".join(f"{t['name']} {(t['read_bytes'] + t['written_bytes']) / 2**20:.2f} MiB" for t in most)
        lines.append(f"bytes from memory are {result['hbm_bytes'] / result['min_hbm_bytes']:.2f} times the least: {parts}")
    if result["us"] > _LIMIT * result["bound_us"]:
        busiest = next(p for p in result["pipes"] if f"{p['core']} {p['pipe']}" == result["busiest_pipe"])
        waits = sorted(busiest["wait_us"].items(), key=lambda item: -item[1])[:3]
        parts = ", ".join(f"{us:.1f} us for {cause}" for cause, us in waits)
        lines.append(f"time is {result['us'] / result['bound_us']:.2f} times the bound: {result['busiest_pipe']} works {busiest['busy_us']:.1f} us and waits {parts}")
    return lines


def render(result):
    """The profile as text for a terminal."""
    from .tiling_report import _bytes_text, _table
    sampled = "" if result["simulated_cores"] == result["cores"] else f" ({result['simulated_cores']} simulated, counts scaled)"
    rows = []
    for pipe in result["pipes"]:
        waits = sorted(pipe["wait_us"].items(), key=lambda item: -item[1])
        rows.append((f"{pipe['core']} {pipe['pipe']}", f"{pipe['busy_us']:.2f}", f"{100 * pipe['busy_us'] / result['us']:.1f} %", str(pipe["operations"]),
                     ", ".join(f"{cause} {us:.2f}" for cause, us in waits if us >= 0.005)))
    return "\n".join([
        f"machine  {result['machine']}: {result['cores']} cores{sampled}, {result['dtype']}, {result['path']} path; {result['source']}",
        f"time     {result['us']:.2f} us, bound {result['bound_us']:.2f} us ({result['us'] / result['bound_us']:.2f} times); "
        f"launch {result['launch_us']:.1f} us apart, barriers between stages {result['barrier_us']:.2f} us of it",
        f"cube     {100 * result['cube_utilisation']:.1f} % by the least multiply-adds ({result['macs']:.4g}; {result['issued_macs']:.4g} issued)",
        f"vector   {100 * result['vector_utilisation']:.1f} %",
        f"bubble   {result['bubble_us']:.2f} us in which the busiest pipe, {result['busiest_pipe']}, does not work",
        f"memory   {_bytes_text(result['hbm_bytes'])}, least {_bytes_text(result['min_hbm_bytes'])} ({result['hbm_bytes'] / result['min_hbm_bytes']:.3f} times)",
        "stages   " + ", ".join(f"{us:.2f}" for us in result["stage_us"]) + " us from barrier to barrier; bounds "
        + ", ".join(f"{name} {us:.2f}" for name, us in result["bound_stages"].items()),
        "", "Pipes, means over the cores (waits in us by what was waited for)",
        *_table(("pipe", "busy us", "share", "operations", "waits"), rows, {1, 2, 3}),
        "", "Bytes by tensor",
        *_table(("tensor", "read", "written", "served by L2"),
                [(t["name"], *(_bytes_text(t[k]) for k in ("read_bytes", "written_bytes", "l2_bytes"))) for t in result["tensors"]
                 if t["read_bytes"] + t["written_bytes"] + t["l2_bytes"]], {1, 2, 3}),
    ])


_COLOURS = {"MTE2": "#4e79a7", "MTE1": "#76b7b2", "M": "#e15759", "FIX": "#f28e2b", "V": "#59a14f", "MTE3": "#b07aa1", "S": "#9c755f"}


def plot(trace_path, picture_path, core=0):
    """A timeline of one core as PNG from a trace file: a row a pipe, work in colour, waits in grey."""
    from PIL import Image, ImageDraw
    with open(trace_path, encoding="utf-8") as file:
        events = [event for event in json.load(file)["traceEvents"] if event["pid"] == core]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    work = [event for event in events if event["ph"] == "X"]
    end = max((event["ts"] + event["dur"] for event in work), default=1.0)
    width, row_height, left = 1600, 34, 90
    rows = {tid: index for index, tid in enumerate(sorted(names))}
    image = Image.new("RGB", (left + width + 20, row_height * len(rows) + 50), "white")
    draw = ImageDraw.Draw(image)
    for tid, row in rows.items():
        draw.text((6, row * row_height + 12), names[tid], fill="black")
    for event in sorted(work, key=lambda event: event["cat"] == "work"):
        if event["tid"] not in rows:
            continue
        top = rows[event["tid"]] * row_height + 5
        x0, x1 = (left + width * t / end for t in (event["ts"], event["ts"] + event["dur"]))
        colour = _COLOURS[names[event["tid"]].split()[-1]] if event["cat"] == "work" else "#dddddd"
        draw.rectangle((x0, top, max(x0, x1 - 0.5), top + row_height - 10), fill=colour)
    for tick in range(11):
        x = left + width * tick / 10
        draw.line((x, 0, x, row_height * len(rows)), fill="#bbbbbb")
        draw.text((x - 14, row_height * len(rows) + 8), f"{end * tick / 10:.1f}", fill="black")
    draw.text((left, row_height * len(rows) + 26), f"us, core {core}, predicted by the twin", fill="black")
    image.save(picture_path)


def add_arguments(parser):
    """Adds the options of `python -m ms_flashmla profile` to an argparse parser."""
    parser.add_argument("--machine", default="ascend950pr_9599", metavar="NAME", help="an Ascend machine of tiling/machines")
    parser.add_argument("--model", choices=sorted(MODELS), help="a shape by name; options that are given change it")
    parser.add_argument("--heads", type=int, help="query heads")
    parser.add_argument("--head-dim", type=int, help="head dimension without its decoupled RoPE part")
    parser.add_argument("--latent", "--kv-lora", dest="kv_lora", type=int, help="kv_lora_rank")
    parser.add_argument("--rope-dim", type=int, help="decoupled RoPE dimension (0: RoPE over the whole head)")
    parser.add_argument("--hidden", type=int, help="hidden size (default: heads x head-dim)")
    parser.add_argument("--q-lora", type=int, help="q_lora_rank (default 0: none)")
    parser.add_argument("--seq", type=int, default=2048, help="keys of a sequence, the new ones included")
    parser.add_argument("--phase", choices=("decode", "prefill"), default="decode", help="decode: --q-len new tokens; prefill: all keys are new")
    parser.add_argument("--q-len", type=int, help="new tokens of a sequence (default 1, in prefill --seq)")
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument("--block-size", type=int, default=64, help="tokens a page of the cache holds")
    parser.add_argument("--dtype", default="fp16", help="fp16 or bf16")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="simulate N of the cores with their share of the bandwidth and scale the counts")
    parser.add_argument("--check", action="store_true", help="look for data races too (slower)")
    parser.add_argument("--scale", default="", metavar="LIST", help="multiply assumed constants: startup_cube=0.5,barrier_cycles=2")
    parser.add_argument("--rows", type=int, default=0, help="query rows of an attention pass (default: as the tiling selects)")
    parser.add_argument("--kv-tile", type=int, default=0, help="keys of a KV tile (default: as the tiling selects)")
    parser.add_argument("--kv-buffers", type=int, default=0, help="KV tiles in L1 (default: as the tiling selects; 1: no double buffering)")
    parser.add_argument("--trace", metavar="FILE", help="write Chrome's trace event format (Perfetto reads it)")
    parser.add_argument("--plot", metavar="FILE", help="write a picture of one core's timeline")
    parser.add_argument("--json", metavar="FILE", help="write the profile as JSON, - for stdout")


def problem_of(args):
    """The Problem that the options ask for. ValueError when one is missing or illegal."""
    shape = dict(MODELS.get(args.model, dict(rope_dim=0, hidden=None, q_lora=0)))
    shape.update({key: getattr(args, key) for key in ("heads", "head_dim", "kv_lora", "rope_dim", "hidden", "q_lora") if getattr(args, key) is not None})
    missing = [f"--{key.replace('_', '-')}" for key in ("heads", "head_dim", "kv_lora") if key not in shape]
    if missing:
        raise ValueError(f"{', '.join(missing)}: missing; give them or --model")
    q_len = args.q_len if args.q_len is not None else args.seq if args.phase == "prefill" else 1
    return tiling_report.make_problem(num_heads=shape["heads"], kv_lora_rank=shape["kv_lora"], qk_nope_head_dim=shape["head_dim"], s_kv=args.seq, s_q=q_len,
                                      batch=args.batch, qk_rope_head_dim=shape["rope_dim"], hidden_size=shape["hidden"], q_lora_rank=shape["q_lora"],
                                      dtype=args.dtype, block_size=args.block_size)


def run(args):
    """Prints and writes what `args` asks for. Returns the exit code: 0, or 2 with the reason on stderr."""
    import os
    import tempfile
    scratch = None
    try:
        problem = problem_of(args)
        trace = args.trace
        if args.plot and not trace:
            descriptor, scratch = tempfile.mkstemp(suffix=".json")
            os.close(descriptor)
            trace = scratch
        result = profile(args.machine, problem, scale=args.scale, sample=args.sample, check=args.check, trace=trace, rows=args.rows, kv_tile=args.kv_tile,
                         kv_buffers=args.kv_buffers)
        if args.plot:
            plot(trace, args.plot)
    except ValueError as error:
        print(f"profile: {error}", file=sys.stderr)
        return 2
    finally:
        if scratch:
            os.unlink(scratch)
    if args.json == "-":
        print(json.dumps(result, indent=2))
    else:
        print(render(result))
        if args.json:
            with open(args.json, "w", encoding="utf-8") as file:
                json.dump(result, file, indent=2)
    for line in warnings(result):
        print(f"warning: {line}", file=sys.stderr)
    return 0
