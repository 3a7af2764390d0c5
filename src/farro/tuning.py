"""Tables of measured configurations: ops/<op>/tuned/<device>.json, and the user's own.

A table is found by the device's name and holds tens of rows, each a problem's sizes and the best
configuration measured for it. The nearest row serves problems between the rows. A user's table
(`farro tune`, in FARRO_TUNED_DIR) beats the shipped one. Nothing is ever tuned inside a call.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .cuda.jit import cache_directory
from .dispatch import forget

_OPS = Path(__file__).parent / "ops"


def user_directory() -> Path:
    """Where `farro tune` writes: FARRO_TUNED_DIR, else the cache directory's `tuned`."""
    given = os.environ.get("FARRO_TUNED_DIR")
    if given:
        return Path(given)
    return cache_directory() / "tuned"


def shipped_path(operator: str, device: str) -> Path:
    return _OPS / operator / "tuned" / f"{device}.json"


def user_path(operator: str, device: str) -> Path:
    return user_directory() / operator / f"{device}.json"


@functools.lru_cache(maxsize=64)
def _read(path: Path) -> tuple[dict[str, Any], ...]:
    try:
        rows = json.loads(path.read_text())["rows"]
    except (OSError, ValueError, KeyError, TypeError):
        return ()  # no table, or not one of ours: heuristics serve
    return tuple(row for row in rows if _is_row(row)) if isinstance(rows, list) else ()


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("config"), dict):
        return False
    return all(isinstance(row.get(name, 1), int) for name in ("m", "n", "k"))


def table(operator: str, device: str) -> tuple[dict[str, Any], ...]:
    """The rows that apply on `device`: the user's, or the shipped ones where there are none."""
    if not device:
        return ()
    return _read(user_path(operator, device)) or _read(shipped_path(operator, device))


def nearest(
    rows: tuple[dict[str, Any], ...],
    exact: Mapping[str, Any],
    sizes: Mapping[str, int],
    legal: Callable[[dict[str, Any]], bool] = lambda config: True,
) -> dict[str, Any] | None:
    """The configuration of the row nearest in log2 of `sizes`, among rows equal in `exact`.

    `sizes` lists m, n, k; a row whose configuration is not `legal` for the problem is passed over.
    """
    best: tuple[float, dict[str, Any]] | None = None
    for row in rows:
        if any(row.get(name) != value for name, value in exact.items()):
            continue
        distance = sum(
            abs(math.log2(max(value, 1) / max(row.get(name, 1), 1)))
            for name, value in sizes.items()
        )
        if (best is None or distance < best[0]) and legal(row["config"]):
            best = (distance, row["config"])
    return None if best is None else best[1]


def write(path: Path, operator: str, device: str, rows: list[dict[str, Any]], about: Any) -> None:
    """Write a table whole, or not at all; the calls that follow in this process read it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"operator": operator, "device": device, "about": about, "rows": rows}
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)
    _read.cache_clear()
    forget()
