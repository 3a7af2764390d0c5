"""quantize_int8_groups and dequantize_int8_groups: INT8 with one FP32 scale per group along K."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..._ops import define, is_plain, ops
from ...arch import Arch
from ...checks import (
    FLOATS,
    check_backend,
    check_devices,
    check_dtype,
    check_required,
    check_shape,
    check_strided,
)
from ...dispatch import Kernel, Operator, explained_by, remember, select
from ...formats.int8_group import GROUP_SIZES, check_group_size, dequantize, group_count
from ...problem import Problem
from . import cpu, triton

KERNELS = (
    Kernel(
        "int8_quantize.cpu",
        "cpu",
        run="ops.int8_quantize.cpu:run",
        needs=frozenset({"cpu"}),
        config=cpu.config,
        must_run=lambda problem: True,
    ),
    Kernel(
        "int8_quantize.triton",
        "triton",
        run="ops.int8_quantize.triton:run",
        bind="ops.int8_quantize.triton:bind",
        needs=frozenset({"triton"}),
        why_not=triton.why_not,
        config=triton.config,
        must_run=lambda problem: len(problem.spec("x").shape) <= 4,
        configs=triton.configs,
    ),
    Kernel(
        "int8_quantize.reference",
        "reference",
        run="ops.int8_quantize.reference:run",
        must_run=lambda problem: True,
    ),
)
OPERATOR = Operator(
    "int8_quantize", KERNELS, functions=("quantize_int8_groups", "dequantize_int8_groups")
)
_QUANTIZE = "quantize_int8_groups"
_DEQUANTIZE = "dequantize_int8_groups"


def _check_arguments(x: Any, group_size: Any, backend: Any) -> None:
    """What the torch operator's schema would turn into a message of its own."""
    check_required(_QUANTIZE, x=x)
    check_group_size(_QUANTIZE, group_size)
    check_backend(_QUANTIZE, backend)


def _check(x: torch.Tensor, group_size: int) -> None:
    check_dtype(_QUANTIZE, "x", x, FLOATS)
    if x.dim() == 0:
        raise ValueError(f"{_QUANTIZE}: x has no dimensions; needed at least [K]")
    check_strided(_QUANTIZE, x=x)
    check_group_size(_QUANTIZE, group_size)


def _problem(x: torch.Tensor, group_size: int, arch: Arch | None = None) -> Problem:
    return Problem.of("int8_quantize", {"x": x}, {"group_size": group_size}, arch)


def _describe(
    x: torch.Tensor, group_size: int = 256, *, backend: str = "auto", arch: Arch | None = None
) -> tuple[Operator, Problem, str]:
    _check_arguments(x, group_size, backend)
    _check(x, group_size)
    return OPERATOR, _problem(x, group_size, arch), backend


def _outputs(x: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    shape = (*x.shape[:-1], group_count(x.shape[-1], group_size))
    return codes, torch.empty(shape, dtype=torch.float32, device=x.device)


_RUNNERS: dict[Any, Any] = {}


def _implementation(
    x: torch.Tensor, group_size: int, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    strided = x.layout == torch.strided  # else it has no address, and the checks refuse it
    address = x.data_ptr() & 15 if strided else None
    key = (x.shape, strided and x.stride(), x.dtype, x.device, address, group_size, backend)
    run = _RUNNERS.get(key)
    if run is None:
        check_backend(_QUANTIZE, backend)
        _check(x, group_size)
        run = select(OPERATOR, _problem(x, group_size), backend).run
        remember(_RUNNERS, key, run)
    codes, scale = _outputs(x, group_size)
    if codes.numel():
        run(x, codes, scale, group_size)
    return codes, scale


def _fake(x: torch.Tensor, group_size: int, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    check_backend(_QUANTIZE, backend)
    _check(x, group_size)
    return _outputs(x, group_size)


define(
    "int8_quantize(Tensor x, int group_size, str backend) -> (Tensor, Tensor)",
    _implementation,
    _fake,
)


@explained_by(_describe)
def quantize_int8_groups(
    x: torch.Tensor, group_size: int = 256, *, backend: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize groups of `group_size` along the last dimension to INT8.

    For each group, in FP32: scale = max(max|x| / 127, 1e-12), q = round-half-even(x / scale)
    clipped to +-127. A group that holds NaN or Inf keeps that as its scale and gets codes 0; no
    other group changes.

    Args:
        x: [..., K], float16, bfloat16, float32 or float64, any leading dimensions and positive
            strides; read in place.
        group_size: 32, 64, 128 or 256; the last group is shorter where it does not divide K.
        backend: "auto", "reference", "cpu", "triton" or "cuda".

    Returns:
        (q, scale): q int8 of x's shape, contiguous; scale fp32 [..., ceil(K/G)], contiguous, the
        factor that restores values: x is about q * scale.

    Raises:
        TypeError: x is not a floating-point tensor.
        ValueError: another group_size, a zero stride, no dimensions.
        UnsupportedError: the asked back end cannot run here.
    """
    _check_arguments(x, group_size, backend)
    call = _implementation if is_plain(x) else ops.int8_quantize
    result: tuple[torch.Tensor, torch.Tensor] = call(x, group_size, backend)
    return result


def dequantize_int8_groups(
    q: torch.Tensor,
    scale: torch.Tensor,
    group_size: int = 256,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Restore values from codes and scales: dtype(fp32(q) * scale).

    Args:
        q: int8 [..., K].
        scale: fp32 [..., ceil(K/G)].
        group_size: 32, 64, 128 or 256.
        dtype: float16, bfloat16, float32 or float64, of the result [..., K].

    The product is FP32 and converted once. Plain torch operators on every device (not a hot path,
    so it has one back end). Raises TypeError and ValueError as quantize_int8_groups does.
    """
    check_required(_DEQUANTIZE, q=q, scale=scale)
    check_group_size(_DEQUANTIZE, group_size)
    check_dtype(_DEQUANTIZE, "q", q, (torch.int8,))
    check_dtype(_DEQUANTIZE, "scale", scale, (torch.float32,), ": pass scale.float()")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{_DEQUANTIZE}: dtype must be a torch.dtype, got {type(dtype).__name__}")
    if dtype not in FLOATS:
        raise TypeError(f"{_DEQUANTIZE}: dtype is {dtype}; needed a floating-point dtype")
    if q.dim() == 0:
        raise ValueError(f"{_DEQUANTIZE}: q has no dimensions; needed at least [K]")
    shape = (*q.shape[:-1], group_count(q.shape[-1], group_size))
    check_shape(_DEQUANTIZE, "scale", scale, shape, "[..., ceil(K/G)]")
    check_strided(_DEQUANTIZE, q=q, scale=scale)
    check_devices(_DEQUANTIZE, q=q, scale=scale)
    return dequantize(q, scale, group_size, dtype)


def warm(device: torch.device, shape: tuple[int, ...]) -> list[Callable[[], Any]]:
    """Calls that compile what rows of (M, N, K) need, for each group size."""

    def call(group_size: int, dtype: torch.dtype) -> Any:
        x = torch.zeros(shape[0], shape[-1], dtype=dtype, device=device)
        return quantize_int8_groups(x, group_size)

    return [
        functools.partial(call, group_size, dtype)
        for group_size in GROUP_SIZES
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    ]
