"""Modules that hold quantized weights, one file each."""

from __future__ import annotations

from .compressed_weight import CompressedWeight
from .fp8_block_linear import FP8BlockLinear
from .fp8_linear import FP8Linear
from .int8_linear import Int8Linear
from .quantized_linear import DTYPES, QuantizedLinear
from .sparse_nvfp4_experts import SparseNVFP4Experts

__all__ = [
    "DTYPES",
    "CompressedWeight",
    "FP8BlockLinear",
    "FP8Linear",
    "Int8Linear",
    "QuantizedLinear",
    "SparseNVFP4Experts",
]
