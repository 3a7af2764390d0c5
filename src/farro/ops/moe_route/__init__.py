"""Routing for mixtures of experts: dispatch_plan(_ragged), moe_finalize, check_routing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from . import finalize, plan
from .check import check_routing
from .finalize import moe_finalize
from .plan import dispatch_plan, dispatch_plan_ragged

OPERATORS = (plan.OPERATOR, finalize.OPERATOR)
_TOPK = (1, 2, 4, 6, 8, 10)
_EXPERTS = 128

__all__ = ["check_routing", "dispatch_plan", "dispatch_plan_ragged", "moe_finalize"]


def warm(device: torch.device, shape: tuple[int, ...]) -> list[Callable[[], Any]]:
    """Calls that compile what (M tokens, N, K features) need, for the usual numbers of routes."""
    tokens, _, k = shape

    def call(topk: int, dtype: torch.dtype) -> None:
        ids = torch.zeros(tokens, topk, dtype=dtype, device=device)
        dispatch_plan(ids, 0, _EXPERTS, tokens)
        dispatch_plan_ragged(ids, 0, _EXPERTS)

    def combine(topk: int, weighted: bool) -> torch.Tensor:
        dest = torch.zeros(tokens, topk, dtype=torch.int32, device=device)
        weights = torch.ones(tokens, topk, device=device) if weighted else None
        fused = torch.zeros(1, 1, k, dtype=torch.bfloat16, device=device)
        out = torch.empty(tokens, k, dtype=torch.bfloat16, device=device)
        return moe_finalize(out, fused, dest, weights)

    plans = [functools.partial(call, topk, dtype) for topk in _TOPK for dtype in plan.ID_DTYPES]
    sums = [
        functools.partial(combine, topk, weighted) for topk in _TOPK for weighted in (False, True)
    ]
    return [*plans, *sums]
