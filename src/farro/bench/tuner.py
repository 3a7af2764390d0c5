"""farro tune: measure a kernel's configurations on this device and keep the best in a table.

For each problem the kernel's own `configs` are compiled in parallel processes, run and compared by
value with the truth and (where they have to give the same bits) with each other, timed quickly, and
the best few carefully. All times go to a log in the user's cache, from which bench/tables.py makes
the table: a run that stops is continued by the next one.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from .. import tuning
from ..arch import arch_of
from ..dispatch import Kernel
from ..problem import Problem
from ..testing import poisoned_memory
from . import builders, results, tables
from .builders import Task
from .case import Adapter, Case
from .runner import Plan, relative_error
from .timing import Budget, GpuTimer, Timer, median, timer

_CAREFUL = Budget(10.0, 10, 60)
_FEW = 4  # configurations that are timed carefully
_HOPELESS = 2.0  # times slower than the best so far after two runs: not timed further


@dataclass
class Tuner:
    adapter: Adapter
    device: torch.device
    slug: str  # of the table
    table: Path
    jobs: int
    deadline: float
    say: Callable[[str], None]
    progress: Callable[[str, int, int], None]
    backends: Sequence[str] = ("all",)
    limit: int = 0  # configurations of a problem, a fair sample of them; 0 for all
    fresh: bool = False
    keep: bool = True  # write the log and the table
    log: Path = Path()  # of all times; beside the table where not said
    entries: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.log == Path():
            self.log = self.table.with_suffix(".log.json")


@dataclass(frozen=True)
class Work:
    """One problem of one kernel, and the configurations to time."""

    plan: Plan
    kernel: Kernel
    configs: tuple[Any, ...]
    chosen: Any  # what a call would use now
    signature: tuple[Any, ...]  # of the strides, as far as compilers specialize on them
    settings: dict[str, Any]  # what a row of the table says of the options
    problem: Problem

    @property
    def key(self) -> dict[str, Any]:
        dtype = str(self.plan.options.dtype).removeprefix("torch.")
        about = {"backend": self.kernel.backend, **self.settings, "dtype": dtype}
        return {**about, **self.plan.sizes}


def as_dict(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = config.as_dict() if hasattr(config, "as_dict") else asdict(config)
    return found


def tune(tuner: Tuner, plans: Sequence[Plan]) -> list[dict[str, Any]]:
    """Measure all plans that the log does not hold yet; write the table; give the log's entries.

    ValueError where the log is not readable, or another process is tuning the same table.
    """
    with _alone(tuner):
        return _tune(tuner, plans)


def _tune(tuner: Tuner, plans: Sequence[Plan]) -> list[dict[str, Any]]:
    if tuner.keep and not tuner.fresh and tuner.table.exists() and not tuner.log.exists():
        raise ValueError(
            f"{tuner.table} has rows, and the times they came from are not at {tuner.log}: they "
            "would be lost. Bring that log there, or begin again with --fresh"
        )
    tuner.entries = [] if tuner.fresh or not tuner.keep else _read_log(tuner.log)
    work: list[Work] = []
    for item in (w for plan in plans for w in _work(tuner, plan)):
        if all(item.key != w.key for w in work):  # of forms that a table does not tell apart one
            work.append(item)
    known = [e["problem"] for e in tuner.entries]
    todo = [w for w in work if w.key not in known]
    if not work:
        raise ValueError(_nothing(tuner, plans))
    tuner.say(f"{len(work)} problems, {len(work) - len(todo)} of them measured before")
    failed = _compile(tuner, todo)
    clock = timer(tuner.device, True)
    for done, item in enumerate(todo):
        if time.monotonic() > tuner.deadline:
            tuner.say(f"time is up: {len(todo) - done} problems were not measured; run it again")
            break
        _measure(tuner, clock, item, failed)
        _write(tuner)
    if not todo and not tuner.table.exists():  # lost, or the last run ended before it was written
        _write(tuner)
    return tuner.entries


def _nothing(tuner: Tuner, plans: Sequence[Plan]) -> str:
    operator = tuner.adapter.operator
    if not plans:
        return f"no problem of {operator} was asked for"
    return (
        f"no kernel of {operator} that runs on {tuner.device} has configurations to choose "
        f"among (back ends asked for: {', '.join(tuner.backends)})"
    )


def _work(tuner: Tuner, plan: Plan) -> list[Work]:
    operator, problem = describe(tuner.adapter, plan)
    found = []
    for kernel in operator.kernels:
        asked = "all" in tuner.backends or kernel.backend in tuner.backends
        if not asked or kernel.configs is None or kernel.refuses(problem) is not None:
            continue
        chosen = kernel.config(problem)
        configs = sorted(kernel.configs(problem), key=lambda config: _scatter(repr(config)))
        some = dict.fromkeys((chosen, *(configs[: tuner.limit] if tuner.limit else configs)))
        settings = tuner.adapter.tuned_as(plan.options)
        signature = _signature(problem)
        found.append(Work(plan, kernel, tuple(some), chosen, signature, settings, problem))
    return found


def _signature(problem: Problem) -> tuple[Any, ...]:
    return tuple(
        None if spec is None else tuple((s == 1, s % 16 == 0) for s in spec.stride)
        for _, spec in problem.tensors
    )


def describe(adapter: Adapter, plan: Plan) -> tuple[Any, Problem]:
    """Operator and problem of a plan, on the plan's device."""
    return adapter.build(plan.sizes, plan.options).problem()


def _compile(tuner: Tuner, work: Iterable[Work]) -> set[tuple[Any, ...]]:
    """Compile what can be in half of the time that is left; gives what is not to be timed."""
    firsts: dict[tuple[Any, ...], Task] = {}
    for item in work:
        options = item.plan.options
        for config in item.configs:
            sizes = tuple(item.plan.sizes.items())
            kernel = item.kernel
            task = Task(tuner.adapter.operator, sizes, options, kernel.backend, config)
            if kernel.compile:
                task = replace(task, problem=item.problem)
            firsts.setdefault(_compiled_key(item, config), task)
    if tuner.jobs == 0 or not firsts:
        return set()
    # in the order of the hash of the text: whatever is reached is a fair sample of each problem
    tasks = sorted(firsts.items(), key=lambda pair: _scatter(repr(pair[0])))
    deadline = time.monotonic() + (tuner.deadline - time.monotonic()) / 2
    answers = builders.build(
        [task for _, task in tasks],
        tuner.jobs,
        deadline,
        lambda done, total: tuner.progress("compiled", done, total),
    )
    errors = {i: text for i, text in answers.items() if text is not None}
    for text in sorted(set(errors.values()))[:5]:
        tuner.say(f"  does not run: {text}")
    skipped = len(tasks) - len(answers)
    tuner.say(
        f"compiled {len(answers) - len(errors)} of {len(tasks)} configurations, "
        f"{len(errors)} failed, {skipped} not reached"
    )
    return {tasks[i][0] for i in range(len(tasks)) if answers.get(i, "not reached") is not None}


def _compiled_key(item: Work, config: Any) -> tuple[Any, ...]:
    options = item.plan.options
    return item.kernel.backend, options.text, options.dtype, config, item.signature


def _scatter(text: str) -> int:
    import zlib

    return zlib.crc32(text.encode())


def _measure(tuner: Tuner, clock: Timer, item: Work, failed: set[tuple[Any, ...]]) -> None:
    """Time all configurations of a problem and add an entry to the log."""
    case = tuner.adapter.build(item.plan.sizes, item.plan.options)
    function = item.kernel.function()
    times: dict[Any, float] = {}
    anchor: Any = None
    best = float("inf")
    for config in _in_turn(item, times):
        if _compiled_key(item, config) in failed:
            continue
        try:
            result = _poisoned(case, function, config)
            if anchor is None or not tuner.adapter.exact:
                error = relative_error(case.value(result), case.truth())
                if not error < tuner.adapter.max_error:
                    tuner.say(f"  WRONG, error {error:.1e}: {config}")
                    continue
                anchor = result
            elif not _same(result, anchor):
                tuner.say(f"  WRONG, differs from {next(iter(times))}: {config}")
                continue
            us = _quick(clock, _bound(case, function, config), best)
        except Exception as error:
            _say_failed(tuner, clock, config, error)
            continue
        times[config] = us
        best = min(best, us)
    if not times:
        tuner.say(f"{item.key}: nothing ran")
        return
    few = sorted(times, key=lambda config: times[config])[:_FEW]
    few = list(dict.fromkeys((*few, *((item.chosen,) if item.chosen in times else ()))))
    for config in few:
        times[config] = median(clock.samples(_bound(case, function, config), _CAREFUL))
    _record(tuner, item, times, few)


def _in_turn(item: Work, times: Mapping[Any, float]) -> Iterator[Any]:
    """The kernel's configurations, then those that their times suggest."""
    yield from item.configs
    if times and item.kernel.further is not None:
        yield from item.kernel.further(times)


def _bound(case: Case, function: Callable[..., None], config: Any) -> Callable[[], Any]:
    run = case.run
    assert run is not None
    return lambda: run(function, config)


def _poisoned(case: Case, function: Callable[..., None], config: Any) -> Any:
    """A result written over what no right result holds, so that what is left unwritten shows."""
    with poisoned_memory():
        return _bound(case, function, config)()


def _same(result: Any, anchor: Any) -> bool:
    pairs = zip(result, anchor) if isinstance(result, tuple) else ((result, anchor),)
    return all(torch.equal(a, b) for a, b in pairs)


def _quick(clock: Timer, call: Callable[[], Any], best: float) -> float:
    two = clock.few(call, 2)
    if min(two) > _HOPELESS * best:
        return min(two)
    return median(two + clock.few(call, 3))


def _say_failed(tuner: Tuner, clock: Timer, config: Any, error: Exception) -> None:
    if isinstance(clock, GpuTimer):
        try:
            torch.cuda.synchronize(tuner.device)
        except Exception:
            raise error from None  # the context is lost; the log holds what was measured
    tuner.say(f"  does not run: {config}: {type(error).__name__}: {error}"[:300])


def _record(tuner: Tuner, item: Work, times: dict[Any, float], few: list[Any]) -> None:
    winner = min(few, key=lambda config: times[config])
    chosen = times.get(item.chosen)
    entry = {
        "problem": item.key,
        "set": item.plan.group,
        "best": as_dict(winner),
        "best_us": times[winner],
        "chosen": as_dict(item.chosen),
        "chosen_us": chosen,
        "measured": len(times),
        "times": [[as_dict(c), us] for c, us in sorted(times.items(), key=lambda p: p[1])],
        "tiles": [list(getattr(c, "tile", ())) for c in sorted(times, key=lambda c: times[c])],
    }
    tuner.entries.append(entry)
    share = (
        "" if chosen is None else f", chosen now {chosen:.1f} us ({times[winner] / chosen:.2f}x)"
    )
    sizes = " ".join(f"{n.upper()}={v}" for n, v in item.plan.sizes.items())
    tuner.say(
        f"{item.kernel.backend} {sizes} {item.plan.options.text}: best of {len(times)} "
        f"{times[winner]:.1f} us{share} {winner}"
    )


def _read_log(path: Path) -> list[dict[str, Any]]:
    """The log's entries, none where there is no log; ValueError where it is not one of ours."""
    try:
        entries = json.loads(path.read_text())["entries"]
        if not (isinstance(entries, list) and all(map(_is_entry, entries))):
            raise ValueError("its entries are not those of a tuner")
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path} cannot be read as a log of measurements ({type(error).__name__}: {error}): "
            "the rows that came from it would be lost. Repair it or bring back a copy, or begin "
            "again with --fresh"
        ) from error
    return entries


def _is_entry(entry: Any) -> bool:
    """Whether an entry has all that a table is made from."""
    if not isinstance(entry, dict) or not isinstance(entry.get("problem"), dict):
        return False
    problem, times, tiles = entry["problem"], entry.get("times"), entry.get("tiles", [])
    sizes = all(type(problem.get(name, 1)) is int for name in ("m", "n", "k"))
    named = isinstance(problem.get("backend"), str) and isinstance(entry.get("set"), str)
    us = (entry.get("best_us"), entry.get("chosen_us", 1.0) or 1.0)
    configs = (entry.get("best"), entry.get("chosen"))
    if not (sizes and named and all(isinstance(t, (int, float)) for t in us)):
        return False
    if not all(isinstance(config, dict) for config in configs) or not isinstance(times, list):
        return False
    pairs = (isinstance(t, list) and len(t) == 2 and isinstance(t[1], (int, float)) for t in times)
    return all(pairs) and isinstance(tiles, list) and all(isinstance(t, list) for t in tiles)


@contextlib.contextmanager
def _alone(tuner: Tuner) -> Iterator[None]:
    """Holds the table's lock, where files can be locked: of two tuners one would lose its rows."""
    if not tuner.keep:
        yield
        return
    path = tuner.log.with_suffix(".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        with contextlib.suppress(ImportError):
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"another farro tune is measuring for {tuner.table} (it holds {path}): wait "
                    "for it, or stop it and run this again; --dry-run measures without writing"
                ) from None
            except OSError:
                pass  # some NFS: nothing tells the other
        yield


def _write(tuner: Tuner) -> None:
    if not tuner.keep:
        return
    about = {"date": _today(), "versions": results.versions(), "commit": results.commit()}
    rows = tables.rows(tuner.entries, _multiprocessors(tuner.device))
    lines = ",\n".join(json.dumps(entry) for entry in tuner.entries)
    text = f'{{"about": {json.dumps(about)},\n"entries": [\n{lines}\n]}}\n'
    tuning.write_whole(tuner.log, text)  # first: a table can be made again from it
    tuning.write(tuner.table, tuner.adapter.operator, tuner.slug, rows, about)


def _multiprocessors(device: torch.device) -> int:
    return arch_of(device).multiprocessors


def _today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())
