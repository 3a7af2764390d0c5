"""The NVFP4 family under one name: formats, weights and quantizers of the paired-4:8 products."""

from __future__ import annotations

from .formats.gate_up import interleave_gate_up_rows
from .formats.paired_sparsity import LAYOUT_VERSION
from .ops.moe_route import check_routing, dispatch_plan, dispatch_plan_ragged, moe_finalize
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
    "check_routing",
    "compress",
    "decompress",
    "dequantize_weight",
    "dispatch_plan",
    "dispatch_plan_ragged",
    "interleave_gate_up_rows",
    "moe_finalize",
    "prune_paired_4of8",
    "quantize_weight",
    "requantize_group16",
]
