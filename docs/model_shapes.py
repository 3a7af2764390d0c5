"""The part of docs/performance.md about problems of served models, each with an M of its own."""

from __future__ import annotations

from typing import Any

SET = "models"

Rows = list[dict[str, Any]]


def tables(rows: Rows) -> list[tuple[str, Rows, list[str], list[list[str]]]]:
    """For each form its title, its rows, and head and lines of a table: one line a problem."""
    forms: dict[tuple[Any, ...], Rows] = {}
    for row in rows:
        if row["set"] == SET:
            key = row.get("variant") or f"G {row['group_size']}", row["dtype"], row["cold"]
            forms.setdefault(key, []).append(row)
    found = []
    for (form, dtype, cold), members in forms.items():
        subjects = list(dict.fromkeys(row["subject"] for row in members))
        by: dict[tuple[int, int, int], dict[str, dict[str, Any]]] = {}
        for row in members:
            by.setdefault((row["m"], row["n"], row["k"]), {})[row["subject"]] = row
        lines = [_line(sizes, subjects, here) for sizes, here in by.items()]
        head = ["M", "N", "K", *subjects, "auto TOPS", "auto, of the floor's speed"]
        caches = "cold caches" if cold else "warm caches"
        found.append((f"Problems of models, {form}, {dtype}, {caches}", members, head, lines))
    return found


def _line(
    sizes: tuple[int, int, int], subjects: list[str], rows: dict[str, dict[str, Any]]
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
