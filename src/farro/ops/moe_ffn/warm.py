"""What `farro.warmup` compiles of moe_ffn: what calls of some tokens would choose."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

from ...arch import arch_of
from ...dispatch import Operator, select
from ...formats.int8_group import GROUP_SIZES, group_count
from ...problem import Problem
from ..int8_gemm.checks import OUTPUT_DTYPES
from ..moe_route.plan import ID_DTYPES
from .checks import ARGUMENTS, NAME
from .triton import offsets_read

_TOPK = (1, 2, 4, 6, 8, 10)
# how many there are decides how many rows one has, and so which tiles are taken
_EXPERTS = (1, 8, 32, 64, 128, 256)


def calls(
    operator: Operator, device: torch.device, shape: tuple[int, ...]
) -> list[Callable[[], Any]]:
    """Calls for (tokens, I, H): each group size, number of routes, ids and output dtype."""
    usual: dict[str, Any] = {
        "group_size": GROUP_SIZES[-1],
        "topk": 8,
        "ids": torch.int64,
        "dtype": torch.bfloat16,
    }
    forms = [{**usual, "group_size": group_size} for group_size in GROUP_SIZES]
    forms += [{**usual, "topk": topk, "ids": ids} for topk in _TOPK for ids in ID_DTYPES]
    forms += [{**usual, "dtype": dtype} for dtype in OUTPUT_DTYPES]
    return [functools.partial(_run, operator, device, shape, **form) for form in forms]


def operands(
    device: torch.device | str,
    shape: tuple[int, ...],
    experts: int,
    group_size: int,
    topk: int,
    ids: torch.dtype,
) -> dict[str, torch.Tensor]:
    """Zeros, laid out as preferred."""
    tokens, i, h = shape

    def new(dtype: torch.dtype, *size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    of_h, of_i = group_count(h, group_size), group_count(i, group_size)
    given = (
        new(torch.int8, tokens, h),
        new(torch.float32, tokens, of_h),
        new(torch.int8, experts, 2 * i, h).transpose(1, 2),
        new(torch.float32, experts, of_h, 2 * i),
        new(torch.int8, experts, h, i).transpose(1, 2),
        new(torch.float32, experts, of_i, h),
        new(ids, tokens, topk),
        new(torch.float32, tokens, topk),
    )
    return dict(zip(ARGUMENTS, given))


def _run(
    operator: Operator,
    device: torch.device,
    shape: tuple[int, ...],
    group_size: int,
    topk: int,
    ids: torch.dtype,
    dtype: torch.dtype,
) -> None:
    """Each kernel and configuration that some number of experts has, on the weights of one.

    Zeros as ids leave all routes to it: the others' weights may be anywhere.
    """
    form = (group_size, topk, ids)
    # strides that 16 does not divide are others where gate and up are interleaved
    layouts = (False, True) if shape[2] % 16 else (False,)
    chosen: dict[Any, tuple[Callable[..., None], int, bool]] = {}
    for experts, interleaved in itertools.product(_EXPERTS, layouts):
        tensors: dict[str, Any] = dict(operands("meta", shape, experts, *form))
        params = {"group_size": group_size, "interleaved": interleaved, "output_dtype": dtype}
        choice = select(operator, Problem.of(NAME, tensors, params, arch_of(device)))
        key = (choice.config, offsets_read(experts), interleaved)
        chosen.setdefault(key, (choice.run, experts, interleaved))
    given = operands(device, shape, 1, *form)
    out = torch.empty(shape[0], shape[2], dtype=dtype, device=device)
    for run, experts, interleaved in chosen.values():
        if out.numel():
            many = {n: t.expand(experts, -1, -1) if t.dim() == 3 else t for n, t in given.items()}
            run(*many.values(), out, group_size, interleaved)
