"""README's table of FP8 products on GPUs, from `farro bench`; docs/generate.py calls this.

Beside farro's own choice stands what another library does with the same codes and scales.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from group_size import SHAPES, _markdown, about

# column -> operator, its form, and the subjects that it compares with
COLUMNS = {
    "one scale": ("fp8_linear", "default", ("torch._scaled_mm precise",)),
    "one scale, fast_accum": ("fp8_linear", "fast", ("torch._scaled_mm fast",)),
    "blocks of 128": ("fp8_blockwise_linear", "plain", ("torch._scaled_mm", "DeepGEMM", "Humming")),
}
Times = dict[tuple[int, int, int], dict[str, tuple[float, float | None, str]]]


def times(results: Sequence[dict[str, Any]]) -> tuple[Times, list[dict[str, Any]]]:
    """(M, N, K) -> column -> farro's and the best peer's microseconds and name; what was used."""
    found: Times = {}
    used = []
    for result in sorted(results, key=lambda result: str(result["date"])):
        for column, (operator, form, names) in COLUMNS.items():
            if result["operator"] != operator:
                continue
            rows = [r for r in result["rows"] if r.get("variant") == form and r["set"] != "dense"]
            for row in rows:
                sizes = row["m"], row["n"], row["k"]
                if row["subject"] != "farro auto" or sizes[1:] not in SHAPES or not row["cold"]:
                    continue
                peers = [
                    (r["us"], r["subject"])
                    for r in rows
                    if (r["m"], r["n"], r["k"]) == sizes and r["subject"].startswith(names)
                ]
                best = min(peers, default=(None, ""))
                found.setdefault(sizes, {})[column] = (row["us"], *best)
                used += [] if result in used else [result]
    return found, used


def summary(devices: Sequence[Path]) -> str:
    """A table for each GPU: microseconds of farro, and of the best peer in brackets."""
    parts = []
    for device in devices:
        contents = [json.loads(path.read_text()) for path in sorted(device.glob("fp8*.json"))]
        results = [c for c in contents if isinstance(c, dict) and c.get("operator") and "rows" in c]
        found, used = times([] if device.name.startswith("cpu") else results)
        if found:
            lines = [
                [", ".join(map(str, sizes)), *(_cell(here.get(column)) for column in COLUMNS)]
                for sizes, here in sorted(found.items(), key=lambda item: item[0][::-1])
            ]
            parts += [*map(about, used), "", _markdown(["(M, N, K)", *COLUMNS], lines)]
    return "\n".join(parts) or "FP8 on a GPU: not measured yet.\n"


def _cell(times: tuple[float, float | None, str] | None) -> str:
    if times is None:
        return ""
    mine, best, name = times
    return f"{mine:.1f}" if best is None else f"{mine:.1f} ({name} {best:.1f})"
