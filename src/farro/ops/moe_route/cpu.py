"""Routing on a CPU: a stable sort of the ids, and blocks of tokens that stay in cache."""

from __future__ import annotations

import torch

_BLOCK_ELEMENTS = 1 << 17  # of FP32 totals: half a MiB


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
    experts = counts.numel() - (cap is None)
    local = topk_ids.reshape(-1) - first_expert
    local = torch.where((local >= 0) & (local < experts), local, experts)
    # a stable sort by expert lists each expert's routes in (t, j) order; others come last
    short = torch.uint8 if experts < 256 else torch.int16  # torch sorts few bits in linear time
    expert, route = local.to(short).sort(stable=True)
    total = torch.bincount(expert, minlength=experts + 1)
    start = total.cumsum(0) - total
    if cap is None:
        counts.copy_(start)
    else:
        counts.copy_(total[:experts].clamp_max(cap))
    ours = int(start[experts])
    expert, route = expert[:ours].long(), route[:ours]
    row = torch.arange(ours, device="cpu")
    if cap is not None:
        rank = row - start[expert]
        kept = rank < cap
        row, route = (expert * cap + rank)[kept], route[kept]
    for source in (route_dest, src_tok, src_route):
        source.fill_(-1)
    route_dest.view(-1).scatter_(0, route, row.int())
    src_route.scatter_(0, row, route.int())
    src_tok.scatter_(0, row, route.int() // max(topk_ids.shape[1], 1))


def finalize(
    config: None,
    out: torch.Tensor,
    fused: torch.Tensor,
    route_dest: torch.Tensor,
    topk_weights: torch.Tensor | None,
) -> None:
    rows = fused if fused.dim() == 2 else fused.flatten(0, 1)
    count, k = rows.shape
    dest = route_dest.long()
    kept = (dest >= 0) & (dest < count)
    dest.masked_fill_(~kept, 0)
    weight = None if topk_weights is None else topk_weights.bfloat16()
    step = max(1, _BLOCK_ELEMENTS // max(k, 1))
    for top in range(0, out.shape[0], step):
        tokens = slice(top, min(top + step, out.shape[0]))
        total = torch.zeros(tokens.stop - top, k, dtype=torch.float32, device="cpu")
        for j in range(route_dest.shape[1] if count else 0):
            here = kept[tokens, j]
            term = rows.index_select(0, dest[tokens, j])
            if weight is not None:
                term *= weight[tokens, j, None]
            if not bool(here.all()):
                term.masked_fill_(~here[:, None], 0)
            total += term
        out[tokens] = total
