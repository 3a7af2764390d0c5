"""Quantize in blocks of rows that stay in cache; the same bytes as the reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...formats.int8_group import MAX_CODE, SCALE_FLOOR
from ...problem import Problem

_BLOCK_ELEMENTS = 1 << 18  # 1 MiB of FP32, so that the passes over a block hit the L2 cache


@dataclass(frozen=True)
class Config:
    rows: int
    policy: str = "row blocks"


def config(problem: Problem) -> Config:
    k = max(problem.spec("x").shape[-1], 1)
    return Config(rows=max(1, _BLOCK_ELEMENTS // k))


def _quantize_block(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, group_size: int) -> None:
    """x, q [rows, K] with K a multiple of group_size; scale [rows, K/G]."""
    rows, k = x.shape
    groups = k // group_size
    # a copy even of FP32, since the values are divided in place
    values = torch.empty(rows, groups, group_size, dtype=torch.float32, device="cpu")
    values.view(rows, k).copy_(x)
    of_group = values.view(rows * groups, group_size)
    # two passes: torch.aminmax along a dimension is twenty times as slow as amax
    s = (
        torch.maximum(of_group.amax(1), of_group.amin(1).neg_())
        .div_(MAX_CODE)
        .clamp_min_(SCALE_FLOOR)
    )
    s = s.view(rows, groups)
    scale.copy_(s)
    # no clip: s is at least (max|x| / 127) * (1 - 2^-24), so no quotient rounds past 127
    values.div_(s.unsqueeze(-1)).round_()
    if not bool(torch.isfinite(s).all()):
        values.masked_fill_(~torch.isfinite(s).unsqueeze(-1), 0)
    q.copy_(values.view(rows, k))


def run(
    config: Config, x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, group_size: int
) -> None:
    k = x.shape[-1]
    whole = k // group_size * group_size
    codes, scales = q.view(-1, k), scale.view(-1, scale.shape[-1])
    row = 0
    for piece in _matrices(x):
        for start in range(0, piece.shape[0], config.rows):
            block = piece[start : start + config.rows]
            here = slice(row, row + block.shape[0])
            row += block.shape[0]
            if whole:
                _quantize_block(
                    block[:, :whole],
                    codes[here, :whole],
                    scales[here, : whole // group_size],
                    group_size,
                )
            if whole < k:
                _quantize_block(block[:, whole:], codes[here, whole:], scales[here, -1:], k - whole)


def _matrices(x: torch.Tensor) -> list[torch.Tensor]:
    """x as [rows, K] views in order: one where the leading dimensions flatten, else several."""
    try:
        return [x.view(-1, x.shape[-1])]
    except RuntimeError:  # the strides of the leading dimensions do not allow one view
        return [x] if x.dim() == 2 else [m for part in x.unbind() for m in _matrices(part)]
