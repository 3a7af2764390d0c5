"""farro verify: every kernel that works here against the reference, or the exact result."""

from __future__ import annotations

import contextlib
import datetime
import fnmatch
import json
import secrets
import shlex
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch

    from ..dispatch import Kernel
    from ..testing import Case


@dataclass
class Subject:
    """One kernel on one device, and what its cases gave."""

    operator: str
    kernel: Kernel
    device: torch.device
    cases: Sequence[Case]
    passed: int = 0
    refused: dict[str, int] = field(default_factory=dict)  # reason -> cases
    failures: list[dict[str, str]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {
            "kernel": self.kernel.name,
            "backend": self.kernel.backend,
            "device": str(self.device),
            "cases": len(self.cases),
            "passed": self.passed,
            "failed": len(self.failures),
            "refused": self.refused,
            "failures": self.failures,
        }


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
    """A bar on stderr where that is a terminal; the function it gives counts one case."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("verify", total=total)

        def step(description: str) -> None:
            progress.update(task, advance=1, description=description)

        yield step


def _verify(subjects: list[Subject], seed: int) -> None:
    """Run every case once per kernel; the reference runs once per case and device."""
    total = sum(len(subject.cases) for subject in subjects)
    with warnings.catch_warnings(), _progress(total) as step:
        # NumPy's, of NaN and Inf in Triton's interpreter
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")
        kinds = dict.fromkeys((subject.operator, subject.device) for subject in subjects)
        for operator, device in kinds:
            kernels = [s for s in subjects if (s.operator, s.device) == (operator, device)]
            for case in kernels[0].cases:
                call = case.build(device, seed)
                for subject in kernels:
                    _record(subject, case, call.check(subject.kernel), seed)
                    step(f"{subject.kernel.name} on {device}")


def _record(subject: Subject, case: Case, outcome: Any, seed: int) -> None:
    if outcome.status == "ok":
        subject.passed += 1
    elif outcome.status == "refused":
        subject.refused[outcome.detail] = subject.refused.get(outcome.detail, 0) + 1
    else:
        again = ["farro", "verify", "--device", str(subject.device), "--operator", subject.operator]
        again += ["--backend", subject.kernel.backend, "--case", case.name, "--seed", str(seed)]
        subject.failures.append(
            {"case": case.name, "what": outcome.detail, "reproduce": shlex.join(again)}
        )


def _report(found: dict[str, Any]) -> list[str]:
    from .environment import describe

    lines = [*describe(found), f"seed: {found['seed']}", ""]
    width = max(len(subject["kernel"]) for subject in found["kernels"])
    for subject in found["kernels"]:
        refused = sum(subject["refused"].values())
        lines.append(
            f"{subject['kernel']:<{width}}  {subject['device']:<7} {subject['cases']:>4} cases: "
            f"{subject['passed']} agree, {subject['failed']} failed, {refused} refused"
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
    lines += ["", f"FAILED: {failed} cases" if failed else "all agree"]
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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare every kernel that works here with the reference over the edge cases.

    Bit for bit; or, where sums depend on their order, each element within rounding of the exact
    result. Sizes, group sizes, views, special values, empty problems; memory beside outputs is
    watched. The summary is meant for bug reports. Exit code 1 where anything differs.
    """
    from ..checks import check_backend
    from .environment import environment

    check_backend("verify", backend)
    data = secrets.randbits(31) if seed is None else seed
    where = _devices(device)
    subjects, absent = _subjects(_operators(operator), where, backend, case, quick)
    if not subjects:
        reasons = [f"{a['kernel']} on {a['device']}: {a['reason']}" for a in absent]
        if not reasons and case != "*":
            reasons = [f"no case is named {case!r}"]
        raise ValueError(f"nothing to verify: {'; '.join(reasons) or f'no kernel of {backend!r}'}")
    _verify(subjects, data)
    found = {
        "date": datetime.date.today().isoformat(),
        **environment(),
        "seed": data,
        "ok": not any(subject.failures for subject in subjects),
        "kernels": [subject.as_dict() for subject in subjects],
        "not_verified": absent,
    }
    typer.echo(json.dumps(found, indent=2) if as_json else "\n".join(_report(found)))
    if not found["ok"]:
        raise typer.Exit(1)
