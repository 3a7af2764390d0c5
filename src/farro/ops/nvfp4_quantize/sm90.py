"""The quantizers on SM90a: launches of sm90.cu, for tensors that start at multiples of 16 bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from ...cuda.fp8.gemm import Prepared
from ...cuda.launch import Launch, kernel_function
from ...formats.nvfp4 import BLOCK
from .activation import Gated
from .sm90_configs import KINDS, Config, grid, kernel_name, least_rows

_THREADS = 256


class _Places(ctypes.Structure):
    """`struct Places` of sm90_rows.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tokens", "routes", "counts")),
        *((name, ctypes.c_int) for name in ("token_count", "route_count", "experts", "capacity")),
    )


class _Quantize(ctypes.Structure):
    """`struct Quantize` of sm90.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weights", "gscale", "codes", "scales")),
        *((name, ctypes.c_int) for name in ("blocks", "per_expert", "least")),
        *((name, ctypes.c_void_p) for name in ("token_codes", "token_scales")),
    )


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _quantizes(
    x: torch.Tensor | None,
    weights: torch.Tensor | None,
    gscale: torch.Tensor | None,
    codes: torch.Tensor,
    scales: torch.Tensor,
    blocks: int,
    least: int = 0,
    tokens: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> _Quantize:
    given = (x, weights, gscale, codes, scales)
    per_expert = gscale is not None and gscale.numel() > 1
    sources = (None, None) if tokens is None else tokens
    numbers = (blocks, int(per_expert), least)
    return _Quantize(*map(_address, given), *numbers, *map(_address, sources))


def _launch(
    name: tuple[str, str], device: int, ctas: int, experts: int, parameters: tuple[Any, ...]
) -> Launch:
    """`experts` whose first rows the kernel lists in shared memory."""
    shared = 4 * (experts + 1)
    function = kernel_function(*name, "sm_90a", device, shared)
    return Launch(device, function, (ctas, 1, 1), _THREADS, shared, 1, parameters)


def quantize_launch(
    config: Config,
    x: torch.Tensor,
    gscale: torch.Tensor,
    expert_num_tokens: torch.Tensor | None,
    how: Gated | None,
    b_act: torch.Tensor,
    sfb: torch.Tensor,
) -> Launch:
    device, (experts, rows, blocks) = x.get_device(), sfb.shape
    if expert_num_tokens is None:  # one long row
        total = sfb.numel()
        name = kernel_name("tokens", "in_place")
        given = _quantizes(x, None, gscale, b_act, sfb, total)
        ctas = grid(config, device, -(-total // 32))
        return _launch(name, device, ctas, 0, (given, _Places()))
    name = kernel_name("rows", "in_place") if how is None else kernel_name("gate", how.interleaved)
    given = _quantizes(x, None, gscale, b_act, sfb, blocks)
    where = _Places(0, 0, expert_num_tokens.data_ptr(), 0, 0, experts, rows)
    ctas = grid(config, device, experts * rows * -(-blocks // 32))
    return _launch(name, device, ctas, experts, (given, where))


class _Two:
    """Two launches, one after the other."""

    def __init__(self, *launches: Launch) -> None:
        self.launches = launches

    def on_current_stream(self) -> None:
        for launch in self.launches:
            launch.on_current_stream()


def scatter_launch(
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
    tokens: tuple[torch.Tensor, torch.Tensor] | None,
) -> Any:
    """Rows from a1; with `tokens`, after a launch that may quantize a1 to these."""
    device, blocks, kind = a1.get_device(), sfb.shape[-1], KINDS[by]
    experts = counts.shape[0] - (kind == "ragged")
    routes = 0 if topk_weights is None else topk_weights.numel()
    if kind == "by_routes":
        routes = first.shape[0]
    least = 0 if tokens is None else least_rows(config, a1.shape[0])
    given = _quantizes(a1, topk_weights, gscale, b_act, sfb, blocks, least, tokens)
    addresses = (first.data_ptr(), second.data_ptr(), counts.data_ptr())
    where = _Places(*addresses, a1.shape[0], routes, experts, cap)
    items = (routes if kind == "by_routes" else sfb.numel() // max(blocks, 1)) * -(-blocks // 32)
    ctas = grid(config, device, max(items, sfb.numel() >> 12))
    name = kernel_name("rows", kind, topk_weights is not None)
    listed = experts if kind == "planned" else 0
    rows = _launch(name, device, ctas, listed, (given, where))
    if tokens is None:
        return rows
    total = tokens[1].numel()
    once = _quantizes(a1, None, gscale, *tokens, total, least)
    ctas = grid(config, device, -(-total // 32))
    return _Two(_launch(kernel_name("tokens", kind), device, ctas, listed, (once, where)), rows)


def copy_launch(
    config: Config,
    q: torch.Tensor,
    q_sf: torch.Tensor,
    src_tok: torch.Tensor,
    expert_num_tokens: torch.Tensor,
    cap: int,
    b_act: torch.Tensor,
    sfb: torch.Tensor,
) -> Launch:
    device, (experts, rows, blocks) = q.get_device(), sfb.shape
    given = _quantizes(None, None, None, b_act, sfb, blocks, 0, (q, q_sf))
    where = _Places(
        src_tok.data_ptr(), 0, expert_num_tokens.data_ptr(), q.shape[0], 0, experts, cap
    )
    ctas = grid(config, device, experts * rows * -(-blocks // 128))
    return _launch(kernel_name("rows", "planned"), device, ctas, experts, (given, where))


class _Bound:
    """run() for calls alike in all but addresses."""

    def __init__(self, config: Config, launch: Callable[..., Any]) -> None:
        self.config, self.launch = config, launch
        self.prepared = Prepared()

    def __call__(self, *given: Any) -> None:
        if given[-1].numel():
            tensors = [g for g in given if g is None or isinstance(g, torch.Tensor)]
            device = given[0].device
            self.prepared.run(device, tensors, lambda: self.launch(self.config, *given))


class _Scatter(_Bound):
    """With room for the tokens' codes where quantizing them once may pay."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, scatter_launch)

    def __call__(self, *given: Any) -> None:
        a1, _, _, topk_weights, gscale, _, by, _, _, sfb = given
        if not sfb.numel():
            return
        tokens, blocks = a1.shape[0], sfb.shape[-1]
        alike = by != "routes" and topk_weights is None and gscale.shape[0] == 1
        room = None
        if alike and self.config.pays(tokens, sfb.numel() // blocks, blocks * BLOCK):
            codes = torch.empty((tokens, 16 * blocks), dtype=torch.uint8, device=a1.device)
            room = codes, torch.empty((tokens, blocks), dtype=torch.uint8, device=a1.device)
        tensors = [g for g in given if g is None or isinstance(g, torch.Tensor)]
        self.prepared.run(
            a1.device,
            [*tensors, *(room or ())],
            lambda: self.launch(self.config, *given, room),
        )


def bind_quantize(config: Config) -> Callable[..., None]:
    """quantize() with its configuration, for calls alike in all but their tensors' addresses."""
    return _Bound(config, quantize_launch)


def bind_scatter(config: Config) -> Callable[..., None]:
    return _Scatter(config)


def bind_copy(config: Config) -> Callable[..., None]:
    return _Bound(config, copy_launch)


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
