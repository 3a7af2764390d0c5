"""Grouped products of paired-4:8 sparse NVFP4 weights with the tokens of each expert."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ...formats.gate_up import interleave_gate_up_rows
from . import fused, product
from .fused import group_mm_swiglu_quant
from .product import group_mm, group_mm_ragged
from .tactics import (
    DEFAULT_TACTIC,
    all_tactics,
    group_mm_configs,
    suggest_tactic,
    valid_clusters,
)

OPERATORS = (product.OPERATOR, fused.OPERATOR)

__all__ = [
    "DEFAULT_TACTIC",
    "OPERATORS",
    "all_tactics",
    "group_mm",
    "group_mm_configs",
    "group_mm_ragged",
    "group_mm_swiglu_quant",
    "interleave_gate_up_rows",
    "suggest_tactic",
    "valid_clusters",
]


def warm(device: torch.device, shape: tuple[int, ...]) -> list[Callable[[], Any]]:
    """Calls that compile what M rows an expert, N features of K need, with and without codes."""
    rows, n, k = shape[0], *(max(32, size // 32 * 32) for size in shape[1:])

    def call(coded: bool, ragged: bool) -> torch.Tensor:
        def new(dtype: torch.dtype, *size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        leading = (rows,) if ragged else (1, rows)
        code, brain = torch.uint8, torch.bfloat16
        weight = (new(code, 1, n, k // 4), new(code, 1, n, k // 16), new(code, 1, n, k // 32))
        x = new(code, *leading, k // 2) if coded else new(brain, *leading, k)
        scales = new(code, *leading, k // 32) if coded else None
        counts = new(torch.int32, 1 + int(ragged))
        one = new(torch.float32, 1)
        if not ragged and n % 64 == 0:
            for interleaved in (False, True):
                given = (*weight, x, scales, one, counts, one, n, k)
                group_mm_swiglu_quant(*given, interleaved=interleaved)
        function = group_mm_ragged if ragged else group_mm
        return function(new(brain, *leading, n), *weight, x, scales, one, counts, n, k)

    return [
        functools.partial(call, coded, ragged)
        for coded in (True, False)
        for ragged in (True, False)
    ]
