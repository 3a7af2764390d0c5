"""The weighted sum of a token's BF16 rows by itself, for rows that came from other processes."""

from __future__ import annotations

from typing import Any

import torch

from ...arch import arch_of
from ...dispatch import not_installed, remember
from ...problem import TensorSpec
from . import cpu, reference

_BOUNDS: dict[Any, Any] = {}


def weighted_sum(
    y: torch.Tensor, route_dest: torch.Tensor, topk_weights: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """sum over j, in order, of topk_weights[t,j] * y[route_dest[t,j]], as moe_ffn computes it.

    y: bf16 [R,H], contiguous. route_dest: int32 [T, topk], contiguous; negative for a dropped
    route. topk_weights: fp32 [T, topk]. Gives [T,H] in `dtype`, on the device of y.
    """
    shape = route_dest.shape[0], y.shape[1]
    out = torch.empty(shape, dtype=dtype, device=y.device)
    if not out.numel():
        return out
    if not (y.numel() and route_dest.numel()):
        return out.zero_()
    if y.device.type == "cpu":
        cpu.combine(y, route_dest, topk_weights, out)
    elif "triton" in arch_of(y.device).features and not_installed("triton") is None:
        _launch(y, route_dest, topk_weights, out)
    else:
        kept = route_dest >= 0
        rows = y[route_dest.clamp_min(0).long()]
        reference.combine(rows, kept, topk_weights, out)
    return out


def _launch(
    y: torch.Tensor, route_dest: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor
) -> None:
    from ...triton_gemm import Bound
    from .triton import prepare_combine
    from .triton_configs import sum_block

    given = (y, route_dest, topk_weights, out)
    key = tuple(map(TensorSpec.of, given))
    bound = _BOUNDS.get(key)
    if bound is None:
        bound = Bound(prepare_combine, sum_block(*out.shape), 4)
        remember(_BOUNDS, key, bound)
    bound(*given)
