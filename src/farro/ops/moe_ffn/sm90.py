"""moe_ffn on SM90a: launches of which each may begin while the one before it ends.

    moe_plan       rows for the routes, sorted by expert         (sm90_route.cu)
    moe_gather     the rows of tokens in this order, where experts have many
    moe_gate_up    codes of silu(gate) * up, of rows read through the plan  (sm90.cu)
    moe_down       BF16 rows
    moe_sum        the weighted sum of each token's rows, in slot order

One piece of scratch memory holds what goes from launch to launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...cuda import jit
from ...cuda.fp8.gemm import Prepared
from ...cuda.launch import Launch
from ...dispatch import remember
from ...problem import Problem, TensorSpec
from .sm90_configs import (
    Config,
    Tile,
    config,
    configs,
    heuristic,
    must_run,
    refuses,
    why_not,
)
from .sm90_launches import Scratch, kernel_name, launches
from .triton_configs import sizes

__all__ = [
    "Config",
    "Tile",
    "bind",
    "compile_products",
    "config",
    "configs",
    "heuristic",
    "must_run",
    "refuses",
    "run",
    "why_not",
]


def compile_products(config: Config, problem: Problem) -> None:
    """Bring both products' machine code to disk, with no GPU at work."""
    group_size = sizes(problem).group
    for tile, gated in ((config.gate_up, True), (config.down, False)):
        jit.cubin(*kernel_name(tile, gated, group_size), "sm_90a")


class _All:
    """Launches, one after the other."""

    def __init__(self, *launches: Launch) -> None:
        self.launches = launches

    def on_current_stream(self) -> None:
        for launch in self.launches:
            launch.on_current_stream()


class Layer:
    """run() for calls alike in all but addresses: launches are prepared once for each of these."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.prepared = Prepared()
        self.scratch: Scratch | None = None

    def __call__(
        self,
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
        (experts, i, h), routes = w_down.shape, topk_ids.numel()
        if not (experts and routes):
            out.zero_()
            return
        if self.scratch is None:
            self.scratch = Scratch(routes, experts, h, i, group_size)
        scratch = self.scratch
        memory = torch.empty(scratch.bytes, dtype=torch.uint8, device=out.device)
        if not i:  # sums over nothing
            memory.zero_()
        given = (x, scale_x, w_gate_up, scale_gate_up, w_down, scale_down, topk_ids, topk_weights)

        def prepare() -> Any:
            where = (out, scratch, memory.data_ptr())
            return _All(*launches(self.config, given, *where, group_size, interleaved))

        self.prepared.run(out.device, (*given, out, memory), prepare)


def bind(config: Config) -> Callable[..., None]:
    """run() with its configuration, for calls alike in all but their tensors' addresses."""
    return Layer(config)


_LAYERS: dict[Any, Callable[..., None]] = {}


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
    """Write moe_ffn's result to `out`, launched on the current stream of its device."""
    given = (x, scale_x, w_gate_up, scale_gate_up, w_down, scale_down, topk_ids, topk_weights, out)
    key = (config, group_size, interleaved, *map(TensorSpec.of, given))
    layer = _LAYERS.get(key)
    if layer is None:
        layer = bind(config)
        remember(_LAYERS, key, layer)
    layer(*given, group_size, interleaved)
