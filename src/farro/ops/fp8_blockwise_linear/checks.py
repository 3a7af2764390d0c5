"""The checks of 128-block FP8 products, on types, shapes, strides, dtypes and devices alone."""

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
from ...formats.fp8 import E4M3, blocks

NAME = "fp8_blockwise_linear_bf16"
ACTIVATIONS = ("gelu_tanh",)
BIAS_DTYPES = (torch.bfloat16, torch.float32)


def check_arguments(
    input: Any,
    weight: Any,
    input_scale: Any,
    weight_scale: Any,
    out: Any,
    bias: Any,
    activation: Any,
    backend: Any,
) -> None:
    """Python types: what the torch operator's schema would turn into a message of its own."""
    check_required(
        NAME, input=input, weight=weight, input_scale=input_scale, weight_scale=weight_scale
    )
    check_tensors(NAME, bias=bias, out=out)
    check_backend(NAME, backend)
    needed = "needed None or " + " or ".join(map(repr, ACTIVATIONS))
    if activation is not None and not isinstance(activation, str):
        given = type(activation).__name__
        raise TypeError(f"{NAME}: activation must be a str or None, got {given}; {needed}")
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"{NAME}: activation is {activation!r}; {needed}")


def check_operands(
    function: str,
    weight_name: str,
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor,
    weight_scale: torch.Tensor,
) -> None:
    """Dtypes and numbers of dimensions of both operands, and the activations' scale."""
    for name, codes in (("input", input), (weight_name, weight)):
        maker = "quantize_fp8_1x128" if name == "input" else "quantize_fp8_128x128"
        check_dtype(function, name, codes, (E4M3,), f": {maker} makes E4M3 codes")
    for name, scale in (("input_scale", input_scale), (f"{weight_name}_scale", weight_scale)):
        check_dtype(function, name, scale, (torch.float32,), f": pass {name}.float()")
    if input.dim() != 2:
        raise ValueError(
            f"{function}: input has shape {list(input.shape)}; needed [M,K]: flatten leading "
            "dimensions with input.reshape(-1, K)"
        )
    m, k = input.shape
    if weight.dim() != 2 or weight.shape[1] != k:
        turned = weight.dim() == 2 and weight.shape[0] == k
        rows = "N" if weight_name == "weight" else "2N"
        raise ValueError(
            f"{function}: {weight_name} has shape {list(weight.shape)}; needed [{rows},K] with "
            f"K = {k} of input" + (f": pass {weight_name}.T of a matrix [K,{rows}]" * turned)
        )
    check_shape(function, "input_scale", input_scale, (m, blocks(k)), "[M, ceil(K/128)]")


def check(
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    out: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> None:
    """Everything that one tensor alone, or two together, can have wrong."""
    check_operands(NAME, "weight", input, weight, input_scale, weight_scale)
    (m, k), n = input.shape, weight.shape[0]
    shape = (blocks(n), blocks(k))
    check_shape(NAME, "weight_scale", weight_scale, shape, "[ceil(N/128), ceil(K/128)]")
    if bias is not None:
        check_dtype(NAME, "bias", bias, BIAS_DTYPES)
        check_shape(NAME, "bias", bias, (n,), "[N]")
    if out is not None:
        check_dtype(NAME, "out", out, (torch.bfloat16,))
        check_shape(NAME, "out", out, (m, n), "[M,N]")
        check_strided(NAME, out=out)
        check_output_layout(NAME, "out", out)
    tensors = {
        "input": input,
        "weight": weight,
        "input_scale": input_scale,
        "weight_scale": weight_scale,
        "bias": bias,
    }
    check_strided(NAME, **tensors)
    check_devices(NAME, **tensors, out=out)
