"""An evaluation as one picture: accuracy against size, and the noise of every layer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from .metrics import NoiseSummary
from .run import LOADED, Evaluation, Row

# dark to bright in the order of the rows, and told apart in grey print too
_COLORS = ("#1d3557", "#2a788e", "#4fac7d", "#b5c334", "#e9a23b", "#d1495b", "#8d5a97")
_INK, _FAINT = "#222222", "#8a8a8a"


def save_plot(evaluation: Evaluation, path: Path) -> None:
    """Write a PNG. Drawn without a display, and without touching matplotlib's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    quantized = [row for row in evaluation.rows if row.weights is not None]
    layout = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12, wspace=0.04, hspace=0.06)
    figure = Figure(figsize=(12, 7.6 if quantized else 4.2), dpi=130, layout=layout)
    FigureCanvasAgg(figure)
    rows = 2 if quantized else 1
    grid = figure.add_gridspec(rows, 6)
    colors = {row.name: _COLORS[i % len(_COLORS)] for i, row in enumerate(quantized)}
    _draw_kl(figure.add_subplot(grid[0, 0:2]), evaluation, colors)
    _draw_bytes(figure.add_subplot(grid[0, 2:4]), evaluation, colors)
    _draw_seconds(figure.add_subplot(grid[0, 4:6]), evaluation, colors)
    if quantized:
        _draw_noise(figure.add_subplot(grid[1, 0:3]), "weights", quantized, colors)
        _draw_noise(figure.add_subplot(grid[1, 3:6]), "inputs", quantized, colors)
    count, tokens = evaluation.windows.ids.shape
    dtype = str(evaluation.dtype).removeprefix("torch.")
    figure.suptitle(
        f"{evaluation.checkpoint.name}: checkpoint in {evaluation.checkpoint.precision}, "
        f"loaded as {dtype}, {count} windows of {tokens} tokens",
        fontsize=13,
        color=_INK,
    )
    figure.savefig(path, format="png")


def _bare(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_FAINT)
    axes.tick_params(colors=_INK, labelsize=9)


def _bars(
    axes: Any, rows: list[Row], values: list[float], labels: list[str], colors: dict[str, str]
) -> None:
    """Horizontal bars, the first row on top, each with its number at its end."""
    positions = range(len(rows))
    axes.barh(positions, values, color=[colors.get(row.name, _FAINT) for row in rows], height=0.62)
    axes.set_yticks(list(positions), [row.name for row in rows])
    axes.invert_yaxis()
    top = max(values, default=0.0) or 1.0
    axes.set_xlim(0, top * 1.3)
    axes.set_xticks([])
    for position, value, label in zip(positions, values, labels):
        axes.text(value + top * 0.02, position, label, va="center", fontsize=9, color=_INK)
    _bare(axes)
    axes.spines["bottom"].set_visible(False)


def _title(axes: Any, title: str, subtitle: str) -> None:
    axes.set_title(f"{title}\n", loc="left", fontsize=11, fontweight="bold", color=_INK)
    axes.text(0, 1.03, subtitle, transform=axes.transAxes, fontsize=9, color=_FAINT)


def _draw_kl(axes: Any, evaluation: Evaluation, colors: dict[str, str]) -> None:
    rows = [row for row in evaluation.rows if row.name != LOADED]
    base = evaluation.rows[0].perplexity
    labels = [f"{row.kl:.4f}  (ppl {row.perplexity:.2f})" for row in rows]
    values = [row.kl if math.isfinite(row.kl) else 0.0 for row in rows]
    _bars(axes, rows, values, labels, colors)
    axes.set_xlim(0, (max(values, default=0.0) or 1.0) * 1.75)
    for row in rows:
        if row.weights is None:  # a cast: what the loaded dtype's own rounding moves
            axes.axvline(row.kl, color=_FAINT, linestyle=":", linewidth=1, zorder=0)
    _title(axes, "How far the predictions move", f"KL, nats a token; loaded model: ppl {base:.2f}")


def _draw_bytes(axes: Any, evaluation: Evaluation, colors: dict[str, str]) -> None:
    rows = evaluation.rows
    labels = [f"{row.model_bytes / 1e6:,.0f}" for row in rows]
    _bars(axes, rows, [row.model_bytes / 1e6 for row in rows], labels, colors)
    rest = [(row.model_bytes - row.layer_bytes) / 1e6 for row in rows]
    axes.barh(range(len(rows)), rest, color="white", alpha=0.55, height=0.62)
    _title(axes, "Memory of the weights", "MB; pale: embeddings and other layers that stay")


def _draw_seconds(axes: Any, evaluation: Evaluation, colors: dict[str, str]) -> None:
    rows = evaluation.rows
    base = rows[0].seconds
    labels = [f"{1e3 * row.seconds:,.0f}  ({base / row.seconds:.2f}x)" for row in rows]
    _bars(axes, rows, [1e3 * row.seconds for row in rows], labels, colors)
    axes.set_xlim(0, max(1e3 * row.seconds for row in rows) * 1.5)
    tokens = evaluation.windows.ids.shape[1]
    _title(axes, "Time of a forward", f"ms for {tokens} tokens on {evaluation.device}; speed-up")


def _draw_noise(axes: Any, what: str, rows: list[Row], colors: dict[str, str]) -> None:
    worst: tuple[float, int, str] | None = None
    for row in rows:
        noise: NoiseSummary | None = getattr(row, what)
        if noise is None:
            continue
        values = list(noise.layers.values())
        axes.plot(
            *(range(len(values)), values, "."),
            color=colors[row.name],
            markersize=4,
            alpha=0.75,
            label=f"{row.name}  (median {noise.median:.1f})",
        )
        index = list(noise.layers).index(noise.worst_layer)
        if math.isfinite(noise.worst) and (worst is None or noise.worst < worst[0]):
            worst = (noise.worst, index, noise.worst_layer)
    if worst is not None:
        db, index, name = worst
        axes.annotate(
            f"worst: {name}, {db:.1f} dB",
            (index, db),
            xytext=(0, -16),
            textcoords="offset points",
            ha="left" if index < axes.get_xlim()[1] / 2 else "right",
            fontsize=8,
            color=_INK,
            arrowprops={"arrowstyle": "-", "color": _FAINT},
        )
    axes.margins(y=0.12)
    axes.grid(axis="y", color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.set_xlabel("linear layer, in the model's order", fontsize=9, color=_INK)
    axes.legend(fontsize=8, frameon=False, loc="upper center", ncols=2, bbox_to_anchor=(0.5, -0.14))
    _bare(axes)
    _title(axes, f"Signal to noise of the layers' {what}", "dB, higher is better; a dot is a layer")
