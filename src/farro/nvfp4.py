"""The NVFP4 family under one name: formats, weights and quantizers of the paired-4:8 products."""

from __future__ import annotations

from .formats.paired_sparsity import LAYOUT_VERSION
from .ops.moe_route import check_routing, dispatch_plan, dispatch_plan_ragged, moe_finalize
from .ops.nvfp4_group_mm import (
    DEFAULT_TACTIC,
    all_tactics,
    group_mm,
    group_mm_configs,
    group_mm_ragged,
    group_mm_swiglu_quant,
    interleave_gate_up_rows,
    suggest_tactic,
    valid_clusters,
)
from .ops.nvfp4_quantize import (
    dequantize_act,
    quant_act,
    quant_rows,
    scatter_fp4_planned,
    scatter_quant_act,
    scatter_quant_act_planned,
    scatter_quant_act_ragged,
    silu_mul_quant_act,
)
from .ops.nvfp4_weights import (
    compress,
    decompress,
    dequantize_weight,
    prune_paired_4of8,
    quantize_weight,
    requantize_group16,
)

__all__ = [
    "DEFAULT_TACTIC",
    "LAYOUT_VERSION",
    "all_tactics",
    "check_routing",
    "compress",
    "decompress",
    "dequantize_act",
    "dequantize_weight",
    "dispatch_plan",
    "dispatch_plan_ragged",
    "group_mm",
    "group_mm_configs",
    "group_mm_ragged",
    "group_mm_swiglu_quant",
    "interleave_gate_up_rows",
    "moe_finalize",
    "prune_paired_4of8",
    "quant_act",
    "quant_rows",
    "quantize_weight",
    "requantize_group16",
    "scatter_fp4_planned",
    "scatter_quant_act",
    "scatter_quant_act_planned",
    "scatter_quant_act_ragged",
    "silu_mul_quant_act",
    "suggest_tactic",
    "valid_clusters",
]
