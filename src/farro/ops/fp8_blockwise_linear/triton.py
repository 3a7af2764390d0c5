"""fp8_blockwise_linear through Triton, on SM80 and newer: what runs, the choice, and the launch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ...problem import Problem
from ...triton_gemm import LONGEST, Bound, Launch, describe, run_bound
from ...tuning import chosen, table, takes
from .triton_configs import (
    BLOCK,
    Config,
    candidates,
    ceil_div,
    configs,
    heuristic,
    refuses,
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
    if max(sizes(problem)) > LONGEST:
        return f"a dimension is longer than {LONGEST}"
    return None


def must_run(problem: Problem) -> bool:
    """Any strides, alignment, M, N, K, bias, activation and out."""
    return max(sizes(problem)) <= LONGEST


def config(problem: Problem) -> Config:
    """The tuned table's configuration, else the heuristic's."""
    m, n, k = sizes(problem)
    legal = takes(Config, lambda c: refuses(c, problem))

    found = chosen(
        table("fp8_blockwise_linear", problem.arch.device),
        {"backend": "triton"},
        {"m": m, "n": n, "k": k},
        problem.arch.multiprocessors,
        legal,
    )
    return heuristic(problem) if found is None else Config.from_dict(found)


def prepare(
    config: Config,
    x: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    gelu: bool,
) -> Launch:
    """The launch that computes a problem in a configuration; meta tensors are accepted."""
    from . import triton_kernel

    swap = config.swap
    left, right = (weight, x) if swap else (x, weight)
    of_left, of_right = (weight_scale, input_scale) if swap else (input_scale, weight_scale)
    order = (1, 0, 3, 2, 4, 5) if swap else (0, 1, 2, 3, 4, 5)
    o = out.T if swap else out
    rows, columns = o.shape
    k = x.shape[1]
    shares = (BLOCK, 1) if swap else (1, BLOCK)
    bias_axis = -1 if bias is None else int(not swap)
    grid = (ceil_div(rows, config.block_m) * ceil_div(columns, config.block_n), 1, 1)
    numbers: tuple[int, ...] = (
        *(rows, columns, k),
        *of_left.stride(),
        *of_right.stride(),
        *(bias.stride() if bias is not None else (1,)),
        *o.stride(),
    )
    descriptors: tuple[Callable[[torch.Tensor], Any] | None, ...] = (None,) * 6
    constants: tuple[Any, ...]
    if config.family == "descriptors":
        kernels = triton_kernel.gemm_descriptors, triton_kernel.gemm_descriptors_swapped
        sides = (config.block_m, config.block_n)
        blocks = tuple(
            functools.partial(describe, transpose=False, rows=side, columns=BLOCK) for side in sides
        )
        descriptors = (*blocks, *(None,) * 4)
        constants = (*sides, config.group_m, config.stages, *shares, bias_axis, gelu)
    else:
        kernels = triton_kernel.gemm_pointers, triton_kernel.gemm_pointers_swapped
        numbers = (*numbers[:3], *left.stride(), *right.stride()[::-1], *numbers[3:])
        even = k % max(BLOCK, config.block_k) == 0
        constants = (
            *(config.block_m, config.block_n, min(config.block_k, BLOCK)),
            *(max(1, config.block_k // BLOCK), config.group_m, config.stages, even),
            *(*shares, bias_axis, gelu, config.family == "decoded"),
        )
    options = {"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": False}
    rows_at = 1 if swap else 0
    return Launch(
        *(kernels[swap], order, descriptors, numbers, rows_at, constants, grid, options),
        fp8_as_bytes=config.family == "decoded",
    )


def bind(config: Config) -> Callable[..., None]:
    """run() with its configuration, for calls alike in all but their tensors' addresses."""
    return Bound(prepare, config, 6)


_BOUNDS: dict[Any, Callable[..., None]] = {}


def run(
    config: Config,
    x: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    gelu: bool,
) -> None:
    """Write the result to `out`, launched on the current stream of its device."""
    if out.numel():
        tensors = (x, weight, input_scale, weight_scale, bias, out)
        run_bound(_BOUNDS, prepare, config, tensors, gelu)
