"""scatter_quant_act_* in the benchmark: M tokens of N routes each to 128 experts, K columns."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..formats.nvfp4 import BLOCK
from ..ops.moe_route import dispatch_plan, dispatch_plan_ragged
from ..ops.nvfp4_quantize import (
    dequantize_act,
    scatter_quant_act,
    scatter_quant_act_planned,
    scatter_quant_act_ragged,
)
from . import nvfp4_figures
from .case import Adapter, Case, Options, Sizes
from .moe_finalize import ROWS, SHAPES
from .routing import capacity, routed

VARIANTS = ("planned", "ragged", "routes")
_EXPERTS = 128


def build(sizes: Sizes, options: Options) -> Case:
    tokens, topk, k, variant = sizes["m"], sizes["n"], sizes["k"], options.variant
    device = options.device
    ids, _ = routed(tokens, _EXPERTS, topk, device)
    a1 = torch.randn(tokens, k, device=device).bfloat16()
    gscale = torch.ones(1, device=device)
    function: Any
    if variant == "ragged":
        counts, dest, tok, route = dispatch_plan_ragged(ids, 0, _EXPERTS)
        function, by, cap = scatter_quant_act_ragged, "ragged", tokens * topk
        leading: tuple[int, ...] = (cap,)
        args: tuple[Any, ...] = (a1, tok, route, None, gscale, counts)
    else:
        cap = capacity(ids, _EXPERTS)
        counts, dest, tok, route = dispatch_plan(ids, 0, _EXPERTS, cap)
        function, by, leading = scatter_quant_act_planned, "plan", (_EXPERTS, cap)
        if variant == "routes":
            tok = torch.arange(tokens, device=device).repeat_interleave(topk)
            function, by, route = scatter_quant_act, "routes", dest.flatten().long()
        args = (a1, tok, route, None, gscale, counts, cap)

    def value(result: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        rows = dequantize_act(*result, gscale).flatten(0, -2)
        return rows[dest.flatten().long()].double()

    def forced(function: Any, config: Any) -> Any:
        b_act = torch.empty((*leading, k // 2), dtype=torch.uint8, device=device)
        sfb = torch.empty((*leading, k // BLOCK), dtype=torch.uint8, device=device)
        function(config, *args[:6], by, cap, b_act, sfb)
        return b_act, sfb

    used, slots = tokens * topk, torch.Size(leading).numel()
    return Case(
        sizes={"m": tokens, "n": topk, "k": k},
        options=options,
        ops=0,
        nbytes=a1.nbytes + used * k // 2 + slots * k // BLOCK + 8 * used,
        function=function,
        args=args,
        kwargs={},
        truth=functools.cache(lambda: a1.double().repeat_interleave(topk, 0)),
        value=value,
        run=forced,
    )


ADAPTER = Adapter(
    "nvfp4_scatter",
    build,
    SHAPES,
    ROWS,
    variants=VARIANTS,
    max_error=0.2,  # codes of 4 bits
    figures=nvfp4_figures.TOKENS,
    summary="each expert's rows gathered by a plan and quantized to NVFP4, in one launch",
)
