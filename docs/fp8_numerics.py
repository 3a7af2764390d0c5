"""The generated parts of docs/numerics.md: what accumulation costs FP8 products.

From benchmarks/results/<device>/fp8_accumulation.json (benchmarks/fp8_accumulation.py) and, for
what `fast_accum` gains, the results of `farro bench fp8_linear`. docs/generate.py calls this.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from group_size import _markdown, about

Row = dict[str, Any]
EXACT = "exact, rounded to BF16"
NOT_MEASURED = "Not measured yet.\n"


def _results(devices: Sequence[Path]) -> list[tuple[str, dict[str, Any]]]:
    paths = [(device.name, device / "fp8_accumulation.json") for device in devices]
    return [(name, json.loads(path.read_text())) for name, path in paths if path.exists()]


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _table(rows: list[Row], ways: list[str], head: list[str]) -> str:
    """A line for each data and K: the error of BF16 results, that of sums before it in brackets."""
    by = {(row["data"], row["k"], row["way"]): row for row in rows}
    lines = []
    for data, k in dict.fromkeys((row["data"], row["k"]) for row in rows):
        cells = [data, str(k)]
        for way in ways:
            row = by.get((data, k, way), {})
            before = f" ({_error(row['error'])})" if row.get("error") else ""
            cells.append(f"{_error(row.get('bf16_error'))}{before}")
        lines.append(cells)
    return _markdown(["data", "K", *head], lines)


def modelled(devices: Sequence[Path]) -> str:
    """The model of the tensor cores: one scale, blocks, and what quantizing itself costs."""
    found = [result for _, result in _results(devices) if _of(result, "model")]
    if not found:
        return NOT_MEASURED
    result = found[-1]
    rows = result["rows"]
    parts = [about(result) + "\n"]
    for scales, title in (("tensor", "One scale"), ("block", "Blocks of 128")):
        mine = [row for row in rows if row["scales"] == scales and row["source"] != "measured"]
        ways = list(dict.fromkeys(row["way"] for row in mine))
        head = [way.replace("14 bits, ", "") for way in ways]
        parts += [f"**{title}**:\n", _table(mine, ways, head)]
    parts += [
        "**What quantizing costs**, the exact product of the codes against that of the data:\n"
    ]
    return "\n".join([*parts, _quantizing(rows)])


def _of(result: dict[str, Any], source: str) -> list[Row]:
    return [row for row in result["rows"] if row["source"] == source]


def _quantizing(rows: list[Row]) -> str:
    exact = {(r["data"], r["k"], r["scales"]): r for r in rows if r["way"] == EXACT}
    lines = [
        [
            data,
            str(k),
            *(_error(exact[data, k, s]["quantization_error"]) for s in ("tensor", "block")),
        ]
        for data, k in dict.fromkeys((data, k) for data, k, _ in exact)
    ]
    return _markdown(["data", "K", "one scale", "blocks of 128"], lines)


def measured(devices: Sequence[Path]) -> str:
    """What kernels gave, a table for each device and kind of scales."""
    parts = []
    for name, result in _results(devices):
        parts.append(f"{name}: {about(result)}\n")
        for scales, title in (("tensor", "one scale"), ("block", "blocks of 128")):
            mine = [row for row in _of(result, "measured") if row["scales"] == scales]
            ways = list(dict.fromkeys(row["way"] for row in mine))
            if mine:
                parts += [f"**{name}, {title}**:\n", _table(mine, ways, ways)]
    if not any(not name.startswith("cpu") for name, _ in _results(devices)):
        parts.append("On a GPU: not measured yet.\n")
    return "\n".join(parts)


def fast(devices: Sequence[Path]) -> str:
    """Times of sums that are promoted and of those that are not, from the benchmark."""
    parts = []
    for device in devices:
        found = [json.loads(path.read_text()) for path in sorted(device.glob("*.json"))]
        for result in found:
            if isinstance(result, dict) and result.get("operator") == "fp8_linear":
                lines = _compared(result.get("rows", []))
                if lines and not device.name.startswith("cpu"):  # CPUs do not tell them apart
                    head = ["M, N, K", "promoted, us", "fast_accum, us", "gain", "error", "fast"]
                    parts += [about(result) + "\n", _markdown(head, lines)]
    return "\n".join(parts) or NOT_MEASURED


def _compared(rows: list[Row]) -> list[list[str]]:
    auto: dict[tuple[int, int, int], dict[str, Row]] = {}
    for row in rows:
        if row["subject"] == "farro auto" and row["set"] != "dense":
            auto.setdefault((row["m"], row["n"], row["k"]), {})[row["variant"]] = row
    lines = []
    for (m, n, k), forms in sorted(auto.items(), key=lambda item: item[0][::-1]):
        if "default" not in forms or "fast" not in forms:
            continue
        promoted, quick = forms["default"], forms["fast"]
        times = [f"{promoted['us']:.1f}", f"{quick['us']:.1f}"]
        gain = f"{promoted['us'] / quick['us']:.2f}x"
        errors = [_error(promoted["error"]), _error(quick["error"])]
        lines.append([f"{m}, {n}, {k}", *times, gain, *errors])
    return lines
