"""The checks of fp8_linear, on types, shapes, strides, dtypes and devices alone."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...checks import (
    check_backend,
    check_devices,
    check_dtype,
    check_output_layout,
    check_required,
    check_shape,
    check_strided,
    check_tensors,
)

# epilogue -> the public function that has it
FUNCTIONS = {
    "none": "fp8_linear_bf16",
    "residual": "fp8_linear_residual_bf16",
    "bias": "fp8_linear_bias_bf16",
    "bias_residual": "fp8_linear_bias_residual_bf16",
    "bias_gelu": "fp8_linear_bias_gelu_bf16",
}
BIAS_DTYPES = (torch.bfloat16, torch.float32)
_LARGEST = torch.finfo(torch.float32).max


def check_arguments(
    epilogue: str,
    input: Any,
    weight: Any,
    alpha: Any,
    bias: Any,
    residual: Any,
    out: Any,
    variant: Any,
    fast_accum: Any,
    backend: Any,
) -> None:
    """Python types: what the torch operator's schema would turn into a message of its own."""
    name = FUNCTIONS[epilogue]
    check_required(name, input=input, weight=weight)
    if "bias" in epilogue:
        check_required(name, bias=bias)
    if "residual" in epilogue:
        check_required(name, residual=residual)
    check_tensors(name, out=out)
    check_alpha(name, alpha)
    check_variant_type(name, variant)
    if not isinstance(fast_accum, bool):
        raise TypeError(f"{name}: fast_accum must be a bool, got {type(fast_accum).__name__}")
    check_backend(name, backend)


def check_alpha(name: str, alpha: Any) -> None:
    if isinstance(alpha, (torch.Tensor, torch.SymFloat, torch.SymInt)):
        return
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)):
        given = type(alpha).__name__
        raise TypeError(f"{name}: alpha must be a float or a tensor of one float32, got {given}")
    if _LARGEST < abs(alpha) < math.inf:
        raise ValueError(f"{name}: alpha is {alpha}; needed a number within float32's range")


def check_variant_type(name: str, variant: Any) -> None:
    if isinstance(variant, bool) or not isinstance(variant, int):
        raise TypeError(f"{name}: variant must be an int, got {type(variant).__name__}")


def check(
    epilogue: str,
    input: torch.Tensor,
    weight: torch.Tensor,
    alpha: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    """Everything that one tensor alone, or two together, can have wrong; `out` may be residual."""
    name = FUNCTIONS[epilogue]
    hint = ": quantize_fp8_per_tensor makes such codes"
    check_dtype(name, "input", input, (torch.float8_e4m3fn,), hint)
    check_dtype(name, "weight", weight, (torch.float8_e4m3fn,), hint)
    if input.dim() != 2:
        raise ValueError(
            f"{name}: input has shape {list(input.shape)}; needed [M,K]: flatten leading "
            "dimensions with input.reshape(-1, K)"
        )
    m, k = input.shape
    if weight.dim() != 2 or weight.shape[1] != k:
        turned = weight.dim() == 2 and weight.shape[0] == k
        raise ValueError(
            f"{name}: weight has shape {list(weight.shape)}; needed [N,K] with K = {k} of input"
            + (": pass weight.T of a matrix [K,N]" if turned else "")
        )
    n = weight.shape[0]
    if alpha is not None:
        check_dtype(name, "alpha", alpha, (torch.float32,), ": pass alpha.float()")
        if alpha.dim() > 1 or alpha.numel() != 1:
            given = list(alpha.shape)
            raise ValueError(f"{name}: alpha has shape {given}; needed one element, [] or [1]")
    if bias is not None:
        check_dtype(name, "bias", bias, BIAS_DTYPES)
        check_shape(name, "bias", bias, (n,), "[N]")
    if residual is not None:
        check_dtype(name, "residual", residual, (torch.bfloat16,))
        _check_residual(name, epilogue, residual, m, n)
    if out is not None and out is not residual:
        check_dtype(name, "out", out, (torch.bfloat16,))
        check_shape(name, "out", out, (m, n), "[M,N]")
    check_strided(name, input=input, weight=weight, alpha=alpha, bias=bias, residual=residual)
    if out is not None:
        written = "residual" if out is residual else "out"
        check_strided(name, **{written: out})
        check_output_layout(name, written, out)
    check_devices(
        name, input=input, weight=weight, alpha=alpha, bias=bias, residual=residual, out=out
    )


def _check_residual(name: str, epilogue: str, residual: torch.Tensor, m: int, n: int) -> None:
    """[M,N]; for the functional form also one row for all, [N] or [1,N]."""
    if epilogue == "bias_residual":
        check_shape(name, "residual", residual, (m, n), "[M,N]")
        return
    shape = residual.shape
    one_row = residual.dim() == 1 or (residual.dim() == 2 and shape[0] == 1)
    if not (one_row and shape[-1] == n):
        meaning = "[M,N], or [N] or [1,N] for every row"
        check_shape(name, "residual", residual, (m, n), meaning)


def over_rows(residual: torch.Tensor | None, rows: int) -> torch.Tensor | None:
    """The residual as [M,N]: a single row is repeated by a zero stride."""
    if residual is None or (residual.dim() == 2 and residual.shape[0] == rows):
        return residual
    return residual.expand(rows, residual.shape[-1])
