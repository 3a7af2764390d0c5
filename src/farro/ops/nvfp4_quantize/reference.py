"""The quantizers of activations, by formats/nvfp4.py, on any device and without synchronizing."""

from __future__ import annotations

from typing import Any

import torch

from ...formats.nvfp4 import NO_ROW, dequantize_blocks, quantize_blocks
from .activation import Gated, gated


def used_rows(counts: torch.Tensor, cap: int) -> torch.Tensor:
    """Which rows [E, cap] are below their expert's count."""
    return torch.arange(cap, device=counts.device) < counts.clamp(0, cap)[:, None]


def _fill(
    x: torch.Tensor,
    gscale: torch.Tensor,
    used: torch.Tensor,
    b_act: torch.Tensor,
    sfb: torch.Tensor,
) -> None:
    """Rows of x [..., K] with gscale [..., 1]; those not used [..., 1] count as zeros."""
    packed, scales = quantize_blocks(torch.where(used, x, 0.0), gscale)
    b_act.copy_(packed)
    sfb.copy_(torch.where(used, scales, NO_ROW))


def quantize(
    config: Any,
    x: torch.Tensor,
    gscale: torch.Tensor,
    expert_num_tokens: torch.Tensor | None,
    how: Gated | None,
    b_act: torch.Tensor,
    sfb: torch.Tensor,
) -> None:
    rows = x.shape[1]
    if expert_num_tokens is None:
        used = torch.ones((1, 1), dtype=torch.bool, device=x.device)
    else:
        used = used_rows(expert_num_tokens, rows)
    y = x if how is None else gated(x, how)
    _fill(y.float(), gscale.view(-1, 1, 1), used.unsqueeze(-1), b_act, sfb)


def scatter(
    config: Any,
    a1: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    topk_weights: torch.Tensor | None,
    gscale: torch.Tensor,
    counts: torch.Tensor,
    by: str,
    cap: int,
    b_act: torch.Tensor,
    sfb: torch.Tensor,
) -> None:
    rows = b_act.shape[0] * cap if by != "ragged" else cap
    device = a1.device
    row = torch.arange(rows, device=device)
    if by == "ragged":
        used = row < counts[-1]
        # an expert's rows end where the next one's begin
        expert = torch.searchsorted(counts[1:].contiguous(), row.int(), right=True)
        expert = expert.clamp_max(counts.shape[0] - 2)
    else:
        used = used_rows(counts, cap).flatten()
        expert = row // cap
    tok, route = first, second
    if by == "routes":
        tok, route = _rows_of_routes(first, second, rows)
    used = used & _inside(tok, a1.shape[0])
    x = _taken(a1, tok, used)
    if topk_weights is not None:
        flat = topk_weights.flatten()
        used = used & _inside(route, flat.shape[0])
        weight = _taken(flat[:, None], route, used)
        x = (x.float() * weight).bfloat16()
    factor = gscale if gscale.shape[0] == 1 else gscale[expert]
    codes, scales = b_act.view(rows, -1), sfb.view(rows, -1)
    _fill(x.float(), factor[:, None], used[:, None], codes, scales)


def _inside(index: torch.Tensor, size: int) -> torch.Tensor:
    return (index >= 0) & (index < size)


def _taken(source: torch.Tensor, index: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """Rows of source, the first where it is not used; zeros where source has none."""
    if source.shape[0] == 0:
        return source.new_zeros(index.shape[0], source.shape[1])
    return source[torch.where(used, index, 0).long()]


def _rows_of_routes(
    flat_tok: torch.Tensor, dest_global: torch.Tensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The token and the route of each row, -1 where no route goes."""
    routes = torch.arange(dest_global.shape[0], device=dest_global.device)
    place = torch.where(_inside(dest_global, rows), dest_global, rows)  # one more row, dropped
    route = dest_global.new_full((rows + 1,), -1).scatter_(0, place, routes)[:rows]
    tok = dest_global.new_full((rows + 1,), -1).scatter_(0, place, flat_tok)[:rows]
    return tok, route


def copy(
    config: Any,
    q: torch.Tensor,
    q_sf: torch.Tensor,
    src_tok: torch.Tensor,
    expert_num_tokens: torch.Tensor,
    cap: int,
    b_act: torch.Tensor,
    sfb: torch.Tensor,
) -> None:
    used = used_rows(expert_num_tokens, cap).flatten() & _inside(src_tok, q.shape[0])
    rows = src_tok.shape[0]
    b_act.view(rows, -1).copy_(_taken(q, src_tok, used))
    scales = _taken(q_sf, src_tok, used)
    sfb.view(rows, -1).copy_(torch.where(used[:, None], scales, NO_ROW))


def dequantize(
    config: Any,
    b_act: torch.Tensor,
    sfb: torch.Tensor,
    gscale: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    values = dequantize_blocks(b_act, sfb)
    if gscale is not None:
        values = values / gscale.view(-1, *(1,) * (b_act.dim() - 1))
    out.copy_(values)
