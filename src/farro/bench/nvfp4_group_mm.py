"""group_mm in the benchmark: M tokens for each of E experts, weights [N, K] of each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..ops.nvfp4_group_mm import group_mm, group_mm_ragged, group_mm_swiglu_quant
from ..ops.nvfp4_quantize import dequantize_act, quant_act
from . import nvfp4_figures
from .case import Adapter, Case, Missing, Options, Sizes, Subject
from .grouped_peers import Experts, grouped
from .sparse_experts import Weight, factor, multiple_of_32, weight

VARIANTS = ("w4a4", "w4a16", "ragged", "fused")
_FIRST_VARIANTS = ("w4a4", "fused", "ragged", "w4a16")
# each with its own rows: what other libraries were measured at
EQUAL = (
    *((32, 16, 4096, 7168), (128, 8, 1536, 2048), (8, 16, 28672, 4096), (32, 512, 4096, 7168)),
    *((128, 8, 2048, 768), (32, 64, 4096, 7168), (32, 16, 7168, 2048), (8, 16, 4096, 14336)),
    *((32, 2048, 4096, 7168), (8, 2048, 28672, 4096), (32, 4, 4096, 7168), (8, 2, 28672, 4096)),
)
SHAPES = {
    "default": tuple({"n": n, "k": k, "e": e, "m": m} for e, m, n, k in EQUAL),
    "grid": (
        {"n": 1536, "k": 2048, "e": 128},
        {"n": 2048, "k": 768, "e": 128},
        {"n": 4096, "k": 7168, "e": 32},
        {"n": 7168, "k": 2048, "e": 32},
        {"n": 28672, "k": 4096, "e": 8},
        {"n": 4096, "k": 14336, "e": 8},
    ),
    "heldout": ({"n": 5632, "k": 2816, "e": 16}, {"n": 1408, "k": 5120, "e": 64}),
    "cpu": ({"n": 512, "k": 1024, "e": 8},),
    "dense": ({"n": 4096, "k": 7168, "e": 32},),
}
_GRID = (2, 4, 8, 16, 64, 512, 2048)
ROWS = {
    "default": _GRID,
    "grid": _GRID,
    "heldout": (3, 24, 200),
    "cpu": (1, 8, 64),
    "dense": tuple(range(1, 257)),
}
_EXPERTS = 4  # where a shape says nothing


def build(sizes: Sizes, options: Options) -> Case:
    rows, experts, variant = sizes["m"], sizes.get("e", _EXPERTS), options.variant
    fused, coded = variant == "fused", variant != "w4a16"
    n, k = multiple_of_32(sizes["n"]), multiple_of_32(sizes["k"])
    n = n + n % 64 if fused else n
    device = options.device
    made = weight(experts, n, k, device)
    x = torch.randn(experts, rows, k, device=device).bfloat16()
    counts = torch.full((experts,), rows, dtype=torch.int32, device=device)
    gscale = factor(x)
    codes, scales = quant_act(x, gscale, counts, n) if coded else (x, None)
    alphas = made.alpha / gscale if coded else made.alpha
    out = torch.empty(experts, rows, n, dtype=torch.bfloat16, device=device)
    if variant == "ragged":
        offsets = torch.arange(experts + 1, dtype=torch.int32, device=device) * rows
        codes, out, counts = codes.flatten(0, 1), out.flatten(0, 1), offsets
        scales = None if scales is None else scales.flatten(0, 1)
    operands = (*made.parts, codes, scales, alphas, counts)

    values = x if scales is None else dequantize_act(codes, scales, gscale).view(x.shape)

    def value(result: Any) -> torch.Tensor:
        if fused:
            return dequantize_act(result[0], result[1], gscale).double()
        products: torch.Tensor = result.view(experts, rows, n)
        return products

    def forced(function: Any, config: Any) -> torch.Tensor:
        function(config, out, *operands)
        return out

    def others() -> Iterator[Subject | Missing]:
        yield from grouped(Experts(x, (rows,) * experts, made.bf16, made.key), options)

    given = tuple(t for t in operands if t is not None)
    written = (n // 2) * (17 / 32) if fused else 2 * n
    return Case(
        sizes={"m": rows, "n": n, "k": k, "e": experts},
        options=options,
        ops=2 * experts * rows * n * k,
        nbytes=sum(t.nbytes for t in given) + int(experts * rows * written),
        function=_FUNCTIONS[variant],
        args=(*operands, gscale, n, k) if fused else (out, *operands, n, k),
        kwargs={},
        truth=functools.cache(lambda: _product(values, made, fused)),
        peers=tuple if fused else others,
        value=value,
        run=None if fused else forced,
    )


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "w4a4": group_mm,
    "w4a16": group_mm,
    "ragged": group_mm_ragged,
    "fused": group_mm_swiglu_quant,
}


def _product(x: torch.Tensor, made: Weight, fused: bool) -> torch.Tensor:
    """float64 [E, rows, N], or its gated activation [E, rows, N/2]."""
    parts = []
    for expert, values in enumerate(x):
        total = values.double() @ made.dense(expert).double().T
        if fused:
            gate, up = total.chunk(2, -1)
            total = torch.nn.functional.silu(gate) * up
        parts.append(total)
    return torch.stack(parts)


def rank(sizes: Sizes, options: Options) -> int:
    """NVFP4 activations first, then the fused form; the cases of EQUAL in their order."""
    case = tuple(sizes.get(name) for name in ("e", "m", "n", "k"))
    place = EQUAL.index(case) if case in EQUAL else len(EQUAL)
    return _FIRST_VARIANTS.index(options.variant) * (len(EQUAL) + 1) + place


ADAPTER = Adapter(
    "nvfp4_group_mm",
    build,
    SHAPES,
    ROWS,
    variants=VARIANTS,
    max_error=0.2,  # of the fused form, whose result has codes of 4 bits
    rank=rank,
    telling=2 * len(EQUAL) + 1,  # the first two forms
    figures=nvfp4_figures.GROUP_MM,
    summary="M tokens for each of E experts with paired-4:8 sparse NVFP4 weights",
)
