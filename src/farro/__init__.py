"""farro: low-precision GEMM kernels for LLM and MoE inference.

Names are imported when first used; importing farro needs torch alone and touches no GPU.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# public name -> module; the one list of what farro offers at its top level
_NAMES = {
    "int8_gemm": "ops.int8_gemm",
    "get_kernel_config": "ops.int8_gemm",
    "quantize_int8_groups": "ops.int8_quantize",
    "dequantize_int8_groups": "ops.int8_quantize",
    "quantize_fp8_per_tensor": "ops.fp8_quantize",
    "quantize_fp8_per_row": "ops.fp8_quantize",
    "quantize_fp8_1x128": "ops.fp8_quantize",
    "quantize_fp8_128x128": "ops.fp8_quantize",
    "dequantize_fp8": "ops.fp8_quantize",
    "fp8_blockwise_linear_bf16": "ops.fp8_blockwise_linear",
    "fp8_blockwise_swiglu_quantize_fp8": "ops.fp8_swiglu_quantize",
    "dispatch_plan": "ops.moe_route",
    "dispatch_plan_ragged": "ops.moe_route",
    "moe_finalize": "ops.moe_route",
    "check_routing": "ops.moe_route",
    "moe_ffn": "ops.moe_ffn",
    "fp8_linear_bf16": "ops.fp8_linear",
    "fp8_linear_residual_bf16": "ops.fp8_linear",
    "fp8_linear_bias_bf16": "ops.fp8_linear",
    "fp8_linear_bias_residual_bf16": "ops.fp8_linear",
    "fp8_linear_bias_gelu_bf16": "ops.fp8_linear",
    "select_fp8_linear_tile": "ops.fp8_linear",
    "quantize_": "quantize",
    "explain": "dispatch",
    "is_available": "dispatch",
    "warmup": "warming",
    "UnsupportedError": "errors",
}
_MODULES = ("fp8", "int8", "moe", "nn", "nvfp4")

__all__ = ["__version__", *_NAMES, *_MODULES]

if TYPE_CHECKING:
    from . import fp8 as fp8
    from . import int8 as int8
    from . import moe as moe
    from . import nn as nn
    from . import nvfp4 as nvfp4
    from .dispatch import explain as explain
    from .dispatch import is_available as is_available
    from .errors import UnsupportedError as UnsupportedError
    from .ops.fp8_blockwise_linear import fp8_blockwise_linear_bf16 as fp8_blockwise_linear_bf16
    from .ops.fp8_linear import fp8_linear_bf16 as fp8_linear_bf16
    from .ops.fp8_linear import fp8_linear_bias_bf16 as fp8_linear_bias_bf16
    from .ops.fp8_linear import fp8_linear_bias_gelu_bf16 as fp8_linear_bias_gelu_bf16
    from .ops.fp8_linear import fp8_linear_bias_residual_bf16 as fp8_linear_bias_residual_bf16
    from .ops.fp8_linear import fp8_linear_residual_bf16 as fp8_linear_residual_bf16
    from .ops.fp8_linear import select_fp8_linear_tile as select_fp8_linear_tile
    from .ops.fp8_quantize import dequantize_fp8 as dequantize_fp8
    from .ops.fp8_quantize import quantize_fp8_1x128 as quantize_fp8_1x128
    from .ops.fp8_quantize import quantize_fp8_128x128 as quantize_fp8_128x128
    from .ops.fp8_quantize import quantize_fp8_per_row as quantize_fp8_per_row
    from .ops.fp8_quantize import quantize_fp8_per_tensor as quantize_fp8_per_tensor
    from .ops.fp8_swiglu_quantize import (
        fp8_blockwise_swiglu_quantize_fp8 as fp8_blockwise_swiglu_quantize_fp8,
    )
    from .ops.int8_gemm import get_kernel_config as get_kernel_config
    from .ops.int8_gemm import int8_gemm as int8_gemm
    from .ops.int8_quantize import dequantize_int8_groups as dequantize_int8_groups
    from .ops.int8_quantize import quantize_int8_groups as quantize_int8_groups
    from .ops.moe_ffn import moe_ffn as moe_ffn
    from .ops.moe_route import check_routing as check_routing
    from .ops.moe_route import dispatch_plan as dispatch_plan
    from .ops.moe_route import dispatch_plan_ragged as dispatch_plan_ragged
    from .ops.moe_route import moe_finalize as moe_finalize
    from .quantize import quantize_ as quantize_
    from .warming import warmup as warmup


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        value = getattr(importlib.import_module(f".{_NAMES[name]}", __name__), name)
    elif name in _MODULES:
        value = importlib.import_module(f".{name}", __name__)
    else:
        raise AttributeError(f"module 'farro' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
