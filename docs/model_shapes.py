"""The part of docs/performance.md that has one line for each problem: served models, experts."""

from __future__ import annotations

from typing import Any

SET = "models"

Rows = list[dict[str, Any]]


# experts here, intermediate size, hidden size: what nvfp4_moe calls E, N and K
LAYERS = {
    (128, 768, 2048): "Qwen3-30B-A3B",
    (128, 1536, 4096): "Qwen3-235B-A22B",
    (8, 14336, 4096): "Mixtral 8x7B",
    (32, 2048, 7168): "DeepSeek-V3, one rank of eight",
}


def apart(row: dict[str, Any]) -> bool:
    """Whether a row is shown here, and not in a table of its shape."""
    return row["set"] == SET or ("e" in row and row["set"] != "dense")


def tables(rows: Rows) -> list[tuple[str, Rows, list[str], list[list[str]]]]:
    """For each form its title, its rows, and head and lines of a table: one line a problem."""
    forms: dict[tuple[Any, ...], Rows] = {}
    for row in rows:
        if apart(row):
            key = row.get("variant") or f"G {row['group_size']}", row["dtype"], row["cold"]
            forms.setdefault(("e" in row, *key), []).append(row)
    found = []
    for (experts, form, dtype, cold), members in forms.items():
        subjects = list(dict.fromkeys(row["subject"] for row in members))
        by: dict[tuple[int, ...], dict[str, dict[str, Any]]] = {}
        for row in _by_shape(members) if experts else members:
            sizes = (row["m"], row["n"], row["k"], *([row["e"]] if experts else []))
            by.setdefault(sizes, {})[row["subject"]] = row
        named = experts and any("topk" in row for row in members)
        lines = []
        for sizes, here in by.items():
            layer = [LAYERS.get((sizes[3], *sizes[1:3]), "")] if named else []
            lines.append([*layer, *_line(sizes, subjects, here)])
        head = [*(["layer"] if named else []), "M", "N", "K", *(["E"] if experts else [])]
        head += [*subjects, "auto TOPS", "auto, of the floor's speed"]
        caches = "cold caches" if cold else "warm caches"
        what = "Problems of models" if not experts else "Layers" if named else "M tokens an expert"
        found.append((f"{what}, {form}, {dtype}, {caches}", members, head, lines))
    return found


def _by_shape(rows: Rows) -> Rows:
    """Shapes in the order in which they were measured first, M ascending."""
    shapes = list(dict.fromkeys((row["e"], row["n"], row["k"]) for row in rows))
    return sorted(rows, key=lambda row: (shapes.index((row["e"], row["n"], row["k"])), row["m"]))


def _line(
    sizes: tuple[int, ...], subjects: list[str], rows: dict[str, dict[str, Any]]
) -> list[str]:
    auto = rows.get("farro auto", {})
    tops, floor = auto.get("tops"), auto.get("floor_percent")
    return [
        *map(str, sizes),
        *(_number(rows[subject]["us"]) if subject in rows else "" for subject in subjects),
        f"{tops:.3g}" if tops else "",
        f"{floor:.0f} %" if floor else "",
    ]


def _number(us: float) -> str:
    return f"{us:.0f}" if us >= 1000 else f"{us:.1f}"
