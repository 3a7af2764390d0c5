"""Functional: a torch operator that gives new tensors, from its checks, outputs and kernels."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ._ops import define, is_plain, ops
from .arch import Arch
from .checks import check_backend
from .dispatch import Operator, explained_by, remember, select
from .problem import Problem

F = TypeVar("F", bound=Callable[..., Any])
Tensors = Mapping[str, "torch.Tensor | None"]


def _key(value: Any) -> Hashable:
    """All of an argument that a choice of kernel may depend on."""
    if not isinstance(value, torch.Tensor):
        return value if isinstance(value, Hashable) else None
    if value.layout != torch.strided:  # it has no address, and the checks refuse it
        return value.layout
    return value.shape, value.stride(), value.dtype, value.device, value.data_ptr() & 15


@dataclass(frozen=True, eq=False)
class Functional:
    """One public function; every callable takes the arguments of its torch operator, in order.

    `schema` leaves out the last argument, `str backend`. `check_types` raises for what the schema
    would turn into a message of torch's own, `check` for the rest. `outputs` makes the results,
    which `launch` has the chosen kernel fill: run(*arguments, *results) unless it says otherwise.
    `problem` gives the tensors and parameters that kernels are chosen by.
    """

    name: str
    operator: Operator
    schema: str
    check_types: Callable[..., None]
    check: Callable[..., None]
    outputs: Callable[..., tuple[torch.Tensor, ...]]
    problem: Callable[..., tuple[Tensors, Mapping[str, Hashable]]]
    launch: Callable[..., None] = lambda run, *arguments: run(*arguments)
    _runners: dict[Any, Callable[..., None]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        head, _, results = self.schema.partition(") -> ")
        define(f"{head}, str backend) -> {results}", self._implementation, self._fake)

    def __call__(self, *arguments: Any, backend: str) -> Any:
        """Check, choose a kernel and run it; past the dispatcher where nothing watches."""
        self._check_types(arguments, backend)
        if is_plain(*(a for a in arguments if isinstance(a, torch.Tensor))):
            return self._implementation(*arguments, backend)
        return getattr(ops, self.schema.partition("(")[0])(*arguments, backend)

    def describe(
        self, *arguments: Any, backend: str, arch: Arch | None
    ) -> tuple[Operator, Problem, str]:
        """What `explain` asks."""
        self._check_types(arguments, backend)
        self.check(*arguments)
        return self.operator, self._problem(arguments, arch), backend

    def explained(self, function: F) -> F:
        """Decorates the public function, whose parameters have the operator's among them."""
        signature = inspect.signature(function)
        arguments = self.schema.partition("(")[2].partition(")")[0].split(", ")
        names = [argument.split(" ")[-1] for argument in arguments]

        def describe(*args: Any, arch: Arch | None = None, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            return self.describe(*(given[n] for n in names), backend=given["backend"], arch=arch)

        return explained_by(describe)(function)

    def _check_types(self, arguments: tuple[Any, ...], backend: str) -> None:
        self.check_types(*arguments)
        check_backend(self.name, backend)

    def _problem(self, arguments: tuple[Any, ...], arch: Arch | None = None) -> Problem:
        tensors, params = self.problem(*arguments)
        return Problem.of(self.operator.name, tensors, params, arch)

    def _implementation(self, *given: Any) -> Any:
        key = tuple(_key(value) for value in given)
        *arguments, backend = given
        run = self._runners.get(key)
        if run is None:
            check_backend(self.name, backend)
            self.check(*arguments)
            run = select(self.operator, self._problem(tuple(arguments)), backend).run
            remember(self._runners, key, run)
        made = self.outputs(*arguments)
        if any(result.numel() for result in made):
            self.launch(run, *arguments, *made)
        return made if len(made) > 1 else made[0]

    def _fake(self, *given: Any) -> Any:
        *arguments, backend = given
        check_backend(self.name, backend)
        self.check(*arguments)
        made = self.outputs(*arguments)
        return made if len(made) > 1 else made[0]
