"""E4M3 codes, and which values share a scale."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from farro.formats import fp8
from farro.testing import assert_bit_equal


def value_of(code: int) -> Fraction:
    """What a finite code stands for, by its bits: sign, 4 of exponent, 3 of significand."""
    exponent, significand = code >> 3 & 15, code & 7
    magnitude = Fraction(significand, 8) + (exponent > 0)
    return (-1 if code & 128 else 1) * magnitude * Fraction(2) ** (max(exponent, 1) - 7)


CODES = [code for code in range(256) if code & 127 != 127]
POSITIVE = [float(value_of(code)) for code in range(127)]


def nearest(x: float) -> int:
    """The code nearest to x, the even one of two, by a search through all of them."""
    distance = [abs(value - abs(x)) for value in POSITIVE]  # exact in float64, for FP32 x
    best = min(distance)
    found = [code for code in range(127) if distance[code] == best]
    code = found[0] if len(found) == 1 else next(c for c in found if c % 2 == 0)
    return code | (128 if math.copysign(1, x) < 0 else 0)


def test_every_code_stands_for_its_value_and_comes_back() -> None:
    codes = torch.tensor(CODES, dtype=torch.uint8)
    values = [float(value_of(code)) for code in CODES]
    assert codes.view(fp8.E4M3).double().tolist() == values
    values[codes.tolist().index(128)] = -0.0
    assert_bit_equal(fp8.encode(torch.tensor(values)).view(torch.uint8), codes)
    assert max(values) == fp8.MAX and min(v for v in values if v > 0) == 2.0**-9


def test_encode_rounds_to_the_nearest_and_halves_to_even(generator) -> None:
    """Every midpoint between neighbours, the floats beside it, and random values."""
    grid = torch.tensor(POSITIVE)
    middle = (grid[1:] + grid[:-1]) / 2
    around = [torch.nextafter(middle, torch.tensor(way)) for way in (math.inf, -math.inf)]
    some = torch.exp2(torch.rand(200, generator=generator) * 24 - 14)
    x = torch.cat([middle, *around, some.clamp(max=448)])
    x = torch.cat([x, -x])
    want = [nearest(v) for v in x.tolist()]
    assert fp8.encode(x).view(torch.uint8).tolist() == want


def test_encode_clamps_before_it_rounds() -> None:
    """torch 2.11 makes NaN of what rounds past 448, newer torch does not: no matter here."""
    x = torch.tensor([448.0, 464.0, 465.0, 1e30, math.inf])
    assert fp8.encode(torch.cat([x, -x])).view(torch.uint8).tolist() == [0x7E] * 5 + [0xFE] * 5


def test_the_fast_decoder_knows_every_code_in_any_strides() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(fp8.E4M3).view(16, 16)
    for view in (codes, codes.T, codes[:, 3::2], codes[:15], codes[1:, :0]):
        into = torch.full(view.shape, 99.0)
        fp8.Decoder(256)(view, into)
        assert_bit_equal(into / fp8.DECODED, view.float())


def test_nan_has_one_code() -> None:
    bits = torch.tensor([0x7FC00000, -0x400000, 0x7F800001, -1], dtype=torch.int32)
    assert bits.view(torch.float32).isnan().all()
    assert fp8.encode(bits.view(torch.float32)).view(torch.uint8).tolist() == [0x7F] * 4
    scale = fp8.scale_of(bits.view(torch.float32))
    assert scale.view(torch.int32).tolist() == [0x7FC00000] * 4


@pytest.mark.parametrize("shape", [(1, 1), (300, 257), (128, 128), (129, 1), (1, 129)])
@pytest.mark.parametrize("kind", fp8.KINDS)
def test_each_group_is_spread_over_its_own_values(kind, shape, generator) -> None:
    """Element by element: the scale it meets is that of its group."""
    scale = torch.rand(fp8.scale_shape(shape, kind), generator=generator)
    spread = fp8.spread(scale, shape, kind).expand(shape)
    for row in range(0, shape[0], 31):
        for column in range(0, shape[1], 31):
            place = {
                "per_tensor": (),
                "per_row": (row, 0),
                "1x128": (row, column // 128),
                "128x128": (row // 128, column // 128),
            }[kind]
            assert spread[row, column] == scale[place]


def test_leading_dimensions_keep_their_scales() -> None:
    assert fp8.scale_shape((2, 3, 300), "per_tensor") == ()
    assert fp8.scale_shape((2, 3, 300), "per_row") == (2, 3, 1)
    assert fp8.scale_shape((2, 3, 300), "1x128") == (2, 3, 3)
    assert fp8.scale_shape((300, 0), "128x128") == (3, 0)
