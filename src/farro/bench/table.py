"""The table of a result, for a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from . import figures
from .results import setting

_COLUMNS = (
    *(("us", "us", "{:.1f}"), ("TOPS", "tops", "{:.4g}"), ("GB/s", "gbs", "{:.0f}")),
    *(("% floor", "floor_percent", "{:.0f}"), ("% ceiling", "ceiling_percent", "{:.0f}")),
    *(("graph us", "graph_us", "{:.1f}"), ("host us", "host_us", "{:.1f}")),
    ("error", "error", "{:.1e}"),
)


def cell(row: dict[str, Any], name: str, form: str) -> str:
    value = row.get(name)
    if value is None:
        return "NaN" if name == "error" and row["role"] != "floor" else ""
    return "" if name in ("tops", "ceiling_percent") and value == 0 else form.format(value)


def table(result: dict[str, Any]) -> Table:
    """One line a row; the dense sweep is told by its largest step only."""
    about = result["machine"]
    where = about.get("gpu") or about.get("cpu") or about["device"]
    cold = "cold" if result["settings"].get("cold") else "warm"
    grid = Table(title=f"{result['operator']} on {where}, {cold} cache, medians")
    names = ("m", "n", "k", *(("e",) if any("e" in r for r in result["rows"]) else ()))
    form = "form" if any("variant" in r for r in result["rows"]) else "G"
    for name in (*map(str.upper, names), form):
        grid.add_column(name, justify="right")
    grid.add_column("what")
    columns = [c for c in _COLUMNS if any(r.get(c[1]) for r in result["rows"]) or c[1] == "error"]
    for title, _, _ in columns:
        grid.add_column(title, justify="right", no_wrap=True)
    before = None
    for row in result["rows"]:
        if row["set"] == "dense":
            continue
        sizes = [str(row.get(name, "")) for name in names]
        sizes.append(str(row.get("variant", row.get("group_size", ""))))
        if before is not None and sizes != before:
            grid.add_section()
        shown = [""] * len(sizes) if sizes == before else sizes
        before = sizes
        style = {"farro": "bold", "floor": "dim"}.get(row["role"])
        grid.add_row(*shown, row["subject"], *(cell(row, n, f) for _, n, f in columns), style=style)
    return grid


def show(result: dict[str, Any], console: Console) -> None:
    """The table, the ceilings, the dense sweep's steps and what did not run."""
    if any(row["set"] != "dense" for row in result["rows"]):
        console.print(table(result))
    for name, ceiling in result["ceilings"].items():
        values = ", ".join(
            f"{ceiling[key]:.0f} {unit}"
            for key, unit in (("gbs", "GB/s"), ("tops", "TOPS"))
            if key in ceiling
        )
        console.print(f"{name}: {values} {ceiling.get('way', '')}", markup=False)
    for step in result["steps"]:
        sizes = " x ".join(str(step[name]) for name in ("n", "k", "e") if name in step)
        low, high = step["between"]
        console.print(
            f"{step['subject']} {sizes} {setting(step)}: largest step between neighbouring M "
            f"{step['largest_step']:.2f}x, M = {low} to {high} "
            f"({step['us'][0]:.1f} and {step['us'][1]:.1f} us)",
            markup=False,
        )
    partly = bool(result["settings"].get("stopped_early"))
    for line in figures.lines(result.get("figures", ()), partly):
        console.print(line, markup=False, soft_wrap=True)
    for line in result["failed"]:
        console.print(f"FAILED: {line}", markup=False)
    for missing in result["missing"]:
        console.print(f"not run: {missing['name']}: {missing['reason']}", markup=False)
