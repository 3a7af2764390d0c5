"""quantize_int8_groups in the benchmark: one read of x, one write of codes and scales."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from ..formats.int8_group import MAX_CODE, SCALE_FLOOR, group_count
from ..ops.int8_quantize import quantize_int8_groups
from . import int8_figures, peers
from .case import Adapter, Case, Missing, Options, Sizes, Subject

SHAPES = {
    "default": ({"k": 4096}, {"k": 7168}),
    "heldout": ({"k": 13824}, {"k": 5120}),
    "cpu": ({"k": 4096},),
    "dense": ({"k": 4096},),
}
ROWS = {
    "default": (1, 16, 64, 256, 1024, 4096, 8192),
    "heldout": (3, 48, 200, 1500),
    "cpu": (1, 16, 128, 1024),
    "dense": tuple(range(1, 257)),
}


def formula(x: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula in plain torch operators, K a multiple of G: what a user would write."""
    groups = x.float().view(*x.shape[:-1], -1, group_size)
    scale = (groups.abs().amax(-1) / MAX_CODE).clamp_min(SCALE_FLOOR)
    q = torch.round(groups / scale.unsqueeze(-1)).clamp(-MAX_CODE, MAX_CODE)
    return q.to(torch.int8).flatten(-2), scale


def build(sizes: Sizes, options: Options) -> Case:
    m, k = sizes["m"], sizes["k"]
    group_size = options.group_size
    x = torch.randn(m, k, device=options.device).to(options.dtype)

    def value(result: Any) -> torch.Tensor:
        q, scale = result
        return peers.exact(q, scale, group_size)

    def others() -> Iterator[Subject | Missing]:
        if k % group_size:
            yield Missing("torch operators", "the plain formula takes whole groups only")
            return
        yield Subject(
            *("torch operators", "peer", functools.partial(formula, x, group_size)), value=value
        )

    def forced(function: Any, config: Any) -> Any:
        q = torch.empty(m, k, dtype=torch.int8, device=x.device)
        scale = torch.empty(m, group_count(k, group_size), device=x.device)
        function(config, x, q, scale, group_size)
        return q, scale

    return Case(
        sizes={"m": m, "k": k},
        options=options,
        ops=0,
        nbytes=x.nbytes + m * k + 4 * m * group_count(k, group_size),
        function=quantize_int8_groups,
        args=(x, group_size),
        kwargs={},
        truth=functools.cache(lambda: x.double()),
        peers=others,
        value=value,
        run=forced,
    )


ADAPTER = Adapter(
    "int8_quantize",
    build,
    SHAPES,
    ROWS,
    group_sizes=(32, 64, 128, 256),
    figures=int8_figures.QUANTIZE,
    summary="INT8 codes and one FP32 scale per group, in one pass over x",
)
