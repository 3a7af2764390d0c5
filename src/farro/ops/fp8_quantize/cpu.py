"""Quantize in blocks of rows that stay in cache; the same bytes as the reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...formats.fp8 import BLOCK, NAN_CODE, inverse_of, scale_of
from ...problem import Problem

_BLOCK_ELEMENTS = 1 << 18  # 1 MiB of FP32, so that the passes over a block hit the L2 cache


@dataclass(frozen=True)
class Config:
    rows: int
    policy: str = "row blocks"


def config(problem: Problem) -> Config:
    k = max(problem.spec("x").shape[-1], 1)
    rows = max(1, _BLOCK_ELEMENTS // k)
    if problem.param("kind") == "128x128":
        rows = max(BLOCK, rows // BLOCK * BLOCK)
    return Config(rows)


def _floats(x: torch.Tensor) -> torch.Tensor:
    """A copy even of FP32, since the values are multiplied in place."""
    return torch.empty(x.shape, dtype=torch.float32, device="cpu").copy_(x)


def _largest(values: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    # two passes: cheaper than a tensor of magnitudes, and than torch.aminmax along a dimension
    return torch.maximum(values.amax(dims), values.amin(dims).neg_())


def _write(values: torch.Tensor, scale: torch.Tensor, q: torch.Tensor) -> None:
    """q <- codes of values (overwritten), under a scale that broadcasts to them."""
    # no clamp: 1/scale is at most (448 / max|x|) (1 + 2^-22), so no product rounds past 448
    values.mul_(inverse_of(scale))
    q.copy_(values)
    if not bool(torch.isfinite(scale).all()):
        q.view(torch.uint8).masked_fill_(values.isnan(), NAN_CODE)


def _rows(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, width: int) -> None:
    """x, q [rows, K] with K a multiple of width; scale [rows, K / width]."""
    rows, k = x.shape
    values = _floats(x).view(rows, k // width, width)
    s = scale_of(_largest(values, (2,)))
    scale.copy_(s)
    _write(values, s.unsqueeze(-1), q.view(rows, k // width, width))


def _squares(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, height: int) -> None:
    """x, q [rows, K] with rows a multiple of height; scale [rows / height, ceil(K / 128)]."""
    rows, k = x.shape
    whole = k // BLOCK * BLOCK
    for columns, width in ((slice(0, whole), BLOCK), (slice(whole, k), k - whole)):
        if columns.start == columns.stop:
            continue
        shape = (rows // height, height, -1, width)
        values = _floats(x[:, columns]).view(shape)
        s = scale_of(_largest(values, (1, 3)))
        scale[:, columns.start // BLOCK : -(-columns.stop // BLOCK)] = s
        codes = q[:, columns].view(shape)
        _write(values, s[:, None, :, None], codes)


def _block(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, kind: str) -> None:
    """All groups of a block of rows; for 128x128 it starts at a multiple of 128 rows."""
    rows, k = x.shape
    if kind == "per_row":
        _rows(x, q, scale, k)
    elif kind == "1x128":
        whole = k // BLOCK * BLOCK
        if whole:
            _rows(x[:, :whole], q[:, :whole], scale[:, : whole // BLOCK], BLOCK)
        if whole < k:
            _rows(x[:, whole:], q[:, whole:], scale[:, -1:], k - whole)
    else:
        whole = rows // BLOCK * BLOCK
        if whole:
            _squares(x[:whole], q[:whole], scale[: whole // BLOCK], BLOCK)
        if whole < rows:
            _squares(x[whole:], q[whole:], scale[-1:], rows - whole)


def run(config: Config, x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, kind: str) -> None:
    codes = q.view(-1, x.shape[-1])
    if kind == "per_tensor":
        largest = [_largest(block, (0, 1)).float() for _, block in _row_blocks(x, config.rows)]
        scale.copy_(scale_of(torch.stack(largest).amax()))
    for first, block in _row_blocks(x, config.rows):
        here = slice(first, first + block.shape[0])
        if kind == "per_tensor":
            _write(_floats(block), scale, codes[here])
        elif kind == "128x128":
            squares = slice(here.start // BLOCK, -(-here.stop // BLOCK))
            _block(block, codes[here], scale[squares], kind)
        else:
            _block(block, codes[here], scale.view(-1, scale.shape[-1])[here], kind)


def _row_blocks(x: torch.Tensor, rows: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Blocks of at most `rows` rows of x, in order, each with the number of its first row."""
    first = 0
    for matrix in _matrices(x):
        for start in range(0, matrix.shape[0], rows):
            block = matrix[start : start + rows]
            yield first, block
            first += block.shape[0]


def _matrices(x: torch.Tensor) -> list[torch.Tensor]:
    """x as [rows, K] views in order: one where the leading dimensions flatten, else several."""
    try:
        return [x.view(-1, x.shape[-1])]
    except RuntimeError:  # the strides of the leading dimensions do not allow one view
        return [x] if x.dim() == 2 else [m for part in x.unbind() for m in _matrices(part)]
