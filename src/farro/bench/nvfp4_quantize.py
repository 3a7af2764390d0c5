"""The NVFP4 quantizers of rows in the benchmark: M rows of each of N experts, K columns.

quant_rows takes M tokens, whatever N is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch

from ..formats.nvfp4 import BLOCK, E2M1_VALUES, MAX_CODE, MAX_SCALE, MIN_SCALE
from ..ops import nvfp4_quantize as quantizers
from ..ops.nvfp4_quantize.activation import Gated
from . import nvfp4_figures
from .case import Adapter, Case, Missing, Options, Sizes, Subject

VARIANTS = ("quant_act", "silu_mul_quant_act", "quant_rows")
SHAPES = {
    "default": ({"n": 128, "k": 2048}, {"n": 32, "k": 7168}, {"n": 8, "k": 4096}),
    "heldout": ({"n": 64, "k": 1408},),
    "cpu": ({"n": 8, "k": 2048},),
    "dense": ({"n": 8, "k": 2048},),
}
ROWS = {
    "default": (1, 8, 64, 512),
    "heldout": (3, 200),
    "cpu": (1, 8, 64),
    "dense": tuple(range(1, 257)),
}


def formula(x: torch.Tensor, gscale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales in plain torch operators: what a user would write."""
    blocks = x.float().view(*x.shape[:-1], -1, BLOCK)
    scale = (blocks.abs().amax(-1) / MAX_CODE * gscale).clamp(MIN_SCALE, MAX_SCALE)
    scale = scale.to(torch.float8_e4m3fn)
    y = blocks * (gscale / scale.float()).unsqueeze(-1)
    values = torch.tensor(E2M1_VALUES, device=x.device)
    middles = (values[1:] + values[:-1]) / 2  # ties are all rounded down, not to even
    code = torch.bucketize(y.abs(), middles).to(torch.uint8) + ((y < 0).to(torch.uint8) << 3)
    pairs = code.view(*x.shape[:-1], -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4, scale.view(torch.uint8)


def build(sizes: Sizes, options: Options) -> Case:
    rows, experts, k, variant = sizes["m"], sizes["n"], sizes["k"], options.variant
    device, flat, gated = options.device, variant == "quant_rows", variant == VARIANTS[1]
    shape = (rows, k) if flat else (experts, rows, 2 * k if gated else k)
    x = torch.randn(shape, device=device).bfloat16()
    gscale = torch.ones(1, device=device)
    counts = torch.full((experts,), rows, dtype=torch.int32, device=device)
    args = (x, gscale) if flat else (x, gscale, counts, 4096)

    def activated() -> torch.Tensor:
        return torch.nn.functional.silu(x[..., :k]) * x[..., k:] if gated else x

    def value(result: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return quantizers.dequantize_act(*result, gscale).double()

    def others() -> Iterator[Subject | Missing]:
        call = functools.partial(lambda: formula(activated(), gscale))
        yield Subject("torch operators", "peer", call, value=value)

    def forced(function: Any, config: Any) -> Any:
        made = torch.Size((1, *shape[:-1]) if flat else shape[:-1])
        b_act = torch.empty((*made, k // 2), dtype=torch.uint8, device=device)
        sfb = torch.empty((*made, k // BLOCK), dtype=torch.uint8, device=device)
        how = Gated(False, "silu", 1.0, -1.0) if gated else None
        function(config, x[None] if flat else x, gscale, None if flat else counts, how, b_act, sfb)
        return (b_act[0], sfb[0]) if flat else (b_act, sfb)

    return Case(
        sizes={"m": rows, "n": experts, "k": k},
        options=options,
        ops=0,
        nbytes=x.nbytes + math.prod(shape[:-1]) * (k // 2 + k // BLOCK),
        function=getattr(quantizers, variant),
        args=args,
        kwargs={},
        truth=functools.cache(lambda: activated().double()),
        peers=others,
        value=value,
        run=forced,
    )


ADAPTER = Adapter(
    "nvfp4_quantize",
    build,
    SHAPES,
    ROWS,
    variants=VARIANTS,
    max_error=0.2,  # codes of 4 bits
    figures=nvfp4_figures.QUANTIZE,
    summary="e2m1 codes of activations, two a byte, with a UE4M3 scale for 32 K",
)
