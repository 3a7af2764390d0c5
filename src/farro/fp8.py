"""The FP8 family under one name: `farro.fp8.quantize_fp8_per_row` is the one at the top."""

from __future__ import annotations

from .ops.fp8_quantize import (
    dequantize_fp8,
    quantize_fp8_1x128,
    quantize_fp8_128x128,
    quantize_fp8_per_row,
    quantize_fp8_per_tensor,
)

__all__ = [
    "dequantize_fp8",
    "quantize_fp8_128x128",
    "quantize_fp8_1x128",
    "quantize_fp8_per_row",
    "quantize_fp8_per_tensor",
]
