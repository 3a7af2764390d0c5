"""quantize_fp8_*: FP8 E4M3 with one FP32 scale a tensor, a row, 1x128 or 128x128 values."""

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
    check_strided,
)
from ...dispatch import Kernel, Operator, explained_by, remember, select
from ...formats.fp8 import E4M3, KINDS, SCALE_FLOOR, dequantize, scale_shape
from ...problem import Problem
from . import cpu, sm90, triton

KERNELS = (
    Kernel(
        "fp8_quantize.cuda_sm90",
        "cuda",
        run="ops.fp8_quantize.sm90:run",
        bind="ops.fp8_quantize.sm90:bind",
        needs=frozenset({"wgmma"}),
        why_not=sm90.why_not,
        config=sm90.config,
        must_run=lambda problem: sm90.why_not(problem) is None,
        yields=sm90.yields,
        functions=frozenset({"quantize_fp8_per_tensor"}),
    ),
    Kernel(
        "fp8_quantize.cpu",
        "cpu",
        run="ops.fp8_quantize.cpu:run",
        needs=frozenset({"cpu"}),
        config=cpu.config,
        must_run=lambda problem: True,
    ),
    Kernel(
        "fp8_quantize.triton",
        "triton",
        run="ops.fp8_quantize.triton:run",
        bind="ops.fp8_quantize.triton:bind",
        needs=frozenset({"triton"}),
        why_not=triton.why_not,
        config=triton.config,
        must_run=lambda problem: len(problem.spec("x").shape) <= 4,
        configs=triton.configs,
    ),
    Kernel(
        "fp8_quantize.reference",
        "reference",
        run="ops.fp8_quantize.reference:run",
        must_run=lambda problem: True,
    ),
)
OPERATOR = Operator(
    "fp8_quantize",
    KERNELS,
    functions=(*(f"quantize_fp8_{kind}" for kind in KINDS), "dequantize_fp8"),
)
_DEQUANTIZE = "dequantize_fp8"


def _check_arguments(function: str, x: Any, backend: Any) -> None:
    """What the torch operator's schema would turn into a message of its own."""
    check_required(function, x=x)
    check_backend(function, backend)


def _check(function: str, x: torch.Tensor, kind: str) -> None:
    check_dtype(function, "x", x, FLOATS)
    if kind == "128x128":
        if x.dim() != 2:
            raise ValueError(
                f"{function}: x has shape {list(x.shape)}; needed [M, K]: "
                "call it for each matrix, or pass x.flatten(0, -2) where that is meant"
            )
    elif x.dim() == 0:
        raise ValueError(f"{function}: x has no dimensions; needed at least [K]")
    check_strided(function, x=x)


def _problem(x: torch.Tensor, kind: str, arch: Arch | None = None) -> Problem:
    return Problem.of("fp8_quantize", {"x": x}, {"kind": kind}, arch)


def _describe(
    kind: str, x: torch.Tensor, *, backend: str = "auto", arch: Arch | None = None
) -> tuple[Operator, Problem, str]:
    function = f"quantize_fp8_{kind}"
    _check_arguments(function, x, backend)
    _check(function, x, kind)
    return OPERATOR, _problem(x, kind, arch), backend


def _outputs(x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.empty(x.shape, dtype=E4M3, device=x.device)
    scale = torch.empty(scale_shape(x.shape, kind), dtype=torch.float32, device=x.device)
    return codes, scale


_RUNNERS: dict[Any, Any] = {}


def _implementation(x: torch.Tensor, kind: str, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    strided = x.layout == torch.strided  # else it has no address, and the checks refuse it
    address = x.data_ptr() & 15 if strided else None
    key = (x.shape, strided and x.stride(), x.dtype, x.device, address, kind, backend)
    run = _RUNNERS.get(key)
    if run is None:
        function = f"quantize_fp8_{_known(kind)}"
        check_backend(function, backend)
        _check(function, x, kind)
        run = select(OPERATOR, _problem(x, kind), backend).run
        remember(_RUNNERS, key, run)
    codes, scale = _outputs(x, kind)
    if codes.numel():
        run(x, codes, scale, kind)
    else:
        scale.fill_(SCALE_FLOOR)
    return codes, scale


def _fake(x: torch.Tensor, kind: str, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    function = f"quantize_fp8_{_known(kind)}"
    check_backend(function, backend)
    _check(function, x, kind)
    return _outputs(x, kind)


def _known(kind: str) -> str:
    """For callers of the torch operator itself."""
    if kind not in KINDS:
        raise ValueError(f"fp8_quantize: kind is {kind!r}; needed one of {', '.join(KINDS)}")
    return kind


define("fp8_quantize(Tensor x, str kind, str backend) -> (Tensor, Tensor)", _implementation, _fake)


def _quantize(x: torch.Tensor, kind: str, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    _check_arguments(f"quantize_fp8_{kind}", x, backend)
    call = _implementation if is_plain(x) else ops.fp8_quantize
    result: tuple[torch.Tensor, torch.Tensor] = call(x, kind, backend)
    return result


@explained_by(functools.partial(_describe, "per_tensor"))
def quantize_fp8_per_tensor(
    x: torch.Tensor, *, backend: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a tensor to FP8 E4M3 with one scale.

    In FP32: scale = max(max|x| / 448, 1e-12), q = e4m3(clamp(x * (1 / scale), +-448)), rounded
    half to even. A tensor that holds NaN or Inf keeps that as its scale, and all codes are NaN.

    Args:
        x: [..., K], float16, bfloat16, float32 or float64, any leading dimensions and positive
            strides; read in place.
        backend: "auto", "reference", "cpu", "triton" or "cuda".

    Returns:
        (q, scale): q float8_e4m3fn of x's shape, contiguous; scale fp32 [], the factor that
        restores values: x is about q * scale. It stays on the device: nothing synchronizes.

    Raises:
        TypeError: x is not a floating-point tensor.
        ValueError: a zero stride, no dimensions.
        UnsupportedError: the asked back end cannot run here.
    """
    return _quantize(x, "per_tensor", backend)


@explained_by(functools.partial(_describe, "per_row"))
def quantize_fp8_per_row(
    x: torch.Tensor, *, backend: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize to FP8 E4M3 with one scale for each row along the last dimension.

    For each row, in FP32: scale = max(max|x| / 448, 1e-12), q = e4m3(clamp(x * (1 / scale),
    +-448)), rounded half to even. A row that holds NaN or Inf keeps that as its scale and all its
    codes are NaN; no other row changes.

    Args:
        x: [..., K], float16, bfloat16, float32 or float64, any leading dimensions and positive
            strides; read in place.
        backend: "auto", "reference", "cpu", "triton" or "cuda".

    Returns:
        (q, scale): q float8_e4m3fn of x's shape, contiguous; scale fp32 [..., 1], contiguous: x is
        about q * scale.

    Raises:
        TypeError: x is not a floating-point tensor.
        ValueError: a zero stride, no dimensions.
        UnsupportedError: the asked back end cannot run here.
    """
    return _quantize(x, "per_row", backend)


@explained_by(functools.partial(_describe, "1x128"))
def quantize_fp8_1x128(
    x: torch.Tensor, *, backend: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize to FP8 E4M3 with one scale for each 128 values along the last dimension.

    For each group, in FP32: scale = max(max|x| / 448, 1e-12), q = e4m3(clamp(x * (1 / scale),
    +-448)), rounded half to even. A group that holds NaN or Inf keeps that as its scale and all
    its codes are NaN; no other group changes. The format of activations for
    `farro.fp8_blockwise_linear_bf16`.

    Args:
        x: [..., K], float16, bfloat16, float32 or float64, any leading dimensions and positive
            strides; read in place. The last group is shorter where 128 does not divide K.
        backend: "auto", "reference", "cpu", "triton" or "cuda".

    Returns:
        (q, scale): q float8_e4m3fn of x's shape, contiguous; scale fp32 [..., ceil(K/128)],
        contiguous.

    Raises:
        TypeError: x is not a floating-point tensor.
        ValueError: a zero stride, no dimensions.
        UnsupportedError: the asked back end cannot run here.
    """
    return _quantize(x, "1x128", backend)


@explained_by(functools.partial(_describe, "128x128"))
def quantize_fp8_128x128(
    x: torch.Tensor, *, backend: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a matrix to FP8 E4M3 with one scale for each 128 x 128 block.

    For each block, in FP32: scale = max(max|x| / 448, 1e-12), q = e4m3(clamp(x * (1 / scale),
    +-448)), rounded half to even. A block that holds NaN or Inf keeps that as its scale and all
    its codes are NaN; no other block changes. The format of weights for
    `farro.fp8_blockwise_linear_bf16`.

    Args:
        x: [M, K], float16, bfloat16, float32 or float64, positive strides; read in place. Blocks
            at the ends are smaller where 128 does not divide M or K.
        backend: "auto", "reference", "cpu", "triton" or "cuda".

    Returns:
        (q, scale): q float8_e4m3fn [M, K], contiguous; scale fp32 [ceil(M/128), ceil(K/128)],
        contiguous.

    Raises:
        TypeError: x is not a floating-point tensor.
        ValueError: not two dimensions, a zero stride.
        UnsupportedError: the asked back end cannot run here.
    """
    return _quantize(x, "128x128", backend)


def dequantize_fp8(
    q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Restore values from codes and scales: dtype(fp32(q) * scale).

    Args:
        q: float8_e4m3fn [..., K].
        scale: fp32, as any quantize_fp8_* gives it; its shape tells which: [] (or [1]) for a
            tensor, [..., 1] for rows, [..., ceil(K/128)] for 1x128, and for a matrix q [M, K]
            also [ceil(M/128), ceil(K/128)] for 128x128.
        dtype: float16, bfloat16, float32 or float64, of the result [..., K].

    The product is FP32 and converted once. Plain torch operators on every device (not a hot path,
    so it has one back end). Raises TypeError and ValueError as the quantizers do.
    """
    check_required(_DEQUANTIZE, q=q, scale=scale)
    check_dtype(_DEQUANTIZE, "q", q, (E4M3,))
    check_dtype(_DEQUANTIZE, "scale", scale, (torch.float32,), ": pass scale.float()")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{_DEQUANTIZE}: dtype must be a torch.dtype, got {type(dtype).__name__}")
    if dtype not in FLOATS:
        raise TypeError(f"{_DEQUANTIZE}: dtype is {dtype}; needed a floating-point dtype")
    if q.dim() == 0:
        raise ValueError(f"{_DEQUANTIZE}: q has no dimensions; needed at least [K]")
    kind = _kind_of(q, scale)
    check_strided(_DEQUANTIZE, q=q, scale=scale)
    check_devices(_DEQUANTIZE, q=q, scale=scale)
    return dequantize(q, scale, kind, dtype)


def _kind_of(q: torch.Tensor, scale: torch.Tensor) -> str:
    """The kind whose scale has this shape; where two do, they mean the same."""
    given = tuple(scale.shape)
    kinds = [kind for kind in KINDS if kind != "128x128" or q.dim() == 2]
    shapes = {kind: scale_shape(q.shape, kind) for kind in kinds}
    if given == (1,):
        return "per_tensor"
    for kind, shape in shapes.items():
        if given == shape:
            return kind
    needed = ", ".join(f"{list(shape)} ({kind})" for kind, shape in shapes.items())
    raise ValueError(
        f"{_DEQUANTIZE}: scale has shape {list(given)}; needed one of {needed} for q of shape "
        f"{list(q.shape)}"
    )


FUNCTIONS = {
    "per_tensor": quantize_fp8_per_tensor,
    "per_row": quantize_fp8_per_row,
    "1x128": quantize_fp8_1x128,
    "128x128": quantize_fp8_128x128,
}


def warm(device: torch.device, shape: tuple[int, ...]) -> list[Callable[[], Any]]:
    """Calls that compile what rows of (M, N, K) need, for each kind."""

    def call(kind: str, dtype: torch.dtype) -> Any:
        x = torch.zeros(shape[0], shape[-1], dtype=dtype, device=device)
        return FUNCTIONS[kind](x)

    return [
        functools.partial(call, kind, dtype)
        for kind in KINDS
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    ]
