"""Modules that hold quantized weights, one file each."""

from __future__ import annotations

from .compressed_weight import CompressedWeight
from .fp8_block_linear import FP8BlockLinear
from .fp8_linear import FP8Linear
from .int8_experts import Int8Experts
from .int8_linear import Int8Linear
from .nvfp4_linear import NVFP4Linear
from .quantized_linear import DTYPES, QuantizedLinear
from .sparse_nvfp4_experts import SparseNVFP4Experts
from .sparse_nvfp4_linear import SparseNVFP4Linear

__all__ = [
    "DTYPES",
    "CompressedWeight",
    "FP8BlockLinear",
    "FP8Linear",
    "Int8Experts",
    "Int8Linear",
    "NVFP4Linear",
    "QuantizedLinear",
    "SparseNVFP4Experts",
    "SparseNVFP4Linear",
]
