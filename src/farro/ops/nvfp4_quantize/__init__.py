"""Activations in NVFP4: quantize rows in place, by routes or by a plan; and restore values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from . import copying, dense, dequantize, scatter
from .copying import scatter_fp4_planned
from .dense import quant_act, quant_rows, silu_mul_quant_act
from .dequantize import dequantize_act
from .planned import scatter_quant_act_planned, scatter_quant_act_ragged
from .scatter import scatter_quant_act

OPERATORS = (dense.OPERATOR, scatter.OPERATOR, copying.OPERATOR, dequantize.OPERATOR)

__all__ = [
    "OPERATORS",
    "dequantize_act",
    "quant_act",
    "quant_rows",
    "scatter_fp4_planned",
    "scatter_quant_act",
    "scatter_quant_act_planned",
    "scatter_quant_act_ragged",
    "silu_mul_quant_act",
]


def warm(device: torch.device, shape: tuple[int, ...]) -> list[Callable[[], Any]]:
    """Calls that compile what M tokens of K features need, with and without router weights."""
    tokens, _, k = shape
    k = max(32, k // 32 * 32)
    if device.type == "cpu":  # nothing compiles there
        tokens = 1

    def calls(per_expert: bool, weighted: bool) -> None:
        experts, cap = 2, max(tokens, 1)
        gscale = torch.ones(experts if per_expert else 1, device=device)
        counts = torch.zeros(experts, dtype=torch.int32, device=device)
        offsets = torch.zeros(experts + 1, dtype=torch.int32, device=device)
        rows = torch.zeros(experts * cap, dtype=torch.int32, device=device)
        routes = torch.zeros(cap, dtype=torch.int64, device=device)
        x = torch.zeros(experts, cap, k, dtype=torch.bfloat16, device=device)
        a1 = x[0]
        weights = torch.ones(cap, 1, device=device) if weighted else None
        flat = None if weights is None else weights.view(-1)
        scatter_quant_act(a1, routes, routes, flat, gscale, counts, cap)
        scatter_quant_act_planned(a1, rows, rows, weights, gscale, counts, cap)
        scatter_quant_act_ragged(a1, rows, rows, weights, gscale, offsets)
        if not weighted:
            quant_act(x, gscale, counts, k)
            x2 = torch.cat((x, x), -1)
            for interleaved in (False, True):
                silu_mul_quant_act(x2, gscale, counts, k, interleaved)
            quant_rows(a1, gscale[:1])
            q, q_sf = quant_act(x, gscale, counts, k)
            for factor in (None, gscale):
                dequantize_act(q, q_sf, factor)
            scatter_fp4_planned(q[0], q_sf[0], rows, counts, cap)

    return [
        functools.partial(calls, per_expert, weighted)
        for per_expert in (False, True)
        for weighted in (False, True)
    ]
