"""int8_gemm through Triton, on SM80 and newer: what runs, the tuned choice, and the launch.

Triton is imported by the first call, never by the choice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...dispatch import remember
from ...problem import Problem, TensorSpec
from ...triton_launch import Launcher, leading_stride, specialization
from ...tuning import chosen, table
from .triton_configs import (
    Config,
    candidates,
    ceil_div,
    configs,
    group_of,
    heuristic,
    refuses,
    ring_scales,
    sizes,
)

__all__ = [
    "Config",
    "bind",
    "candidates",
    "config",
    "configs",
    "heuristic",
    "must_run",
    "refuses",
    "run",
    "why_not",
]
_LONGEST = 2**31 - 2**10  # an index rounded up to whole tiles or loop steps stays an int32


def why_not(problem: Problem) -> str | None:
    """Why these kernels cannot run the problem, or None."""
    if len(problem.spec("b").shape) == 3:
        return "b is group-packed for the CPU; pass the logical [K, N] weight"
    if max(sizes(problem)) > _LONGEST:
        return f"a dimension is longer than {_LONGEST}"
    return None


def must_run(problem: Problem) -> bool:
    """Any strides, alignment, M, N, K, group, bias and out."""
    return len(problem.spec("b").shape) == 2 and max(sizes(problem)) <= _LONGEST


def is_legal(values: dict[str, Any], problem: Problem) -> bool:
    """Whether a row of a table is a legal configuration for the problem."""
    try:
        return refuses(Config.from_dict(values), problem) is None
    except TypeError:  # a table of another version
        return False


def config(problem: Problem) -> Config:
    """The tuned table's configuration, else the heuristic's."""
    m, n, k = sizes(problem)
    found = chosen(
        table("int8_gemm", problem.arch.device),
        {"backend": "triton", "group_size": group_of(problem)},
        {"m": m, "n": n, "k": k},
        problem.arch.multiprocessors,
        lambda values: is_legal(values, problem),
    )
    return heuristic(problem) if found is None else Config.from_dict(found)


@dataclass(frozen=True)
class Launch:
    """One launch but for the addresses.

    `order` tells which of run()'s six tensors the kernel takes, -1 for an absent one;
    `descriptors` makes a tensor descriptor of those that are not passed by pointer.
    """

    kernel: Any
    order: tuple[int, ...]
    descriptors: tuple[Callable[[torch.Tensor], Any] | None, ...]
    numbers: tuple[int, ...]
    constants: tuple[Any, ...]
    grid: tuple[int, int, int]
    options: dict[str, Any]

    def args(self, *tensors: torch.Tensor | None) -> tuple[Any, ...]:
        """Complete positional arguments, for run()'s six tensors; they may be meta tensors."""
        made: list[Any] = []
        for index, make in zip(self.order, self.descriptors):
            tensor = tensors[index] if index >= 0 else None
            made.append(tensor if make is None or tensor is None else make(tensor))
        return (*made, *self.numbers, *self.constants)


def prepare(
    config: Config,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    group_size: int,
) -> Launch:
    """The launch that computes a problem in a configuration; meta tensors are accepted."""
    if config.swap:
        x, y, scale_x, scale_y, o = b.T, a.T, scale_b.T, scale_a.T, out.T
        order, bias_axis = (1, 0, 3, 2, 4, 5), 0
    else:
        x, y, scale_x, scale_y, o = a, b, scale_a, scale_b, out
        order, bias_axis = (0, 1, 2, 3, 4, 5), 1
    bias_axis = -1 if bias is None else bias_axis
    rows, columns = o.shape
    k = x.shape[1]
    block_k = min(config.block_k, group_size)
    strides = (
        *scale_x.stride(),
        *scale_y.stride(),
        *(bias.stride() if bias is not None else (1,)),
        *o.stride(),
    )
    grid = (ceil_div(rows, config.block_m) * ceil_div(columns, config.block_n), 1, 1)
    if config.family == "ring":
        carried = ring_scales(config, TensorSpec.of(scale_a), TensorSpec.of(scale_b))
        numbers: tuple[int, ...] = (rows, columns, k, *strides)
        return _prepare_ring(config, order, numbers, grid, o, group_size, carried, bias_axis)
    from . import triton_kernel

    unroll = max(1, config.block_k // group_size)
    common = (group_size, config.block_m, config.block_n, block_k, unroll, config.group_m)
    descriptors: tuple[Callable[[torch.Tensor], Any] | None, ...]
    if config.family == "pointers":
        kernels = triton_kernel.gemm_pointers, triton_kernel.gemm_pointers_swapped
        even = k % max(group_size, config.block_k) == 0
        numbers = (rows, columns, k, *x.stride(), *y.stride(), *strides)
        constants: tuple[Any, ...] = (*common, config.stages, even, bias_axis)
        descriptors = (None,) * 6
    else:
        kernels = triton_kernel.gemm_descriptors, triton_kernel.gemm_descriptors_swapped
        numbers = (rows, columns, k, *strides)
        constants = (*common, config.stages, config.family == "specialized", bias_axis)
        sides = _sides(_describe, config.swap, config.block_m, config.block_n, block_k)
        descriptors = (*sides, *(None,) * 4)
    options = {"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": False}
    return Launch(kernels[config.swap], order, descriptors, numbers, constants, grid, options)


def _prepare_ring(
    config: Config,
    order: tuple[int, ...],
    numbers: tuple[int, ...],
    grid: tuple[int, int, int],
    o: torch.Tensor,
    group_size: int,
    carried: bool,
    bias_axis: int,
) -> Launch:
    from . import triton_hopper

    block_n, depth = config.block_n, config.block_k
    describe = triton_hopper.describe
    scales = functools.partial(describe, transpose=config.swap, rows=1, columns=block_n)
    sides = _sides(describe, config.swap, 64, block_n, depth)
    descriptors = (*sides, scales if carried else None, *(None,) * 4)
    x, y, scale_x, scale_y, bias, out = order
    order = (x, y, scale_y if carried else -1, scale_x, scale_y, bias, out)
    constants = (
        *(group_size, block_n, depth, config.group_m, config.stages),
        *(config.consumers, config.waves, carried, bias_axis),
        triton_hopper.total_layout(block_n),
        triton_hopper.stored_layout(block_n, o.element_size(), o.stride(0) == 1),
    )
    options: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
    resident = 1
    if config.warps == 4:  # a lone consumer leaves room for a second block on the multiprocessor
        options["maxnreg"] = 128
        resident = 2
    if o.is_cuda:
        grid = (min(grid[0], resident * _multiprocessors(o.device.index)), 1, 1)
    kernel = (triton_hopper.gemm_ring, triton_hopper.gemm_ring_swapped)[config.swap]
    return Launch(kernel, order, descriptors, numbers, constants, grid, options)


def _sides(
    describe: Callable[..., Any], swap: bool, rows_x: int, rows_y: int, depth: int
) -> tuple[Callable[[torch.Tensor], Any], Callable[[torch.Tensor], Any]]:
    """How x and y are described, both as [rows, K]: a as it is, b transposed."""
    return (
        functools.partial(describe, transpose=swap, rows=rows_x, columns=depth),
        functools.partial(describe, transpose=not swap, rows=rows_y, columns=depth),
    )


@functools.lru_cache(maxsize=64)
def _multiprocessors(index: int) -> int:
    count: int = torch.cuda.get_device_properties(index).multi_processor_count
    return count


def _describe(tensor: torch.Tensor, transpose: bool, rows: int, columns: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    matrix = tensor.T if transpose else tensor
    strides = [leading_stride(matrix), 1]
    return TensorDescriptor(matrix, list(matrix.shape), strides, [rows, columns])


class _Bound:
    """run() for calls of one Problem: all but addresses is worked out once for each device."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.launchers: dict[int | None, tuple[Launcher, tuple[int, ...]]] = {}

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        group_size: int,
    ) -> None:
        tensors = (a, b, scale_a, scale_b, bias, out)
        found = self.launchers.get(out.device.index)
        if found is None:
            call = prepare(self.config, *tensors, group_size)
            found = self.launchers[out.device.index] = (_launcher(call, tensors), call.order)
        launcher, order = found
        launcher(*[tensors[i] if i >= 0 else None for i in order])


def _launcher(call: Launch, tensors: tuple[torch.Tensor | None, ...]) -> Launcher:
    out = tensors[-1]
    assert out is not None
    swapped = call.order[0] == 1
    key = (
        call.kernel,
        out.device.index,
        call.constants,
        tuple(call.options.items()),
        tuple(None if t is None else (t.dtype, t.data_ptr() % 16 == 0) for t in tensors),
        specialization(call.numbers[0 if swapped else 1]),  # the number of tokens never
        tuple(map(specialization, call.numbers[2:])),
    )
    rest = (*call.numbers, *call.constants)
    device = out.device.index
    return Launcher(call.kernel, key, device, call.grid, rest, call.options, call.descriptors)


def bind(config: Config) -> Callable[..., None]:
    """run() with its configuration, for calls alike in all but their tensors' addresses."""
    return _Bound(config)


_BOUND: dict[Any, Callable[..., None]] = {}


def run(
    config: Config,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    group_size: int,
) -> None:
    """Write int8_gemm's result to `out`, launched on the current stream of its device."""
    if out.numel() == 0:
        return
    tensors = (a, b, scale_a, scale_b, bias, out)
    key = (config, group_size, *(None if t is None else TensorSpec.of(t) for t in tensors))
    bound = _BOUND.get(key)
    if bound is None:
        bound = bind(config)
        remember(_BOUND, key, bound)
    bound(*tensors, group_size)
