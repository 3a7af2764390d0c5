"""quantize_fp8_* in the benchmark: one read of x, one write of codes and scales."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from ..formats.fp8 import BLOCK, E4M3, KINDS, MAX, SCALE_FLOOR, dequantize, scale_shape
from ..ops.fp8_quantize import FUNCTIONS
from .case import Adapter, Case, Missing, Options, Sizes, Subject
from .fp8_figures import QUANTIZE
from .int8_quantize import ROWS, SHAPES


def formula(x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula in plain torch operators, whole groups: what a user would write."""
    dims: tuple[int, ...]
    if kind == "per_tensor":
        groups, dims = x.float(), (0, 1)
    elif kind == "per_row":
        groups, dims = x.float(), (1,)
    elif kind == "1x128":
        groups, dims = x.float().view(x.shape[0], -1, BLOCK), (2,)
    else:
        groups = x.float().view(x.shape[0] // BLOCK, BLOCK, -1, BLOCK)
        dims = (1, 3)
    scale = (groups.abs().amax(dims, keepdim=True) / MAX).clamp_min(SCALE_FLOOR)
    q = (groups * scale.reciprocal()).clamp(-MAX, MAX).to(E4M3)
    return q.view(x.shape), scale.view(scale_shape(x.shape, kind))


def build(sizes: Sizes, options: Options) -> Case:
    m, k, kind = sizes["m"], sizes["k"], options.variant
    x = torch.randn(m, k, device=options.device).to(options.dtype)

    def value(result: Any) -> torch.Tensor:
        q, scale = result
        return dequantize(q, scale, kind, torch.float32).double()

    def others() -> Iterator[Subject | Missing]:
        whole = {"1x128": k % BLOCK == 0, "128x128": m % BLOCK == 0 == k % BLOCK}
        if not whole.get(kind, True):
            yield Missing("torch operators", "the plain formula takes whole groups only")
            return
        call = functools.partial(formula, x, kind)
        yield Subject("torch operators", "peer", call, value=value)

    def forced(function: Any, config: Any) -> Any:
        q = torch.empty(m, k, dtype=E4M3, device=x.device)
        scale = torch.empty(scale_shape(x.shape, kind), device=x.device)
        function(config, x, q, scale, kind)
        return q, scale

    scales = torch.Size(scale_shape(x.shape, kind)).numel()
    return Case(
        sizes={"m": m, "k": k},
        options=options,
        ops=0,
        nbytes=x.nbytes + m * k + 4 * scales,
        function=FUNCTIONS[kind],
        args=(x,),
        kwargs={},
        truth=functools.cache(lambda: x.double()),
        peers=others,
        value=value,
        run=forced,
    )


ADAPTER = Adapter(
    "fp8_quantize",
    build,
    SHAPES,
    ROWS,
    variants=KINDS,
    max_error=4e-2,  # 3 bits of significand
    figures=QUANTIZE,
    summary="FP8 E4M3 codes with a scale a tensor, a row, 1x128 or 128x128 values",
)
