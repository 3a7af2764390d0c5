"""moe_ffn by its formula: the references of the product and of the quantizer, expert by expert."""

from __future__ import annotations

import torch

from ...formats.int8_group import quantize
from ..int8_gemm.reference import run as product
from .swiglu import gate_and_up, silu


def hidden(
    x: torch.Tensor,
    scale_x: torch.Tensor,
    w_gate_up: torch.Tensor,
    scale_gate_up: torch.Tensor,
    group_size: int,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [rows, I] and scales of one expert's silu(gate) * up, for rows of x."""
    shape = (x.shape[0], w_gate_up.shape[1])
    both = torch.empty(shape, dtype=torch.bfloat16, device=x.device)
    if both.numel():
        product(None, x, w_gate_up, scale_x, scale_gate_up, None, both, group_size)
    gate, up = gate_and_up(both, interleaved)
    return quantize(silu(gate) * up.float(), group_size)


def down(
    codes: torch.Tensor,
    scale: torch.Tensor,
    w_down: torch.Tensor,
    scale_down: torch.Tensor,
    group_size: int,
) -> torch.Tensor:
    """BF16 [rows, H]: one expert's result for rows, before any weight of the router."""
    shape = (codes.shape[0], w_down.shape[1])
    y = torch.empty(shape, dtype=torch.bfloat16, device=codes.device)
    if y.numel():
        product(None, codes, w_down, scale, scale_down, None, y, group_size)
    return y


def combine(
    y: torch.Tensor, kept: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor
) -> None:
    """out[t] = sum over kept slots j, in order, of topk_weights[t,j] * y[t,j], in FP32."""
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for j in range(kept.shape[1]):
        term = topk_weights[:, j, None] * y[:, j].float()
        total = torch.where(kept[:, j, None], total + term, total)
    out.copy_(total)


def run(
    config: None,
    x: torch.Tensor,
    scale_x: torch.Tensor,
    w_gate_up: torch.Tensor,
    scale_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    scale_down: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor,
    group_size: int,
    interleaved: bool,
) -> None:
    experts = w_gate_up.shape[0]
    y = torch.zeros(*topk_ids.shape, out.shape[1], dtype=torch.bfloat16, device=out.device)
    for e in range(experts):
        hit = topk_ids == e
        # asking a GPU which tokens these are would make the host wait, so there all are computed
        every = torch.arange(len(hit), device=hit.device)
        here = every if hit.is_cuda else hit.any(1).nonzero()[:, 0]
        gate_up = (w_gate_up[e], scale_gate_up[e])
        codes = hidden(x[here], scale_x[here], *gate_up, group_size, interleaved)
        result = down(*codes, w_down[e], scale_down[e], group_size)
        y[here] = torch.where(hit[here, :, None], result[:, None], y[here])
    combine(y, (topk_ids >= 0) & (topk_ids < experts), topk_weights, out)
