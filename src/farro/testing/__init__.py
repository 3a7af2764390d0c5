"""Public helpers to compare tensors, and the specification's edge cases as data.

    for case in farro.testing.int8_gemm_cases():
        call = case.build(device="cpu", seed=0)
        assert call.check(kernel).status != "failed"

`farro verify` and the test-suite run the same cases; a kernel outside farro can use them too, with
`call.arguments` (its inputs), `call.expected` (what the reference gives, or the exact result) and
`assert_bit_equal` or, for sums in floating point, `assert_close_to_exact`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .case import Call, Case, Outcome
from .compare import (
    FP8_FAST_SUM,
    FP8_PROMOTED_SUM,
    FP32_SUM,
    Mismatch,
    assert_bit_equal,
    assert_close_to_exact,
    difference,
    far_from_exact,
    first_mismatch,
)
from .fp8_blockwise_linear import BlockwiseCase, blockwise_cases
from .fp8_linear import LinearCase, exact_linear, linear_cases
from .fp8_quantize import Fp8QuantizeCase, fp8_quantize_cases
from .fp8_swiglu_quantize import SwigluCase, swiglu_cases
from .int8_gemm import GemmCase, int8_gemm_cases
from .int8_quantize import QuantizeCase, quantize_cases
from .layouts import LAYOUTS, Guarded, guarded, laid_out, poisoned_memory
from .moe_ffn import MoeCase, moe_ffn_cases
from .moe_route import FinalizeCase, PlanCase, finalize_cases, plan_cases
from .nvfp4_group_mm import GroupCase, group_mm_cases
from .nvfp4_group_mm_swiglu_quant import FusedCase, fused_cases
from .nvfp4_quantize import (
    ActCase,
    act_cases,
    dequantize_cases,
    scatter_cases,
    scatter_fp4_cases,
)
from .nvfp4_weights import WeightCase, weight_cases

# operator -> its cases; an operator without a row has none for `farro verify` to run
CASES: dict[str, Callable[[], Sequence[Case]]] = {
    "fp8_blockwise_linear": blockwise_cases,
    "fp8_linear": linear_cases,
    "fp8_quantize": fp8_quantize_cases,
    "fp8_swiglu_quantize": swiglu_cases,
    "int8_gemm": int8_gemm_cases,
    "int8_quantize": quantize_cases,
    "nvfp4_group_mm": group_mm_cases,
    "nvfp4_group_mm_swiglu_quant": fused_cases,
    "nvfp4_dequantize": dequantize_cases,
    "nvfp4_quantize": act_cases,
    "nvfp4_scatter": scatter_cases,
    "nvfp4_scatter_fp4": scatter_fp4_cases,
    "nvfp4_weights": weight_cases,
    "moe_ffn": moe_ffn_cases,
    "moe_finalize": finalize_cases,
    "moe_route": plan_cases,
}

__all__ = [
    "ActCase",
    "BlockwiseCase",
    "CASES",
    "Call",
    "Case",
    "FinalizeCase",
    "FusedCase",
    "FP32_SUM",
    "FP8_FAST_SUM",
    "FP8_PROMOTED_SUM",
    "Fp8QuantizeCase",
    "GemmCase",
    "GroupCase",
    "Guarded",
    "LAYOUTS",
    "LinearCase",
    "Mismatch",
    "MoeCase",
    "Outcome",
    "PlanCase",
    "QuantizeCase",
    "SwigluCase",
    "WeightCase",
    "act_cases",
    "assert_bit_equal",
    "assert_close_to_exact",
    "blockwise_cases",
    "dequantize_cases",
    "difference",
    "exact_linear",
    "far_from_exact",
    "finalize_cases",
    "first_mismatch",
    "fused_cases",
    "fp8_quantize_cases",
    "group_mm_cases",
    "guarded",
    "int8_gemm_cases",
    "laid_out",
    "plan_cases",
    "linear_cases",
    "moe_ffn_cases",
    "poisoned_memory",
    "quantize_cases",
    "scatter_cases",
    "scatter_fp4_cases",
    "swiglu_cases",
    "weight_cases",
]
