"""Run cases: check every subject's result, time all of them in turn, collect rows."""

from __future__ import annotations

import itertools
import math
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from . import builders, figures, results
from .case import Adapter, Case, Missing, Options, Subject
from .floor import Floors
from .timing import BRIEF, QUICK, Budget, CpuTimer, GpuTimer, Timer, median, timer

Say = Callable[[str], None]
_SAVE_S = 1.0
_MOST_HELD = 0.4  # of a GPU's memory, by caches of graphs that are gone


@dataclass(frozen=True)
class Plan:
    """One case to run, and the named set that it belongs to."""

    group: str  # "default", "heldout", "dense", ...
    sizes: dict[str, int]
    options: Options


@dataclass
class Session:
    """What a run shares between cases."""

    adapter: Adapter
    result: dict[str, Any]
    clock: Timer
    floors: Floors
    backends: Sequence[str] = ("all",)
    rounds: int = 2
    quick: bool = False
    brief: bool = False  # only what the figures need
    jobs: int = 0  # processes that run everything once beforehand
    say: Say = lambda line: None
    output: Path | None = None
    deadline: float | None = None
    tops: float | None = None  # the tensor-core ceiling

    def miss(self, missing: Missing, where: str) -> None:
        """Name a subject that does not run, once for each reason, and all cases that lack it."""
        about = {"name": missing.name, "reason": missing.reason}
        for entry in self.result["missing"]:
            if about.items() <= entry.items():
                entry["cases"].append(where)
                return
        self.result["missing"].append({**about, "cases": [where]})
        self.say(f"  {missing.name}: {missing.reason}")


def open_session(
    adapter: Adapter, device: torch.device, command: Sequence[str], cold: bool | None, **more: Any
) -> Session:
    clock = timer(device, cold)
    result = results.empty(adapter.operator, device, command)
    result["settings"] = {"cold": clock.cold, "statistic": "median", **adapter.about}
    session = Session(adapter, result, clock, Floors(clock), **more)
    if session.brief and isinstance(clock, GpuTimer):
        clock.wake_s = 0.01
        session.floors.prepare = clock.graphed
        result["settings"]["timed"] = "replays of a CUDA graph of each call"
    return session


def run(session: Session, plans: Iterable[Plan]) -> dict[str, Any]:
    """Run all plans, saving on the way; stops early at the session's deadline.

    With a deadline, those that the adapter ranks first are run first, and named groups of cases
    before dense sweeps.
    """
    _measure_ceilings(session)
    rank = session.adapter.rank
    if session.brief:
        plans = [p for p in plans if rank(p.sizes, p.options) <= session.adapter.telling]
    if session.deadline is not None or session.brief:
        plans = sorted(plans, key=lambda p: (p.group == "dense", rank(p.sizes, p.options)))
    plans = list(plans)
    _prepare(session, plans)
    saved = -math.inf
    for plan in plans:
        if session.deadline is not None and time.monotonic() > session.deadline:
            session.say("time is up: the remaining cases were not run")
            session.result["settings"]["stopped_early"] = True
            break
        for row in run_case(session, plan):
            session.result["rows"].append(row)
        if time.monotonic() - saved > _SAVE_S:  # a result is written whole: not after each case
            _save(session)
            saved = time.monotonic()
    rows = session.result["rows"]
    session.result["steps"] = steps(rows)
    judged = session.brief or session.clock.device.type == "cuda"  # figures are a GPU's
    session.result["figures"] = figures.judge(session.adapter.figures if judged else (), rows)
    _save(session)
    return session.result


def _prepare(session: Session, plans: Sequence[Plan]) -> None:
    """Run every subject once in other processes, which leave what they compile in caches on disk.

    One after the other, compiling takes most of a run: peers compile for each shape.
    """
    if session.jobs == 0 or session.clock.device.type != "cuda":
        return
    began = time.monotonic()
    end = began + 600 if session.deadline is None else session.deadline
    tasks = everything(session.adapter, plans, session.backends)
    answers = builders.build(
        tasks, session.jobs, began + (end - began) / 2, lambda done, total: None
    )
    for text in sorted({text for text in answers.values() if text is not None})[:5]:
        session.say(f"  beforehand: {text}")
    seconds = time.monotonic() - began
    session.say(f"ran {len(answers)} of {len(tasks)} cases beforehand, in {seconds:.0f} s")


def everything(
    adapter: Adapter, plans: Iterable[Plan], backends: Sequence[str]
) -> list[builders.Everything]:
    """A task for each plan but those of dense sweeps, those of one shape apart from each other."""
    tasks = [
        builders.Everything(adapter.operator, tuple(p.sizes.items()), p.options, tuple(backends))
        for p in plans
        if p.group != "dense"
    ]
    return sorted(tasks, key=lambda task: zlib.crc32(repr(task.sizes).encode()))


def _save(session: Session) -> None:
    if session.output is not None:
        results.save(session.output, session.result)


def _measure_ceilings(session: Session) -> None:
    device = session.clock.device
    ceilings = session.result["ceilings"]
    size = 1 << 29 if device.type == "cuda" else 1 << 27
    if session.quick:
        size >>= 3
    us, way = session.floors.read(size)
    ceilings["read"] = {"gbs": size / us / 1e3, "bytes": size, "way": way}
    ceilings["copy"] = {"gbs": session.floors.copy_gbs(2 * size)}
    if session.adapter.ceiling is None:
        return
    subject = session.adapter.ceiling(device)
    if isinstance(subject, Missing):
        session.miss(subject, "ceiling")
        return
    subject.call()
    us = median(session.clock.samples(subject.call, QUICK))
    session.tops = session.adapter.ceiling_ops(device) / us / 1e6
    ceilings["arithmetic"] = {"tops": session.tops, "way": subject.name}


def run_case(session: Session, plan: Plan) -> list[dict[str, Any]]:
    """Rows of one case, the floor's first. Subjects that fail are named as missing."""
    case = session.adapter.build(plan.sizes, plan.options)
    dense = plan.group == "dense"
    session.say(_title(session, plan))
    ready: list[tuple[Subject, dict[str, Any]]] = []
    for found in _subjects(session, case, dense):
        if isinstance(found, Missing):
            session.miss(found, _title(session, plan))
            continue
        try:
            ready.append((found, _check(session, case, found)))
        except Exception as error:  # one that fails must not hide the others
            _failed(session, plan, found, error)
    budget = _budget(session, dense)
    samples: dict[str, list[float]] = {subject.name: [] for subject, _ in ready}
    calls = {subject.name: _timed(session, subject, row) for subject, row in ready}
    for _ in range(1 if dense else session.rounds):
        for name, call in calls.items():
            samples[name] += session.clock.samples(call, budget)
    calls.clear()
    floor_us, way = session.floors.read(case.nbytes)
    rows = [_floor_row(session, case, plan, floor_us, way)]
    for subject, row in ready:
        _fill(session, case, plan, row, samples[subject.name], floor_us)
        if not dense and not session.brief:
            _host_and_graph(session, subject, row)
        rows.append(row)
        session.say(_line(row))
    if session.brief:
        _let_go(session.clock.device)
    return rows


def _timed(session: Session, subject: Subject, row: dict[str, Any]) -> Callable[[], Any]:
    """What is timed: the call, or in a brief run the replay of a graph of it."""
    if not session.brief or not isinstance(session.clock, GpuTimer):
        return subject.call
    replay = session.clock.graphed(subject.call)
    if isinstance(replay, str):
        row["note"] = "; ".join(filter(None, [row["note"], replay]))
        return subject.call
    return replay


def _let_go(device: torch.device) -> None:
    """Give back what graphs held, before it fills the device."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        if torch.cuda.memory_reserved(device) > _MOST_HELD * total:
            torch.cuda.empty_cache()


def _failed(session: Session, plan: Plan, subject: Subject, error: Exception) -> None:
    """Name what failed; farro's own failures fail the run. A lost GPU context ends it."""
    if session.clock.device.type == "cuda":
        try:
            torch.cuda.synchronize(session.clock.device)
        except Exception:
            raise error from None
    reason = f"{type(error).__name__}: {_first_line(error)}"
    if subject.role == "farro":
        session.result["failed"].append(f"{_title(session, plan)}: {subject.name}: {reason}")
        session.say(f"  FAILED {subject.name}: {reason}")
    else:
        session.miss(Missing(subject.name, reason), _title(session, plan))


def _subjects(session: Session, case: Case, dense: bool) -> Iterator[Subject | Missing]:
    if dense:
        wanted: Sequence[str] = ["auto"] if "all" in session.backends else session.backends
        yield from case.farro(wanted)
        return
    yield from case.subjects(session.backends)


def _budget(session: Session, dense: bool) -> Budget:
    if session.quick:
        return QUICK
    if session.brief:
        return BRIEF
    if dense:
        return replace(QUICK, least=15) if session.clock.device.type == "cuda" else QUICK
    return session.clock.default


def _check(session: Session, case: Case, subject: Subject) -> dict[str, Any]:
    """Warm a subject up and compare its result, over memory that held NaN, with the truth."""
    result = subject.call()
    if case.options.device.type == "cuda":
        for tensor in result if isinstance(result, tuple) else (result,):
            if tensor.is_floating_point():
                torch.full_like(tensor, math.nan)  # the allocator hands this block out next
        del result, tensor
        result = subject.call()
        torch.cuda.synchronize(case.options.device)
    value = subject.value(result)
    truth = (subject.truth or case.truth)()
    error = relative_error(value, truth)
    return {
        "subject": subject.name,
        "role": subject.role,
        "backend": subject.backend,
        "kernel": subject.kernel,
        "config": subject.config,
        "note": subject.note,
        "error": error if math.isfinite(error) else None,
    }


def relative_error(value: torch.Tensor, truth: torch.Tensor) -> float:
    """||value - truth|| / ||truth|| (Frobenius, float64), a block of rows at a time."""
    if value.shape != truth.shape:
        raise ValueError(f"a result of shape {list(value.shape)}; needed {list(truth.shape)}")
    difference = reference = 0.0
    rows = max(1, (1 << 26) // max(1, truth[0].numel())) if truth.numel() else 1
    for top in range(0, len(truth), rows):
        part, exact = value[top : top + rows], truth[top : top + rows]
        difference += float((part.double() - exact).square().sum())
        reference += float(exact.square().sum())
    if reference == 0:
        return math.sqrt(difference)
    return math.sqrt(difference / reference)


def _floor_row(
    session: Session, case: Case, plan: Plan, floor_us: float, way: str
) -> dict[str, Any]:
    row: dict[str, Any] = {"subject": "read floor", "role": "floor", "note": way}
    _describe(session, case, plan, row)
    row["us"] = floor_us
    row["gbs"] = case.nbytes / floor_us / 1e3
    return row


def _describe(session: Session, case: Case, plan: Plan, row: dict[str, Any]) -> None:
    options = case.options
    row |= {"set": plan.group, **case.sizes, **options.settings}
    row |= {"dtype": str(options.dtype).removeprefix("torch."), "cold": session.clock.cold}


def _fill(
    session: Session,
    case: Case,
    plan: Plan,
    row: dict[str, Any],
    samples: list[float],
    floor_us: float,
) -> None:
    _describe(session, case, plan, row)
    ordered = sorted(samples)
    us = median(ordered)
    row |= {
        "us": us,
        "us_low": ordered[len(ordered) // 10],
        "us_high": ordered[len(ordered) * 9 // 10],
        "runs": len(ordered),
        "tops": case.ops / us / 1e6,
        "gbs": case.nbytes / us / 1e3,
        "floor_us": floor_us,
        "floor_percent": 100 * floor_us / us,
    }
    if session.tops:
        row["ceiling_percent"] = 100 * row["tops"] / session.tops


def _host_and_graph(session: Session, subject: Subject, row: dict[str, Any]) -> None:
    clock = session.clock
    graph = clock.graph_us(subject.call)
    if isinstance(graph, str):
        row["note"] = "; ".join(filter(None, [row["note"], graph]))
        graph = None
    row["graph_us"] = graph
    row["host_us"] = clock.host_us(subject.call, row["us"])
    row["peak_bytes"] = clock.peak_bytes(subject.call) if subject.role == "farro" else None


_OF_SWEEP = ("subject", "n", "k", "e", "group_size", "variant", "dtype")


def steps(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each dense sweep: the largest ratio of times of neighbouring m, and where it is."""
    sweeps: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if row["set"] == "dense" and row["role"] == "farro":
            sweeps.setdefault(tuple(row.get(name) for name in _OF_SWEEP), []).append(row)
    found = []
    for points in sweeps.values():
        points = sorted(points, key=lambda row: row["m"])
        pairs = [(a, b) for a, b in itertools.pairwise(points) if b["m"] == a["m"] + 1]
        if not pairs:
            continue
        worst = max(pairs, key=lambda pair: _ratio(*pair))
        found.append(
            {
                **{name: worst[0][name] for name in _OF_SWEEP if name in worst[0]},
                "largest_step": _ratio(*worst),
                "between": [worst[0]["m"], worst[1]["m"]],
                "us": [worst[0]["us"], worst[1]["us"]],
            }
        )
    return found


def _ratio(a: dict[str, Any], b: dict[str, Any]) -> float:
    return float(max(a["us"] / b["us"], b["us"] / a["us"]))


def _title(session: Session, plan: Plan) -> str:
    sizes = " ".join(f"{name.upper()}={value}" for name, value in plan.sizes.items())
    return f"{session.adapter.operator} {sizes} {plan.options.text} ({plan.group})"


def _line(row: dict[str, Any]) -> str:
    floor = f"{row['floor_percent']:5.1f}% of the floor"
    error = "NaN" if row["error"] is None else f"{row['error']:.1e}"
    return (
        f"  {row['subject']:30s} {row['us']:9.1f} us {row['tops']:7.1f} TOPS "
        f"{row['gbs']:7.0f} GB/s {floor} error {error}"
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else "no message"


__all__ = ["CpuTimer", "GpuTimer", "Plan", "Session", "open_session", "run", "steps"]
