"""Processes that compile configurations' kernels to disk, most by running each once.

A configuration that crashes or hangs takes its process with it, and nothing else: it is reported as
failed and another process takes over.
"""

from __future__ import annotations

import collections
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from ..catalogue import operator_named
from ..dispatch import Kernel
from ..problem import Problem
from . import adapter
from .case import Case, Missing, Options, backends_of
from .kept import forget

STALL_S = 120.0  # a compiler that needs longer for one configuration is taken to hang


@dataclass(frozen=True)
class Task:
    """One configuration of one kernel, on a problem that it is legal for."""

    operator: str
    sizes: tuple[tuple[str, int], ...]
    options: Options
    backend: str
    config: Any
    problem: Problem | None = None  # where the kernel compiles without running


def _kernel_of(task: Task) -> Kernel:
    return operator_named(task.operator).first_of(task.backend)


@dataclass(frozen=True)
class Everything:
    """All ways to compute a problem, the peers' too."""

    operator: str
    sizes: tuple[tuple[str, int], ...]
    options: Options
    backends: tuple[str, ...]


def run_all(task: Everything) -> None:
    """Run each way once, so that what it compiles lies in its cache on disk."""
    case = adapter(task.operator).build(dict(task.sizes), task.options)
    failed = []
    for subject in case.subjects(task.backends):
        if isinstance(subject, Missing):
            continue
        try:
            subject.call()
            if case.options.device.type == "cuda":
                torch.cuda.synchronize(case.options.device)
        except Exception as error:  # a peer's own; the run names it
            failed.append(f"{subject.name}: {type(error).__name__}: {error}"[:200])
    forget()
    if failed:
        raise RuntimeError("; ".join(failed))


def run_once(task: Task, case: Case) -> None:
    """Compile and run a configuration, to the end."""
    kernel = _kernel_of(task)
    assert case.run is not None, f"{task.operator} cannot force a configuration"
    case.run(kernel.function(), task.config)
    if case.options.device.type == "cuda":
        torch.cuda.synchronize(case.options.device)


def _serve(pipe: Connection) -> None:
    """A builder process: answers each task with None, or with why it failed."""
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # each would start as many as there are CPUs
    cases: dict[Any, Case] = {}
    while True:
        task: Task | Everything | None = pipe.recv()
        if task is None:
            return
        try:
            if isinstance(task, Everything):
                run_all(task)
                pipe.send(None)
                continue
            if task.problem is not None:
                _kernel_of(task).compiles(task.config, task.problem)
                pipe.send(None)
                continue
            where = (task.sizes, task.options)
            if where not in cases:
                if len(cases) >= 4:
                    cases.clear()
                cases[where] = adapter(task.operator).build(dict(task.sizes), task.options)
            run_once(task, cases[where])
            pipe.send(None)
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}"[:300])
            if "CUDA error" in str(error) or "Triton Error" in str(error):
                return  # the context is lost: another process goes on


class _Builder:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.task: int | None = None
        self.since = time.monotonic()

    def give(self, index: int, task: Task | Everything) -> None:
        self.task, self.since = index, time.monotonic()
        self.pipe.send(task)

    def stop(self) -> None:
        self.process.kill()
        self.process.join(5)
        self.pipe.close()


def build(
    tasks: Sequence[Task | Everything],
    jobs: int,
    deadline: float,
    progress: Callable[[int, int], None],
) -> dict[int, str | None]:
    """Run each task once in `jobs` processes until `deadline`: index -> None, or why it failed.

    Tasks that were not reached are absent from the answer.
    """
    answers: dict[int, str | None] = {}
    todo = collections.deque(enumerate(tasks))
    builders = [_Builder() for _ in range(min(jobs, len(tasks)))]
    try:
        while (todo or any(b.task is not None for b in builders)) and (time.monotonic() < deadline):
            for index, builder in enumerate(builders):
                if builder.task is None and todo:
                    builders[index] = _give(builder, *todo.popleft())
            for index, answer in _answers(builders):
                task = builders[index].task
                assert task is not None
                answers[task] = answer
                builders[index].task = None
                progress(len(answers), len(tasks))
    finally:
        for builder in builders:
            builder.stop()
    return answers


def _give(builder: _Builder, index: int, task: Task | Everything) -> _Builder:
    try:
        builder.give(index, task)
    except OSError:  # it ended after its last answer
        builder.stop()
        builder = _Builder()
        builder.give(index, task)
    return builder


def _answers(builders: list[_Builder]) -> Iterator[tuple[int, str | None]]:
    """Answers that have come; a builder that died or hangs is replaced."""
    busy = {b.pipe: i for i, b in enumerate(builders) if b.task is not None}
    for pipe in wait(list(busy), timeout=1.0):
        index = busy[pipe]  # type: ignore[index]
        try:
            yield index, builders[index].pipe.recv()
        except (EOFError, OSError):
            yield index, _replace(builders, index, "its process died")
    for index, builder in enumerate(builders):
        if builder.task is not None and time.monotonic() - builder.since > STALL_S:
            yield index, _replace(builders, index, f"no end after {STALL_S:.0f} s")


def _replace(builders: list[_Builder], index: int, reason: str) -> str:
    builders[index].stop()
    fresh = _Builder()
    fresh.task = builders[index].task
    builders[index] = fresh
    return reason


__all__ = ["STALL_S", "Everything", "Task", "backends_of", "build", "run_all", "run_once"]
