"""farro verify: every kernel that works here against the reference, or the exact result."""

from __future__ import annotations

import contextlib
import datetime
import fnmatch
import json
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch

    from ..dispatch import Kernel
    from ..testing import Case
    from .verify_run import Check, Checks, Found

_MOST_JOBS = 16  # by default: each process on a GPU takes some of its memory
_LINES_S = 20  # between lines of progress, where no bar can be drawn


@dataclass
class Subject:
    """One kernel on one device, and what its cases gave."""

    operator: str
    kernel: Kernel
    device: torch.device
    cases: Sequence[Case]
    found: dict[int, Found] = field(default_factory=dict)  # by the case's place, as they ended

    @property
    def not_run(self) -> int:
        return len(self.cases) - len(self.found)

    @property
    def failed(self) -> int:
        return sum(found.status == "failed" for found in self.found.values())

    def as_dict(self, seed: int) -> dict[str, Any]:
        """In the order of the cases, whichever process ended first."""
        refused: dict[str, int] = {}  # reason -> cases
        failures = []
        for index, found in sorted(self.found.items()):
            if found.status == "refused":
                refused[found.detail] = refused.get(found.detail, 0) + 1
            elif found.status == "failed":
                failures.append(self._failure(self.cases[index].name, found, seed))
        return {
            "kernel": self.kernel.name,
            "backend": self.kernel.backend,
            "device": str(self.device),
            "cases": len(self.cases),
            "passed": sum(found.status == "ok" for found in self.found.values()),
            "failed": len(failures),
            "refused": refused,
            "not_run": self.not_run,
            "failures": failures,
        }

    def _failure(self, case: str, found: Found, seed: int) -> dict[str, str]:
        again = ["farro", "verify", "--device", found.device, "--operator", self.operator]
        again += ["--backend", self.kernel.backend, "--case", case, "--seed", str(seed)]
        return {"case": case, "what": found.detail, "reproduce": shlex.join(again)}


def _devices(asked: str | None) -> list[torch.device]:
    from .environment import device_named, devices

    return devices() if asked is None else [device_named(asked)]


def _absent(kernel: Kernel, device: torch.device) -> str | None:
    """Why a kernel is not verified on a device at all, or None."""
    from ..arch import arch_of
    from ..dispatch import not_installed

    arch = arch_of(device)
    if kernel.backend == "reference" and device.type == "cpu":
        return "what the others are compared with"
    lacking = arch.lacks(kernel.needs)
    if lacking is not None:
        return f"needs {lacking}; this is {arch.name}"
    return not_installed(kernel.backend)


def _subjects(
    operators: list[str], devices: list[torch.device], backend: str, pattern: str, quick: bool
) -> tuple[list[Subject], list[dict[str, str]]]:
    """What to verify, and the kernels left out with the reason."""
    from ..catalogue import operator_named
    from ..testing import CASES

    subjects, absent = [], []
    for name in operators:
        cases = [
            case
            for case in CASES[name]()
            if (case.quick or not quick) and fnmatch.fnmatchcase(case.name, pattern)
        ]
        for device in devices:
            for kernel in operator_named(name).kernels:
                if not cases or backend not in ("auto", kernel.backend):
                    continue
                reason = _absent(kernel, device)
                if reason is None:
                    subjects.append(Subject(name, kernel, device, cases))
                else:
                    absent.append({"kernel": kernel.name, "device": str(device), "reason": reason})
    return subjects, absent


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr, or a line now and then where that is no terminal; a call counts one case."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    begun = said = time.monotonic()
    done = 0
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("verify", total=total)

        def step(description: str) -> None:
            nonlocal done, said
            done += 1
            progress.update(task, completed=min(done, total), description=description)
            now = time.monotonic()
            if not console.is_terminal and now - said >= _LINES_S:
                said = now
                line = f"farro verify: {done} of {total} after {now - begun:.0f} s, {description}"
                print(line, file=sys.stderr, flush=True)

        yield step


def _checks(subjects: list[Subject]) -> Iterator[Check]:
    from .verify_run import Check

    for number, subject in enumerate(subjects):
        names = subject.operator, subject.kernel.name
        for index, case in enumerate(subject.cases):
            yield Check(number, index, *names, case.name, str(subject.device))


def _verify(
    subjects: list[Subject], work: Checks, jobs: int, budget_s: float | None, deadline: float | None
) -> str | None:
    """Run every case once per kernel; gives the reason where it ended before that."""
    from .verify_run import run, stoppable

    total = sum(len(subject.cases) for subject in subjects)
    try:
        with stoppable(), _progress(total) as step:
            for check, found in run(_checks(subjects), work, jobs, deadline):
                subjects[check.subject].found[check.at] = found
                step(f"{check.kernel} on {found.device}")
    except KeyboardInterrupt:
        return "interrupted"
    if not any(subject.not_run for subject in subjects):
        return None
    if deadline is not None and time.monotonic() >= deadline:
        return f"the {budget_s:g} s of --budget-s were over"
    return "a fault took the GPU from this process; with --jobs 2 a new process takes the rest"


def _report(found: dict[str, Any]) -> list[str]:
    from .environment import describe

    lines = [*describe(found), f"seed: {found['seed']}", ""]
    width = max(len(subject["kernel"]) for subject in found["kernels"])
    for subject in found["kernels"]:
        refused = sum(subject["refused"].values())
        lines.append(
            f"{subject['kernel']:<{width}}  {subject['device']:<7} {subject['cases']:>4} cases: "
            f"{subject['passed']} agree, {subject['failed']} failed, {refused} refused"
            + (f", {subject['not_run']} not run" if subject["not_run"] else "")
        )
        lines += [f"  refused {count}: {why}" for why, count in subject["refused"].items()]
        for failure in subject["failures"][:5]:
            lines += [
                f"  FAILED {failure['case']}: {failure['what']}",
                f"    {failure['reproduce']}",
            ]
        if len(subject["failures"]) > 5:
            lines.append(f"  ... and {len(subject['failures']) - 5} more failures (--json has all)")
    for kernel in found["not_verified"]:
        lines.append(f"not verified: {kernel['kernel']} on {kernel['device']}: {kernel['reason']}")
    failed = sum(subject["failed"] for subject in found["kernels"])
    missing = sum(subject["not_run"] for subject in found["kernels"])
    lines.append("")
    if missing:
        lines.append(f"NOT COMPLETE: {missing} cases were not run: {found['ended_early']}")
    if failed or not missing:
        lines.append(f"FAILED: {failed} cases" if failed else "all agree")
    return lines


def _operators(asked: str | None) -> list[str]:
    """Names of operators that have cases; a public function names its operator too."""
    from ..catalogue import OPERATORS
    from ..testing import CASES

    if asked is None:
        return list(CASES)
    for operator in OPERATORS:
        if operator.name in CASES and asked in (operator.name, *operator.functions):
            return [operator.name]
    raise ValueError(f"--operator is {asked!r}; needed one of {', '.join(CASES)}")


def verify_command(
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N. Default: the CPU and every GPU.")
    ] = None,
    operator: Annotated[
        str | None, typer.Option(help="int8_gemm or int8_quantize. Default: all.")
    ] = None,
    backend: Annotated[
        str, typer.Option(help="auto (all), reference, cpu, triton, cuda.")
    ] = "auto",
    case: Annotated[str, typer.Option(help="Cases to run, a pattern of fnmatch.")] = "*",
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of the data. Default: a new one each time.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One case of each kind.")] = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes. Default: where a GPU is among the devices one for each CPU, at most "
            f"{_MOST_JOBS}; else 1, with all threads.",
        ),
    ] = None,
    budget_s: Annotated[
        float | None, typer.Option(min=0, help="End after so many seconds, with what was verified.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare every kernel that works here with the reference over the edge cases.

    Bit for bit; or, where sums depend on their order, each element within rounding of the exact
    result. Sizes, group sizes, views, special values, empty problems; memory beside outputs is
    watched. The summary is meant for bug reports. Several processes share the cases, and with
    --device cuda all GPUs like the current one; a case that ends its process has failed. The
    report is the same as of one process. An interrupt or --budget-s ends a run with a report of
    what was verified until then. Exit code 1 where anything differs, 3 where nothing differs so
    far and cases were not run.
    """
    from ..checks import check_backend
    from .environment import environment

    deadline = None if budget_s is None else time.monotonic() + budget_s
    check_backend("verify", backend)
    data = secrets.randbits(31) if seed is None else seed
    where = _devices(device)
    subjects, absent = _subjects(_operators(operator), where, backend, case, quick)
    if not subjects:
        reasons = [f"{a['kernel']} on {a['device']}: {a['reason']}" for a in absent]
        if not reasons and case != "*":
            reasons = [f"no case is named {case!r}"]
        raise ValueError(f"nothing to verify: {'; '.join(reasons) or f'no kernel of {backend!r}'}")
    count, work = _work(where, device, jobs, data)
    early = _verify(subjects, work, count, budget_s, deadline)
    failed = any(subject.failed for subject in subjects)
    found = {
        "date": datetime.date.today().isoformat(),
        **environment(),
        "seed": data,
        "ok": not failed and early is None,
        "ended_early": early,
        "kernels": [subject.as_dict(data) for subject in subjects],
        "not_verified": absent,
    }
    typer.echo(json.dumps(found, indent=2) if as_json else "\n".join(_report(found)))
    if not found["ok"]:
        raise typer.Exit(1 if failed else 3)


def _work(
    devices: list[torch.device], asked: str | None, jobs: int | None, seed: int
) -> tuple[int, Checks]:
    """How many processes, and what each of them does."""
    from .verify_run import Checks, alike, cpus

    on_gpu = any(device.type == "cuda" for device in devices)
    count = jobs or (min(cpus(), _MOST_JOBS) if on_gpu else 1)
    if count == 1:
        return 1, Checks(seed)
    threads = max(1, cpus() // count)
    if asked == "cuda":  # with a number it is that one GPU
        return count, Checks(seed, threads, str(devices[0]), alike(devices[0]))
    return count, Checks(seed, threads)
