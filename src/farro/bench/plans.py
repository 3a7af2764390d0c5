"""Which cases a run has: from named sets of shapes, or from sizes given one by one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from .case import Adapter, Options
from .runner import Plan

_QUICK_ROWS = (1, 16, 1024)
_QUICK_DENSE = (1, 2, 3, 4, 8, 9, 16, 17, 18)


def parse_rows(text: str) -> tuple[int, ...]:
    """ "1,16,64-67" -> (1, 16, 64, 65, 66, 67)."""
    rows: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None:
            raise ValueError(f"--m: {part!r} is neither a number nor a range such as 1-256")
        low = int(match[1])
        rows.extend(range(low, int(match[2] or low) + 1))
    if not rows:
        raise ValueError("--m: no value given")
    return tuple(rows)


def parse_shapes(adapter: Adapter, text: str) -> dict[str, tuple[dict[str, int], ...]]:
    """Named sets ("default,heldout") or sizes ("4096x7168", N x K) -> sets of sizes.

    Sizes after K, such as the number of experts, may be left out.
    """
    sets: dict[str, tuple[dict[str, int], ...]] = {}
    names = tuple(name for name in next(iter(adapter.shapes.values()))[0] if name != "m")
    least = sum(name in ("n", "k") for name in names)
    for part in filter(None, (p.strip() for p in text.split(","))):
        if part in adapter.shapes:
            sets[part] = adapter.shapes[part]
            continue
        numbers = part.lower().split("x")
        fits = least <= len(numbers) <= len(names)
        if not fits or not all(number.isdigit() for number in numbers):
            known = ", ".join(adapter.shapes)
            form = "x".join(name.upper() for name in names)
            raise ValueError(f"--shapes: {part!r}; needed sizes {form}, or a set among {known}")
        shape = dict(zip(names, map(int, numbers)))
        sets["given"] = (*sets.get("given", ()), shape)
    if not sets:
        raise ValueError("--shapes: no shape given")
    return sets


def cases(
    adapter: Adapter,
    sets: dict[str, tuple[dict[str, int], ...]],
    rows: Sequence[int] | None,
    options: Sequence[Options],
    quick: bool = False,
) -> Iterator[Plan]:
    """All plans: for each of `options` (group sizes), each set, each shape, each m.

    A shape that has an m of its own is taken with it alone, unless rows are given.
    """
    for each in options:
        for group, shapes in sets.items():
            default = adapter.rows.get(group, adapter.rows["default"])
            if quick:
                default = _QUICK_DENSE if group == "dense" else _QUICK_ROWS
            for shape in shapes[:1] if quick else shapes:
                own = (shape["m"],) if "m" in shape else default
                for m in rows or own:
                    yield Plan(group, {**shape, "m": m}, each)
