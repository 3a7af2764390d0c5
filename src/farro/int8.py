"""The INT8 family under one name: `farro.int8.int8_gemm` is `farro.int8_gemm`."""

from __future__ import annotations

from .formats.int8_group import pack_groups, unpack_groups
from .ops.int8_gemm import get_kernel_config, int8_gemm
from .ops.int8_quantize import dequantize_int8_groups, quantize_int8_groups
from .ops.moe_ffn import moe_ffn

__all__ = [
    "dequantize_int8_groups",
    "get_kernel_config",
    "int8_gemm",
    "moe_ffn",
    "pack_groups",
    "quantize_int8_groups",
    "unpack_groups",
]
