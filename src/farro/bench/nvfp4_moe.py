"""Expert layers of models in the benchmark: M tokens, hidden size K, intermediate size N.

The variants are the two products of a layer by themselves, the first one fused with its activation
and quantizer, and the whole layer as farro.nn.SparseNVFP4Experts computes it: plan, quantizer, both
products, the weighted sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..arch import Arch
from ..dispatch import _DESCRIBERS, explained_by
from ..nn import SparseNVFP4Experts
from ..ops.moe_route import dispatch_plan, dispatch_plan_ragged
from ..ops.nvfp4_group_mm import group_mm, group_mm_ragged, group_mm_swiglu_quant
from ..ops.nvfp4_quantize import (
    dequantize_act,
    scatter_quant_act_planned,
    scatter_quant_act_ragged,
    silu_mul_quant_act,
)
from . import nvfp4_figures
from .case import Adapter, Case, Missing, Options, Sizes, Subject
from .grouped_peers import Experts, grouped
from .layer_peers import layers
from .routing import ABOUT, capacity, routed
from .sparse_experts import Weight, factor, multiple_of_32, weight

VARIANTS = ("gate_up", "down", "fused", "layer")
# n: intermediate size, k: hidden size, e: experts here, of `all` on all ranks
SHAPES = {
    "default": (
        {"n": 768, "k": 2048, "e": 128, "all": 128, "topk": 8},  # Qwen3-30B-A3B
        {"n": 1536, "k": 4096, "e": 128, "all": 128, "topk": 8},  # Qwen3-235B-A22B
        {"n": 14336, "k": 4096, "e": 8, "all": 8, "topk": 2},  # Mixtral 8x7B
        {"n": 2048, "k": 7168, "e": 32, "all": 256, "topk": 8},  # DeepSeek-V3, one rank of eight
    ),
    "heldout": ({"n": 1408, "k": 2048, "e": 64, "all": 64, "topk": 6},),
    "cpu": ({"n": 256, "k": 512, "e": 16, "all": 16, "topk": 4},),
    "dense": ({"n": 768, "k": 2048, "e": 128, "all": 128, "topk": 8},),
}
ROWS = {
    "default": (1, 16, 128, 512, 2048, 8192),
    "heldout": (3, 1000),
    "cpu": (1, 16, 128),
    "dense": tuple(range(1, 257)),
}
_LARGEST = 16.0  # of what is between the products, more than normal values reach
# the most telling points first, where there is no time for all
_FIRST_ROWS = (128, 2048, 16, 8192, 1, 512)
_FIRST_VARIANTS = ("gate_up", "layer", "down", "fused")
_FEW = {"e": 4, "all": 4, "topk": 2}  # where a shape says nothing


@dataclass(frozen=True)
class Layer:
    """The experts of one rank, and what its two quantizers multiply by."""

    gate_up: Weight
    down: Weight
    first: torch.Tensor  # gscale of the layer's input
    second: torch.Tensor  # gscale between the products
    total: int  # experts on all ranks

    @functools.cached_property
    def alphas(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of both products."""
        return self.gate_up.alpha / self.first, self.down.alpha / self.second

    @property
    def experts(self) -> int:
        return self.gate_up.alpha.shape[0]

    def module(self, capacity: int | None = None) -> SparseNVFP4Experts:
        sizes = self.experts, self.down.n, self.down.k
        more: dict[str, Any] = {"capacity": capacity, "total_experts": self.total}
        made = SparseNVFP4Experts(*sizes, **more, device="meta")
        made.gate_up, made.down = self.gate_up.module(), self.down.module()
        made.input_gscale, made.middle_gscale = self.first, self.second
        made.derive_alphas_()
        return made


@dataclass(frozen=True)
class Inputs:
    """x bf16 [T, K] with its routes, and the capacity of an expert."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    cap: int

    def rows(self, experts: int) -> int:
        """What one of so many experts has on average, as layers tell the products."""
        return max(1, self.ids.numel() // experts)


def _gate_up(layer: Layer, counts: torch.Tensor, codes: Any) -> tuple[Any, ...]:
    return *layer.gate_up.parts, *codes, layer.alphas[0], counts


def run_layer(inputs: Inputs, module: SparseNVFP4Experts, *, backend: str = "auto") -> torch.Tensor:
    module.backend = backend
    out: torch.Tensor = module(inputs.x, inputs.ids, inputs.weights)
    return out


def _describe(
    inputs: Inputs,
    module: SparseNVFP4Experts,
    *,
    backend: str = "auto",
    arch: Arch | None = None,
) -> Any:
    """As the product that takes most of its time."""
    offsets, _, token, route = dispatch_plan_ragged(inputs.ids, 0, module.num_experts)
    gscale, up = module.input_gscale, module.gate_up
    codes = scatter_quant_act_ragged(inputs.x, token, route, None, gscale, offsets)
    out = torch.empty(len(token), up.shape[1], dtype=torch.bfloat16, device=inputs.x.device)
    given = (out, *up.parts, *codes, up.alpha, offsets, *up.shape[1:])
    return _DESCRIBERS[group_mm_ragged](*given, backend=backend, arch=arch)


explained_by(_describe)(run_layer)


@dataclass(frozen=True)
class Form:
    """One variant: the call, its result in float64, and the bytes that it has to move."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    products: tuple[Weight, ...]
    moved: int  # beside weights
    truth: Callable[[], torch.Tensor]
    value: Callable[[Any], torch.Tensor]
    peers: Callable[[Options], Iterable[Subject | Missing]] = lambda options: ()
    extra: Callable[[], Iterable[Subject | Missing]] = tuple


def _exact(values: torch.Tensor, made: Weight, counts: list[int]) -> torch.Tensor:
    """Rows of values [E, cap, K] that are tokens, times their expert's weight: float64."""
    rows = [
        values[expert, :count].double() @ made.dense(expert).double().T
        for expert, count in enumerate(counts)
        if count
    ]
    none = torch.empty(0, made.n, dtype=torch.float64, device=values.device)
    return torch.cat([none, *rows])


def _gated(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def _forms(inputs: Inputs, layer: Layer) -> dict[str, Form]:
    x, experts, cap = inputs.x, layer.experts, inputs.cap
    up, down = layer.gate_up, layer.down
    counts, _, token, route = dispatch_plan(inputs.ids, 0, experts, cap)
    given = (x, token, route, None, layer.first, counts, cap)
    codes = scatter_quant_act_planned(*given)
    fused = (*_gate_up(layer, counts, codes), layer.second, up.n, up.k)
    expected: dict[str, Any] = {"expected_rows": inputs.rows(layer.total)}
    middle = group_mm_swiglu_quant(*fused, **expected)
    known = counts.tolist()
    used = sum(known)
    mine = torch.arange(cap, device=x.device) < counts.unsqueeze(1)
    first = dequantize_act(codes[0], codes[1], layer.first)
    second = dequantize_act(middle[0], middle[1], layer.second)

    def product(made: Weight, codes: Any, gscale: torch.Tensor, values: torch.Tensor) -> Form:
        out = torch.empty(experts, cap, made.n, dtype=torch.bfloat16, device=x.device)
        operands = (*made.parts, *codes, made.alpha / gscale, counts)
        return Form(
            group_mm,
            (out, *operands, made.n, made.k),
            (made,),
            used * (made.k * 17 // 32 + 2 * made.n),
            lambda: _exact(values, made, known),
            lambda result: result[mine],
            lambda options: grouped(
                Experts(values.bfloat16(), tuple(known), made.bf16, made.key), options
            ),
        )

    def value(result: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return dequantize_act(*result, layer.second)[mine].double()

    def apart() -> Iterator[Subject | Missing]:
        """The bytes of the fused form by two calls."""
        both = torch.empty(experts, cap, up.n, dtype=torch.bfloat16, device=x.device)
        operands: tuple[Any, ...] = (*_gate_up(layer, counts, codes), up.n, up.k)

        def call() -> Any:
            group_mm(both, *operands, **expected)
            return silu_mul_quant_act(both, layer.second, counts, down.n)

        yield Subject(nvfp4_figures.TWO_CALLS, "farro", call, value)

    def in_padded_rows() -> Iterator[Subject | Missing]:
        """With the least capacity that drops nothing, which the host cannot know in real use."""
        module = layer.module(cap)
        yield Subject("farro auto, padded", "farro", lambda: run_layer(inputs, module))

    def summed() -> torch.Tensor:
        """The layer on dequantized weights, without quantization in between."""
        total = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        for expert in set(inputs.ids[inputs.ids < experts].tolist()):
            t, j = (inputs.ids == expert).nonzero(as_tuple=True)
            rows = _gated(x[t].double() @ up.dense(expert).double().T)
            rows = rows @ down.dense(expert).double().T
            total.index_add_(0, t, rows * inputs.weights[t, j, None].double())
        return total

    return {
        "gate_up": product(up, codes, layer.first, first),
        "down": product(down, middle, layer.second, second),
        "fused": Form(
            group_mm_swiglu_quant,
            fused,
            (up,),
            used * (up.k + down.k) * 17 // 32,
            lambda: _gated(_exact(first, up, known)),
            value,
            extra=apart,
        ),
        "layer": Form(
            run_layer,
            (inputs, layer.module()),
            (up, down),
            2 * x.nbytes,
            summed,
            lambda result: result,
            extra=in_padded_rows,
            peers=lambda options: layers(
                x, inputs.ids, inputs.weights, lambda: (up.bf16(), down.bf16()), options
            ),
        ),
    }


def build(sizes: Sizes, options: Options) -> Case:
    tokens, device = sizes["m"], options.device
    more = {**_FEW, **{name: sizes[name] for name in _FEW if name in sizes}}
    inner, hidden = (multiple_of_32(sizes[name]) for name in ("n", "k"))
    experts = more["e"]
    ids, weights = routed(tokens, more["all"], more["topk"], device)
    cap = capacity(ids[ids < experts], experts)
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    layer = Layer(
        gate_up=weight(experts, 2 * inner, hidden, device),
        down=weight(experts, hidden, inner, device),
        first=factor(x),
        second=torch.full((1,), 448 * 6 / _LARGEST, device=device),
        total=more["all"],
    )
    inputs = Inputs(x, ids, weights, cap)
    form = _forms(inputs, layer)[options.variant]
    whole = options.variant == "layer"
    active, used = len(set(ids[ids < experts].tolist())), int((ids < experts).sum())
    return Case(
        sizes={"m": tokens, "n": inner, "k": hidden, **more, "cap": cap},
        options=options,
        ops=sum(2 * used * made.n * made.k for made in form.products),
        nbytes=sum(made.nbytes(active) for made in form.products) + form.moved,
        function=form.function,
        args=form.args,
        kwargs={} if whole else {"expected_rows": inputs.rows(layer.total)},
        truth=functools.cache(form.truth),
        peers=lambda: form.peers(options),
        extra=form.extra,
        value=form.value,
    )


def rank(sizes: Sizes, options: Options) -> int:
    """Each model at 128 tokens, at 2048, ..., the first products before the rest."""
    late = len(_FIRST_ROWS) + len(_FIRST_VARIANTS)
    m, form = sizes["m"], options.variant
    rows = _FIRST_ROWS.index(m) if m in _FIRST_ROWS else late
    return rows + (_FIRST_VARIANTS.index(form) if form in _FIRST_VARIANTS else late)


ADAPTER = Adapter(
    "nvfp4_moe",
    build,
    SHAPES,
    ROWS,
    variants=VARIANTS,
    max_error=0.3,  # codes of 4 bits, before each product of a layer
    rank=rank,
    telling=len(_FIRST_ROWS) + len(_FIRST_VARIANTS) - 2,  # all that are among the first
    about={"routing": ABOUT},
    figures=nvfp4_figures.MOE,
    summary="expert layers of models, routed: each product, the first one fused, the whole layer",
)
