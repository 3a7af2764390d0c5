"""Tables of measured configurations: ops/<op>/tuned/<device>.json, and the user's own.

A table is found by the device's name and holds tens of rows, each a problem's sizes and the best
configuration measured for it. Where a product has few rows, the nearest row serves problems between
the rows. Where it has many, tiles come in rounds over the multiprocessors and the nearest problem
says little: there a table holds models of the configurations' times. A user's table (`farro tune`,
in FARRO_TUNED_DIR) beats the shipped one. Nothing is ever tuned inside a call.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

from .cuda.jit import cache_directory
from .dispatch import forget

_OPS = Path(__file__).parent / "ops"
FEW_ROWS = 64  # up to here the bytes of the weights bound a product, and the nearest row serves
LAUNCH_US = 4.0  # an almost empty kernel
_CLOSE = 0.25  # in log2 of all sizes together: a row this near knows better than a model
_SIZES = ("m", "n", "k", "e", "topk")  # what a row says of a problem's size
_LISTS = ("config", "tile", "model")  # fields of a row that are no plain values
_SLOWEST = 1e12  # microseconds: no model's numbers are larger

C = TypeVar("C")


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
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ()  # no table, or not one of ours: heuristics serve
    return tuple(row for row in rows if _is_row(row)) if isinstance(rows, list) else ()


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("config"), dict):
        return False
    if "model" in row and not _is_model(row):
        return False
    if not all(_is_size(row.get(name, 1), 0) for name in _SIZES):
        return False
    others = (value for name, value in row.items() if name not in _LISTS)
    return all(value is None or isinstance(value, (bool, int, float, str)) for value in others)


def _is_size(value: Any, least: int) -> bool:
    return type(value) is int and least <= value < 2**63


def _is_model(row: dict[str, Any]) -> bool:
    model, tile = row["model"], row.get("tile")
    if not isinstance(model, list) or not isinstance(tile, list):
        return False
    numbers = all(type(x) in (int, float) and 0 <= x <= _SLOWEST for x in model)
    sides = len(tile) == 2 and all(_is_size(side, 1) for side in tile)
    return len(model) == 3 and numbers and sides and isinstance(row.get("backend"), str)


def parsed(kind: type[C], values: Any) -> C | None:
    """The configuration that a row describes, or None where it is none of this dataclass.

    Fields have their very types: True is no size and 16.0 no int, whatever they are equal to.
    """
    hints = _hints(cast(Hashable, kind))
    if not isinstance(values, Mapping) or not values.keys() <= hints.keys():
        return None
    fields: dict[str, Any] = {}
    for name, value in values.items():
        hint = hints[name]
        fields[name] = parsed(hint, value) if hasattr(hint, "__dataclass_fields__") else value
        if type(fields[name]) is not hint:
            return None
    try:
        return kind(**fields)
    except TypeError:  # fields are missing: a table of another version
        return None


@functools.lru_cache(maxsize=64)
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def takes(kind: type[C], refuses: Callable[[C], str | None]) -> Callable[[dict[str, Any]], bool]:
    """For `nearest` and `chosen`: whether a row has a configuration, one that is not refused."""

    def legal(values: dict[str, Any]) -> bool:
        found = parsed(kind, values)
        return found is not None and refuses(found) is None

    return legal


def table(operator: str, device: str) -> tuple[dict[str, Any], ...]:
    """The rows that apply on `device`: the user's, then the shipped ones that they do not replace.

    Of rows that are as near the first wins; shipped models go where the user's table has its own.
    """
    if not device:
        return ()
    return _joined(_read(user_path(operator, device)), _read(shipped_path(operator, device)))


def _joined(
    own: tuple[dict[str, Any], ...], shipped: tuple[dict[str, Any], ...]
) -> tuple[dict[str, Any], ...]:
    if not own:
        return shipped
    modelled = [_exact(row) for row in own if "model" in row]
    return (*own, *(row for row in shipped if "model" not in row or _exact(row) not in modelled))


def _exact(row: dict[str, Any]) -> dict[str, Any]:
    """What a row is for, beside sizes."""
    about = ("m", "n", "k", "us", "config", "tile", "model")
    return {name: value for name, value in row.items() if name not in about}


def nearest(
    rows: tuple[dict[str, Any], ...],
    exact: Mapping[str, Any],
    sizes: Mapping[str, int],
    legal: Callable[[dict[str, Any]], bool] = lambda config: True,
) -> dict[str, Any] | None:
    """The configuration of the row nearest in log2 of `sizes`, among rows equal in `exact`.

    `sizes` lists m, n, k; a row whose configuration is not `legal` for the problem is passed over.
    """
    found = _nearest(rows, exact, sizes, legal)
    return None if found is None else found[1]


def _nearest(
    rows: tuple[dict[str, Any], ...],
    exact: Mapping[str, Any],
    sizes: Mapping[str, int],
    legal: Callable[[dict[str, Any]], bool],
) -> tuple[float, dict[str, Any]] | None:
    best: tuple[float, dict[str, Any]] | None = None
    for row in rows:
        if "model" in row or any(row.get(name) != value for name, value in exact.items()):
            continue
        if ("m" in sizes and "m" in row) and (sizes["m"] <= FEW_ROWS) != (row["m"] <= FEW_ROWS):
            continue  # bound by other things
        distance = sum(
            abs(math.log2(max(value, 1) / max(row.get(name, 1), 1)))
            for name, value in sizes.items()
        )
        if (best is None or distance < best[0]) and legal(row["config"]):
            best = (distance, row["config"])
    return best


def rounds(tile: Sequence[int], m: int, n: int, multiprocessors: int) -> int:
    """How often each multiprocessor gets a tile."""
    tiles = -(-m // tile[0]) * -(-n // tile[1])
    return -(-tiles // multiprocessors)


def predicted_us(row: Mapping[str, Any], m: int, n: int, k: int, multiprocessors: int) -> float:
    """A model row's time: launch + rounds * (a + b * k) + c * k, k in thousands."""
    a, b, c = row["model"]
    turns = rounds(row["tile"], m, n, multiprocessors)
    return float(LAUNCH_US + turns * (a + b * k / 1000) + c * k / 1000)


def fastest(
    rows: tuple[dict[str, Any], ...],
    exact: Mapping[str, Any],
    sizes: Mapping[str, int],
    multiprocessors: int,
    legal: Callable[[dict[str, Any]], bool] = lambda config: True,
) -> tuple[dict[str, Any], float] | None:
    """The configuration of the least predicted time, and that time; None without models."""
    best: tuple[dict[str, Any], float] | None = None
    for row in rows:
        if "model" not in row or any(row.get(name) != value for name, value in exact.items()):
            continue
        us = predicted_us(row, sizes["m"], sizes["n"], sizes["k"], multiprocessors)
        if (best is None or us < best[1]) and legal(row["config"]):
            best = (row["config"], us)
    return best


def chosen(
    rows: tuple[dict[str, Any], ...],
    exact: Mapping[str, Any],
    sizes: Mapping[str, int],
    multiprocessors: int,
    legal: Callable[[dict[str, Any]], bool] = lambda config: True,
    far: bool = True,
) -> dict[str, Any] | None:
    """The table's configuration for a product of m x n x k, or None where it has none.

    Few rows: the nearest row's. Many: a row that is close, else the models', else, unless `far` is
    False (a heuristic knows more), the nearest's.
    """
    near = _nearest(rows, exact, sizes, legal)
    if sizes["m"] > FEW_ROWS and (near is None or near[0] > _CLOSE):
        model = fastest(rows, exact, sizes, multiprocessors, legal)
        if model is not None:
            return model[0]
        if not far:
            return None
    return None if near is None else near[1]


def preferred(
    rows: tuple[dict[str, Any], ...],
    exact: Mapping[str, Any],
    sizes: Mapping[str, int],
    multiprocessors: int,
    legal: Mapping[str, Callable[[dict[str, Any]], bool]],
    backends: Collection[str] = (),
) -> str | None:
    """The back end that the table finds fastest for a product, or None where it cannot tell.

    `legal` says of each back end which configurations it would take for the problem. A row may
    name one of these, or of `backends`; one that names anything else is passed over.
    """

    def names_one(config: dict[str, Any]) -> bool:
        named = config.get("backend")
        return isinstance(named, str) and (named in legal or named in backends)

    near = _nearest(rows, {"backend": "auto", **exact}, sizes, names_one)
    if sizes["m"] > FEW_ROWS and (near is None or near[0] > _CLOSE):
        times: dict[str, float] = {}
        for backend, takes in legal.items():
            key = {"backend": backend, **exact}
            found = fastest(rows, key, sizes, multiprocessors, takes)
            if found is not None:
                times[backend] = found[1]
        if len(times) > 1:
            return min(times, key=times.__getitem__)
    return None if near is None else str(near[1]["backend"])


def write(path: Path, operator: str, device: str, rows: list[dict[str, Any]], about: Any) -> None:
    """Write a table whole, or not at all; the calls that follow in this process read it."""
    content = {"operator": operator, "device": device, "about": about, "rows": rows}
    write_whole(path, json.dumps(content, indent=1) + "\n")
    _read.cache_clear()
    forget()


def write_whole(path: Path, text: str) -> None:
    """Write a file whole, or not at all, beside other processes that may do the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        part.write_text(text)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
