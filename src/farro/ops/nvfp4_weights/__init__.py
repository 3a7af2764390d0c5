"""Weights of the paired-4:8 NVFP4 products: prune, quantize, compress, and back, at load time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .compression import compress, decompress
from .operator import OPERATOR
from .quantization import (
    dequantize_weight,
    prune_paired_4of8,
    quantize_weight,
    requantize_group16,
)

__all__ = [
    "OPERATOR",
    "compress",
    "decompress",
    "dequantize_weight",
    "prune_paired_4of8",
    "quantize_weight",
    "requantize_group16",
]


def warm(device: torch.device, shape: tuple[int, ...]) -> list[Callable[[], Any]]:
    """Nothing compiles: these are plain torch operators."""
    return []
