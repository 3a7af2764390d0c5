"""check_routing: an error for what forward functions silently drop."""

from __future__ import annotations

from typing import Any

import torch

from ...checks import (
    check_devices,
    check_dtype,
    check_required,
    check_shape,
    check_size,
    check_strided,
    check_tensors,
)
from .plan import check_ids

_NAME = "check_routing"


def check_routing(
    topk_ids: torch.Tensor,
    num_experts: int,
    topk_weights: torch.Tensor | None = None,
    *,
    cap: int | None = None,
    unique: bool = False,
) -> None:
    """Raise for a router's output that forward functions would take without a word.

    They drop routes to ids outside [0, num_experts) and those past an expert's capacity, since
    asking the device would make them wait for it. This function waits: it is for loading, tests
    and debugging, and cannot be captured in a CUDA graph.

    Args:
        topk_ids: int32 or int64 [T, topk], any positive strides.
        num_experts: of all ranks together, 0 or more.
        topk_weights: fp32 [T, topk]; each has to be finite.
        cap: rows of an expert; no expert may be given more routes.
        unique: whether an expert that comes twice in a token is an error.

    Raises:
        ValueError: names the first bad token and route, in (t, j) order, and what it holds; also
            shapes that do not fit, a zero stride, mixed devices.
        TypeError: an argument of the wrong type or dtype.
    """
    _check_arguments(topk_ids, num_experts, topk_weights, cap)
    ids = topk_ids.detach().cpu().long()
    outside = (ids < 0) | (ids >= num_experts)
    if bool(outside.any()):
        t, j = _first(outside)
        raise ValueError(
            f"{_NAME}: token {t}, route {j} goes to expert {int(ids[t, j])}; needed 0 to "
            f"{num_experts - 1} (forward functions drop such a route)"
        )
    if topk_weights is not None:
        bad = ~torch.isfinite(topk_weights.detach().cpu())
        if bool(bad.any()):
            t, j = _first(bad)
            value = float(topk_weights[t, j])
            raise ValueError(
                f"{_NAME}: token {t}, route {j} has the weight {value}; needed a finite one"
            )
    if unique:
        _check_unique(ids)
    if cap is not None:
        _check_capacity(ids, cap)


def _check_arguments(topk_ids: Any, num_experts: Any, topk_weights: Any, cap: Any) -> None:
    check_required(_NAME, topk_ids=topk_ids)
    check_tensors(_NAME, topk_weights=topk_weights)
    check_size(_NAME, "num_experts", num_experts)
    if cap is not None:
        check_size(_NAME, "cap", cap)
    check_ids(_NAME, topk_ids)
    if topk_weights is not None:
        hint = ": pass topk_weights.float()"
        check_dtype(_NAME, "topk_weights", topk_weights, (torch.float32,), hint)
        shape = tuple(topk_ids.shape)
        check_shape(_NAME, "topk_weights", topk_weights, shape, "[T, topk] of topk_ids")
        check_strided(_NAME, topk_weights=topk_weights)
    check_devices(_NAME, topk_ids=topk_ids, topk_weights=topk_weights)


def _first(bad: torch.Tensor) -> tuple[int, int]:
    """(t, j) of the first True."""
    t, j = bad.nonzero()[0].tolist()
    return t, j


def _check_unique(ids: torch.Tensor) -> None:
    topk = ids.shape[1]
    earlier = torch.ones(topk, topk, dtype=torch.bool).tril(-1)
    again = ((ids[:, :, None] == ids[:, None, :]) & earlier).any(-1)
    if bool(again.any()):
        t, j = _first(again)
        raise ValueError(
            f"{_NAME}: token {t}, route {j} goes to expert {int(ids[t, j])}, to which an earlier "
            "route of the token goes too; needed different experts, or unique=False"
        )


def _check_capacity(ids: torch.Tensor, cap: int) -> None:
    expert, route = ids.reshape(-1).sort(stable=True)
    total = torch.bincount(expert)
    rank = torch.arange(expert.numel()) - (total.cumsum(0) - total)[expert]
    over = torch.zeros(expert.numel(), dtype=torch.bool)
    over[route] = rank >= cap
    if bool(over.any()):
        t, j = _first(over.view(ids.shape))
        e = int(ids[t, j])
        raise ValueError(
            f"{_NAME}: token {t}, route {j} is past the capacity of expert {e}, which {total[e]} "
            f"routes go to; needed a cap of at least {int(total.max())}, got {cap} (dispatch_plan "
            "drops such a route)"
        )
