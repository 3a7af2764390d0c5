"""Figures: what an operator has to reach beside its peers and floors, told from a run's rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .results import key, label

Row = Mapping[str, Any]
Cases = dict[tuple[Any, ...], dict[str, Row]]


@dataclass(frozen=True)
class Goal:
    """Bounds of a figure; None where there is none."""

    mean: float | None = None  # of all points
    worst: float | None = None  # of any point


@dataclass(frozen=True)
class Figure:
    """A number for each case that it is about, their mean and the worst of them."""

    name: str
    value: Callable[[Point], float | None]  # None: the case is not one of the figure's
    needed: Goal = Goal()
    aim: Goal = Goal()
    less: bool = False  # the smaller, the better
    unit: str = "x"  # of ratios, whose mean is geometric; of anything else it is arithmetic


class Point:
    """The rows of one case, by subject."""

    def __init__(self, rows: Mapping[str, Row], cases: Cases, where: tuple[Any, ...]) -> None:
        self._rows, self._cases, self._where = rows, cases, where
        self.about = next(iter(rows.values()))

    def __getitem__(self, name: str) -> Any:
        """A size or a setting of the case."""
        return self.about.get(name)

    @property
    def ours(self) -> float | None:
        return self.us("farro auto")

    @property
    def floor(self) -> float | None:
        return self.us("read floor")

    @property
    def tops(self) -> float | None:
        return self.measure("farro auto", "tops")

    @property
    def graph(self) -> float | None:
        """Ours as a replay of a CUDA graph, which is what a brief run times."""
        brief = "graph_us" not in self._rows.get("farro auto", {})
        return self.ours if brief else self.measure("farro auto", "graph_us")

    def us(self, subject: str) -> float | None:
        return self.measure(subject, "us")

    def measure(self, subject: str, name: str) -> float | None:
        row = self._rows.get(subject)
        return None if row is None else row.get(name)

    def fastest(self, *wanted: str, ending: str = "") -> float | None:
        """The least time of the subjects whose names begin so, farro's own calls apart."""
        own = ("farro auto", "farro cuda", "farro triton", "farro cpu", "farro reference")
        names = (n for n in self._rows if n.startswith(wanted) and n.endswith(ending))
        found = (us for n in names if n not in own for us in [self.us(n)] if us is not None)
        return min(found, default=None)

    def of(self, variant: str) -> Point | None:
        """The same sizes in another form of the operator."""
        where = tuple(variant if value == self["variant"] else value for value in self._where)
        rows = self._cases.get(where)
        return None if rows is None else Point(rows, self._cases, where)


def over(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


Value = Callable[[Point], float | None]
Where = Callable[[Point], bool]


def when(where: Where, value: Value) -> Value:
    """Of the points where it holds."""
    return lambda point: value(point) if where(point) else None


def against(*names: str, ending: str = "") -> Value:
    """The fastest of the peers so named, over ours."""
    return lambda point: over(point.fastest(*names, ending=ending), point.ours)


def over_floor(point: Point) -> float | None:
    return over(point.ours, point.floor)


def judge(figures: Iterable[Figure], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What each figure reached; one without a point is told to have none."""
    cases: Cases = {}
    for row in rows:
        if row["set"] != "dense" and row.get("us") is not None:
            cases.setdefault(key(dict(row))[1:], {})[row["subject"]] = row
    points = [Point(found, cases, where) for where, found in cases.items()]
    return [_reached(figure, points) for figure in figures]


def _reached(figure: Figure, points: Sequence[Point]) -> dict[str, Any]:
    found = [(v, p) for p in points for v in [figure.value(p)] if v is not None]
    about: dict[str, Any] = {"figure": figure.name, "unit": figure.unit, "points": len(found)}
    about |= {"needed": asdict(figure.needed), "aim": asdict(figure.aim), "less": figure.less}
    if not found:
        return about
    values = [value for value, _ in found]
    if figure.unit == "x":
        mean = math.exp(sum(math.log(value) for value in values) / len(values))
    else:
        mean = sum(values) / len(values)
    worst, where = (max if figure.less else min)(found, key=lambda pair: pair[0])
    place = label({**where.about, "subject": ""}).removeprefix(" at ")
    return {
        **about,
        **{"mean": mean, "worst": worst, "worst_at": place},
        "needed_met": _met(figure, figure.needed, mean, worst),
        "aim_met": _met(figure, figure.aim, mean, worst),
    }


def _met(figure: Figure, goal: Goal, mean: float, worst: float) -> bool | None:
    """None where there is no bound to keep."""
    pairs = [(goal.mean, mean), (goal.worst, worst)]
    kept = [(v <= bound if figure.less else v >= bound) for bound, v in pairs if bound is not None]
    return all(kept) if kept else None


def lines(judged: Iterable[Mapping[str, Any]], partly: bool = False) -> list[str]:
    """One line a figure. `partly`: the run was stopped before its end."""
    some = ", of a run stopped early" if partly else ""
    told = []
    for one in judged:
        if not one["points"]:
            told.append(f"figure: {one['figure']}: not measured{some}")
            continue
        mean, worst = (
            f"{name} {one[name]:.3f} (needed {_text(one['needed'][name])}, "
            f"aim {_text(one['aim'][name])})"
            for name in ("mean", "worst")
        )
        verdict = ", ".join(
            f"{what} {'met' if one[f'{what}_met'] else 'MISSED'}"
            for what in ("needed", "aim")
            if one[f"{what}_met"] is not None
        )
        told.append(
            f"figure: {one['figure']} [{one['unit']}, {'less' if one['less'] else 'more'} is "
            f"better]: {mean}, {worst} at {one['worst_at']}, {one['points']} points{some}"
            f"{verdict and ': '}{verdict}"
        )
    return told


def _text(bound: float | None) -> str:
    return "-" if bound is None else f"{bound:g}"
