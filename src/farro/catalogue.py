"""The catalogue: every operator under ops/, found by its folder.

One registry for whoever needs all operators: the contract tests, the support table, `warmup` and
`farro verify`. A new folder under ops/ is in it at once.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from typing import Any

import torch

from . import ops
from .dispatch import Operator

# device, (M, N, K) -> calls that compile what an operator needs there
Warmer = Callable[[torch.device, tuple[int, ...]], Iterable[Callable[[], Any]]]


def _discover() -> dict[Operator, Any]:
    """Operator -> its module, in the order of the folders' names.

    A module has its OPERATOR, or OPERATORS, the first of them named after the folder.
    """
    found = {}
    for info in sorted(pkgutil.iter_modules(ops.__path__), key=lambda info: info.name):
        module = importlib.import_module(f".ops.{info.name}", __package__)
        operators = getattr(module, "OPERATORS", None) or (module.OPERATOR,)
        if operators[0].name != info.name:
            raise RuntimeError(f"ops/{info.name} defines the operator {operators[0].name}")
        found.update(dict.fromkeys(operators, module))
    return found


_MODULES = _discover()
OPERATORS: tuple[Operator, ...] = tuple(_MODULES)


def operator_named(name: str) -> Operator:
    """The operator of that name; ValueError lists those there are."""
    for operator in OPERATORS:
        if operator.name == name:
            return operator
    known = ", ".join(operator.name for operator in OPERATORS)
    raise ValueError(f"no operator is named {name!r}; known: {known}")


def warmers() -> dict[str, Warmer]:
    """Public function -> the `warm` of its operator."""
    return {
        function: module.warm
        for operator, module in _MODULES.items()
        if hasattr(module, "warm")
        for function in operator.functions
    }
