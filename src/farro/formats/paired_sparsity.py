"""Paired 4:8 sparsity: of the 4 adjacent pairs of 8 consecutive K at most two are not zero.

The unit is the pair, and both of its elements are stored. In packed NVFP4 codes a pair is one
byte. Which pairs are kept is a nibble, idx0 | idx1 << 2 with idx0 < idx1.

The compressed layout (version 1, drawn in docs/formats.md) is the order in which a warp of a
tensor core reads: M in blocks of 64 rows, K in chunks of 128, the last of each shorter where it
does not divide. In such a tile, warp w has rows 16w .. 16w+15, lane l of it rows r = 16w + l/4 and
r + 8, of these the 8-groups l%4, and step s is 32 of K:

    codes     [warp][lane][step][row r, row r+8][kept byte 0, 1]   8 bytes a row and step
    metadata  [warp][lane/4][step][row r, row r+8][2 bytes]        nibble c is 8-group c
    scales    [row][step]                                          1 byte

Tiles of a row block follow one another along K, row blocks follow one another along M; nothing is
padded. With S = 32-steps of K, tile (b, c) of an expert begins at b*64*S*u + rows*4*c*u, where rows
is 64 (32 in a short last block) and u is 8, 2 or 1 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .nvfp4 import BLOCK, positive_zeros
from .shape import split

LAYOUT_VERSION = 1
PATTERNS = (0x4, 0x8, 0x9, 0xC, 0xD, 0xE)  # idx0 | idx1 << 2; 0x4 also for an empty group
GROUP = 8  # consecutive K, that is 4 pairs
ROWS, CHUNK = 64, 128  # of a whole tile
CODE_BYTES, META_BYTES, SCALE_BYTES = 8, 2, 1  # for each row and 32 of K
_WARP_ROWS = 16
ILLEGAL = 0xFF


def prune(w: torch.Tensor) -> torch.Tensor:
    """Zeros but for the two pairs of larger L2 norm in each 8 of the last dimension.

    Ties go to the lower index; NaN and Inf count as the largest.
    """
    pairs = split(w, -1, -1, 4, 2)
    kept = keep_two(_norms(pairs))
    return pairs.masked_fill(kept.logical_not_().unsqueeze(-1), 0).flatten(-3)


def _norms(pairs: torch.Tensor) -> torch.Tensor:
    """Numbers in the order of the pairs' L2 norms within each group: [..., 4, 2] -> [..., 4]."""
    wide = pairs.double()
    if pairs.dtype == torch.float64:  # squares of narrower types stay within float64
        exponent = torch.frexp(wide.abs().amax((-2, -1), keepdim=True)).exponent
        wide = wide * torch.exp2(-exponent.clamp(-1000, 1000).double())
    even, odd = wide.unbind(-1)
    return (even * even).addcmul_(odd, odd).nan_to_num_(torch.inf, torch.inf)


def keep_two(order: torch.Tensor) -> torch.Tensor:
    """Which two of the last dimension's four are the largest, ties to the lower index."""
    values = order.movedim(-1, 0).contiguous()
    before = torch.zeros(values.shape, dtype=torch.uint8, device=order.device)
    for i in range(3):
        for j in range(i + 1, 4):
            first = values[i] >= values[j]
            before[j] += first
            before[i] += first.logical_not_()
    return (before < 2).movedim(0, -1)


def _nibble_of_mask(mask: int) -> int:
    """The pattern that stores the non-zero pairs of a group; zero pairs fill up from index 0."""
    ones = [i for i in range(4) if mask >> i & 1]
    if len(ones) > 2:
        return ILLEGAL
    zeros = [i for i in range(4) if i not in ones]
    first, second = sorted((ones + zeros)[:2])
    return first | second << 2


def patterns_of(packed: torch.Tensor) -> torch.Tensor:
    """packed codes [..., K/2] without -0 -> nibbles uint8 [..., K/8], 0xff where none fits."""
    bits = torch.tensor((1, 2, 4, 8), dtype=torch.uint8, device=packed.device)
    mask = (split(packed != 0, -1, -1, 4) * bits).sum(-1, dtype=torch.uint8)
    table = [_nibble_of_mask(m) for m in range(16)]
    return torch.tensor(table, dtype=torch.uint8, device=packed.device)[mask.long()]


def kept_bytes(packed: torch.Tensor, nibbles: torch.Tensor) -> torch.Tensor:
    """The two kept bytes of each group: [..., K/2] and [..., K/8] -> [..., K/8, 2]."""
    which = torch.stack((nibbles & 3, nibbles >> 2), -1)
    return split(packed, -1, -1, 4).gather(-1, which.long())


def spread_bytes(kept: torch.Tensor, nibbles: torch.Tensor) -> torch.Tensor:
    """The inverse of kept_bytes: [..., K/8, 2] and [..., K/8] -> packed codes [..., K/2]."""
    which = torch.stack((nibbles & 3, nibbles >> 2), -1)
    packed = kept.new_zeros(*nibbles.shape, 4)
    return packed.scatter_(-1, which.long(), kept).flatten(-2)


@dataclass(frozen=True)
class _Part:
    """Tiles of one size: `blocks` x `chunks` of them, each of `rows` rows and `steps` steps."""

    row: int
    rows: int
    blocks: int
    step: int
    steps: int
    chunks: int

    def natural(self, x: torch.Tensor) -> torch.Tensor:
        """The part of x [E, M, K/32, u] as [E, blocks, rows, chunks, steps, u], a view."""
        x = x[:, self.row : self.row + self.rows * self.blocks]
        x = x[:, :, self.step : self.step + self.steps * self.chunks]
        return split(split(x, 2, self.chunks, self.steps), 1, self.blocks, self.rows)

    def stored(self, flat: torch.Tensor, unit: int, all_steps: int) -> torch.Tensor:
        """The part of flat [E, M*K/32*u] as [E, blocks, chunks, bytes of a tile], a view."""
        size = self.rows * all_steps * unit
        blocks = flat[:, self.row * all_steps * unit :][:, : self.blocks * size]
        first = self.rows * self.step * unit
        tile = self.rows * self.steps * unit
        chunks = split(blocks, 1, self.blocks, size)[..., first : first + self.chunks * tile]
        return split(chunks, -1, self.chunks, tile)


def _parts(m: int, k: int) -> Iterator[_Part]:
    """Whole tiles, and those of the short last row block and chunk."""
    steps = k // BLOCK
    whole_m, whole_k, per_chunk = m // ROWS * ROWS, k // CHUNK * (CHUNK // BLOCK), CHUNK // BLOCK
    for row, rows, blocks in ((0, ROWS, whole_m // ROWS), (whole_m, m - whole_m, 1)):
        for step, size, chunks in ((0, per_chunk, whole_k // per_chunk), (whole_k, steps % 4, 1)):
            if rows * blocks and size * chunks:
                yield _Part(row, rows, blocks, step, size, chunks)


def _threads(tiles: torch.Tensor, groups: int) -> torch.Tensor:
    """[E, blocks, rows, chunks, steps, u] -> in thread order, for codes (4 groups) or metadata."""
    parts = split(split(tiles, -1, groups, -1), 2, -1, 2, _WARP_ROWS // 2)
    # E, blocks, warp, half, lane/4, chunks, steps, group, byte
    return parts.permute(0, 1, 5, 2, 4, 7, 6, 3, 8)


def arrange(values: torch.Tensor, kind: str) -> torch.Tensor:
    """[E, M, K/32, u] in natural order -> flat [E, M*K/32*u] in the compressed layout.

    `kind` is "codes" (u = 8: 4 groups of 2), "metadata" (u = 2) or "scales" (u = 1).
    """
    e, m, steps, unit = values.shape
    flat = values.new_empty(e, m * steps * unit)
    for part in _parts(m, steps * BLOCK):
        tiles = _ordered(part.natural(values), kind)
        part.stored(flat, unit, steps).copy_(tiles.flatten(3))
    return flat


def restore(flat: torch.Tensor, kind: str, m: int, k: int) -> torch.Tensor:
    """The inverse of arrange: flat [E, M*K/32*u] -> [E, M, K/32, u]."""
    steps = k // BLOCK
    unit = {"codes": CODE_BYTES, "metadata": META_BYTES, "scales": SCALE_BYTES}[kind]
    values = flat.new_empty(flat.shape[0], m, steps, unit)
    for part in _parts(m, k):
        tiles = _ordered(part.natural(values), kind)  # a view of values
        tiles.copy_(part.stored(flat, unit, steps).reshape(tiles.shape))
    return values


def _ordered(tiles: torch.Tensor, kind: str) -> torch.Tensor:
    """A view of [E, blocks, rows, chunks, steps, u] in the order of `kind`, chunks before rows."""
    if kind == "scales":
        return tiles.permute(0, 1, 3, 2, 4, 5)
    return _threads(tiles, 4 if kind == "codes" else 1)


def compress(
    packed: torch.Tensor, nibbles: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """packed [E, M, K/2] without -0, its legal nibbles [E, M, K/8] and scales [E, M, K/32] ->

    codes [E, M, K/4], metadata [E, M, K/16] and scales [E, M, K/32], in the compressed layout.
    """
    e, m, steps = scales.shape
    kept = kept_bytes(packed, nibbles).reshape(e, m, steps, CODE_BYTES)
    meta = (nibbles[..., 0::2] | nibbles[..., 1::2] << 4).view(e, m, steps, META_BYTES)
    codes = arrange(kept, "codes").view(e, m, steps * CODE_BYTES)
    metadata = arrange(meta, "metadata").view(e, m, steps * META_BYTES)
    return codes, metadata, arrange(scales[..., None], "scales").view(e, m, steps)


def unpack_metadata(metadata: torch.Tensor) -> torch.Tensor:
    """metadata [E, M, K/16] in the compressed layout -> nibbles [E, M, K/8] in natural order."""
    e, m, pairs = metadata.shape
    meta = restore(metadata.reshape(e, -1), "metadata", m, pairs * 16).view(e, m, pairs)
    return torch.stack((meta & 15, meta >> 4), -1).flatten(-2)


def decompress(
    codes: torch.Tensor, nibbles: torch.Tensor, sfa: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales in the compressed layout, nibbles in natural order -> packed, scales."""
    e, m, steps = sfa.shape
    k = steps * BLOCK
    kept = restore(codes.reshape(e, -1), "codes", m, k).view(e, m, k // GROUP, 2)
    scales = restore(sfa.reshape(e, -1), "scales", m, k).view(e, m, steps)
    return positive_zeros(spread_bytes(kept, nibbles)), scales
