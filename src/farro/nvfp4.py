"""The NVFP4 family under one name: formats, weights and quantizers of the paired-4:8 products."""

from __future__ import annotations

from .formats.gate_up import interleave_gate_up_rows
from .formats.paired_sparsity import LAYOUT_VERSION
from .ops.nvfp4_weights import (
    compress,
    decompress,
    dequantize_weight,
    prune_paired_4of8,
    quantize_weight,
    requantize_group16,
)

__all__ = [
    "LAYOUT_VERSION",
    "compress",
    "decompress",
    "dequantize_weight",
    "interleave_gate_up_rows",
    "prune_paired_4of8",
    "quantize_weight",
    "requantize_group16",
]
