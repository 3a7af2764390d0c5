"""Sample: how the contract tests call one public function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from farro.catalogue import operator_named
from farro.dispatch import Operator
from farro.problem import Problem
from farro.testing import LAYOUTS, assert_bit_equal

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Argument:
    """One tensor argument: what the contract says of it."""

    dtypes: tuple[torch.dtype, ...]
    # the dimension that counts rows (tokens), where results have one of their own for each of them
    rows: int | None = None
    required: bool = True
    layouts: tuple[str, ...] = tuple(LAYOUTS)  # views that are read in place
    any_shape: bool = False  # no other argument fixes its sizes or their number
    fill: int = 0  # a value that is legal everywhere


def _not_finite(results: tuple[torch.Tensor, ...]) -> bool:
    floats = [r for r in results if r.dtype.is_floating_point]
    return any(not r.float().isfinite().all() for r in floats)


@dataclass(frozen=True)
class Sample:
    """How the contract tests call one public function.

    `make(generator, **options)` gives its keyword arguments on the CPU, `backend` left out.
    `variants` and `empties` are options by name; the first variant also serves where one is enough.
    Options `m` (rows) and `exact=True` (results that agree bit for bit on all back ends) are known
    to every `make`; `sizes` are options (n, k, ...) whose values may be any positive int.
    """

    name: str  # the public function
    operator: str
    function: Callable[..., Any]
    make: Callable[..., dict[str, Any]]
    arguments: Mapping[str, Argument]
    variants: Mapping[str, dict[str, Any]]
    empties: Mapping[str, dict[str, Any]]
    empty_result: Callable[[dict[str, Any]], tuple[torch.Tensor, ...]]
    sizes: tuple[str, ...] = ()
    out: Callable[[dict[str, Any]], tuple[tuple[int, ...], torch.dtype]] | None = None
    # the same of functions with several outputs, by keyword; tests/ops covers these
    outputs: Callable[[dict[str, Any]], dict[str, tuple[tuple[int, ...], torch.dtype]]] | None = (
        None
    )
    # arguments that are wrong in a way of their own: what changes, the error, words it must hold
    wrong: Mapping[str, tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = field(
        default_factory=dict
    )
    # (back end, problem) that the specification says must run, on an architecture that can
    required: Callable[[str, Problem], bool] = lambda backend, problem: backend == "reference"
    compare: Callable[[torch.Tensor, torch.Tensor, str], None] = assert_bit_equal
    kernels: bool = True  # False: plain torch operators, no back ends to choose from
    records_grad: bool = True  # False: results are integers, or all written to a given tensor
    load_time: bool = False  # called once, by nothing but the reference
    refuses_non_finite: bool = False  # a check of values, of what is done at load time
    # whether results of a row that is not finite tell it
    shows_non_finite: Callable[[tuple[torch.Tensor, ...]], bool] = _not_finite
    # options of rows of millions of elements, whose groups the reference takes one by one
    long: Mapping[str, Any] = field(default_factory=dict)
    out_layouts: tuple[str, ...] = tuple(LAYOUTS)
    out_fill: float | None = None  # what `out` holds before, where some of it is never written
    graphs: int = 3  # of torch.compile at most, whatever the number of rows
    # (M, N, K) for farro.warmup to compile what a call needs
    warm_shape: Callable[[dict[str, Any]], tuple[int, int, int]] | None = None

    @property
    def catalogued(self) -> Operator:
        return operator_named(self.operator)

    @property
    def out_layout(self) -> str:
        """One in which to look for writes beside `out`."""
        return "columns" if "columns" in self.out_layouts else "offset"

    def place(self, out: torch.Tensor) -> torch.Tensor:
        """`out` as a call should find it: as it is, or filled where some of it stays."""
        return out if self.out_fill is None else out.fill_(self.out_fill)

    def inputs(
        self, generator: torch.Generator, device: Any = "cpu", **options: Any
    ) -> dict[str, Any]:
        """Keyword arguments of one call, tensors on `device`."""
        made = self.make(generator, **options)
        return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in made.items()}

    def first(self, generator: torch.Generator, device: Any = "cpu", **options: Any) -> Any:
        """Inputs of the first variant, with some of its options replaced."""
        return self.inputs(generator, device, **{**next(iter(self.variants.values())), **options})

    def present(self, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The tensor arguments of a call, by name."""
        return {name: inputs[name] for name in self.arguments if inputs.get(name) is not None}


def tensors(result: Any) -> tuple[torch.Tensor, ...]:
    """What a function returned, as a tuple."""
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def randint(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)


def signed_scales(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Of both signs and of many magnitudes, some of them zero."""
    scale = torch.randn(shape, generator=generator) * torch.exp(
        2 * torch.randn(shape, generator=generator)
    )
    return torch.where(torch.rand(shape, generator=generator) < 0.05, 0.0, scale)
