"""One case of an operator run on one kernel and compared with the reference."""

from __future__ import annotations

import functools
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..catalogue import operator_named
from ..dispatch import (
    _DESCRIBERS,
    Kernel,
    Operator,
    explain,
    explained_by,
    not_installed,
    select,
)
from ..problem import Problem
from .compare import difference
from .layouts import Guarded, poisoned_memory


@dataclass(frozen=True)
class Outcome:
    """`status` is "ok", "refused" (with the kernel's reason) or "failed" (with what differs)."""

    status: str
    detail: str = ""


def generator(seed: int, name: str) -> torch.Generator:
    """A generator on the CPU for one case: the same values on every device, alone or in a run."""
    # torch's generator on the CPU reads 32 bits of a seed
    return torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))


class Case(ABC):
    """A named input of an operator, built from a seed on any device."""

    name: str
    quick: bool  # among the few that `farro verify --quick` runs

    def __str__(self) -> str:
        return self.name

    @abstractmethod
    def build(self, device: torch.device | str = "cpu", seed: int = 0) -> Call:
        """The case's tensors, random from `seed`, as views of guarded buffers on `device`."""


class Call(ABC):
    """The arguments of one call of a public function, and how to run it on one kernel."""

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: Mapping[str, Guarded | None],
        keywords: Mapping[str, Any],
        out: Guarded | None = None,
    ) -> None:
        self.function = function
        self.inputs = inputs
        self.keywords = dict(keywords)
        self.out = out

    @property
    def gives_bfloat16(self) -> bool:
        """Whether a result is BF16, which Triton's interpreter on the CPU truncates."""
        return False

    @property
    def arguments(self) -> dict[str, Any]:
        """Everything the function takes but `backend`; `out` is a view of a guarded buffer."""
        tensors = {n: None if g is None else g.view for n, g in self.inputs.items()}
        out = {} if self.out is None else {"out": self.out.view}
        return {**tensors, **self.keywords, **out}

    @functools.cached_property
    def problem(self) -> Problem:
        return explain(self.function, **self.arguments).problem

    @functools.cached_property
    def operator(self) -> Operator:
        return operator_named(self.problem.operator)

    @functools.cached_property
    def expected(self) -> tuple[torch.Tensor, ...]:
        """What the reference gives on the CPU, whatever device the case is on."""
        arguments = {
            name: value.cpu() if isinstance(value, torch.Tensor) else value
            for name, value in self.arguments.items()
            if name != "out"
        }
        return _tuple(self.function(**arguments, backend="reference"))

    def through(self, backend: str) -> tuple[torch.Tensor, ...]:
        """The public function's results, in `out` where the case has one."""
        return _tuple(self.function(**self.arguments, backend=backend))

    @abstractmethod
    def direct(self, kernel: Kernel) -> tuple[torch.Tensor, ...]:
        """The kernel's own results, for a kernel that another of its back end would beat."""

    def results(self, kernel: Kernel) -> tuple[torch.Tensor, ...]:
        """The kernel's results, through the public function wherever that would pick it."""
        picked = select(self.operator, self.problem, kernel.backend).kernel
        return self.through(kernel.backend) if picked is kernel else self.direct(kernel)

    def check(self, kernel: Kernel) -> Outcome:
        """Run `kernel` in poisoned memory and compare it with the reference.

        Fails where results differ (`differs`), where memory beside `out` or an input was written,
        where the kernel raises, and where it refuses what it declares it must run.
        """
        reason = kernel.refuses(self.problem)
        if reason is not None:
            elsewhere = self.problem.arch.lacks(kernel.needs) or not_installed(kernel.backend)
            must = kernel.must_run(self.problem) and not elsewhere
            return Outcome("failed" if must else "refused", reason)
        if kernel.backend == "triton" and self.problem.arch.name == "cpu" and self.gives_bfloat16:
            return Outcome("refused", "Triton's interpreter truncates BF16; a GPU rounds it")
        expected = self.expected  # before the kernel could spoil an input
        for place in (self.out, *self.inputs.values()):
            if place is not None:
                place.restore()
        try:
            with poisoned_memory():
                actual = self.results(kernel)
            return self._judge(actual, expected)
        except Exception as error:
            return Outcome("failed", f"raised {type(error).__name__}: {error}")

    def differs(self, index: int, actual: torch.Tensor, expected: torch.Tensor) -> str | None:
        """What is wrong with result `index`, or None: bit for bit, unless an operator overrides."""
        return difference(actual, expected)

    def _judge(
        self, actual: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]
    ) -> Outcome:
        for name, place in self.inputs.items():
            if place is not None and place.changed():
                return Outcome("failed", f"{place.changed()} elements of {name} were written")
        for index, (got, needed) in enumerate(zip(actual, expected)):
            found = self.differs(index, got, needed)
            if found is not None:
                which = f"result {index}: " if len(actual) > 1 else ""
                return Outcome("failed", which + found)
        if self.out is not None and self.out.overwritten():
            return Outcome("failed", f"{self.out.overwritten()} elements beside out were written")
        return Outcome("ok")


def allocating(
    function: Callable[..., torch.Tensor], place: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """`function(out, ...)`, which writes a given tensor, as one whose `out` may be left out.

    `place(**arguments)` makes the `out` of such a call, filled with what shows where it was not
    written; it must take arguments that `function` will refuse. `explain` takes the result too.
    """

    def call(
        *, out: torch.Tensor | None = None, backend: str = "auto", **arguments: Any
    ) -> torch.Tensor:
        out = place(**arguments) if out is None else out
        return function(out, **arguments, backend=backend)

    def describe(*, out: torch.Tensor | None = None, **arguments: Any) -> Any:
        given = {k: v for k, v in arguments.items() if k not in ("backend", "arch")}
        out = place(**given) if out is None else out
        return _DESCRIBERS[function](out, **arguments)

    call.__name__ = function.__name__
    return explained_by(describe)(call)


def _tuple(results: Any) -> tuple[torch.Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)
