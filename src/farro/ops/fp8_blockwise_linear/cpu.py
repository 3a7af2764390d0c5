"""fp8_blockwise_linear_bf16 on a CPU: FP32 products of decoded codes, a block of K at a time.

A tile of the output is finished before the next begins: for each 128 of K one FP32 product of
codes decoded exactly, added under its scales, all in buffers of the tile's size. The weight is
decoded once for up to 512 rows, a chunk that fits in cache at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ...formats.fp8 import BLOCK, DECODED, Decoder, blocks
from ...problem import Problem

_ROWS = 512
_DECODED_INPUT = 1 << 21  # elements of decoded activations, 8 MiB
_TILE = 1 << 18  # elements of one output tile
_MAX_COLUMNS = 1024
_CHUNK = 1 << 18  # elements that are decoded at a time
# Of fewer rows MKL's products take other kernels, whose sums have other bits. Rows of zeros fill up
_LEAST_ROWS = 8


@dataclass(frozen=True)
class Config:
    """One tile of the output."""

    rows: int
    columns: int
    policy: str = "fp32 products of decoded codes"

    @property
    def tile(self) -> tuple[int, int]:
        return self.rows, self.columns


def tile_of(m: int, n: int, k: int) -> Config:
    rows = min(max(m, _LEAST_ROWS), _ROWS, max(_LEAST_ROWS, _DECODED_INPUT // max(k, 1)))
    columns = min(_MAX_COLUMNS, max(BLOCK, _TILE // rows // BLOCK * BLOCK))
    return Config(rows, min(columns, blocks(max(n, 1)) * BLOCK))


def config(problem: Problem) -> Config:
    m, k = problem.spec("input").shape
    return tile_of(m, problem.spec("weight").shape[0], k)


class Rows:
    """Decoded activations of a tile's rows, as many as `_LEAST_ROWS` at least."""

    def __init__(self, x: torch.Tensor, input_scale: torch.Tensor) -> None:
        self.count, k = x.shape
        self.padded = max(self.count, _LEAST_ROWS)
        values, scales = _floats(self.padded, k), _floats(blocks(k), self.padded)
        values[self.count :], scales[:, self.count :] = 0, 0
        scales[:, : self.count] = input_scale.T
        step = max(1, _CHUNK // max(k, 1))
        decode = Decoder(step * k)
        for top in range(0, self.count, step):
            here = values[top : min(top + step, self.count)]
            decode(x[top : top + step], here)
            here *= DECODED**-2  # what decoding takes from both operands
        self.blocks = values.split(BLOCK, dim=1)  # type: ignore[no-untyped-call]
        self.scales = scales  # [ceil(K/128), rows]


class Product:
    """Buffers for FP32 products of `Rows` of one number with up to `columns` rows of a weight."""

    def __init__(self, rows: int, columns: int) -> None:
        self.size = max(columns * BLOCK, _CHUNK)
        self.partial = _floats(rows * columns)
        self.decoded = _floats(self.size)
        self.decode = Decoder(self.size)

    def __call__(
        self, rows: Rows, weight: torch.Tensor, weight_scale: torch.Tensor, total: torch.Tensor
    ) -> None:
        """total [rows, columns] <- the product with weight [columns, K]."""
        n, k = weight.shape
        total.zero_()
        partial = self.partial[: total.numel()].view(total.shape)
        scales = rows.scales.unsqueeze(2) * weight_scale.T.unsqueeze(1)  # [blocks of K, rows, of N]
        add = _adder(total, partial)
        # as many blocks of K at a time as there is room for
        depth = self.size // n // BLOCK * BLOCK
        for start in range(0, k, depth):
            codes = weight[:, start : start + depth]
            decoded = self.decoded[: codes.numel()].view(codes.shape)
            self.decode(codes, decoded)
            here = slice(start // BLOCK, blocks(start + codes.shape[1]))
            parts = decoded.T.split(BLOCK)  # type: ignore[no-untyped-call]
            for left, right, scale in zip(rows.blocks[here], parts, scales[here].unbind()):
                torch.mm(left, right, out=partial)
                add(scale)


def _adder(total: torch.Tensor, partial: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """total += partial * scale, for scales [rows, ceil(columns / 128)]."""
    rows, columns = total.shape
    count, whole = columns // BLOCK, columns // BLOCK * BLOCK
    shape = (rows, count, BLOCK)
    totals, partials = (t[:, :whole].view(shape) for t in (total, partial))
    tails = total[:, whole:], partial[:, whole:]

    def add(scale: torch.Tensor) -> None:
        if whole:
            torch.addcmul(totals, partials, scale[:, :count].unsqueeze(2), out=totals)
        if whole < columns:
            torch.addcmul(*tails, scale[:, count:], out=tails[0])

    return add


def tiles(
    config: Config,
    x: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    input_scale: torch.Tensor,
    weight_scales: tuple[torch.Tensor, ...],
) -> Iterator[tuple[slice, slice, list[torch.Tensor]]]:
    """(rows, columns, FP32 products there with each of `weights`), tile by tile, in one memory."""
    m, n = x.shape[0], weights[0].shape[0]
    product: Product | None = None
    for top in range(0, m, config.rows):
        down = slice(top, min(top + config.rows, m))
        rows = Rows(x[down], input_scale[down])
        if product is None:  # the first rows are the most
            product = Product(rows.padded, min(config.columns, n))
            memory = [_floats(product.partial.numel()) for _ in weights]
        for left in range(0, n, config.columns):
            across = slice(left, min(left + config.columns, n))
            of_scale = slice(left // BLOCK, blocks(across.stop))
            shape = (rows.padded, across.stop - left)
            totals = [place[: shape[0] * shape[1]].view(shape) for place in memory]
            for weight, scale, total in zip(weights, weight_scales, totals):
                product(rows, weight[across], scale[of_scale], total)
            yield down, across, [total[: rows.count] for total in totals]
        del rows  # before the next ones are decoded


def _floats(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def gelu_(x: torch.Tensor) -> torch.Tensor:
    """x <- gelu_tanh(x), as x * sigmoid(2u): 1 + tanh(u) would cancel for negative x."""
    inner = (x * x).mul_(0.044715 * 1.5957691216057308).add_(1.5957691216057308).mul_(x)
    return x.mul_(inner.sigmoid_())


def run(
    config: Config,
    x: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    gelu: bool,
) -> None:
    addend = None if bias is None else bias.float()
    for down, across, (total,) in tiles(config, x, (weight,), input_scale, (weight_scale,)):
        if addend is not None:
            total += addend[across]
        out[down, across] = gelu_(total) if gelu else total
