"""fp8_linear through Triton, on SM80 and newer: what runs, the tuned choice, and the launch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ...arch import arch_of
from ...problem import Problem
from ...triton_gemm import LONGEST, Bound, Launch, describe, run_bound
from ...tuning import chosen, table, takes
from .triton_configs import Config, candidates, configs, heuristic, refuses, sizes, variants

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
    "variants",
    "why_not",
]


def why_not(problem: Problem) -> str | None:
    """Why these kernels cannot run the problem, or None."""
    if max(sizes(problem)) > LONGEST:
        return f"a dimension is longer than {LONGEST}"
    return None


def must_run(problem: Problem) -> bool:
    """Any strides, alignment, M, N, K, epilogue and out."""
    return max(sizes(problem)) <= LONGEST


def config(problem: Problem) -> Config:
    """The tuned table's configuration for the nearest problem, else the heuristic's."""
    m, n, k = sizes(problem)
    legal = takes(Config, lambda c: refuses(c, problem))

    found = chosen(
        table("fp8_linear", problem.arch.device),
        {"backend": "triton", "fast_accum": bool(problem.param("fast_accum"))},
        {"m": m, "n": n, "k": k},
        problem.arch.multiprocessors,
        legal,
    )
    return heuristic(problem) if found is None else Config.from_dict(found)


def prepare(
    config: Config,
    x: torch.Tensor,
    weight: torch.Tensor,
    alpha: float | torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    epilogue: str,
    fast_accum: bool,
    decode: bool | None = None,
) -> Launch:
    """The launch that computes a problem in a configuration; meta tensors are accepted.

    `decode`: whether the device has no FP8 tensor cores; by default, that of `out`.
    """
    from . import triton_kernel

    if decode is None:
        decode = "fp8_mma" not in arch_of(out.device).features
    decode = decode and config.family == "pointers"  # who has the copy engine has FP8
    left, right, o, addend, order = x, weight, out, residual, (0, 1, 2, 3, 4, 5)
    if config.swap:
        left, right, o, order = weight, x, out.T, (1, 0, 2, 3, 4, 5)
        addend = None if residual is None else residual.T
    rows, columns = o.shape
    k = x.shape[1]
    strides = (
        *(bias.stride() if bias is not None else (1,)),
        *(addend.stride() if addend is not None else (1, 1)),
        *o.stride(),
    )
    flags = (
        isinstance(alpha, torch.Tensor),
        -1 if bias is None else (0 if config.swap else 1),
        residual is not None,
        epilogue == "bias_gelu",
    )
    block = (config.block_m, config.block_n, config.block_k)
    common = (*block, config.steps, config.promote > 0, config.group_m, config.stages)
    numbers: tuple[int, ...]
    constants: tuple[Any, ...]
    descriptors: tuple[Callable[[torch.Tensor], Any] | None, ...] = (None,) * 6
    if config.family == "pointers":
        kernels = triton_kernel.gemm_pointers, triton_kernel.gemm_pointers_swapped
        even = k % (config.steps * config.block_k) == 0
        numbers = (rows, columns, k, *left.stride(), *right.stride()[::-1], *strides)
        constants = (*common, even, decode, *flags)
    else:
        kernels = triton_kernel.gemm_descriptors, triton_kernel.gemm_descriptors_swapped
        numbers = (rows, columns, k, *strides)
        constants = (*common, *flags)
        sides = (config.block_m, config.block_n)
        descriptors = (
            *(_described(rows, config.block_k) for rows in sides),
            *(None,) * 4,
        )
    tiles = -(-rows // config.block_m) * -(-columns // config.block_n)
    options = {"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": False}
    return Launch(
        *(kernels[config.swap], order, descriptors, numbers, 1 if config.swap else 0),
        *(constants, (tiles, 1, 1), options, decode),
    )


def _described(rows: int, columns: int) -> Callable[[torch.Tensor], Any]:
    return functools.partial(describe, transpose=False, rows=rows, columns=columns)


def bind(config: Config) -> Callable[..., None]:
    """run() with its configuration, for calls alike in all but addresses and alpha's value."""
    return Bound(prepare, config, 6)


_BOUNDS: dict[Any, Callable[..., None]] = {}


def run(
    config: Config,
    x: torch.Tensor,
    weight: torch.Tensor,
    alpha: float | torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    epilogue: str,
    fast_accum: bool,
) -> None:
    """Write fp8_linear's result to `out`, launched on the current stream of its device."""
    if out.numel():
        tensors = (x, weight, alpha, bias, residual, out)
        run_bound(_BOUNDS, prepare, config, tensors, epilogue, fast_accum)
