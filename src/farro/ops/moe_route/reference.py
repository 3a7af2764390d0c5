"""The definition of a plan and of the sum over routes, in plain torch, without synchronizing."""

from __future__ import annotations

import torch


def plan(
    config: None,
    topk_ids: torch.Tensor,
    counts: torch.Tensor,
    route_dest: torch.Tensor,
    src_tok: torch.Tensor,
    src_route: torch.Tensor,
    first_expert: int,
    cap: int | None,
) -> None:
    """Padded where there is a cap; else ragged, and `counts` holds the E + 1 offsets."""
    ragged = cap is None
    ids = topk_ids.reshape(-1).long()
    route = torch.arange(ids.numel(), device=ids.device)
    dest = torch.full_like(route, -1)
    used = torch.zeros((), dtype=torch.int64, device=ids.device)  # rows of the experts before
    for e in range(counts.numel() - ragged):
        hit = ids == first_expert + e
        rank = hit.cumsum(0) - 1
        kept = hit if cap is None else hit & (rank < cap)
        start = used if cap is None else e * cap
        dest = torch.where(kept, start + rank, dest)
        counts[e] = used if ragged else kept.sum()
        used = used + kept.sum()
    if ragged:
        counts[-1] = used
    route_dest.copy_(dest.view(route_dest.shape))
    rows = src_tok.numel()
    place = torch.where(dest < 0, rows, dest)  # dropped routes share a place past the end
    for source, value in ((src_tok, route // max(topk_ids.shape[1], 1)), (src_route, route)):
        filled = torch.full((rows + 1,), -1, dtype=torch.int32, device=ids.device)
        source.copy_(filled.scatter_(0, place, value.int())[:rows])


def finalize(
    config: None,
    out: torch.Tensor,
    fused: torch.Tensor,
    route_dest: torch.Tensor,
    topk_weights: torch.Tensor | None,
) -> None:
    rows = fused if fused.dim() == 2 else fused.flatten(0, 1)
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for j in range(route_dest.shape[1] if rows.shape[0] else 0):
        dest = route_dest[:, j].long()
        kept = (dest >= 0) & (dest < rows.shape[0])
        term = rows[torch.where(kept, dest, 0)].float()
        if topk_weights is not None:
            weight = topk_weights[:, j].bfloat16().float()
            term = (term * weight[:, None]).bfloat16().float()
        total = torch.where(kept[:, None], total + term, total)
    out.copy_(total)
