"""The checks of fp8_blockwise_swiglu_quantize_fp8."""

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
from ..fp8_blockwise_linear.checks import check_operands

NAME = "fp8_blockwise_swiglu_quantize_fp8"


def check_arguments(
    input: Any,
    gate_up_weight: Any,
    input_scale: Any,
    gate_up_weight_scale: Any,
    output: Any,
    output_scale: Any,
    backend: Any,
) -> None:
    """Python types: what the torch operator's schema would turn into a message of its own."""
    check_required(
        NAME,
        input=input,
        gate_up_weight=gate_up_weight,
        input_scale=input_scale,
        gate_up_weight_scale=gate_up_weight_scale,
    )
    check_tensors(NAME, output=output, output_scale=output_scale)
    check_backend(NAME, backend)


def check(
    input: torch.Tensor,
    gate_up_weight: torch.Tensor,
    input_scale: torch.Tensor,
    gate_up_weight_scale: torch.Tensor,
    output: torch.Tensor | None,
    output_scale: torch.Tensor | None,
) -> None:
    """Everything that one tensor alone, or two together, can have wrong."""
    operands = (input, gate_up_weight, input_scale, gate_up_weight_scale)
    check_operands(NAME, "gate_up_weight", *operands)
    (m, k), rows = input.shape, gate_up_weight.shape[0]
    if rows % 2:
        raise ValueError(
            f"{NAME}: gate_up_weight has shape {list(gate_up_weight.shape)}; needed [2N,K], "
            "N rows of the gate and then N of the up projection"
        )
    n = rows // 2
    check_shape(
        NAME,
        "gate_up_weight_scale",
        gate_up_weight_scale,
        (2 * blocks(n), blocks(k)),
        "[2 * ceil(N/128), ceil(K/128)]: gate and up are quantized apart, then joined",
    )
    outputs = {
        "output": (output, E4M3, (m, n), "[M,N]"),
        "output_scale": (output_scale, torch.float32, (m, blocks(n)), "[M, ceil(N/128)]"),
    }
    for name, (tensor, dtype, shape, meaning) in outputs.items():
        if tensor is not None:
            check_dtype(NAME, name, tensor, (dtype,))
            check_shape(NAME, name, tensor, shape, meaning)
            check_strided(NAME, **{name: tensor})
            check_output_layout(NAME, name, tensor)
    names = ("input", "gate_up_weight", "input_scale", "gate_up_weight_scale")
    given = dict(zip(names, operands))
    check_strided(NAME, **given)
    check_devices(NAME, **given, output=output, output_scale=output_scale)
