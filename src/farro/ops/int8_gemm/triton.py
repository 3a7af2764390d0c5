"""int8_gemm through Triton, on SM80 and newer: what runs, the tuned choice, and the launch.

Triton is imported by the first call, never by the choice.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from ...problem import Problem, TensorSpec
from ...triton_launch import launch, specialization
from ...tuning import nearest, table
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

__all__ = ["Config", "candidates", "config", "configs", "heuristic", "refuses", "run", "why_not"]
_INT32 = 0x7FFFFFFF


def why_not(problem: Problem) -> str | None:
    """Why these kernels cannot run the problem, or None."""
    if len(problem.spec("b").shape) == 3:
        return "b is group-packed for the CPU; pass the logical [K, N] weight"
    if max(sizes(problem)) > _INT32:
        return f"a dimension is longer than {_INT32}"
    return None


def config(problem: Problem) -> Config:
    """The tuned table's configuration for the nearest problem, else the heuristic's."""
    m, n, k = sizes(problem)

    def legal(values: dict[str, Any]) -> bool:
        try:
            return refuses(Config.from_dict(values), problem) is None
        except TypeError:  # a table of another version
            return False

    found = nearest(
        table("int8_gemm", problem.arch.device),
        {"backend": "triton", "group_size": group_of(problem)},
        {"m": m, "n": n, "k": k},
        legal,
    )
    return heuristic(problem) if found is None else Config.from_dict(found)


@dataclass(frozen=True)
class Launch:
    """What one launch needs: the kernel, its complete positional arguments, grid and options."""

    kernel: Any
    tensors: tuple[Any, ...]
    numbers: tuple[int, ...]
    constants: tuple[Any, ...]
    grid: tuple[int, int, int]
    options: dict[str, Any]

    @property
    def args(self) -> tuple[Any, ...]:
        return (*self.tensors, *self.numbers, *self.constants)


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
        x, y, scale_x, scale_y, o, bias_axis = b.T, a.T, scale_b.T, scale_a.T, out.T, 0
    else:
        x, y, scale_x, scale_y, o, bias_axis = a, b, scale_a, scale_b, out, 1
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
        scales = ring_scales(config, TensorSpec.of(scale_a), TensorSpec.of(scale_b))
        return _prepare_ring(
            config, (x, y, scale_x, scale_y, bias, o), strides, grid, group_size, scales, bias_axis
        )
    from . import triton_kernel

    unroll = max(1, config.block_k // group_size)
    common = (group_size, config.block_m, config.block_n, block_k, unroll, config.group_m)
    if config.family == "pointers":
        kernels = triton_kernel.gemm_pointers, triton_kernel.gemm_pointers_swapped
        even = k % max(group_size, config.block_k) == 0
        numbers = (rows, columns, k, *x.stride(), *y.stride(), *strides)
        constants: tuple[Any, ...] = (*common, config.stages, even, bias_axis)
        tensors: tuple[Any, ...] = (x, y, scale_x, scale_y, bias, o)
    else:
        kernels = triton_kernel.gemm_descriptors, triton_kernel.gemm_descriptors_swapped
        numbers = (rows, columns, k, *strides)
        constants = (*common, config.stages, config.family == "specialized", bias_axis)
        tensors = (
            _descriptor(x, config.block_m, block_k),
            _descriptor(y.T, config.block_n, block_k),
            *(scale_x, scale_y, bias, o),
        )
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return Launch(kernels[config.swap], tensors, numbers, constants, grid, options)


def _prepare_ring(
    config: Config,
    operands: tuple[Any, ...],
    strides: tuple[int, ...],
    grid: tuple[int, int, int],
    group_size: int,
    scales: bool,
    bias_axis: int,
) -> Launch:
    from . import triton_hopper

    x, y, scale_x, scale_y, bias, o = operands
    block_n, depth = config.block_n, config.block_k
    tensors = (
        triton_hopper.descriptor(x, 64, depth),
        triton_hopper.descriptor(y.T, block_n, depth),
        triton_hopper.descriptor(scale_y, 1, block_n) if scales else None,
        *(scale_x, scale_y, bias, o),
    )
    constants = (
        *(group_size, block_n, depth, config.group_m, config.stages),
        *(config.consumers, config.waves, scales, bias_axis),
        triton_hopper.total_layout(block_n),
        triton_hopper.stored_layout(block_n, o.element_size(), o.stride(0) == 1),
    )
    options: dict[str, Any] = {"num_warps": 4}
    resident = 1
    if config.warps == 4:  # a lone consumer leaves room for a second block on the multiprocessor
        options["maxnreg"] = 128
        resident = 2
    if o.is_cuda:
        grid = (min(grid[0], resident * _multiprocessors(o.device.index)), 1, 1)
    kernels = triton_hopper.gemm_ring, triton_hopper.gemm_ring_swapped
    numbers = (*o.shape, x.shape[1], *strides)
    return Launch(kernels[config.swap], tensors, numbers, constants, grid, options)


@functools.lru_cache(maxsize=64)
def _multiprocessors(index: int) -> int:
    count: int = torch.cuda.get_device_properties(index).multi_processor_count
    return count


def _descriptor(tensor: torch.Tensor, rows: int, depth: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    stride, unit = tensor.stride(0), 16
    if tensor.shape[0] == 1 and stride % unit:  # the stride of a single row is never used
        stride = ceil_div(tensor.shape[1], unit) * unit
    return TensorDescriptor(tensor, list(tensor.shape), [stride, 1], [rows, depth])


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
    call = prepare(config, a, b, scale_a, scale_b, bias, out, group_size)
    key = (
        call.kernel,
        out.device.index,
        config,
        call.constants,
        out.dtype,
        None if bias is None else bias.dtype,
        tuple(t is None or t.data_ptr() % 16 == 0 for t in (a, b, scale_a, scale_b, bias, out)),
        specialization(call.numbers[0 if config.swap else 1]),
        tuple(map(specialization, call.numbers[2:])),
    )
    launch(call.kernel, key, out.device, call.grid, call.args, call.options)
