"""What is timed: a Case is one problem, its Subjects are the ways to compute it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..dispatch import _DESCRIBERS, Operator, select
from ..problem import Problem
from .figures import Figure

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Subject:
    """One way to compute a case. `call` enqueues it and gives its result."""

    name: str
    role: str  # "farro", "peer", "ceiling"
    call: Callable[[], Any]
    value: Callable[[Any], torch.Tensor] = lambda result: result  # the tensor to compare
    truth: Callable[[], torch.Tensor] | None = None  # None: the case's own
    backend: str | None = None
    kernel: str | None = None
    config: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class Missing:
    """A subject that does not run here, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Options:
    """What every adapter is told."""

    device: torch.device
    group_size: int = 256
    dtype: torch.dtype = torch.bfloat16
    peers: str = "default"  # "none", "default", "tuned"
    variant: str = (
        ""  # among the adapter's, for operators of several forms; they have no group size
    )

    @property
    def settings(self) -> dict[str, Any]:
        """What a row of results tells of these, beside the dtype."""
        return {"variant": self.variant} if self.variant else {"group_size": self.group_size}

    @property
    def text(self) -> str:
        return self.variant or f"G{self.group_size}"


@dataclass(frozen=True)
class Case:
    """One problem: `function(*args, backend=..., **kwargs)` is farro's public call."""

    sizes: dict[str, int]
    options: Options
    ops: int  # multiplications and additions
    nbytes: int  # each input read once, each output written once
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    truth: Callable[[], torch.Tensor]  # float64
    peers: Callable[[], Iterable[Subject | Missing]] = field(default=tuple)
    extra: Callable[[], Iterable[Subject | Missing]] = field(default=tuple)  # farro's other ways
    value: Callable[[Any], torch.Tensor] = lambda result: result
    run: Callable[[Callable[..., None], Any], Any] | None = None  # (kernel function, config)

    def problem(self) -> tuple[Operator, Problem]:
        operator, problem, _ = _DESCRIBERS[self.function](*self.args, **self.kwargs)
        return operator, problem

    def farro(self, backends: Iterable[str]) -> list[Subject | Missing]:
        """A subject for each back end that runs this, else why not; "auto" is one too."""
        operator, problem = self.problem()
        found: list[Subject | Missing] = []
        for backend in backends:
            name = f"farro {backend}"
            try:
                choice = select(operator, problem, backend)
            except RuntimeError as error:
                found.append(Missing(name, str(error)))
                continue
            call = self._call(backend)
            config = None if choice.config is None else str(choice.config)
            found.append(
                Subject(
                    *(name, "farro", call, self.value),
                    backend=choice.kernel.backend,
                    kernel=choice.kernel.name,
                    config=config,
                )
            )
        return found

    def subjects(self, backends: Sequence[str] = ("all",)) -> Iterator[Subject | Missing]:
        """farro's back ends, its other ways, and the peers that were asked for."""
        operator, _ = self.problem()
        named = list(backends)
        yield from self.farro(["auto", *backends_of(operator)] if "all" in named else named)
        yield from self.extra()
        if self.options.peers != "none":
            yield from self.peers()

    def _call(self, backend: str) -> Callable[[], Any]:
        function, args, kwargs = self.function, self.args, self.kwargs
        return lambda: function(*args, backend=backend, **kwargs)


@dataclass(frozen=True)
class Adapter:
    """One operator of the benchmark."""

    operator: str
    build: Callable[[Sizes, Options], Case]
    # named sets of sizes: all dimensions but m, or, where a problem has rows of its own, m too
    shapes: Mapping[str, tuple[dict[str, int], ...]]
    rows: Mapping[str, tuple[int, ...]]  # the same names: values of m
    group_sizes: tuple[int, ...] = (256,)
    variants: tuple[str, ...] = ()  # instead of group sizes
    # what rows of tuned tables say of the options, beside sizes
    tuned_as: Callable[[Options], dict[str, Any]] = lambda options: options.settings
    max_error: float = 1e-2  # of any right result against the truth
    exact: bool = True  # all configurations give the same bits
    ceiling: Callable[[torch.device], Subject | Missing] | None = None
    ceiling_ops: Callable[[torch.device], int] = lambda device: 0
    rank: Callable[[Sizes, Options], int] = lambda sizes, options: 0  # the lowest is run first
    telling: int = 2  # what ranks behind is left out of a brief run
    figures: tuple[Figure, ...] = ()  # what a run's rows are judged by
    about: Mapping[str, Any] = field(default_factory=dict)  # what results tell among settings
    summary: str = ""


def backends_of(operator: Operator) -> list[str]:
    """All fast back ends of an operator, in order; the reference is timed only when asked for."""
    names = dict.fromkeys(k.backend for k in operator.kernels)
    return [name for name in names if name != "reference"]
