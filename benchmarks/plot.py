"""The roofline of a run as a picture: left where each case stands under the two ceilings, right how much of its own roof it reaches."""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (after the backend)
import numpy as np  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402

COLORS = {"decode_core": "#0b6e99", "decode": "#d9730d", "prefill": "#448361"}
MARKERS = {"float32": "o", "bfloat16": "s", "float16": "^"}
PHASES = {"decode_core": "decode core", "decode": "decode layer", "prefill": "prefill layer"}


def _phase(result):
    return result["case"].split("/")[1]


def _intensity(result):
    return result["gflops"] / result["gb_per_s"]


def draw(results, ceiling, path):
    """Writes a PNG. ceiling: the run's Sample (ceilings.py); results: what bench.py collects."""
    most = max(result["threads"] for result in results)
    ours = [result for result in results if result["system"] == "ms_flashmla" and result["threads"] == most]
    names = list(dict.fromkeys(result["case"] for result in ours))
    figure, (left, right) = plt.subplots(1, 2, figsize=(17, max(7.5, 1.5 + 0.27 * len(names))), gridspec_kw={"width_ratios": [1.25, 1]})
    _roofline(left, ours, [result for result in results if result["system"] != "ms_flashmla"], ceiling, most)
    _shares(right, ours, names)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _roofline(axes, ours, peers, ceiling, threads):
    knee = ceiling.fma_gflops / ceiling.read_gb_per_s
    low = min([_intensity(result) for result in ours] + [knee / 10]) / 1.6
    high = max([_intensity(result) for result in ours] + [knee * 10]) * 1.6
    x = np.geomspace(low, high, 400)
    axes.loglog(x, np.minimum(ceiling.fma_gflops, x * ceiling.read_gb_per_s), color="black", linewidth=2)
    axes.text(high / 1.1, ceiling.fma_gflops * 1.04, f"FMA float32 {ceiling.fma_gflops:.0f} GFLOP/s", ha="right", va="bottom")
    axes.text(0.03, 0.95, f"memory, huge pages\n{ceiling.read_gb_per_s:.1f} GB/s", transform=axes.transAxes, ha="left", va="top")
    axes.set_ylim(min(result["gflops"] for result in ours) / 4, ceiling.fma_gflops * 1.8)
    for result in peers:
        axes.plot(_intensity(result), result["gflops"], marker="x" if result["system"] == "mindspore" else "+", color="0.65", markersize=6, zorder=1)
    for result in ours:
        color = COLORS[_phase(result)]
        # From the case to its own roof: the sum over stages lies under the black line where one stage is bound by memory and one by FMA.
        axes.plot([_intensity(result)] * 2, [result["gflops"], result["gflops"] / result["roof_share"]], color=color, linewidth=1, alpha=0.5)
        axes.plot(_intensity(result), result["gflops"] / result["roof_share"], marker="_", color=color, markersize=9)
        axes.plot(_intensity(result), result["gflops"], marker=MARKERS[result["dtype"]], color=color, markersize=8, markeredgecolor="white", zorder=3)
    axes.set_xlabel("flops per byte of weights and cached rows")
    axes.set_ylabel("GFLOP/s")
    axes.set_title(f"Roofline, {threads} threads")
    axes.grid(True, which="both", color="0.92")
    handles = [Line2D([], [], color=color, marker="o", linestyle="", label=PHASES[phase]) for phase, color in COLORS.items()]
    handles += [Line2D([], [], color="0.3", marker=marker, linestyle="", label=dtype) for dtype, marker in MARKERS.items()]
    handles.append(Line2D([], [], color="0.3", marker="_", markersize=9, linestyle="", label="the case's own roof"))
    handles += [Line2D([], [], color="0.65", marker=marker, linestyle="", label=label) for marker, label in (("x", "MindSpore"), ("+", "torch, transformers"))]
    axes.legend(handles=handles, loc="lower right", fontsize=9, ncol=2)


def _shares(axes, ours, names):
    rows = {name: len(names) - 1 - i for i, name in enumerate(names)}
    for result in ours:
        axes.plot(100 * result["roof_share"], rows[result["case"]], marker=MARKERS[result["dtype"]], color=COLORS[_phase(result)], markersize=8,
                  markeredgecolor="white", zorder=3)
    for name, row in rows.items():
        worst = 100 * min(result["roof_share"] for result in ours if result["case"] == name)
        axes.barh(row, worst, height=0.55, color=COLORS[name.split("/")[1]], alpha=0.18, zorder=1)
        axes.text(1, row, f"{worst:.0f}", va="center", fontsize=8, color="0.3")
    axes.set_yticks(list(rows.values()), list(rows), fontsize=9)
    axes.set_ylim(-0.8, len(names) - 0.2)
    axes.set_xlim(0, max(105, 5 + 100 * max(result["roof_share"] for result in ours)))
    axes.axvline(100, color="black", linewidth=2)
    axes.set_xlabel("% of the case's own roof (bar and number: its slowest dtype)")
    axes.set_title("Share of the roof")
    axes.grid(True, axis="x", color="0.92")
