"""The runs behind farro verify: one case on one kernel after another, here or in processes."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..catalogue import operator_named
from ..testing import CASES, Call, Case, Outcome
from .workers import Died, SpentError, handed_out


class Check(NamedTuple):
    """One case on one kernel, by names, for another process; the numbers are for its report."""

    subject: int
    at: int  # of the subject's cases
    operator: str
    kernel: str
    case: str
    device: str


class Found(NamedTuple):
    """What a check gave, and the device that it ran on."""

    status: str
    detail: str
    device: str


@dataclass(frozen=True)
class Checks:
    """Runs checks, in this process or a worker's; `gpus` are alike and take the place of `gpu`."""

    seed: int
    threads: int | None = None  # of torch, for each worker
    gpu: str = ""
    gpus: tuple[str, ...] = ()

    def __call__(self, number: int, checks: Sequence[Check]) -> Iterator[Found]:
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        built, call = None, None
        for check in checks:
            device = check.device
            if self.gpus and device == self.gpu:
                device = self.gpus[number % len(self.gpus)]
            if (check.operator, check.case, device) != built:
                built = check.operator, check.case, device
                call = _built(_cases(check.operator)[check.case], device, self.seed)
            outcome = call if isinstance(call, Outcome) else _checked(call, check)
            yield Found(outcome.status, outcome.detail, device)
            if outcome.status == "failed" and _lost(device):
                raise SpentError(f"{device} does not answer this process any more")


@functools.cache
def _cases(operator: str) -> dict[str, Case]:
    return {case.name: case for case in CASES[operator]()}


def _built(case: Case, device: str, seed: int) -> Call | Outcome:
    try:
        return case.build(device, seed)
    except Exception as error:
        return Outcome("failed", f"building the case raised {type(error).__name__}: {error}")


def _checked(call: Call | None, check: Check) -> Outcome:
    assert call is not None
    kernel = next(k for k in operator_named(check.operator).kernels if k.name == check.kernel)
    with warnings.catch_warnings():
        # NumPy's, of NaN and Inf in Triton's interpreter
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")
        try:
            return call.check(kernel)
        except Exception as error:  # of the reference; a kernel's own are outcomes already
            return Outcome("failed", f"the comparison raised {type(error).__name__}: {error}")


def _lost(device: str) -> bool:
    """Whether a fault has ended this process's use of a GPU: every later call would fail too."""
    place = torch.device(device)
    if place.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(place)
    except Exception:
        return True
    return False


def cpus() -> int:
    """CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def alike(device: torch.device) -> tuple[str, ...]:
    """Every GPU here of the same kind, for work on any of them."""
    same = torch.cuda.get_device_properties(device)
    return tuple(
        f"cuda:{index}"
        for index in range(torch.cuda.device_count())
        if torch.cuda.get_device_properties(index).name == same.name
    )


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM, which `timeout` sends, is KeyboardInterrupt here as Ctrl-C is."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _together(checks: Iterable[Check]) -> dict[tuple[str, str], list[list[Check]]]:
    """Checks by operator and device, in lists of one case: its kernels share one reference."""
    groups: dict[tuple[str, str], dict[str, list[Check]]] = {}
    for check in checks:
        cases = groups.setdefault((check.operator, check.device), {})
        cases.setdefault(check.case, []).append(check)
    return {key: list(cases.values()) for key, cases in groups.items()}


def run(
    checks: Iterable[Check],
    work: Checks,
    jobs: int,
    deadline: float | None = None,  # of time.monotonic()
) -> Iterator[tuple[Check, Found]]:
    """Each check with what it gave, as they come; those missing at the end were not run."""
    groups = _together(checks)
    if jobs > 1:
        with contextlib.closing(handed_out(groups, work, jobs, deadline)) as results:
            for check, result in results:
                if isinstance(result, Died):
                    result = Found("failed", str(result), check.device)
                yield check, result
        return
    for bundles in groups.values():
        for bundle in bundles:
            try:
                for found, check in zip(work(0, bundle), bundle):
                    yield check, found
                    if deadline is not None and time.monotonic() >= deadline:
                        return
            except SpentError:
                return
