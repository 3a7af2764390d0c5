"""Modules that hold quantized weights, one file each."""

from __future__ import annotations

from .compressed_weight import CompressedWeight
from .int8_linear import DTYPES, Int8Linear
from .sparse_nvfp4_experts import SparseNVFP4Experts

__all__ = ["DTYPES", "CompressedWeight", "Int8Linear", "SparseNVFP4Experts"]
