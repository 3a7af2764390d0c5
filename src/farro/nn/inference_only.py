"""Modules that only infer: their backward says so, rather than leaving a gradient out."""

from __future__ import annotations

from typing import Any

import torch

from .._ops import ops


class _InferenceOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, x: torch.Tensor, name: str) -> torch.Tensor:
        ctx.spec = list(x.shape), x.dtype, name
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, ops.no_backward(grad, *ctx.spec), None


def inference_only(name: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """y of a module that was given x; where x wants a gradient, backward raises."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return y
    result: torch.Tensor = _InferenceOnly.apply(y, x, name)  # type: ignore[no-untyped-call]
    return result
