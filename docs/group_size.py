"""The tables and the plot of docs/group-size.md, from results of `farro eval` and `farro bench`.

docs/generate.py calls this. Accuracy comes from benchmarks/results/<device>/eval*.json, speed from
the results of `farro bench` beside them: int8_linear on a CPU, whose fast path is the module's
packed weight, int8_gemm on a GPU.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GROUP_SIZES = (32, 64, 128, 256)
# schemes of quantize_ that are measured beside, and what the table calls them
FP8 = {
    "fp8-tensor": "FP8, one scale",
    "fp8-row": "FP8, a scale for each row",
    "fp8-block128": "FP8, blocks of 128",
}
SHAPES = ((4096, 4096), (7168, 16384))  # (N, K); docs/performance.md has all that were measured
COLORS = ("#d1495b", "#e9a23b", "#4fac7d", "#1d3557")  # of G 32, 64, 128, 256
INK, FAINT = "#222222", "#8a8a8a"
# (M, N, K) -> group size, or "bf16" for the library's product -> microseconds
Times = dict[tuple[int, int, int], dict[Any, float]]


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def about(result: dict[str, Any]) -> str:
    """The machine, the day, the commit and the command of a result."""
    machine = result["machine"]
    chip = machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} threads"
    date, commit = result["date"][:10], result["commit"]
    return f"{chip}; {date}, commit {commit}, torch {result['versions']['torch']}. " + (
        f"`{result['command']}`"
    )


# --- accuracy ------------------------------------------------------------------------------------


def evaluations(devices: Sequence[Path]) -> list[dict[str, Any]]:
    """Every result of `farro eval`, by the device's name."""
    paths = [path for device in devices for path in sorted(device.glob("eval*.json"))]
    return [json.loads(path.read_text()) for path in paths]


def _group(row: dict[str, Any]) -> int | None:
    name = row["model"]
    return int(name.removeprefix("int8-g")) if name.startswith("int8-g") else None


def _number(value: float | None, digits: int) -> str:
    return "not finite" if value is None else f"{value:.{digits}f}"


def _decibels(value: float | None) -> str:
    """JSON has no infinity: nothing was lost."""
    return "exact" if value is None else f"{value:.1f}"


def _accuracy_row(row: dict[str, Any], dtype: str) -> list[str]:
    group, cells = _group(row), []
    for noise in (row["weight_sqnr_db"], row["input_sqnr_db"]):
        cells += ["", ""] if noise is None else [_decibels(noise[k]) for k in ("median", "worst")]
    name = f"loaded, {dtype}" if row["model"] == "loaded" else row["model"]
    return [
        FP8.get(name, name) if group is None else f"INT8, G {group}",
        _number(row["perplexity"], 3),
        "" if row["model"] == "loaded" else _number(row["kl_nats_per_token"], 5),
        *cells,
        f"{row['layer_bytes'] / 1e6:.1f}",
        f"{row['model_bytes'] / 1e6:.1f}",
        f"{1e3 * row['seconds_per_forward']:.0f}",
    ]


def accuracy(devices: Sequence[Path]) -> str:
    """A table for each evaluation."""
    tables = accuracy_tables(evaluations(devices))
    return tables or "Not measured yet: no `benchmarks/results/<device>/eval.json`.\n"


def accuracy_tables(results: Sequence[dict[str, Any]]) -> str:
    head = ["model", "perplexity", "KL, nats a token", "weights, median dB", "worst"]
    head += ["inputs, median dB", "worst", "swapped layers, MB", "model, MB", "ms a forward"]
    parts = []
    for result in results:
        model, text = result["model"], result["text"]
        rows = [_accuracy_row(row, model["loaded_dtype"]) for row in result["rows"]]
        parts += [
            f"**{model['name']}** (checkpoint in {model['precision']}, loaded as "
            f"{model['loaded_dtype']}), {text['windows']} windows of {text['window_tokens']} "
            f"tokens of {text['name']}. {about(result)}\n",
            _markdown(head, rows),
        ]
    return "\n".join(parts)


# --- speed ---------------------------------------------------------------------------------------


def _results(device: Path) -> list[dict[str, Any]]:
    """Results of `farro bench` of this device, oldest first; with cold caches, if any are."""
    operator = "int8_linear" if device.name.startswith("cpu") else "int8_gemm"
    found = [json.loads(path.read_text()) for path in sorted(device.glob("*.json"))]
    mine = [r for r in found if r.get("operator") == operator and "rows" in r]
    cold = [result for result in mine if result["settings"].get("cold")]
    return sorted(cold or mine, key=lambda result: result["date"])


def times(results: Sequence[dict[str, Any]]) -> Times:
    """Of BF16 results on SHAPES; a later result replaces an earlier one."""
    found: Times = {}
    for result in results:
        for row in result["rows"]:
            if (row.get("n"), row["k"]) not in SHAPES or row["dtype"] != "bfloat16":
                continue
            if row["set"] == "dense" or row["us"] is None:
                continue
            here = found.setdefault((row["m"], row["n"], row["k"]), {})
            if row["subject"] == "farro auto":
                here[row["group_size"]] = row["us"]
            elif "BF16" in row["subject"]:
                here["bf16"] = row["us"]
    # what one group size alone was measured for compares nothing
    return {key: t for key, t in sorted(found.items(), key=_order) if len(t.keys() - {"bf16"}) > 1}


def _order(item: tuple[tuple[int, int, int], Any]) -> tuple[int, int, int]:
    m, n, k = item[0]
    return n, k, m


def _cell(us: float | None, base: float | None) -> str:
    if us is None:
        return ""
    text = f"{us:.0f}" if us >= 1000 else f"{us:.1f}"
    return text if base is None else f"{text} ({us / base:.2f}x)"


def speed(devices: Sequence[Path]) -> str:
    """Microseconds of one product for each group size, beside the library's in BF16."""
    head = ["M, N, K", *(f"G {g}" for g in GROUP_SIZES), "library, BF16"]
    parts = []
    for kind, chosen in (("a CPU", True), ("a GPU", False)):
        tables = []
        for device in devices:
            results = _results(device) if device.name.startswith("cpu") == chosen else []
            measured = times(results)
            if not measured:
                continue
            rows = [
                [
                    ", ".join(map(str, sizes)),
                    *(_cell(t.get(g), t.get(256)) for g in GROUP_SIZES),
                    _cell(t.get("bf16"), t.get(256)),
                ]
                for sizes, t in measured.items()
            ]
            tables += [*(f"{about(result)}\n" for result in results), _markdown(head, rows)]
        parts += tables or [f"On {kind}: not measured yet.\n"]
    return "\n".join(parts)


# --- the plot ------------------------------------------------------------------------------------


def _panels(devices: Sequence[Path]) -> tuple[list[dict[str, Any]], list[tuple[str, Times]]]:
    speeds = [(device.name, times(_results(device))) for device in devices]
    return evaluations(devices), [(name, found) for name, found in speeds if found]


def plot(devices: Sequence[Path], name: str) -> str:
    """The line of Markdown that shows the plot, where there is anything to draw."""
    text = "KL divergence against the group size, and time relative to G 256"
    return f"![{text}]({name})\n" if any(_panels(devices)) else "No plot: not measured yet.\n"


def draw(devices: Sequence[Path], path: Path) -> None:
    """Accuracy against G on the left, time relative to G 256 against M for each device."""
    evaluated, speeds = _panels(devices)
    if not evaluated and not speeds:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = bool(evaluated) + len(speeds)
    figure = Figure(figsize=(5.2 * count, 4.0), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(1, count, squeeze=False)[0])
    if evaluated:
        _draw_accuracy(axes.pop(0), evaluated)
    for (name, found), at in zip(speeds, axes):
        _draw_speed(at, name, found)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _bare(axes: Any, title: str, x: str, y: str) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK)
    axes.set_xlabel(x, fontsize=9, color=INK)
    axes.set_ylabel(y, fontsize=9, color=INK)
    axes.tick_params(labelsize=8, colors=INK)
    axes.grid(axis="y", color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.legend(fontsize=8, frameon=False)


def _draw_accuracy(axes: Any, evaluated: Sequence[dict[str, Any]]) -> None:
    for index, result in enumerate(evaluated):
        rows = {_group(r): r["kl_nats_per_token"] for r in result["rows"] if _group(r) is not None}
        groups = sorted(g for g, kl in rows.items() if g is not None and kl is not None)
        label = f"{result['model']['name']}, {result['machine']['device']}"
        kls, marker = [rows[g] for g in groups], "os^v"[index % 4]
        axes.plot(groups, kls, f"-{marker}", color=INK, label=label, alpha=1 - index % 4 * 0.2)
    yardsticks = {
        row["kl_nats_per_token"]
        for result in evaluated
        for row in result["rows"]
        if _group(row) is None and row["model"] != "loaded"
    }
    for index, kl in enumerate(sorted(filter(None, yardsticks))):
        text = "" if index else "the loaded dtype's own rounding"
        axes.axhline(kl, color=FAINT, linestyle=":", label=text)
    axes.set_xscale("log", base=2)
    axes.set_xticks(GROUP_SIZES, [str(g) for g in GROUP_SIZES])
    axes.set_ylim(bottom=0)
    _bare(axes, "How far the predictions move", "group size G", "KL divergence, nats a token")


def _draw_speed(axes: Any, name: str, found: Times) -> None:
    for (n, k), style in zip(SHAPES, ("-o", "--s")):
        for group, color in zip(GROUP_SIZES[:-1], COLORS):
            points = [
                (m, t[group] / t[256])
                for (m, *shape), t in found.items()
                if tuple(shape) == (n, k) and group in t and 256 in t
            ]
            if points:
                label = f"G {group}, N x K = {n} x {k}"
                axes.plot(*zip(*points), style, color=color, label=label, markersize=4)
    axes.axhline(1.0, color=COLORS[-1], linewidth=1, label="G 256")
    axes.set_xscale("log", base=2)
    rows = sorted({m for m, _, _ in found})
    axes.set_xticks(rows, [str(m) for m in rows])
    top = max((v / t[256] for t in found.values() if 256 in t for g, v in t.items() if g != "bf16"))
    axes.set_ylim(0, math.ceil(top * 4 + 0.5) / 4)
    _bare(axes, f"Time of a product on {name}", "M", "time / time at G 256")
