"""moe_ffn through Triton, on SM80 and newer: four launches, none of which asks the host anything.

    plan       rows for the routes, sorted by expert                (moe_route's)
    gate_up    codes of silu(gate) * up, of rows read through the plan
    down       BF16 rows
    combine    the weighted sum of each token's rows, in slot order

Between them are the plan, the codes with their scales, and the BF16 rows; nothing else grows with
the number of routes. Triton is imported by the first call, never by the choice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ...arch import interpreting
from ...dispatch import remember
from ...formats.int8_group import group_count
from ...problem import TensorSpec
from ...triton_gemm import Bound, Launch
from ..moe_route import triton_plan
from .triton_configs import (
    Config,
    Tile,
    block_k,
    config,
    configs,
    heuristic,
    must_run,
    refuses,
    why_not,
)

__all__ = [
    "Config",
    "Tile",
    "bind",
    "config",
    "configs",
    "heuristic",
    "must_run",
    "refuses",
    "run",
    "why_not",
]

_EXPERTS = 128  # whose offsets a program reads, or a larger power of two: few kernels to compile
_PER_PROCESSOR = 4  # programs at a time, or a few more
_PROCESSORS = 132  # of a device that is not here
_OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}


@functools.lru_cache(maxsize=16)
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _grid(rows: int, experts: int, tile: Tile, column_tiles: int, device: torch.device) -> int:
    """Programs: at most so many tiles, whatever the routes; each expert may begin another one."""
    tiles = (rows // tile.tokens + min(experts, rows)) * column_tiles
    return max(1, min(tiles, _PER_PROCESSOR * _processors(device)))


def offsets_read(experts: int) -> int:
    """By each program, a power of two; kernels differ by it."""
    return max(_EXPERTS, 1 << (experts - 1).bit_length())


def _strides(tensor: torch.Tensor, rows: bool = False) -> tuple[int, ...]:
    """Those of a tensor, and dense ones of dimensions whose own say nothing: of one element.

    Triton tells kernels apart by them. A stride of 0, which the checks refuse, comes from `warm`:
    weights of many experts, of which no row but the first expert's is read. `rows`: of weights,
    dense as they are preferred, with the last two dimensions exchanged.
    """
    order = list(range(tensor.dim()))
    if rows:
        order[-2:] = order[:-3:-1]
    strides, dense = list(tensor.stride()), 1
    for dim in reversed(order):
        if tensor.shape[dim] == 1 or strides[dim] == 0:
            strides[dim] = dense
        dense *= max(tensor.shape[dim], 1)
    return tuple(strides)


def _constants(tile: Tile, experts: int, group_size: int, k: int) -> tuple[Any, ...]:
    shape = (group_size, block_k(group_size), offsets_read(experts), tile.tokens, tile.columns)
    return (*shape, tile.stages, tile.swap, k % group_size == 0, interpreting())


def prepare_gate_up(
    tile: Tile,
    x: torch.Tensor,
    scale_x: torch.Tensor,
    w: torch.Tensor,
    scale_w: torch.Tensor,
    offsets: torch.Tensor,
    src_tok: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    group_size: int,
    interleaved: bool,
) -> Launch:
    """The launch that writes codes and scales of silu(gate) * up; meta tensors are accepted."""
    from . import triton_kernel

    (experts, h, _), (rows, i) = w.shape, codes.shape
    # where a feature's gate is, and its up from there: in columns of w and of its scales
    step, up = (2, 1) if interleaved else (1, i)
    of_w, of_scale = _strides(w, rows=True), _strides(scale_w)
    numbers = (
        *(experts, i, h, *_strides(x), *_strides(scale_x)),
        *(of_w[0], of_w[1], step * of_w[2], up * of_w[2]),
        *(of_scale[0], of_scale[1], step * of_scale[2], up * of_scale[2]),
    )
    constants = _constants(tile, experts, group_size, h)
    column_tiles = -(-i // max(group_size, tile.columns))
    grid = (_grid(rows, experts, tile, column_tiles, codes.device), 1, 1)
    order, options = tuple(range(8)), {"num_warps": tile.warps, **_OPTIONS}
    kernel = triton_kernel.gate_up
    return Launch(kernel, order, (None,) * 8, numbers, 0, constants, grid, options)


def prepare_down(
    tile: Tile,
    codes: torch.Tensor,
    scale: torch.Tensor,
    w: torch.Tensor,
    scale_w: torch.Tensor,
    offsets: torch.Tensor,
    y: torch.Tensor,
    group_size: int,
) -> Launch:
    """The launch that writes the BF16 rows; meta tensors are accepted."""
    from . import triton_kernel

    (experts, i, h), rows = w.shape, y.shape[0]
    numbers = (experts, h, i, *_strides(w, rows=True), *_strides(scale_w))
    constants = _constants(tile, experts, group_size, i)
    grid = (_grid(rows, experts, tile, -(-h // tile.columns), y.device), 1, 1)
    order, options = tuple(range(6)), {"num_warps": tile.warps, **_OPTIONS}
    return Launch(triton_kernel.down, order, (None,) * 6, numbers, 0, constants, grid, options)


def prepare_combine(
    block: int,
    y: torch.Tensor,
    route_dest: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor,
) -> Launch:
    """The launch that writes the weighted sums; meta tensors are accepted."""
    from . import triton_kernel

    (tokens, topk), h = route_dest.shape, out.shape[1]
    while h > block * 65535:  # a grid's second dimension ends there
        block *= 2
    numbers = (topk, h, *_strides(topk_weights))
    grid = (tokens, -(-h // block), 1)
    options = {"num_warps": max(1, min(block // 256, 16)), **_OPTIONS}
    order = tuple(range(4))
    return Launch(triton_kernel.combine, order, (None,) * 4, numbers, 0, (block,), grid, options)


class Layer:
    """run() for calls of one Problem: all but addresses is worked out once for each device."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.gate_up = Bound(prepare_gate_up, config.gate_up, 8)
        self.down = Bound(prepare_down, config.down, 6)
        self.combine = Bound(prepare_combine, config.block, 4)
        self.plan: Callable[..., None] | None = None

    def routed(self, topk_ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, ...]:
        """offsets [E+1], route_dest [T, topk], src_tok and src_route [T*topk], all int32."""
        routes = topk_ids.numel()
        shapes = ((experts + 1,), tuple(topk_ids.shape), (routes,), (routes,))
        made = [torch.empty(s, dtype=torch.int32, device=topk_ids.device) for s in shapes]
        if self.plan is None:
            self.plan = triton_plan.bind(triton_plan.config_of(routes, experts))
        self.plan(topk_ids, *made, 0, None)
        return tuple(made)

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
        (experts, i, h), routes, device = w_down.shape, topk_ids.numel(), out.device
        if not (experts and routes):
            out.zero_()
            return
        offsets, route_dest, src_tok, _ = self.routed(topk_ids, experts)
        codes = torch.empty(routes, i, dtype=torch.int8, device=device)
        shape = (routes, group_count(i, group_size))
        scale = torch.empty(shape, dtype=torch.float32, device=device)
        if i:
            rows = (x, scale_x, w_gate_up, scale_gate_up, offsets, src_tok)
            self.gate_up(*rows, codes, scale, group_size, interleaved)
        y = torch.empty(routes, h, dtype=torch.bfloat16, device=device)
        self.down(codes, scale, w_down, scale_down, offsets, y, group_size)
        self.combine(y, route_dest, topk_weights, out)


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
