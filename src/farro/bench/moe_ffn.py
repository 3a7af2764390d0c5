"""moe_ffn in the benchmark: expert layers of models, M tokens that are quantized already.

Sizes and routes are those of nvfp4_moe. Peers compute the layer from values that the codes stand
for, in formats of their own, from prequantized tokens to the weighted sum.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..formats.int8_group import group_count, quantize
from ..ops.int8_gemm import int8_gemm
from ..ops.int8_quantize import quantize_int8_groups
from ..ops.moe_ffn import moe_ffn
from ..ops.moe_ffn.combine import weighted_sum
from ..ops.moe_route import dispatch_plan_ragged
from . import moe_figures, peers
from .case import Adapter, Case, Missing, Options, Sizes, Subject
from .int8_gemm import activations, ceiling, ceiling_ops
from .kept import kept
from .layer_peers import layers
from .moe_ffn_products import peer_products, products
from .nvfp4_moe import SHAPES
from .quantized_layer_peers import Layer, quantized_layers
from .routing import ABOUT, routed

ROWS = {
    "default": (1, 16, 128, 512, 2048, 8192),
    "heldout": (3, 1000),
    "cpu": (1, 16, 128),
    "dense": tuple(range(1, 257)),
}
_FIRST_ROWS = (8192, 16, 128, 1, 2048, 512)
_FEW = {"e": 4, "all": 4, "topk": 2}  # where a shape says nothing


@dataclass(frozen=True, eq=False)
class Weight:
    """Codes [E, N, K] and scales [E, ceil(K/G), N] of one projection of all experts."""

    codes: torch.Tensor
    scale: torch.Tensor
    group_size: int
    key: Hashable

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As moe_ffn takes them."""
        return self.codes.transpose(1, 2), self.scale

    def dense(self, expert: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        scale = self.scale[expert].T
        return peers.exact(self.codes[expert], scale, self.group_size, dtype)

    def bf16(self) -> torch.Tensor:
        experts = range(len(self.codes))
        values: torch.Tensor = kept(
            ("bf16", self.key),
            lambda: torch.stack([self.dense(e, torch.bfloat16) for e in experts]),
        )
        return values

    def nbytes(self, experts: int) -> int:
        """Of so many of the experts."""
        return (self.codes.nbytes + self.scale.nbytes) // max(len(self.codes), 1) * experts


def weight(experts: int, n: int, k: int, group_size: int, device: torch.device) -> Weight:
    """Normal values over sqrt(K), quantized; the same for the same sizes, in every run."""
    key = ("int8 experts", experts, n, k, group_size, device)

    def make() -> Weight:
        random = torch.Generator(device=device).manual_seed(n * 1000003 + k)
        codes = torch.empty(experts, n, k, dtype=torch.int8, device=device)
        scale = torch.empty(experts, group_count(k, group_size), n, device=device)
        for e in range(experts):
            values = torch.randn(n, k, device=device, generator=random) * k**-0.5
            codes[e], of_rows = quantize(values, group_size)
            scale[e] = of_rows.T
        return Weight(codes, scale, group_size, key)

    made: Weight = kept(key, make)
    return made


@dataclass(frozen=True, eq=False)
class Inputs:
    """Codes of M tokens with their scales, their routes, and both projections."""

    codes: torch.Tensor
    scale: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    gate_up: Weight
    down: Weight
    options: Options

    @property
    def args(self) -> tuple[torch.Tensor, ...]:
        return (
            *(self.codes, self.scale, *self.gate_up.parts, *self.down.parts),
            *(self.ids, self.weights),
        )

    @property
    def experts(self) -> int:
        return len(self.gate_up.codes)

    def exact(self) -> torch.Tensor:
        """The layer in float64, without quantization in between."""
        x = peers.exact(self.codes, self.scale, self.gate_up.group_size)
        total = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        for expert in set(self.ids[self.ids < self.experts].tolist()):
            t, j = (self.ids == expert).nonzero(as_tuple=True)
            gate, up = (x[t] @ self.gate_up.dense(expert).T).chunk(2, -1)
            rows = torch.nn.functional.silu(gate) * up @ self.down.dense(expert).T
            total.index_add_(0, t, rows * self.weights[t, j, None].double())
        return total

    def apart(self) -> Iterator[Subject | Missing]:
        """What farro's other operators make of it, an expert at a time, counts known here."""
        group_size, experts = self.gate_up.group_size, self.experts
        counts = torch.bincount(self.ids[self.ids < experts].flatten(), minlength=experts)
        ends = counts.cumsum(0).tolist()
        bounds = [(e, a, b) for e, (a, b) in enumerate(zip([0, *ends], ends)) if b > a]
        (w_up, s_up), (w_down, s_down) = self.gate_up.parts, self.down.parts
        used = ends[-1] if ends else 0

        def call() -> torch.Tensor:
            _, dest, token, _ = dispatch_plan_ragged(self.ids, 0, experts)
            rows = token[:used]
            x, scale = self.codes[rows], self.scale[rows]
            both = x.new_empty(used, w_up.shape[2], dtype=torch.bfloat16)
            for e, a, b in bounds:
                given = (x[a:b], w_up[e], scale[a:b], s_up[e])
                int8_gemm(*given, group_size=group_size, out=both[a:b])
            gate, up = both.chunk(2, -1)
            h = torch.nn.functional.silu(gate.float()) * up.float()
            q, s = quantize_int8_groups(h, group_size)
            y = x.new_empty(used, w_down.shape[2], dtype=torch.bfloat16)
            for e, a, b in bounds:
                given = (q[a:b], w_down[e], s[a:b], s_down[e])
                int8_gemm(*given, group_size=group_size, out=y[a:b])
            return weighted_sum(y, dest, self.weights, self.options.dtype)

        yield Subject(
            *("farro auto, operators apart", "farro", call),
            note="an int8_gemm for each expert and product; the host knows the counts",
        )

    def peers(self) -> Iterator[Subject | Missing]:
        x = peers.exact(self.codes, self.scale, self.gate_up.group_size, torch.bfloat16)
        dense = lambda: (self.gate_up.bf16(), self.down.bf16())  # noqa: E731
        yield from layers(x, self.ids, self.weights, dense, self.options)
        key = (self.gate_up.key, self.down.key)
        given = (self.gate_up.codes, self.gate_up.scale, self.down.codes, self.down.scale)
        codes = (self.codes, self.scale, *given)
        layer = Layer(x, self.ids, self.weights, dense, key, codes)
        yield from quantized_layers(layer, self.options)
        yield from peer_products(layer, self.options)


def build(sizes: Sizes, options: Options) -> Case:
    tokens, inner, hidden, device = sizes["m"], sizes["n"], sizes["k"], options.device
    more = {**_FEW, **{name: sizes[name] for name in _FEW if name in sizes}}
    experts, group_size = more["e"], options.group_size
    ids, weights = routed(tokens, more["all"], more["topk"], device)
    inputs = Inputs(
        *activations(tokens, hidden, group_size, device),
        *(ids, weights),
        weight(experts, 2 * inner, hidden, group_size, device),
        weight(experts, hidden, inner, group_size, device),
        options,
    )
    active, used = len(set(ids[ids < experts].tolist())), int((ids < experts).sum())

    def forced(function: Any, config: Any) -> torch.Tensor:
        out = torch.empty(tokens, hidden, dtype=options.dtype, device=device)
        function(config, *inputs.args, out, group_size, False)
        return out

    case = Case(
        sizes={"m": tokens, "n": inner, "k": hidden, **more},
        options=options,
        ops=6 * used * inner * hidden,
        nbytes=inputs.gate_up.nbytes(active)
        + inputs.down.nbytes(active)
        + inputs.codes.nbytes
        + inputs.scale.nbytes
        + tokens * hidden * options.dtype.itemsize,
        function=moe_ffn,
        args=inputs.args,
        kwargs={"group_size": group_size, "output_dtype": options.dtype},
        truth=functools.cache(inputs.exact),
        peers=inputs.peers,
        extra=lambda: (*inputs.apart(), *products(case, inputs)),
        run=forced,
    )
    return case


def rank(sizes: Sizes, options: Options) -> int:
    """Each model at 8192 tokens, at 16, ..., other numbers of tokens last."""
    m = sizes["m"]
    return _FIRST_ROWS.index(m) if m in _FIRST_ROWS else len(_FIRST_ROWS)


ADAPTER = Adapter(
    "moe_ffn",
    build,
    SHAPES,
    ROWS,
    group_sizes=(128, 256),
    max_error=5e-2,  # quantized in between
    ceiling=ceiling,
    ceiling_ops=ceiling_ops,
    rank=rank,
    telling=_FIRST_ROWS.index(1),  # all that figures are about
    about={"routing": ABOUT},
    figures=moe_figures.LAYER,
    summary="expert layers of models in INT8, routed, tokens already quantized, one call",
)
