"""Modules that hold quantized weights, one file each."""

from __future__ import annotations

from .int8_linear import DTYPES, Int8Linear

__all__ = ["DTYPES", "Int8Linear"]
