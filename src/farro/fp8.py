"""The FP8 family under one name: `farro.fp8.quantize_fp8_per_row` is the one at the top."""

from __future__ import annotations

from .ops.fp8_blockwise_linear import fp8_blockwise_linear_bf16
from .ops.fp8_linear import (
    fp8_linear_bf16,
    fp8_linear_bias_bf16,
    fp8_linear_bias_gelu_bf16,
    fp8_linear_bias_residual_bf16,
    fp8_linear_residual_bf16,
    select_fp8_linear_tile,
)
from .ops.fp8_quantize import (
    dequantize_fp8,
    quantize_fp8_1x128,
    quantize_fp8_128x128,
    quantize_fp8_per_row,
    quantize_fp8_per_tensor,
)
from .ops.fp8_swiglu_quantize import fp8_blockwise_swiglu_quantize_fp8

__all__ = [
    "dequantize_fp8",
    "fp8_blockwise_linear_bf16",
    "fp8_blockwise_swiglu_quantize_fp8",
    "fp8_linear_bf16",
    "fp8_linear_bias_bf16",
    "fp8_linear_bias_gelu_bf16",
    "fp8_linear_bias_residual_bf16",
    "fp8_linear_residual_bf16",
    "quantize_fp8_128x128",
    "quantize_fp8_1x128",
    "quantize_fp8_per_row",
    "quantize_fp8_per_tensor",
    "select_fp8_linear_tile",
]
