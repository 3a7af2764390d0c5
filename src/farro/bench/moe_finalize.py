"""moe_finalize in the benchmark: M tokens of N routes each, K columns."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from ..ops.moe_route import dispatch_plan, moe_finalize
from . import nvfp4_figures
from .case import Adapter, Case, Missing, Options, Sizes, Subject
from .routing import capacity, routed

SHAPES = {
    "default": ({"n": 8, "k": 2048}, {"n": 8, "k": 7168}, {"n": 2, "k": 4096}),
    "heldout": ({"n": 6, "k": 5120},),
    "cpu": ({"n": 8, "k": 2048},),
    "dense": ({"n": 8, "k": 2048},),
}
ROWS = {
    "default": (1, 16, 128, 512, 2048, 8192),
    "heldout": (3, 1000, 4096),
    "cpu": (1, 16, 128, 1024),
    "dense": tuple(range(1, 257)),
}
_EXPERTS = 128


def gathered(
    fused: torch.Tensor, dest: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """The sum in plain torch operators where every route is kept: what a user would write."""
    rows = fused.flatten(0, 1)[dest.reshape(-1)].view(*dest.shape, -1)
    return torch.sum(rows * weights.bfloat16().unsqueeze(-1), 1, out=out)


def build(sizes: Sizes, options: Options) -> Case:
    tokens, topk, k = sizes["m"], sizes["n"], sizes["k"]
    ids, weights = routed(tokens, _EXPERTS, topk, options.device)
    cap = capacity(ids, _EXPERTS)
    dest = dispatch_plan(ids, 0, _EXPERTS, cap)[1]
    fused = torch.empty(_EXPERTS, cap, k, dtype=torch.bfloat16, device=options.device).normal_()
    out = torch.empty(tokens, k, dtype=torch.bfloat16, device=options.device)

    @functools.cache
    def truth() -> torch.Tensor:
        total = torch.zeros(tokens, k, dtype=torch.float64, device=options.device)
        for j in range(topk):
            total += fused.flatten(0, 1)[dest[:, j]].double() * weights[:, j, None].double()
        return total

    def others() -> Iterator[Subject | Missing]:
        gather = functools.partial(gathered, fused, dest, weights, out)
        yield Subject("torch operators", "peer", gather)

    def forced(function: Any, config: Any) -> torch.Tensor:
        function(config, out, fused, dest, weights)
        return out

    return Case(
        sizes={"m": tokens, "n": topk, "k": k},
        options=options,
        ops=2 * tokens * topk * k,
        nbytes=2 * (tokens * topk * k + tokens * k) + dest.nbytes + weights.nbytes,
        function=moe_finalize,
        args=(out, fused, dest, weights),
        kwargs={},
        truth=truth,
        peers=others,
        run=forced,
    )


ADAPTER = Adapter(
    "moe_finalize",
    build,
    SHAPES,
    ROWS,
    figures=nvfp4_figures.TOKENS,
    summary="each token's rows of the experts' results, weighted and summed",
)
