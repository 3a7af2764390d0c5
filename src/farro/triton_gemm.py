"""What the Triton products of several operators share on the host: launches, descriptors, limits.

Triton is imported by the first call, never by the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .dispatch import remember
from .problem import Problem, TensorSpec
from .triton_launch import Launcher, arguments, leading_stride, specialization

LONGEST = 2**31 - 2**10  # an index rounded up to whole tiles or loop steps stays an int32

# KiB of shared memory that one block may have; where an architecture has no row, what all have
_SHARED = {"sm_80": 163, "sm_87": 163, "sm_90": 227, "sm_100": 227, "sm_103": 227}
_SHARED_KIB = 99
WIDEST = 256  # side of a tile
LONGEST_STEP = 1024  # of K: an index past LONGEST by a step stays an int32
DEEPEST = 16  # stages of a loop
LARGEST_BAND = 64  # row tiles that are visited together: counted with columns, they stay an int32


def powers_of_two(*values: int) -> bool:
    """Whether all are: sides of Triton's tiles and numbers of warps have to be."""
    return all(value > 0 and value & (value - 1) == 0 for value in values)


def shared_limit(problem: Problem) -> int:
    """Bytes of shared memory that one block may have."""
    return _SHARED.get(problem.arch.name, _SHARED_KIB) * 1024


def indescribable(spec: TensorSpec, along: int) -> str | None:
    """Why there is no tensor descriptor of this matrix with `along` as its inner dimension."""
    other, size = 1 - along, spec.dtype.itemsize
    if min(spec.shape) == 0:
        return "it is empty"
    if spec.align < 16:
        return "its pointer is not 16-byte aligned"
    if spec.stride[along] != 1 and spec.shape[along] > 1:
        return f"dimension {along} is not contiguous"
    if spec.stride[other] * size % 16 and spec.shape[other] > 1:
        return f"its leading stride {spec.stride[other]} is no multiple of {16 // size}"
    if spec.stride[other] < spec.shape[along] and spec.shape[other] > 1:
        return "its rows overlap"
    return None


def describe(tensor: torch.Tensor, transpose: bool, rows: int, columns: int) -> Any:
    """A tensor descriptor of a matrix, in blocks of rows x columns."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    matrix = tensor.T if transpose else tensor
    strides = [leading_stride(matrix), 1]
    return TensorDescriptor(matrix, list(matrix.shape), strides, [rows, columns])


@dataclass(frozen=True)
class Launch:
    """One launch but for the addresses.

    `order` tells which of run()'s tensors the kernel takes, -1 for an absent one; `descriptors`
    makes a tensor descriptor of those that are not passed by pointer. Triton specializes on
    `numbers`, all but the one at `rows` (the number of tokens) and those that the kernel names.
    """

    kernel: Any
    order: tuple[int, ...]
    descriptors: tuple[Callable[[torch.Tensor], Any] | None, ...]
    numbers: tuple[int, ...]
    rows: int
    constants: tuple[Any, ...]
    grid: tuple[int, int, int]
    options: dict[str, Any]
    fp8_as_bytes: bool = False

    def args(self, *tensors: torch.Tensor | float | None) -> tuple[Any, ...]:
        """Complete positional arguments, for run()'s tensors; they may be meta tensors."""
        taken = [tensors[index] if index >= 0 else None for index in self.order]
        made = arguments(taken, self.descriptors, self.fp8_as_bytes)
        return (*made, *self.numbers, *self.constants)


class Bound:
    """run() for calls of one Problem: all but addresses is worked out once for each device."""

    def __init__(self, prepare: Callable[..., Launch], config: Any, tensors: int) -> None:
        self.prepare = prepare
        self.config = config
        self.tensors = tensors  # the first arguments of run() after its configuration
        self.launchers: dict[int | None, tuple[Launcher, tuple[int, ...]]] = {}

    def __call__(self, *args: Any) -> None:
        device = args[self.tensors - 1].device.index
        found = self.launchers.get(device)
        if found is None:
            call = self.prepare(self.config, *args)
            found = _launcher(call, args[: self.tensors]), call.order
            self.launchers[device] = found
        launcher, order = found
        launcher(*[args[i] if i >= 0 else None for i in order])


def _launcher(call: Launch, tensors: Sequence[torch.Tensor | float | None]) -> Launcher:
    last = tensors[-1]
    assert isinstance(last, torch.Tensor)
    key = (
        call.kernel,
        last.device.index,
        call.constants,
        tuple(call.options.items()),
        tuple(
            (t.dtype, t.data_ptr() % 16 == 0) if isinstance(t, torch.Tensor) else type(t)
            for t in tensors
        ),
        *_specializations(call),
    )
    return Launcher(
        *(call.kernel, key, last.device.index, call.grid, (*call.numbers, *call.constants)),
        *(call.options, call.descriptors, call.fp8_as_bytes),
    )


def _specializations(call: Launch) -> Iterator[tuple[bool, ...]]:
    """What Triton tells numbers apart by; of those that it does not specialize on, the width."""
    params = getattr(call.kernel, "params", ())[len(call.order) :]  # () in the interpreter
    for i, number in enumerate(call.numbers):
        told = specialization(number)
        if i == call.rows:
            continue
        yield told[2:] if params and params[i].do_not_specialize else told


def run_bound(
    bounds: dict[Any, Callable[..., None]],
    prepare: Callable[..., Launch],
    config: Any,
    tensors: Sequence[torch.Tensor | float | None],
    *rest: Any,
) -> None:
    """Run through a Bound that is kept in `bounds` for calls alike in all but addresses."""
    kinds = (TensorSpec.of(t) if isinstance(t, torch.Tensor) else type(t) for t in tensors)
    key = (config, *rest, *kinds)
    bound = bounds.get(key)
    if bound is None:
        bound = Bound(prepare, config, len(tensors))
        remember(bounds, key, bound)
    bound(*tensors, *rest)
