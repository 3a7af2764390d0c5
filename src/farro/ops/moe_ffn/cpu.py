"""moe_ffn on a CPU: the routes sorted by expert, and each expert's rows through oneDNN's INT8.

Both products are int8_gemm's and the quantizer is quantize_int8_groups', so the bits are theirs;
silu comes from a table. Rows are taken some at a time, of one expert or of many: gate and up stay
small, and what is done to rows of any expert is done to many of them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from ...formats.int8_group import group_count
from ...problem import Problem
from ..int8_gemm import cpu as gemm
from ..int8_quantize import cpu as quantizer
from ..moe_route import cpu as routing
from .swiglu import gate_and_up, looked_up

_ROWS = 1024
_BLOCK_ELEMENTS = 1 << 18  # of FP32 sums: 1 MiB


@dataclass(frozen=True)
class Config:
    """How many rows are computed at a time, sorted by expert."""

    rows: int
    policy: str


def config(problem: Problem) -> Config:
    product = "int8 product" if gemm.int8_product_is_exact() else "fp32 product of the codes"
    return Config(_ROWS, f"routes sorted by expert, {product}")


def run(
    config: Config,
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
    experts, routes = w_gate_up.shape[0], topk_ids.numel()
    if not (experts and routes):
        out.zero_()
        return

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device="cpu")

    offsets, dest, token, route = (
        ints(experts + 1),
        ints(*topk_ids.shape),
        ints(routes),
        ints(routes),
    )
    routing.plan(None, topk_ids, offsets, dest, token, route, 0, None)
    bounds = offsets.tolist()
    y = torch.empty(routes, out.shape[1], dtype=torch.bfloat16, device="cpu")
    for top in range(0, bounds[-1], config.rows):
        stop = min(top + config.rows, bounds[-1])
        spans = [
            (e, slice(max(first, top) - top, min(last, stop) - top))
            for e, (first, last) in enumerate(itertools.pairwise(bounds))
            if max(first, top) < min(last, stop)
        ]
        rows = token[top:stop].long()
        taken = x.index_select(0, rows), scale_x.index_select(0, rows)
        codes = _hidden(*taken, w_gate_up, scale_gate_up, spans, group_size, interleaved)
        for e, here in spans:
            given = (codes[0][here], w_down[e], codes[1][here], scale_down[e])
            _product(*given, y[top:stop][here], group_size)
    combine(y, dest, topk_weights, out)


def _hidden(
    x: torch.Tensor,
    scale_x: torch.Tensor,
    w_gate_up: torch.Tensor,
    scale_gate_up: torch.Tensor,
    spans: list[tuple[int, slice]],
    group_size: int,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of silu(gate) * up, of rows of which each span is an expert's."""
    rows, both_i = x.shape[0], w_gate_up.shape[2]
    both = torch.empty(rows, both_i, dtype=torch.bfloat16, device="cpu")
    for e, here in spans:
        given = (x[here], w_gate_up[e], scale_x[here], scale_gate_up[e])
        _product(*given, both[here], group_size)
    gate, up = gate_and_up(both, interleaved)
    h = looked_up(gate).mul_(up)
    codes = torch.empty(h.shape, dtype=torch.int8, device="cpu")
    shape = (rows, group_count(h.shape[1], group_size))
    scale = torch.empty(shape, dtype=torch.float32, device="cpu")
    if h.numel():
        step = max(1, _BLOCK_ELEMENTS // h.shape[1])
        quantizer.run(quantizer.Config(step), h, codes, scale, group_size)
    return codes, scale


def _product(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out: torch.Tensor,
    group_size: int,
) -> None:
    if out.numel():
        blocks = gemm.blocking(out.shape[0], out.shape[1], False, b.stride(0) == 1)
        gemm.run(blocks, a, b, scale_a, scale_b, None, out, group_size)


def combine(
    y: torch.Tensor, dest: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor
) -> None:
    """The weighted sum of each token's rows, a block of tokens at a time, slot by slot."""
    h = out.shape[1]
    places = dest.long()
    kept = places >= 0
    places.clamp_min_(0)
    step = max(1, _BLOCK_ELEMENTS // max(h, 1))
    for top in range(0, out.shape[0], step):
        tokens = slice(top, min(top + step, out.shape[0]))
        total = torch.zeros(tokens.stop - top, h, dtype=torch.float32, device="cpu")
        for j in range(dest.shape[1]):
            here = kept[tokens, j]
            # a product and a sum: addcmul would round once
            term = y.index_select(0, places[tokens, j]).float().mul_(topk_weights[tokens, j, None])
            if not bool(here.all()):
                term.masked_fill_(~here[:, None], 0)
            total += term
        out[tokens] = total
