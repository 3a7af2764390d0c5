"""A study as one picture, drawn from its JSON: noise against crest factor and block size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .formats import ELEMENTS, SCALES
from .theory import PAPER, predicted

_COLORS = {"int8": "#1d3557", "fp8": "#d1495b", "int4": "#2a788e", "fp4": "#e9a23b"}
_INK, _FAINT = "#222222", "#8a8a8a"
_ELEMENTS = {element.name: element for element in ELEMENTS}
_SCALES = {scale.name: scale for scale in SCALES}


def save_plot(content: dict[str, Any], path: Path) -> None:
    """Write a PNG. Drawn without a display, and without touching matplotlib's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8.4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    _draw_crest(axes[0][0], content, "e8m0")
    _draw_crest(axes[0][1], content, "fp32")
    _draw_blocks(axes[1][0], content, "weights")
    _draw_blocks(axes[1][1], content, "inputs")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    model = content["model"]
    figure.suptitle(f"{model['name']}: signal to quantization noise", fontsize=13, color=_INK)
    # no software version in the file: the same data gives the same bytes
    figure.savefig(path, format="png", metadata={"Software": None})


def _title(axes: Any, title: str, subtitle: str) -> None:
    axes.set_title(f"{title}\n", loc="left", fontsize=11, fontweight="bold", color=_INK)
    axes.text(0, 1.03, subtitle, transform=axes.transAxes, fontsize=9, color=_FAINT)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9)


def _draw_crest(axes: Any, content: dict[str, Any], scale: str) -> None:
    """Dots are measured blocks, lines the theory."""
    curves = [curve for curve in content["by_crest"] if curve["scale"] == scale]
    crests = [c for curve in curves for c in curve["crest"]]
    low, high = min(crests, default=1.0), max(crests, default=16.0)
    high = max(high, PAPER["crossover"] * 1.15)
    grid = [low * (high / low) ** (i / 200) for i in range(201)]
    blocks = curves[0]["blocks_of"] if curves else []
    for curve in curves:
        element = _ELEMENTS[curve["format"]]
        color = _COLORS[element.name]
        line = [predicted(element, _SCALES[scale], c, max(blocks)) for c in grid]
        axes.plot(grid, line, color=color, linewidth=1.2)
        axes.plot(curve["crest"], curve["db"], "o", color=color, markersize=4, label=element.label)
    if scale == "e8m0":
        axes.axvline(PAPER["crossover"], color=_FAINT, linestyle=":", linewidth=1)
        axes.annotate(
            f"paper: {PAPER['crossover']}",
            (PAPER["crossover"], axes.get_ylim()[0]),
            xytext=(4, 6),
            textcoords="offset points",
            fontsize=8,
            color=_FAINT,
        )
    axes.set_xscale("log", base=2)
    ticks = [t for t in (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24) if low * 0.95 <= t <= high * 1.05]
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()
    axes.set_xlabel("crest factor of a block, max|x| / rms", fontsize=9)
    axes.set_ylabel("dB", fontsize=9)
    sizes = f"blocks of {blocks[0]}" + (f" to {blocks[-1]}" if len(blocks) > 1 else "")
    label = _SCALES[scale].label
    _title(axes, f"By crest factor, {label} scales", f"{sizes}; dots measured, lines theory")


def _draw_blocks(axes: Any, content: dict[str, Any], kind: str) -> None:
    """E8M0 scales: as it is, and with the rotation of blocks."""
    styles = {"none": "-", "block": "--", "row": ":"}
    for name, color in _COLORS.items():
        for rotation, style in styles.items():
            cells = sorted(
                (cell["block"], cell["mean_db"])
                for cell in content["cells"]
                if (cell["of"], cell["format"], cell["scale"]) == (kind, name, "e8m0")
                and cell["rotation"] == rotation
                and cell["mean_db"] is not None
            )
            if cells:
                axes.plot(*zip(*cells), style, color=color, marker="o", markersize=3.5)
    for name in ("int8", "fp8"):
        paper, color = PAPER[name], _COLORS[name]
        axes.plot([32], [paper], "*", color=color, markersize=11, markeredgecolor="white")
    axes.set_xscale("log", base=2)
    blocks = content["settings"]["blocks"]
    axes.set_xticks(blocks, [str(block) for block in blocks])
    axes.minorticks_off()
    axes.set_xlabel("block size", fontsize=9)
    axes.set_ylabel("dB", fontsize=9)
    subtitle = "mean over tensors; dashed rotated in blocks, dotted along K; stars: the paper"
    _title(axes, f"{kind.capitalize()} by block size, E8M0 scales", subtitle)
