"""Patterns, pruning, and the compressed layout read as a tensor core reads it."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch

from farro.formats import paired_sparsity
from farro.formats.nvfp4 import decode_e2m1, decode_ue4m3, pack_codes, unpack_codes
from farro.formats.paired_sparsity import PATTERNS, patterns_of, prune

SHAPES = [(64, 128), (32, 32), (96, 160), (64, 96), (32, 128), (160, 352), (128, 64)]
PAIRS = list(itertools.combinations(range(4), 2))


def weight(generator, e: int, m: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes of every pattern, with -0 and zero pairs and groups among them, and scales."""
    codes = torch.randint(16, (e, m, k // 8, 4, 2), generator=generator, dtype=torch.uint8)
    which = torch.tensor(PAIRS)[torch.randint(6, (e, m, k // 8), generator=generator)]
    kept = torch.zeros(e, m, k // 8, 4, dtype=torch.bool).scatter_(-1, which, True)
    kept &= torch.rand(kept.shape, generator=generator) > 0.1
    codes = (codes * kept[..., None]).view(e, m, k)
    scales = torch.randint(128, (e, m, k // 32), generator=generator, dtype=torch.uint8)
    scales[scales == 127] = 3
    return pack_codes(codes), scales


def compressed(packed: torch.Tensor, scales: torch.Tensor):
    clean = torch.where(packed & 0x07 == 0, packed & 0xF0, packed)
    clean = torch.where(clean & 0x70 == 0, clean & 0x0F, clean)
    nibbles = patterns_of(clean)
    assert (nibbles != paired_sparsity.ILLEGAL).all()
    return paired_sparsity.compress(clean, nibbles, scales)


def test_patterns_are_the_legal_2_of_4_nibbles() -> None:
    assert PATTERNS == (0x4, 0x8, 0x9, 0xC, 0xD, 0xE)
    assert sorted(PATTERNS) == sorted(i | j << 2 for i, j in PAIRS)


def test_patterns_of_every_group() -> None:
    for mask in range(16):
        pairs = [i for i in range(4) if mask >> i & 1]
        packed = torch.tensor([0x21 * (mask >> i & 1) for i in range(4)], dtype=torch.uint8)
        nibble = int(patterns_of(packed))
        if len(pairs) > 2:
            assert nibble == paired_sparsity.ILLEGAL
            continue
        assert nibble in PATTERNS
        assert set(pairs) <= {nibble & 3, nibble >> 2}
    assert int(patterns_of(torch.zeros(4, dtype=torch.uint8))) == 0x4


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32, torch.float64))
def test_pruning_keeps_the_two_largest_pairs(dtype, generator) -> None:
    w = torch.randn(20, 64, generator=generator, dtype=torch.float64)
    w[1] = torch.randint(-2, 3, (64,), generator=generator)  # ties
    w[2] *= 1e-4 if dtype is torch.float16 else 1e-30
    w[3] *= 0
    if dtype is torch.float64:
        w[4] *= 1e300  # squares overflow
        w[5] *= 1e-300
        w[6] *= 1e-310  # subnormal
    w = w.to(dtype)
    pruned = prune(w)
    assert pruned.dtype == dtype and pruned.shape == w.shape
    for row, want in zip(pruned.tolist(), w.tolist()):
        for start in range(0, 64, 8):
            group = [want[start + 2 * p : start + 2 * p + 2] for p in range(4)]
            norms = [sum(Fraction(v) ** 2 for v in pair) for pair in group]
            kept = sorted(range(4), key=lambda p: (-norms[p], p))[:2]
            expected = [v if p in kept else 0.0 for p in range(4) for v in group[p]]
            assert row[start : start + 8] == expected


def test_pruning_keeps_what_is_not_finite() -> None:
    w = torch.ones(1, 16)
    w[0, 5], w[0, 15] = float("nan"), float("-inf")
    pruned = prune(w)
    assert pruned[0, 5].isnan() and pruned[0, 4] == 1 and pruned[0, 15] == -float("inf")
    assert pruned[0, :2].tolist() == [1, 1] and pruned[0, 2:4].tolist() == [0, 0]


@pytest.mark.parametrize("m, k", SHAPES)
def test_nothing_is_padded(m, k, generator) -> None:
    parts = compressed(*weight(generator, 2, m, k))
    assert [tuple(p.shape) for p in parts] == [(2, m, k // 4), (2, m, k // 16), (2, m, k // 32)]
    assert all(p.is_contiguous() and p.dtype == torch.uint8 for p in parts)
    assert sum(p.numel() for p in parts) / (2 * m * k) == 0.34375


@pytest.mark.parametrize("m, k", SHAPES)
def test_round_trip(m, k, generator) -> None:
    packed, scales = weight(generator, 2, m, k)
    codes, metadata, sfa = compressed(packed, scales)
    nibbles = paired_sparsity.unpack_metadata(metadata)
    restored, restored_scales = paired_sparsity.decompress(codes, nibbles, sfa)
    assert torch.equal(restored_scales, scales)
    want = unpack_codes(packed)
    assert torch.equal(unpack_codes(restored), torch.where(want == 8, 0, want))


def tiles(m: int, k: int):
    """(row, rows, first 32-step, steps) of each tile: short ones at the ends."""
    for row in range(0, m, 64):
        for chunk in range(0, k, 128):
            yield row, min(64, m - row), chunk // 32, min(128, k - chunk) // 32


def wgmma_sp_weight(codes: torch.Tensor, metadata: torch.Tensor, sfa: torch.Tensor, m, k):
    """Dense values of one expert, as sparse wgmma would see them, from bytes at closed offsets.

    Each lane supplies a0..a3 (two values each) and a metadata word; K is reordered, so that the low
    nibbles are positions 0..15 and the high ones 16..31.
    """
    codes, metadata, sfa = (part.flatten().tolist() for part in (codes, metadata, sfa))
    value = decode_e2m1(torch.arange(16, dtype=torch.uint8)).tolist()
    scale = decode_ue4m3(torch.arange(128, dtype=torch.uint8)).tolist()
    steps = k // 32
    dense = torch.zeros(m, steps, 32, dtype=torch.float64)
    for row, rows, first, count in tiles(m, k):
        begin = row * steps + rows * first  # rows * 32-steps before this tile
        for warp, lane, step in itertools.product(range(rows // 16), range(32), range(count)):
            r, j = 16 * warp + lane // 4, lane % 4
            at = 8 * begin + ((warp * 32 + lane) * count + step) * 4
            word_at = 2 * begin + ((warp * 8 + lane // 4) * count + step) * 4
            word = sum(metadata[word_at + i] << 8 * i for i in range(4))
            for half in (0, 1):  # rows r and r + 8
                b0, b1 = codes[at + 2 * half], codes[at + 2 * half + 1]
                low, high = (b0 & 15, b1 & 15), (b0 >> 4, b1 >> 4)  # registers a0/a1 and a2/a3
                nibble = word >> 16 * half + 4 * j & 15
                s = scale[sfa[begin + (r + 8 * half) * count + step]]
                place = dense[row + r + 8 * half, first + step]
                for i, index in enumerate((nibble & 3, nibble >> 2)):
                    place[4 * j + index] = value[low[i]] * s
                    place[16 + 4 * j + index] = value[high[i]] * s
    order = [2 * p if p < 16 else 2 * (p - 16) + 1 for p in range(32)]
    natural = torch.empty_like(dense)
    natural[..., order] = dense
    return natural.view(m, k)


@pytest.mark.parametrize("m, k", SHAPES)
def test_a_tensor_core_reads_the_dense_weight(m, k, generator) -> None:
    packed, scales = weight(generator, 2, m, k)
    parts = compressed(packed, scales)
    want = decode_e2m1(unpack_codes(packed)).double()
    want = want * decode_ue4m3(scales).double().repeat_interleave(32, -1)
    for e in range(2):
        assert torch.equal(wgmma_sp_weight(*(p[e] for p in parts), m, k), want[e])


def test_row_blocks_are_slices(generator) -> None:
    """The first 64i rows of what compress gives are the first 64i rows of the weight."""
    packed, scales = weight(generator, 2, 160, 224)
    whole = compressed(packed, scales)
    part = compressed(packed[:, :128], scales[:, :128])
    assert all(torch.equal(p, w[:, :128]) for p, w in zip(part, whole))
