"""Plots of a result: time against M for each shape, and the dense sweep."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any


def _shapes(rows: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows of each (N, K, E, G) or (N, K, E, variant), by the name of its file."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        sizes = "x".join(str(row[name]) for name in ("n", "k", "e") if name in row)
        form = row.get("variant") or f"g{row['group_size']}"
        found.setdefault(f"{sizes}-{form}", []).append(row)
    return found


def _figures(result: dict[str, Any]) -> dict[str, tuple[str, list[dict[str, Any]]]]:
    """File name -> kind ("m" or "dense") and the rows to draw."""
    found = {}
    for kind in ("m", "dense"):
        sets = {row["set"] for row in result["rows"]} - {"models"}  # an M of their own
        sets = {"dense"} & sets if kind == "dense" else sets - {"dense"}
        rows = [row for row in result["rows"] if row["set"] in sets]
        for name, members in _shapes(rows).items():
            if len({row["m"] for row in members}) > 1:
                found[f"{name}-{kind}.png"] = kind, members
    return found


def names(result: dict[str, Any]) -> list[str]:
    """The file names, less their prefix, that `draw` writes for a result."""
    return list(_figures(result)) if "rows" in result else []


def draw(result: dict[str, Any], directory: Path, prefix: str | None = None) -> list[Path]:
    """Write all plots of a result as PNG files; gives their paths."""
    import matplotlib

    matplotlib.use("Agg")
    directory.mkdir(parents=True, exist_ok=True)
    prefix = f"{result['operator']}-" if prefix is None else prefix
    paths = []
    for name, (kind, rows) in _figures(result).items():
        path = directory / f"{prefix}{name}"
        shape = name.rpartition("-")[0].replace("-g", ", G ").replace("-", ", ")
        _plot(rows, f"{result['operator']} {shape}", kind, path)
        paths.append(path)
    return paths


def _plot(rows: list[dict[str, Any]], title: str, kind: str, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    for subject in dict.fromkeys(row["subject"] for row in rows):
        points = sorted((r["m"], r["us"]) for r in rows if r["subject"] == subject)
        role = next(r["role"] for r in rows if r["subject"] == subject)
        axes.plot(
            *zip(*points),
            label=subject,
            linewidth=2.2 if role == "farro" else 1.1,
            linestyle={"floor": ":", "peer": "--"}.get(role, "-"),
            color="black" if role == "floor" else None,
            marker="" if kind == "dense" else "o",
            markersize=3.5,
        )
    if kind != "dense":
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = sorted({row["m"] for row in rows})
        axes.set_xticks(ticks, [str(tick) for tick in ticks], fontsize=7)
    else:
        axes.set_ylim(bottom=0)
    axes.set(xlabel="M", ylabel="microseconds", title=title)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=7)
    # no software version in the file: the same data gives the same bytes
    figure.savefig(path, metadata={"Software": None})
