"""How to call each operator: one Sample a public function, one file a family.

The tests in this folder know nothing about an operator but what its sample tells.
"""

from __future__ import annotations

from farro.catalogue import OPERATORS

from . import (
    fp8,
    fp8_blockwise,
    fp8_linear,
    int8,
    moe,
    nvfp4_group_mm,
    nvfp4_quantize,
    nvfp4_weights,
)
from .sample import Argument, Sample, tensors

__all__ = ["Argument", "CHECKS", "QUESTIONS", "SAMPLES", "Sample", "tensors", "uncovered"]

SAMPLES = (
    *int8.SAMPLES,
    *fp8.SAMPLES,
    *fp8_blockwise.SAMPLES,
    *fp8_linear.SAMPLES,
    *moe.SAMPLES,
    *nvfp4_group_mm.SAMPLES,
    *nvfp4_weights.SAMPLES,
    *nvfp4_quantize.SAMPLES,
)

# public functions that answer questions about a call and compute nothing
QUESTIONS = (
    *("get_kernel_config", "select_fp8_linear_tile"),
    *("group_mm_configs", "all_tactics", "suggest_tactic", "valid_clusters"),
    "interleave_gate_up_rows",
)
# public functions that raise or do nothing
CHECKS = ("check_routing",)


def uncovered() -> list[str]:
    """Public functions of the catalogue that have no sample, and operators without any."""
    covered = {sample.name for sample in SAMPLES} | set(QUESTIONS) | set(CHECKS)
    missing = [f for operator in OPERATORS for f in operator.functions if f not in covered]
    sampled = {sample.operator for sample in SAMPLES if sample.kernels}
    return missing + [operator.name for operator in OPERATORS if operator.name not in sampled]
