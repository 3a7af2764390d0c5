"""Tuned tables from the measurements of `farro tune`: rows of the best, models, preferences."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from .. import tuning

_TOLERANCE = 1.02  # a row is left out where the rest of the table serves its problem this well
_MODELLED = 1.1  # configurations that came this near the best of a problem get a model
_LEAST = 4  # problems that a model's three numbers are fitted to
_SIZES: tuple[str, ...] = ("m", "n", "k")
_OF_EXPERTS = ("e", "topk")

Entry = dict[str, Any]
Row = dict[str, Any]


def rows(entries: list[Entry], multiprocessors: int) -> list[Row]:
    """All rows of a table: measured problems, models of times, and which back end was fastest."""
    found = models(entries, multiprocessors)
    kept = thin(entries, found, multiprocessors)
    return [*kept, *found, *preferences(entries, found, multiprocessors)]


def _problem(entry: Entry) -> dict[str, Any]:
    return {name: value for name, value in entry["problem"].items() if name != "dtype"}


def _split(entry: Entry) -> tuple[dict[str, Any], dict[str, int]]:
    """What a row must agree in, and the sizes."""
    problem = _problem(entry)
    names = _SIZES
    if _of_experts(problem):
        names += _OF_EXPERTS
        problem.pop("all", None)  # a call does not tell it
    sizes: dict[str, int] = {n: problem.pop(n) for n in names if n in problem}
    return problem, sizes


def _of_experts(problem: Mapping[str, Any]) -> bool:
    """Whether calls take the nearest row in all sizes, as those over several experts do."""
    return "e" in problem


def _row(entry: Entry) -> Row:
    return {**_problem(entry), "us": round(entry["best_us"], 2), "config": entry["best"]}


def _key(config: Mapping[str, Any]) -> str:
    return json.dumps(config, sort_keys=True)


# --- models --------------------------------------------------------------------------------------


def models(entries: list[Entry], multiprocessors: int) -> list[Row]:
    """For many rows, a model of each configuration that was near the best somewhere.

    `tuning.predicted_us` has its form; fitted by least squares of the relative error.
    """
    samples: dict[tuple[str, str], list[tuple[dict[str, int], float]]] = {}
    near: dict[tuple[str, str], Row] = {}
    for entry in entries:
        exact, sizes = _split(entry)
        if sizes.get("m", 0) <= tuning.FEW_ROWS or "n" not in sizes or _of_experts(sizes):
            continue
        for (config, us), tile in zip(entry["times"], entry.get("tiles", ())):
            key = (_key(exact), _key(config))
            samples.setdefault(key, []).append((sizes, us))
            if len(tile) == 2 and us <= _MODELLED * entry["best_us"]:
                near.setdefault(key, {**exact, "tile": tile, "config": config})
    return [
        {**row, "model": _fit(row["tile"], samples[key], multiprocessors)}
        for key, row in near.items()
        if len(samples[key]) >= _LEAST
    ]


def _fit(
    tile: list[int], samples: list[tuple[dict[str, int], float]], multiprocessors: int
) -> list[float]:
    left, right = [], []
    for sizes, us in samples:
        turns = tuning.rounds(tile, sizes["m"], sizes["n"], multiprocessors)
        depth = sizes["k"] / 1000
        left.append([turns / us, turns * depth / us, depth / us])
        right.append([(us - tuning.LAUNCH_US) / us])
    a, b = torch.tensor(left, dtype=torch.float64), torch.tensor(right, dtype=torch.float64)
    solved = torch.linalg.lstsq(a, b, driver="gelsd").solution.flatten().clamp_min(0)
    return [round(float(value), 5) for value in solved]


# --- rows ----------------------------------------------------------------------------------------


def thin(
    entries: list[Entry],
    modelled: list[Row] | None = None,
    multiprocessors: int = 132,
    tolerance: float = _TOLERANCE,
) -> list[Row]:
    """Each problem's best, less those that the rest of the table serves as well.

    A row is dropped only if every problem measured is still served within `tolerance` of its best.
    """
    kept = [_row(entry) for entry in entries]
    for row in list(kept):
        rest = [r for r in kept if r is not row]
        table = (*rest, *(modelled or ()))
        alike = [e for e in entries if all(row[n] == v for n, v in _split(e)[0].items())]
        if all(_served(entry, table, multiprocessors, tolerance) for entry in alike):
            kept = rest
    return kept


def _served(entry: Entry, table: tuple[Row, ...], multiprocessors: int, tolerance: float) -> bool:
    """Whether a call would get a configuration that was measured here, and found good.

    One that was not measured may be legal all the same: then the call would get it.
    """
    exact, sizes = _split(entry)
    measured = {_key(config): us for config, us in entry["times"]}
    if "n" in sizes and not _of_experts(sizes):
        found = tuning.chosen(table, exact, sizes, multiprocessors)
    else:
        found = tuning.nearest(table, exact, sizes)
    us = float("inf") if found is None else measured.get(_key(found), float("inf"))
    return us <= tolerance * float(entry["best_us"])


# --- preferences ---------------------------------------------------------------------------------


def preferences(
    entries: list[Entry],
    modelled: list[Row] | None = None,
    multiprocessors: int = 132,
    tolerance: float = _TOLERANCE,
) -> list[Row]:
    """Rows that tell "auto" which back end was fastest, where several were measured.

    As in `thin`, a row is dropped where the rest names a back end as fast.
    """
    times: dict[tuple[tuple[str, Any], ...], dict[str, float]] = {}
    for entry in entries:
        problem = _problem(entry)
        backend = problem.pop("backend")
        times.setdefault(tuple(problem.items()), {})[backend] = entry["best_us"]
    rivals = {problem: us for problem, us in times.items() if len(us) > 1}
    kept: list[Row] = [
        {"backend": "auto", **dict(problem), "config": {"backend": min(us, key=us.__getitem__)}}
        for problem, us in rivals.items()
    ]

    def served(rest: list[Row]) -> bool:
        table = (*rest, *(modelled or ()))
        for problem, us in rivals.items():
            sizes = {name: v for name, v in problem if name in ("m", "n", "k")}
            exact = {name: v for name, v in problem if name not in sizes}
            legal = dict.fromkeys(us, lambda config: True)
            found = tuning.preferred(table, exact, sizes, multiprocessors, legal)
            if found is None or us.get(found, float("inf")) > tolerance * min(us.values()):
                return False
        return True

    for row in list(kept):
        rest = [r for r in kept if r is not row]
        if served(rest):
            kept = rest
    return kept
