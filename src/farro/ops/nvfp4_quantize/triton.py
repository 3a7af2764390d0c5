"""The quantizers through Triton, on SM80 and newer: one launch each, for any alignment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...triton_launch import Launcher
from .activation import Gated
from .triton_configs import Config, copying

_MANY_TOKENS = 256  # from which a token is quantized once, by a launch of its own


@dataclass(frozen=True)
class Launch:
    """One launch but for addresses.

    `order` tells which of run()'s arguments are the kernel's tensors, which come first; None for an
    absent one.
    """

    kernel: Any
    order: tuple[int | None, ...]
    numbers: tuple[int, ...]
    constants: tuple[Any, ...]
    grid: tuple[int, int, int]
    options: dict[str, Any]

    def tensors(self, arguments: Sequence[Any]) -> list[torch.Tensor | None]:
        """Those that the kernel takes, of run()'s arguments."""
        return [None if place is None else arguments[place] for place in self.order]

    def args(self, *arguments: Any) -> tuple[Any, ...]:
        """Complete positional arguments, which may be meta tensors."""
        return (*self.tensors(arguments), *self.numbers, *self.constants)


def _launch(
    config: Config,
    kernel: Any,
    order: tuple[int | None, ...],
    numbers: Sequence[int],
    constants: Sequence[Any],
    items: int,
    regions: int,
) -> Launch:
    """Enough programs in each region for its items, or its share of all programs."""
    grid = (max(1, min(items, -(-config.programs // regions))), regions, 1)
    # no product may be fused with a sum that the formula rounds apart
    options = {"num_warps": config.warps, "enable_fp_fusion": False}
    made = tuple(numbers), (*constants, config.blocks)
    return Launch(kernel, order, *made, grid, options)


# run()'s arguments that are the kernels' tensors: x, rows, routes, weights, gscale, counts, ...
_DENSE = (0, None, None, None, 1, 2, 4, 5)
_SCATTER = (0, 1, 2, 3, 4, 5, 8, 9)
_COPY = (0, 1, 2, 3, 5, 6)
_PLAIN = Gated(False, "silu", 1.0, -1.0)


def prepare_quantize(
    config: Config,
    x: torch.Tensor,
    gscale: torch.Tensor,
    expert_num_tokens: torch.Tensor | None,
    how: Gated | None,
    b_act: torch.Tensor,
    sfb: torch.Tensor,
) -> Launch:
    from .triton_kernel import quantize_regions

    experts, rows, blocks = sfb.shape
    gated = how or _PLAIN
    activation = (gated.interleaved, gated.activation == "situ", gated.beta, gated.linear_beta)
    constants = (False, gscale.shape[0] > 1, how is not None, *activation)
    numbers = (0, 0, rows, experts, blocks)
    items = rows * -(-blocks // config.blocks)
    return _launch(config, quantize_regions, _DENSE, numbers, constants, items, experts)


def prepare_scatter(
    config: Config,
    a1: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    topk_weights: torch.Tensor | None,
    gscale: torch.Tensor,
    counts: torch.Tensor,
    by: str,
    cap: int,
    b_act: torch.Tensor,
    sfb: torch.Tensor,
) -> Launch:
    from .triton_kernel import quantize_regions, quantize_routes

    ragged = by == "ragged"
    experts, blocks = counts.shape[0] - ragged, sfb.shape[-1]
    tiles, per_expert = -(-blocks // config.blocks), gscale.shape[0] > 1
    if by == "routes":
        numbers = (a1.shape[0], first.shape[0], cap, experts, blocks)
        items = max(first.shape[0] * tiles, experts * -(-cap * blocks // (16 * config.blocks)))
        return _launch(config, quantize_routes, _SCATTER, numbers, (per_expert,), items, 1)
    routes = 0 if topk_weights is None else topk_weights.numel()
    numbers = (a1.shape[0], routes, cap, experts, blocks)
    regions = 1 if ragged else experts
    constants = (ragged, per_expert, False, False, False, 1.0, -1.0)
    return _launch(config, quantize_regions, _SCATTER, numbers, constants, cap * tiles, regions)


def prepare_copy(
    config: Config,
    q: torch.Tensor,
    q_sf: torch.Tensor,
    src_tok: torch.Tensor,
    expert_num_tokens: torch.Tensor,
    cap: int,
    b_act: torch.Tensor,
    sfb: torch.Tensor,
) -> Launch:
    from .triton_kernel import copy_rows

    experts, rows, blocks = sfb.shape
    items = rows * -(-blocks // config.blocks)
    numbers = (q.shape[0], rows, blocks)
    return _launch(config, copy_rows, _COPY, numbers, (), items, experts)


def prepare_dequantize(
    config: Config,
    b_act: torch.Tensor,
    sfb: torch.Tensor,
    gscale: torch.Tensor | None,
    out: torch.Tensor,
) -> Launch:
    from .triton_kernel import dequantize_rows

    regions = b_act.shape[0] if b_act.dim() > 2 else 1
    per_region = gscale is not None and gscale.numel() > 1
    if per_region and b_act.dim() == 2:  # a row is a region
        regions = b_act.shape[0]
    blocks = sfb.shape[-1]
    rows = sfb.numel() // (regions * blocks)
    items = rows * -(-blocks // config.blocks)
    order = (0, 1, 2, 3)
    return _launch(config, dequantize_rows, order, (rows, blocks), (per_region,), items, regions)


class _Bound:
    """run() for calls of one Problem: all but addresses is worked out once for each device."""

    def __init__(self, config: Config, prepare: Callable[..., Launch]) -> None:
        self.config, self.prepare = config, prepare
        self.launchers: dict[int | None, tuple[Launcher, Launch]] = {}

    def __call__(self, *arguments: Any) -> None:
        index = arguments[0].device.index
        if index not in self.launchers:
            self.launchers[index] = self._bind(index, arguments)
        launcher, launch = self.launchers[index]
        launcher(*launch.tensors(arguments))

    def _bind(self, index: int | None, arguments: tuple[Any, ...]) -> tuple[Launcher, Launch]:
        launch = self.prepare(self.config, *arguments)
        tensors = launch.tensors(arguments)
        key = (
            *(launch.kernel, index, launch.constants, self.config.warps),
            tuple(t is not None and (t.dtype, t.data_ptr() % 16 == 0) for t in tensors),
        )
        rest = (*launch.numbers, *launch.constants)
        absent = (None,) * len(tensors)
        made = Launcher(launch.kernel, key, index, launch.grid, rest, launch.options, absent)
        return made, launch


def bind_quantize(config: Config) -> Callable[..., None]:
    """quantize() with its configuration, for calls alike in all but their tensors' addresses."""
    return _Bound(config, prepare_quantize)


class _Scatter:
    """Routes to their rows: each quantized on its way, or copied from tokens quantized once.

    A token's routes have the same bytes where neither a weight nor a gscale is theirs. Quantizing
    is bound by arithmetic, so where tokens are many two launches take less time than one.
    """

    def __init__(self, config: Config) -> None:
        self.direct = _Bound(config, prepare_scatter)
        self.tokens = _Bound(config, prepare_quantize)
        self.rows: _Bound | None = None

    def __call__(
        self,
        a1: torch.Tensor,
        first: torch.Tensor,
        second: torch.Tensor,
        topk_weights: torch.Tensor | None,
        gscale: torch.Tensor,
        counts: torch.Tensor,
        by: str,
        cap: int,
        b_act: torch.Tensor,
        sfb: torch.Tensor,
    ) -> None:
        alike = by != "routes" and topk_weights is None and gscale.shape[0] == 1
        if not alike or a1.shape[0] < _MANY_TOKENS:
            self.direct(a1, first, second, topk_weights, gscale, counts, by, cap, b_act, sfb)
            return
        tokens, blocks = a1.shape[0], sfb.shape[-1]
        codes = torch.empty((1, tokens, 16 * blocks), dtype=torch.uint8, device=a1.device)
        scales = torch.empty((1, tokens, blocks), dtype=torch.uint8, device=a1.device)
        self.tokens(a1, gscale, None, None, codes, scales)
        if self.rows is None:
            self.rows = _Bound(copying(blocks), prepare_copy)
        if by == "ragged":  # as one expert's
            counts, b_act, sfb, cap = counts[-1:], b_act[None], sfb[None], sfb.shape[0]
        self.rows(codes[0], scales[0], first, counts, cap, b_act, sfb)


def bind_scatter(config: Config) -> Callable[..., None]:
    return _Scatter(config)


def bind_copy(config: Config) -> Callable[..., None]:
    return _Bound(config, prepare_copy)


def bind_dequantize(config: Config) -> Callable[..., None]:
    return _Bound(config, prepare_dequantize)


def quantize(
    config: Config,
    x: torch.Tensor,
    gscale: torch.Tensor,
    expert_num_tokens: torch.Tensor | None,
    how: Gated | None,
    b_act: torch.Tensor,
    sfb: torch.Tensor,
) -> None:
    bind_quantize(config)(x, gscale, expert_num_tokens, how, b_act, sfb)


def scatter(
    config: Config,
    a1: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    topk_weights: torch.Tensor | None,
    gscale: torch.Tensor,
    counts: torch.Tensor,
    by: str,
    cap: int,
    b_act: torch.Tensor,
    sfb: torch.Tensor,
) -> None:
    given = (a1, first, second, topk_weights, gscale, counts, by, cap, b_act, sfb)
    bind_scatter(config)(*given)


def copy(
    config: Config,
    q: torch.Tensor,
    q_sf: torch.Tensor,
    src_tok: torch.Tensor,
    expert_num_tokens: torch.Tensor,
    cap: int,
    b_act: torch.Tensor,
    sfb: torch.Tensor,
) -> None:
    bind_copy(config)(q, q_sf, src_tok, expert_num_tokens, cap, b_act, sfb)


def dequantize(
    config: Config,
    b_act: torch.Tensor,
    sfb: torch.Tensor,
    gscale: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    bind_dequantize(config)(b_act, sfb, gscale, out)
