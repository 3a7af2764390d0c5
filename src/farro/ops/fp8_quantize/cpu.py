"""Quantize in blocks of rows that stay in cache; the same bytes as the reference."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...formats.fp8 import BLOCK, MAX, SCALE_FLOOR, encode, inverse_of
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


def _scale(values: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """scale_of(max|values|) in fewer operators; a CPU divides by a number as it should."""
    # two passes: cheaper than a tensor of magnitudes, and than torch.aminmax along a dimension
    largest = torch.maximum(values.amax(dims), values.amin(dims).neg_())
    return largest.div_(MAX).clamp_min_(SCALE_FLOOR)


def _write(
    values: torch.Tensor, scale: torch.Tensor, codes: torch.Tensor, out: torch.Tensor
) -> None:
    """out <- scale, codes <- those of values (overwritten), to which `scale` broadcasts."""
    if bool(torch.isfinite(scale).all()):
        # no clamp: 1/scale is at most (448 / max|x|) (1 + 2^-22), so no product rounds past 448
        codes.copy_(values.mul_(scale.reciprocal()))
    else:
        codes.copy_(encode(values.mul_(inverse_of(scale))))
        scale = scale.masked_fill(scale.isnan(), math.nan)  # whatever its sign and payload
    out.copy_(scale.view(out.shape))


def _rows(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, width: int) -> None:
    """x, q [rows, K] with K a multiple of width; scale [rows, K / width]."""
    shape = (x.shape[0], x.shape[1] // width, width)
    values = _floats(x).view(shape)
    _write(values, _scale(values, (2,)).unsqueeze(-1), q.view(shape), scale)


def _squares(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, height: int) -> None:
    """x, q [rows, K] with rows a multiple of height; scale [rows / height, ceil(K / 128)]."""
    rows, k = x.shape
    whole = k // BLOCK * BLOCK
    for columns, width in ((slice(0, whole), BLOCK), (slice(whole, k), k - whole)):
        if columns.start == columns.stop:
            continue
        shape = (rows // height, height, -1, width)
        values = _floats(x[:, columns]).view(shape)
        s = _scale(values, (1, 3))[:, None, :, None]
        squares = slice(columns.start // BLOCK, -(-columns.stop // BLOCK))
        _write(values, s, q[:, columns].view(shape), scale[:, squares])


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
    blocks = list(_row_blocks(x, config.rows))
    if kind == "per_tensor":
        s = torch.stack([_scale(_floats(block), (0, 1)) for _, block in blocks]).amax()
        for first, block in blocks:
            _write(_floats(block), s, codes[first : first + block.shape[0]], scale)
        return
    scales = scale.view(-1, scale.shape[-1])
    for first, block in blocks:
        here = slice(first, first + block.shape[0])
        if kind == "128x128":
            squares = slice(here.start // BLOCK, -(-here.stop // BLOCK))
            _block(block, codes[here], scales[squares], kind)
        else:
            _block(block, codes[here], scales[here], kind)


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
