"""int8_gemm through Triton, on SM80 and newer: what runs, the tuned choice, and the launch.

Triton is imported by the first call, never by the choice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ...problem import Problem, TensorSpec
from ...triton_gemm import LONGEST, Bound, Launch, describe, run_bound
from ...tuning import chosen, table, takes
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


def why_not(problem: Problem) -> str | None:
    """Why these kernels cannot run the problem, or None."""
    if len(problem.spec("b").shape) == 3:
        return "b is group-packed for the CPU; pass the logical [K, N] weight"
    if max(sizes(problem)) > LONGEST:
        return f"a dimension is longer than {LONGEST}"
    return None


def must_run(problem: Problem) -> bool:
    """Any strides, alignment, M, N, K, group, bias and out."""
    return len(problem.spec("b").shape) == 2 and max(sizes(problem)) <= LONGEST


def is_legal(values: dict[str, Any], problem: Problem) -> bool:
    """Whether a row of a table is a legal configuration for the problem."""
    return takes(Config, lambda c: refuses(c, problem))(values)


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
        sides = _sides(describe, config.swap, config.block_m, config.block_n, block_k)
        descriptors = (*sides, *(None,) * 4)
    options = {"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": False}
    rows_at = 1 if config.swap else 0
    kernel = kernels[config.swap]
    return Launch(kernel, order, descriptors, numbers, rows_at, constants, grid, options)


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
    rows_at = 1 if config.swap else 0
    return Launch(kernel, order, descriptors, numbers, rows_at, constants, grid, options)


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


def bind(config: Config) -> Callable[..., None]:
    """run() with its configuration, for calls alike in all but their tensors' addresses."""
    return Bound(prepare, config, 6)


_BOUNDS: dict[Any, Callable[..., None]] = {}


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
    if out.numel():
        tensors = (a, b, scale_a, scale_b, bias, out)
        run_bound(_BOUNDS, prepare, config, tensors, group_size)
