"""The rational arithmetic that judges the operators, against what the processor rounds."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farro.exact import FMA_TRIPLE, bfloat16_once, fma32
from farro.testing import assert_bit_equal

from .exact_arithmetic import multiply_add, rounded, sign

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.mark.parametrize("form", DTYPES)
def test_rounding_is_the_processor_s(form, generator):
    """Over the format's whole range, halves between neighbours and subnormals included."""
    dtype = DTYPES[form]
    bits, smallest, largest = {"float32": (24, -149, 128), "float16": (11, -24, 16)}.get(
        form, (8, -133, 128)
    )
    exponent = torch.rand(3000, generator=generator) * (largest - smallest + 8) + smallest - 4
    x = torch.randn(3000, dtype=torch.float64, generator=generator) * torch.exp2(exponent.double())
    middle = torch.randint(1, 2**bits, (500,), generator=generator).double() + 0.5
    x = torch.cat([x, middle, -middle * 2.0**smallest, torch.tensor([0.0, -0.0]).double()])
    if form != "float32":
        x = x.float().double()  # torch goes through float32, which must not round a first time
        x = x[x.isfinite()]
        x = torch.cat([x, torch.tensor([torch.finfo(torch.float32).max]).double()])
    want = x.to(dtype)
    direct = [rounded(Fraction(v), form, math.copysign(1, v) < 0) for v in x.tolist()]
    got = torch.tensor(direct, dtype=torch.float64).to(dtype)
    assert torch.isinf(got).any() and (got == 0).any()
    assert_bit_equal(got, want)


def test_fma32_rounds_once(generator):
    """Against rational arithmetic: random exponents, cancellation, ties, subnormals, zeros."""
    size = 2000
    exponents = torch.randint(-70, 60, (3, size), generator=generator)
    mantissas = torch.randint(-(2**24), 2**24, (3, size), generator=generator)
    p, s, t = torch.ldexp(mantissas.double(), exponents - 24).float()
    t[::4] = -(p * s)[::4]  # what is left is the product's rounding error
    t[1::4] = torch.nextafter(t[1::4], torch.tensor(0.0)) * 2.0**20
    t[2::16], p[3::16] = 0.0, -0.0
    t[5::16] = -0.0
    s[7::16] *= 2.0**-70
    want = [multiply_add(*values) for values in zip(p.tolist(), s.tolist(), t.tolist())]
    assert_bit_equal(fma32(p, s, t), torch.tensor(want))


def test_fma_triple_tells():
    p, s, t = FMA_TRIPLE
    once = multiply_add(p, s, t)
    twice = float(torch.tensor(p * s + t, dtype=torch.float64).float())
    assert once != twice
    assert float(fma32(*(torch.tensor(v) for v in FMA_TRIPLE))) == once


def test_fma32_of_nonfinite_values():
    inf, nan = math.inf, math.nan
    rows = [
        (0.0, inf, 1.0, nan),
        (2.0, inf, 1.0, inf),
        (2.0, inf, -inf, nan),
        (2.0, 3.0, -inf, -inf),
        (nan, 0.0, 1.0, nan),
        (1.0, 1.0, nan, nan),
        (3e38, 3e38, 0.0, inf),
        (3e38, -2.0, 3e38, -3e38),
        (3e38, 2.0, 1.0, inf),
    ]
    p, s, t, want = torch.tensor(rows).unbind(1)
    assert_bit_equal(fma32(p, s, t), want)


@settings(max_examples=300, deadline=None)
@given(x=st.floats(allow_nan=False, allow_infinity=False))
def test_bfloat16_with_one_rounding(x):
    result = bfloat16_once(torch.tensor([x], dtype=torch.float64))
    want = rounded(Fraction(x), "bfloat16", sign(x))
    assert_bit_equal(result, torch.tensor([want], dtype=torch.float64).bfloat16())


def test_bfloat16_next_to_ties():
    """1 + 2^-8 is in the middle of two bfloat16; float32 cannot tell it from what is next to it."""
    middle, little = 1 + 2.0**-8, 2.0**-40
    x = torch.tensor([middle - little, middle, middle + little], dtype=torch.float64)
    x = torch.cat((x, -x, torch.tensor([math.nan, math.inf, -math.inf, 1e39, -1e300, 1e-60])))
    want = [1.0, 1.0, 1 + 2.0**-7]
    want = [*want, *(-w for w in want), math.nan, math.inf, -math.inf, math.inf, -math.inf, 0.0]
    assert_bit_equal(bfloat16_once(x), torch.tensor(want).bfloat16())
    assert not torch.equal(bfloat16_once(x)[:6], x.bfloat16()[:6])  # what torch gives
