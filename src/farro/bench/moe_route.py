"""dispatch_plan in the benchmark: N experts, K routes a token, some experts asked more often."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from ..ops.moe_route import dispatch_plan, reference
from . import nvfp4_figures
from .case import Adapter, Case, Missing, Options, Sizes, Subject
from .routing import capacity, routed

SHAPES = {
    "default": ({"n": 128, "k": 8}, {"n": 8, "k": 2}),
    "heldout": ({"n": 256, "k": 8},),
    "cpu": ({"n": 128, "k": 8},),
    "dense": ({"n": 128, "k": 8},),
}
ROWS = {
    "default": (1, 16, 128, 512, 2048, 8192),
    "heldout": (3, 1000, 4096),
    "cpu": (1, 16, 128, 1024),
    "dense": tuple(range(1, 257)),
}


def by_sorting(ids: torch.Tensor, experts: int, cap: int) -> tuple[torch.Tensor, ...]:
    """The plan in plain torch operators, without synchronizing: what a user would write."""
    topk = ids.shape[1]
    expert, route = ids.reshape(-1).sort(stable=True)
    edges = torch.searchsorted(expert, torch.arange(experts + 1, device=ids.device))
    rank = torch.arange(expert.numel(), device=ids.device) - edges[expert]
    rows = experts * cap
    row = torch.where(rank < cap, expert * cap + rank, rows).int()
    source = torch.full((rows + 1,), -1, dtype=torch.int32, device=ids.device)
    source[row.long()] = route.int()
    dest = torch.empty_like(row)
    dest[route] = torch.where(row < rows, row, -1)
    source = source[:rows]
    token = torch.where(source < 0, -1, source // topk)
    return edges.diff().clamp_max(cap).int(), dest.view(ids.shape), token, source


def _joined(plan: Any) -> torch.Tensor:
    """All four results as one column of float64, which holds them exactly."""
    return torch.cat([part.reshape(-1).double() for part in plan]).unsqueeze(1)


def build(sizes: Sizes, options: Options) -> Case:
    tokens, experts, topk = sizes["m"], sizes["n"], sizes["k"]
    ids, _ = routed(tokens, experts, topk, options.device)
    cap = capacity(ids, experts)
    rows = experts * cap

    def made() -> list[torch.Tensor]:
        shapes = ((experts,), (tokens, topk), (rows,), (rows,))
        return [torch.empty(s, dtype=torch.int32, device=ids.device) for s in shapes]

    def forced(function: Any, config: Any) -> Any:
        plan = made()
        function(config, ids, *plan, 0, cap)
        return plan

    @functools.cache
    def truth() -> torch.Tensor:
        plan = made()
        reference.plan(None, ids, *plan, 0, cap)  # type: ignore[arg-type, call-arg]
        return _joined(plan)

    def others() -> Iterator[Subject | Missing]:
        sort = functools.partial(by_sorting, ids, experts, cap)
        yield Subject("torch operators, by sorting", "peer", sort, value=_joined)

    return Case(
        sizes={"m": tokens, "n": experts, "k": topk},
        options=options,
        ops=0,
        nbytes=ids.nbytes + 4 * (experts + tokens * topk + 2 * rows),
        function=dispatch_plan,
        args=(ids, 0, experts, cap),
        kwargs={},
        truth=truth,
        peers=others,
        value=_joined,
        run=forced,
    )


ADAPTER = Adapter(
    "moe_route",
    build,
    SHAPES,
    ROWS,
    figures=nvfp4_figures.PLAN,
    summary="rows for M tokens of K routes each to N experts, int64 ids, in one launch",
)
