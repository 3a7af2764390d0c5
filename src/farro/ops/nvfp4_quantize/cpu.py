"""The quantizers on a CPU: used rows alone, in blocks that stay in cache; the reference's bytes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ...formats.nvfp4 import NO_ROW, dequantize_blocks, quantize_blocks
from ...problem import Problem
from . import activation
from .activation import Gated, gated
from .checks import source

_BLOCK_ELEMENTS = 1 << 16  # 256 KiB of FP32: a dozen passes over a block hit the L2 cache


@dataclass(frozen=True)
class Config:
    rows: int
    policy: str = "blocks of used rows"


def config(problem: Problem) -> Config:
    return Config(rows=max(1, _BLOCK_ELEMENTS // max(source(problem).shape[-1], 1)))


@functools.lru_cache(maxsize=1)
def _silu() -> Any:
    """torch's own BF16 SiLU where it gives the right bits here for every value, else the formula.

    Its exponential differs between processors, and values next to a tie of BF16 may tell.
    """
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32, device="cpu").to(torch.int16)
    every = bits.view(torch.bfloat16)
    ours, theirs = activation.silu(every), torch.nn.functional.silu(every)
    same = (ours.view(torch.int16) == theirs.view(torch.int16)) | (ours.isnan() & theirs.isnan())
    return torch.nn.functional.silu if bool(same.all()) else activation.silu


def _blocks(start: int, stop: int, step: int) -> Iterator[slice]:
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


def quantize(
    config: Config,
    x: torch.Tensor,
    gscale: torch.Tensor,
    expert_num_tokens: torch.Tensor | None,
    how: Gated | None,
    b_act: torch.Tensor,
    sfb: torch.Tensor,
) -> None:
    experts, rows = x.shape[:2]
    values, codes, scales = (t.view(experts * rows, -1) for t in (x, b_act, sfb))
    row = torch.arange(experts * rows, device="cpu")
    if expert_num_tokens is not None:  # the used rows of all experts together, few of each or many
        row = row[row % rows < expert_num_tokens.long()[row // rows]]
        scales.fill_(NO_ROW)
    factor = gscale if gscale.shape[0] == 1 else gscale[row // rows]
    for part in _blocks(0, row.shape[0], config.rows):
        y = values[row[part]]
        y = y if how is None else gated(y, how, _silu())
        own = factor[:, None] if factor.shape[0] == 1 else factor[part, None]
        codes[row[part]], scales[row[part]] = quantize_blocks(y, own)


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
    codes, scales = b_act.view(-1, b_act.shape[-1]), sfb.view(-1, sfb.shape[-1])
    row, tok, route, expert = _sources(a1, first, second, topk_weights, counts, by, cap)
    scales.fill_(NO_ROW)
    flat = None if topk_weights is None else topk_weights.flatten()
    for part in _blocks(0, row.shape[0], config.rows):
        x = a1[tok[part]]
        if flat is not None:
            x = (x.float() * flat[route[part]][:, None]).bfloat16()
        factor = gscale if gscale.shape[0] == 1 else gscale[expert[part]]
        codes[row[part]], scales[row[part]] = quantize_blocks(x, factor[:, None])


def _sources(
    a1: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    topk_weights: torch.Tensor | None,
    counts: torch.Tensor,
    by: str,
    cap: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Row, token, route and expert of every row that a token goes to."""
    tok, routes = first.long(), torch.arange(first.shape[0], device="cpu")
    row = second if by == "routes" else routes
    route = routes if by == "routes" else second.long()
    if by == "ragged":
        expert = torch.searchsorted(counts[1:].long(), row, right=True)
        expert = expert.clamp_max(counts.shape[0] - 2)
        used = row < int(counts[-1])
    else:
        used = (row >= 0) & (row < counts.shape[0] * cap)
        expert = torch.where(used, row // max(cap, 1), 0)
        used &= row - expert * cap < counts.long()[expert]
    used &= (tok >= 0) & (tok < a1.shape[0])
    if topk_weights is not None:
        used &= (route >= 0) & (route < topk_weights.numel())
    return row[used], tok[used], route[used], expert[used]


def copy(
    config: Any,
    q: torch.Tensor,
    q_sf: torch.Tensor,
    src_tok: torch.Tensor,
    expert_num_tokens: torch.Tensor,
    cap: int,
    b_act: torch.Tensor,
    sfb: torch.Tensor,
) -> None:
    codes, scales = b_act.view(-1, b_act.shape[-1]), sfb.view(-1, sfb.shape[-1])
    row = torch.arange(src_tok.shape[0], device="cpu")
    used = row % cap < expert_num_tokens.long()[row // cap]
    used &= (src_tok >= 0) & (src_tok < q.shape[0])
    row, tok = row[used], src_tok[used].long()
    scales.fill_(NO_ROW)
    codes[row] = q[tok]
    scales[row] = q_sf[tok]


def dequantize(
    config: Any,
    b_act: torch.Tensor,
    sfb: torch.Tensor,
    gscale: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    k = out.shape[-1]
    rows = out.numel() // k
    codes, scales, values = b_act.view(rows, -1), sfb.view(rows, -1), out.view(rows, k)
    for part in _blocks(0, rows, max(1, _BLOCK_ELEMENTS // k)):
        values[part] = dequantize_blocks(codes[part], scales[part])
    if gscale is not None:
        out.div_(gscale.view(-1, *(1,) * (out.dim() - 1)))
