"""The `tiling` sub-command: which blocks the tiling chooses for a problem on a machine, what they hold, and the least time they can take."""

import ctypes
import json
import sys

from ._lib import library

DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2}
_SHORT_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
ROPE_MODES = {"decoupled": 0, "full": 1}
PATHS = {"absorbed", "expanded", "value-absorbed"}

_INT32_FIELDS = ("hidden_size", "num_heads", "num_kv_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
                 "v_head_dim", "rope_mode", "act_dtype", "weight_dtype", "cache_dtype", "block_size")
_INT64_FIELDS = ("batch", "s_q", "s_kv")


class Problem(ctypes.Structure):
    """struct Problem of tiling/tiling_data.h, field by field."""

    _fields_ = [(name, ctypes.c_int32) for name in _INT32_FIELDS] + [(name, ctypes.c_int64) for name in _INT64_FIELDS]


def machines():
    """Names of the machines that tiling knows (tiling/machines/*.yaml), sorted."""
    lib = library()
    lib.fm_machines.restype = ctypes.c_char_p
    return json.loads(lib.fm_machines().decode())


def make_problem(*, num_heads, kv_lora_rank, qk_nope_head_dim, s_kv, s_q=1, batch=1, v_head_dim=None, qk_rope_head_dim=0, rope_mode=None,
                 hidden_size=None, q_lora_rank=0, dtype="float16", block_size=64):
    """A Problem of one layer call.

    s_q new tokens and s_kv keys (the new ones included) for each of `batch` sequences. Defaults: v_head_dim = qk_nope_head_dim,
    hidden_size = num_heads * qk_nope_head_dim, rope_mode "full" when qk_rope_head_dim is 0, else "decoupled".
    dtype, one of float32, float16, bfloat16, holds for activations, weights and cache.
    ValueError: a number that does not fit its field, an unknown dtype or rope_mode.
    """
    dtype = _SHORT_DTYPES.get(dtype, dtype)
    if dtype not in DTYPES:
        raise ValueError(f"dtype: {dtype!r} is not allowed; it must be one of {', '.join([*DTYPES, *_SHORT_DTYPES])}")
    if rope_mode is None:
        rope_mode = "decoupled" if qk_rope_head_dim else "full"
    if rope_mode not in ROPE_MODES:
        raise ValueError(f"rope_mode: {rope_mode!r} is not allowed; it must be one of {', '.join(ROPE_MODES)}")
    values = dict(hidden_size=num_heads * qk_nope_head_dim if hidden_size is None else hidden_size, num_heads=num_heads, num_kv_heads=1,
                  q_lora_rank=q_lora_rank, kv_lora_rank=kv_lora_rank, qk_nope_head_dim=qk_nope_head_dim,
                  qk_rope_head_dim=qk_rope_head_dim, v_head_dim=qk_nope_head_dim if v_head_dim is None else v_head_dim,
                  rope_mode=ROPE_MODES[rope_mode], act_dtype=DTYPES[dtype], weight_dtype=DTYPES[dtype], cache_dtype=DTYPES[dtype],
                  block_size=block_size, batch=batch, s_q=s_q, s_kv=s_kv)
    for name, value in values.items():
        limit = 2**31 if name in _INT32_FIELDS else 2**40
        if not -limit <= value < limit:
            raise ValueError(f"{name}: {value} is out of range")
    return Problem(**values)


def report(machine, problem):
    """The tiling of `problem` on `machine` as a dict (see fm_tiling_json in tiling/tiling_c_api.h); bytes in bytes, times in us.

    ValueError: an unknown machine, an illegal field, a dtype that the machine does not do, tiles that fit nowhere.
    """
    lib = library()
    lib.fm_tiling_json.argtypes = [ctypes.c_char_p, ctypes.POINTER(Problem), ctypes.c_char_p, ctypes.c_int64]
    size = 1 << 14
    while True:
        buffer = ctypes.create_string_buffer(size)
        needs = lib.fm_tiling_json(machine.encode(), ctypes.byref(problem), buffer, size)
        if abs(needs) <= size:
            break
        size = abs(needs)
    text = buffer.value.decode()
    if needs < 0:
        raise ValueError(text)
    return json.loads(text)


def _bytes_text(n):
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n >= scale:
            return f"{n / scale:.1f} {unit}"
    return f"{n:.0f} B"


def _flops_text(n):
    for unit, scale in (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if n >= scale:
            return f"{n / scale:.2f} {unit}"
    return f"{n:.0f} FLOP"


def _table(header, rows, right):
    """Lines of a text table; `right`: the columns that are right-aligned."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(row):
        return "  " + "  ".join(cell.rjust(width) if i in right else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths))).rstrip()

    return [line(header), "  " + "  ".join("-" * width for width in widths), *(line(row) for row in rows)]


_COPIES = {1: "no", 2: "yes"}


def _buffer_rows(buffers):
    """One row a buffer, and one with the total of every memory that more than one buffer of a stage shares."""
    rows = []
    for stage, memory in dict.fromkeys((b["stage"], b["memory"]) for b in buffers):
        group = [b for b in buffers if (b["stage"], b["memory"]) == (stage, memory)]
        rows += [(stage, memory, b["name"], b["shape"], _bytes_text(b["bytes"]), f"{100 * b['share']:.1f} %", _COPIES.get(b["copies"], f"{b['copies']} deep"))
                 for b in group]
        if len(group) > 1:
            total, capacity = sum(b["bytes"] for b in group), group[0]["capacity"]
            rows.append((stage, memory, "= in all", f"of {_bytes_text(capacity)}", _bytes_text(total), f"{100 * total / capacity:.1f} %", ""))
    return rows


def render(result, problem):
    """The report as text for a terminal. result: of report(); problem: the Problem it was made for."""
    taken = result["seq"]["path"]
    dtype = next(name for name, code in DTYPES.items() if code == problem.act_dtype)
    rope = next(name for name, code in ROPE_MODES.items() if code == problem.rope_mode)
    # A CPU layer keeps one set of blocks for every call; on Ascend the blocks of other paths are those of another shape.
    others = set() if result["kind"] == "cpu" else PATHS - {taken}
    shown = [b for b in result["buffers"] if b["stage"] not in others]
    lines = [
        f"machine  {result['machine']}: {result['cores']} cores, peak {result['peak_gflops']:.0f} GFLOP/s, memory {result['gb_per_s']:.0f} GB/s",
        f"problem  {problem.num_heads} heads x ({problem.qk_nope_head_dim} + {problem.qk_rope_head_dim}), v {problem.v_head_dim}, latent {problem.kv_lora_rank}, "
        f"hidden {problem.hidden_size}, rope {rope}, {dtype}",
        f"         batch {problem.batch}, {problem.s_q} new of {problem.s_kv} keys a sequence, cache pages of {problem.block_size}",
        f"path     {taken}, {result['seq']['num_splits']} KV split(s) of {result['seq']['split_len']} keys",
        "", "Buffers (share: of the capacity of one core's memory; a stage's buffers live together)",
        *_table(("stage", "memory", "buffer", "shape", "bytes", "share", "double-buffered"), _buffer_rows(shown), {4, 5}),
        "", "Blocks",
        *_table(("block", "value", "what"), [(b["name"], str(b["value"]), b["meaning"]) for b in result["blocks"]], {1}),
        "", "Why not larger, and other choices",
        *(f"  - {reason}" for reason in result["reasons"]),
        "", "Lower bound (stages wait for each other; each: the larger of bytes / bandwidth and flops / peak)",
        *_table(("stage", "least bytes", "flops", "us", "limited by"),
                [(s["name"], _bytes_text(s["bytes"]), _flops_text(s["flops"]), f"{s['us']:.2f}", s["limited_by"]) for s in result["stages"]]
                + [("total", _bytes_text(result["least_bytes"]), _flops_text(result["flops"]), f"{result['bound_us']:.2f}", "")], {1, 2, 3}),
        "",
        f"bytes read and written: least {result['least_bytes']:.0f} ({_bytes_text(result['least_bytes'])}); with these blocks "
        f"{result['bytes_read']:.0f} ({_bytes_text(result['bytes_read'])})",
        f"lower bound in time: {result['bound_us']:.2f} us (predicted from the machine file, not measured)",
    ]
    return "\n".join(lines)


def add_arguments(parser):
    """Adds the options of `python -m ms_flashmla tiling` to an argparse parser."""
    parser.add_argument("--machine", required=True, metavar="NAME", help="a name of tiling/machines, such as cpu_avx512 or ascend950pr_9599")
    parser.add_argument("--heads", type=int, required=True, help="query heads")
    parser.add_argument("--head-dim", type=int, required=True, help="head dimension without its decoupled RoPE part")
    parser.add_argument("--latent", type=int, required=True, help="kv_lora_rank")
    parser.add_argument("--seq", type=int, required=True, help="keys of a sequence, the new ones included")
    parser.add_argument("--q-len", type=int, default=1, help="new tokens of a sequence (default 1: decode)")
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument("--dtype", default="fp16", help="float32, float16 or bfloat16, or fp32, fp16, bf16, of activations, weights and cache")
    parser.add_argument("--rope-dim", type=int, default=0, help="decoupled RoPE dimension (default 0: RoPE over the whole head)")
    parser.add_argument("--rope-mode", choices=sorted(ROPE_MODES), help="default: full when --rope-dim is 0, else decoupled")
    parser.add_argument("--v-head-dim", type=int, help="default: --head-dim")
    parser.add_argument("--hidden", type=int, help="hidden size (default: heads x head-dim)")
    parser.add_argument("--q-lora", type=int, default=0, help="q_lora_rank (default 0: none)")
    parser.add_argument("--block-size", type=int, default=64, help="tokens a page of the cache holds")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args):
    """Prints the report that `args` (of add_arguments) asks for. Returns the exit code: 0, or 2 with the reason on stderr."""
    try:
        problem = make_problem(num_heads=args.heads, kv_lora_rank=args.latent, qk_nope_head_dim=args.head_dim, s_kv=args.seq, s_q=args.q_len,
                               batch=args.batch, v_head_dim=args.v_head_dim, qk_rope_head_dim=args.rope_dim, rope_mode=args.rope_mode,
                               hidden_size=args.hidden, q_lora_rank=args.q_lora, dtype=args.dtype, block_size=args.block_size)
        if problem.hidden_size < 1:
            raise ValueError(f"hidden: {problem.hidden_size} is not allowed; it must be >= 1")
        result = report(args.machine, problem)
    except ValueError as error:
        print(f"tiling: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result, indent=2) if args.json else render(result, problem))
    return 0
