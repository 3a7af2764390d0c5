"""Grouped products on a CPU: weights decoded to FP32, exactly, some rows at a time.

Every FP32 product has the same shape, config.rows tokens x config.weights weights (fewer at an
expert's end of M): libraries pick another order of summation for another shape, and a row must not
depend on how many others there are. Rows of zeros fill up the last one.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch

from ...formats.nvfp4 import BLOCK, decode_e2m1, decode_ue4m3
from ...formats.paired_sparsity import ROWS, restore, unpack_metadata
from ...problem import Problem

_MAX_ROWS = 32
_DECODED = 1 << 19  # weights at a time: 2 MiB of FP32
_ACTIVATIONS = 1 << 24  # decoded at a time


@dataclass(frozen=True)
class Config:
    """The shape of one FP32 product."""

    rows: int
    weights: int
    policy: str = "FP32 products of decoded codes"

    @property
    def tile(self) -> tuple[int, int]:
        """Tokens and weight rows."""
        return self.rows, self.weights


def config(problem: Problem) -> Config:
    _, m, quarter = problem.spec("a_comp").shape
    rows = 1
    while rows < min(problem.spec("out").shape[-2], _MAX_ROWS):
        rows *= 2
    blocks = max(1, _DECODED // max(quarter * 4 * ROWS, 1))
    return Config(rows, min(blocks, -(-max(m, 1) // ROWS)) * ROWS)


@functools.lru_cache(maxsize=1)
def _pairs() -> torch.Tensor:
    """complex64 [256]: the two values of a byte of codes, as the two parts of one number."""
    byte = torch.arange(256, dtype=torch.uint8, device="cpu")
    values = torch.stack((decode_e2m1(byte & 15), decode_e2m1(byte >> 4)), -1)
    return torch.view_as_complex(values.float())


def decode(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """FP32 [rows, K] of code * scale, from packed codes [rows, K/2] and scales [rows, K/32]."""
    rows, half = packed.shape
    values = torch.view_as_real(_pairs().index_select(0, packed.reshape(-1).int()))
    blocks = values.view(rows, scales.shape[1], 2 * half // max(scales.shape[1], 1))
    return blocks.mul_(decode_ue4m3(scales).unsqueeze(2)).view(rows, 2 * half)


def _weight(a_comp: torch.Tensor, e_meta: torch.Tensor, sfa: torch.Tensor) -> torch.Tensor:
    """FP32 of the rows of one expert, [1, rows, ...] of the compressed tensors."""
    _, rows, steps = sfa.shape
    k = steps * BLOCK
    kept = restore(a_comp.reshape(1, -1), "codes", rows, k).view(torch.int16).view(rows, -1).int()
    nibbles = unpack_metadata(e_meta)[0].int()
    # the two kept bytes of a group at their places among its four: faster than spread_bytes
    first = (kept & 0xFF) << ((nibbles & 3) << 3)
    second = (kept >> 8 & 0xFF) << ((nibbles >> 2) << 3)
    packed = (first | second).view(torch.uint8).view(rows, k // 2)
    return decode(packed, restore(sfa.reshape(1, -1), "scales", rows, k).view(rows, steps))


def _ranges(counts: torch.Tensor, rows: int, ragged: bool) -> list[tuple[int, int]]:
    """First and last row of each expert, clamped to those that there are."""
    clamped = counts.clamp(0, rows).tolist()
    return list(itertools.pairwise(clamped)) if ragged else [(0, count) for count in clamped]


def run(
    config: Config,
    out: torch.Tensor,
    a_comp: torch.Tensor,
    e_meta: torch.Tensor,
    sfa: torch.Tensor,
    b_act: torch.Tensor,
    sfb: torch.Tensor | None,
    alphas: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    ragged = out.dim() == 2
    k = a_comp.shape[2] * 4
    step = max(1, _ACTIVATIONS // max(k * config.rows, 1)) * config.rows
    for e, (first, last) in enumerate(_ranges(counts, out.shape[-2], ragged)):
        place, codes = (out, b_act) if ragged else (out[e], b_act[e])
        scales = sfb if ragged or sfb is None else sfb[e]
        for top in range(first, last, step):
            here = slice(top, min(top + step, last))
            x = _activations(codes[here], None if scales is None else scales[here], k, config.rows)
            weight = (a_comp[e : e + 1], e_meta[e : e + 1], sfa[e : e + 1])
            _multiply(config, place[here], x, weight, alphas[e])


def _activations(
    codes: torch.Tensor, scales: torch.Tensor | None, k: int, rows: int
) -> torch.Tensor:
    """FP32 [blocks of rows, rows, K], the last block filled up with zeros."""
    count = codes.shape[0]
    blocks = -(-count // rows)
    x = torch.zeros(blocks, rows, k, dtype=torch.float32, device="cpu")
    x.view(blocks * rows, k)[:count] = codes if scales is None else decode(codes, scales)
    return x


def _multiply(
    config: Config,
    out: torch.Tensor,
    x: torch.Tensor,
    weight: tuple[torch.Tensor, ...],
    alpha: torch.Tensor,
) -> None:
    """out [n, M] <- alpha * x @ weight.T"""
    n, m = out.shape
    for left in range(0, m, config.weights):
        right = min(left + config.weights, m)
        decoded = _weight(*(part[:, left:right] for part in weight)).T
        part = torch.empty(config.rows, right - left, dtype=torch.float32, device="cpu")
        for i, block in enumerate(x):
            torch.mm(block, decoded, out=part)
            rows = out[i * config.rows : min((i + 1) * config.rows, n), left:right]
            rows.copy_(part.mul_(alpha)[: rows.shape[0]])
