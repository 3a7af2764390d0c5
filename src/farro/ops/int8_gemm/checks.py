"""The checks of int8_gemm, on types, shapes, strides, dtypes and devices alone."""

from __future__ import annotations

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
from ...formats.int8_group import check_group_size, group_count

NAME = "int8_gemm"
OUTPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_arguments(
    a: Any,
    b: Any,
    scale_a: Any,
    scale_b: Any,
    group_size: Any,
    output_dtype: Any,
    bias: Any,
    out: Any,
    backend: Any,
) -> None:
    """Python types: what the torch operator's schema would turn into a message of its own."""
    check_required(NAME, a=a, b=b, scale_a=scale_a, scale_b=scale_b)
    check_tensors(NAME, bias=bias, out=out)
    check_group_size(NAME, group_size)
    check_backend(NAME, backend)
    if not isinstance(output_dtype, torch.dtype):
        given = type(output_dtype).__name__
        raise TypeError(f"{NAME}: output_dtype must be a torch.dtype, got {given}")
    if output_dtype not in OUTPUT_DTYPES:
        raise TypeError(
            f"{NAME}: output_dtype is {output_dtype}; needed bfloat16, float16, float32"
        )
    if out is not None and out.dtype != output_dtype:
        raise TypeError(
            f"{NAME}: out has dtype {out.dtype} and output_dtype is {output_dtype}; "
            f"pass output_dtype={out.dtype}"
        )


def check(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    group_size: int,
    output_dtype: torch.dtype,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    """Everything that one tensor alone, or two together, can have wrong."""
    for name, codes in (("a", a), ("b", b)):
        check_dtype(NAME, name, codes, (torch.int8,), ": quantize_int8_groups makes int8 codes")
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        check_dtype(NAME, name, scale, (torch.float32,), f": pass {name}.float()")
    if a.dim() != 2:
        raise ValueError(
            f"{NAME}: a has shape {list(a.shape)}; needed [M,K]: flatten leading dimensions with "
            "a.reshape(-1, K)"
        )
    m, k = a.shape
    groups = group_count(k, group_size)
    if b.dim() == 3:
        shape = (groups, group_size, b.shape[2])
        check_shape(NAME, "b", b, shape, "the group-packed [ceil(K/G), G, N]")
    elif b.dim() != 2 or b.shape[0] != k:
        turned = b.dim() == 2 and b.shape[1] == k
        raise ValueError(
            f"{NAME}: b has shape {list(b.shape)}; needed [K,N] with K = {k} of a"
            + (": pass b.T of a weight [N,K]" if turned else "")
        )
    n = b.shape[-1]
    check_shape(NAME, "scale_a", scale_a, (m, groups), "[M, ceil(K/G)]")
    check_shape(NAME, "scale_b", scale_b, (groups, n), "[ceil(K/G), N]")
    if bias is not None:
        check_dtype(NAME, "bias", bias, OUTPUT_DTYPES)
        check_shape(NAME, "bias", bias, (n,), "[N]")
    if out is not None:
        check_dtype(NAME, "out", out, (output_dtype,))
        check_shape(NAME, "out", out, (m, n), "[M,N]")
        check_strided(NAME, out=out)
        check_output_layout(NAME, "out", out)
    check_strided(NAME, a=a, b=b, scale_a=scale_a, scale_b=scale_b, bias=bias)
    check_devices(NAME, a=a, b=b, scale_a=scale_a, scale_b=scale_b, bias=bias, out=out)


def contiguous_scales(a: Any, b: Any, group_size: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialized scales of the right shape, for a question about the operands alone."""
    check_required(NAME, a=a, b=b)
    check_group_size(NAME, group_size)
    m = a.shape[0] if a.dim() else 0
    groups = group_count(a.shape[-1] if a.dim() else 0, group_size)
    n = b.shape[-1] if b.dim() else 0
    scale_a = torch.empty(m, groups, dtype=torch.float32, device=a.device)
    return scale_a, torch.empty(groups, n, dtype=torch.float32, device=a.device)
