"""The Triton int8_quantize in the interpreter, byte for byte."""

from __future__ import annotations

import math

import pytest
import torch

import farro
from farro.arch import interpreting
from farro.catalogue import operator_named
from farro.exact import fma32
from farro.formats.int8_group import quantize
from farro.ops.int8_quantize import triton
from farro.ops.int8_quantize.triton import Config
from farro.testing import assert_bit_equal, quantize_cases

from . import fused

pytestmark = [
    pytest.mark.skipif(not interpreting(), reason="run by run_again"),
    pytest.mark.skipif(not fused(), reason="this interpreter's tl.fma rounds twice"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, on Inf * 0
]
# the largest cases belong to a GPU
CASES = [
    pytest.param(case, marks=() if case.quick else pytest.mark.slow)
    for case in quantize_cases()
    if math.prod(case.shape) <= 50_000
]
KERNEL = next(k for k in operator_named("int8_quantize").kernels if k.backend == "triton")


def seed_of(generator: torch.Generator) -> int:
    return int(torch.randint(2**31, (1,), generator=generator))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(case, generator):
    outcome = case.build(seed=seed_of(generator)).check(KERNEL)
    assert outcome.status == "ok", outcome.detail


@pytest.mark.parametrize("config", [Config(1, 1, 1), Config(4, 2, 4), Config(16, 1, 8)], ids=str)
@pytest.mark.parametrize("group_size", (32, 64, 128, 256))
def test_any_configuration(group_size, config, generator):
    for shape in ((1, 1), (5, 5 * group_size // 2 + 3), (17, 3 * group_size)):
        x = torch.randn(shape, generator=generator)
        q = torch.full(shape, 99, dtype=torch.int8)
        scale = torch.full((shape[0], -(-shape[1] // group_size)), -1.0)
        triton.run(config, x, q, scale, group_size)
        want = quantize(x, group_size)
        assert_bit_equal(q, want[0])
        assert_bit_equal(scale, want[1])


def test_quotients_next_to_ties(generator):
    """x within two units in the last place of (j + 1/2) * scale: a hasty division rounds wrong."""
    largest = torch.exp2(torch.rand(64, 1, generator=generator) * 20 - 10)
    scale = largest / 127
    half = torch.randint(0, 127, (64, 255), generator=generator) + 0.5
    x = (half * scale).view(torch.int32)
    x += torch.randint(-2, 3, x.shape, generator=generator, dtype=torch.int32)
    x = torch.cat([largest, x.view(torch.float32)], 1)
    q, s = farro.quantize_int8_groups(x, 256, backend="triton")
    want_q, want_s = quantize(x, 256)
    assert_bit_equal(s, want_s)
    assert_bit_equal(q, want_q)


@pytest.mark.parametrize("dtype, significands", [(torch.bfloat16, 128), (torch.float16, 1024)])
def test_one_correction_is_enough_for_16_bits(dtype, significands):
    """All quotients of two such values whose code is not 0, as the kernel computes them.

    Powers of two scale every step exactly, so the significands and the distance of the exponents
    are all that matters; the scale is no subnormal, thanks to its floor.
    """
    largest = (significands + torch.arange(significands)).float()[:, None]
    scale = largest / 127
    reciprocal = 1 / scale
    for exponent in range(9):
        x = (significands + torch.arange(significands)).float()[None] * 2.0**-exponent
        ratio = x * reciprocal
        ratio = fma32(fma32(ratio, -scale, x), reciprocal, ratio)
        assert torch.equal(ratio, x / scale)


def test_leading_dimensions_are_read_in_place(generator):
    x = torch.randn(4, 6, 5, 130, generator=generator)
    for view in (x, x.transpose(0, 2), x[:, ::2, 1:4], x[..., ::3], x[0, 0, 0], x[:, :, 0]):
        q, scale = farro.quantize_int8_groups(view, 64, backend="triton")
        want = quantize(view, 64)
        assert_bit_equal(q, want[0])
        assert_bit_equal(scale, want[1])
    five = torch.randn(2, 3, 2, 3, 40, generator=generator)[::2, ::2, :, ::2]
    assert farro.quantize_int8_groups(five, 32, backend="triton")[0].shape == five.shape


def test_more_strides_than_it_takes_are_refused(generator):
    x = torch.randn(4, 4, 4, 4, 40, generator=generator)[::2, ::2, ::2, ::2]
    with pytest.raises(farro.UnsupportedError, match="leading dimensions need 4 strides"):
        farro.quantize_int8_groups(x, 32, backend="triton")
