"""Signal to noise of sampled tensors, over formats, scales, block sizes and rotations."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from .formats import ELEMENTS, SCALES, Element, Scale, restored, scales_of
from .theory import decibels

ROTATIONS = ("none", "block", "row")
_LONGEST_ROTATION = 1024
# crest factors are counted in bins of equal ratio from 1 to 32
BINS = 40
_PER_OCTAVE = BINS / 5


def rotated(x: torch.Tensor, size: int, signs: torch.Tensor) -> torch.Tensor:
    """Each `size` values along K times random signs, then a Hadamard matrix / sqrt(size).

    x [R, K] with K a multiple of size, a power of two; signs [size] of +-1. It is orthogonal:
    what a matrix product loses by it on one operand it gets back on the other.
    """
    y = x.reshape(-1, size) * signs
    half = 1
    while half < size:
        y = y.view(-1, size // (2 * half), 2, half)
        y = torch.stack((y[:, :, 0] + y[:, :, 1], y[:, :, 0] - y[:, :, 1]), 2)
        half *= 2
    return y.reshape(x.shape).mul(size**-0.5)


def rotation_size(rotation: str, block: int, k: int) -> int:
    """Over how many values: a block, or the longest power of two that divides a row."""
    return block if rotation == "block" else min(k & -k, _LONGEST_ROTATION)


def columns_of(k: int, blocks: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """How many of K columns are used, whole blocks of every size that fits; and those sizes."""
    fitting = tuple(block for block in blocks if block <= k)
    longest = max(fitting, default=1)
    return (k // longest * longest if fitting else 0), fitting


@dataclass(frozen=True)
class Cell:
    """One column and row of the tables."""

    kind: str  # "weights" or "inputs"
    element: Element
    scale: Scale
    block: int
    rotation: str


# (mean crest factor, dB of the mean relative noise, number of blocks) of a bin
Point = tuple[float, float, int]
_ENOUGH = 30  # blocks; fewer are no average


@dataclass
class Bins:
    """Blocks of one size by their crest factor: how many, sums of it, sums of relative noise."""

    count: torch.Tensor = field(default_factory=lambda: torch.zeros(BINS, dtype=torch.float64))
    crest: torch.Tensor = field(default_factory=lambda: torch.zeros(BINS, dtype=torch.float64))
    noise: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)  # element, scale

    def add(self, crest: torch.Tensor, noise: dict[tuple[str, str], torch.Tensor]) -> None:
        place = (crest.log2() * _PER_OCTAVE).long().clamp(0, BINS - 1)
        rows = torch.stack((torch.ones_like(crest), crest, *noise.values())).double()
        sums = torch.zeros(len(rows), BINS, dtype=torch.float64, device=crest.device)
        count, crests, *noises = sums.index_add_(1, place, rows).cpu()
        self.count += count
        self.crest += crests
        for name, found in zip(noise, noises):
            self.noise[name] = self.noise.get(name, 0) + found


def points(bins: Sequence[Bins], element: str, scale: str) -> list[Point]:
    """Of some sizes of blocks together, where a bin has enough of them."""
    mine = [b for b in bins if (element, scale) in b.noise]
    if not mine:
        return []
    count, crest = sum(b.count for b in mine), sum(b.crest for b in mine)
    noise = sum(b.noise[element, scale] for b in mine)
    lists = (t.tolist() for t in (count, crest, noise))  # type: ignore[union-attr]
    return [(c / n, decibels(e / n), int(n)) for n, c, e in zip(*lists) if n >= _ENOUGH]


@dataclass
class Study:
    """All that was measured: dB of every tensor by cell, crest factors, noise by crest factor."""

    blocks: tuple[int, ...]
    rotations: tuple[str, ...]
    elements: tuple[Element, ...] = ELEMENTS
    seed: int = 0
    db: dict[Cell, dict[str, float]] = field(default_factory=dict)
    # (kind, block, rotation) -> median crest factor of each tensor's blocks
    crests: dict[tuple[str, int, str], list[float]] = field(default_factory=dict)
    bins: dict[int, Bins] = field(default_factory=dict)  # by block size

    def add(self, kind: str, name: str, x: torch.Tensor) -> None:
        """A sample [R, K] of a tensor whose blocks lie along K."""
        k, fitting = columns_of(x.shape[-1], self.blocks)
        x = x[:, :k].float()
        if not fitting or not bool((x != 0).any()) or not bool(torch.isfinite(x).all()):
            return
        for block, rotation in ((b, r) for b in fitting for r in self.rotations):
            y = x if rotation == "none" else self._rotated(x, rotation, block)
            self._add(kind, name, y.reshape(-1, block), rotation)

    def _rotated(self, x: torch.Tensor, rotation: str, block: int) -> torch.Tensor:
        size = rotation_size(rotation, block, x.shape[-1])
        random = torch.Generator().manual_seed(self.seed)
        signs = torch.randint(0, 2, (size,), generator=random).mul(2).sub(1)
        return rotated(x, size, signs.to(x.device, torch.float32))

    def _add(self, kind: str, name: str, x: torch.Tensor, rotation: str) -> None:
        """x [blocks, B]"""
        block = x.shape[-1]
        largest, energy = x.abs().amax(-1), x.square().sum(-1)
        some = energy > 0
        crest = (largest * (block / energy).sqrt())[some]
        self.crests.setdefault((kind, block, rotation), []).append(crest.median().item())
        relative = {}
        for element, scale in self._formats(block):
            near = restored(x, scales_of(scale, largest, element), element)
            noise = near.sub_(x).square_().sum(-1)
            total = (noise.double().sum() / energy.double().sum()).item()
            cell = Cell(kind, element, scale, block, rotation)
            self.db.setdefault(cell, {})[name] = decibels(total)
            relative[element.name, scale.name] = (noise / energy)[some]
        self.bins.setdefault(block, Bins()).add(crest, relative)

    def _formats(self, block: int) -> Iterator[tuple[Element, Scale]]:
        return ((e, s) for e in self.elements for s in SCALES if s.fits(e, block))

    def mean(self, cell: Cell) -> float | None:
        """dB averaged over the tensors, as the paper does; None where none was measured."""
        found = [db for db in self.db.get(cell, {}).values() if math.isfinite(db)]
        return statistics.fmean(found) if found else None


def measured_crossover(low: list[Point], high: list[Point]) -> float | None:
    """The crest factor where `low` falls below `high`, between two bins; None where it does not."""
    other = {_place(crest): db for crest, db, _ in high}
    before: tuple[float, float] | None = None
    for crest, db, _ in low:
        if _place(crest) not in other:
            continue
        lead = db - other[_place(crest)]
        if before is not None and before[1] >= 0 > lead:
            return before[0] + (crest - before[0]) * before[1] / (before[1] - lead)
        before = crest, lead
    return None


def _place(crest: float) -> int:
    return min(BINS - 1, max(0, int(math.log2(crest) * _PER_OCTAVE)))
