"""Closeness to an exact result: right roundings pass, and no single wrong element can hide."""

from __future__ import annotations

import math

import pytest
import torch

from farro.testing import FP8_PROMOTED_SUM, assert_close_to_exact, far_from_exact


def product(generator, m=40, n=30, k=512):
    """A BF16 product, its exact float64 result and the sum of magnitudes."""
    a, b = (torch.randn(size, k, generator=generator).double() for size in (m, n))
    exact, magnitude = a @ b.T, a.abs() @ b.abs().T
    return exact.float().bfloat16(), exact, magnitude


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
def test_one_rounding_is_close(dtype, generator):
    _, exact, magnitude = product(generator)
    assert_close_to_exact(exact.to(dtype), exact, magnitude, sum_error=0.0)
    assert_close_to_exact(exact.to(dtype).T.contiguous().T, exact, magnitude.max())


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
def test_a_second_step_away_is_too_far(dtype, generator):
    """The bound of an element is its own rounding: two steps of its dtype are refused."""
    _, exact, magnitude = product(generator)
    got = exact.to(dtype)
    for _ in range(2):
        got[7, 3] = torch.nextafter(got[7, 3], torch.tensor(torch.inf, dtype=dtype))
    with pytest.raises(AssertionError, match=r"kernel: 1 of 1200 elements.*first at \[7, 3\]: got"):
        assert_close_to_exact(got, exact, magnitude, sum_error=0.0, what="kernel")


def test_a_wrong_element_does_not_hide_in_the_sum_s_error(generator):
    got, exact, magnitude = product(generator)
    got[-1, -1] += got.float().std().bfloat16() / 8
    found = far_from_exact(got, exact, magnitude, FP8_PROMOTED_SUM)
    assert found is not None and "1 of 1200" in found and "[39, 29]" in found
    assert (got.double() - exact).norm() / exact.norm() < 5e-3  # the norm would hardly tell


def test_the_whole_is_judged_too(generator):
    """Errors that every element allows add up in the norm; a constant factor shows there."""
    got, exact, magnitude = product(generator)
    off = (exact * 1.005).bfloat16()
    found = far_from_exact(off, exact, magnitude, sum_error=0.01)
    assert found is not None and "Frobenius error is 0.005" in found
    assert far_from_exact(off, exact, magnitude, sum_error=0.01, frobenius=0.02) is None
    noise = got + (magnitude * 0.002 * torch.randn(exact.shape, generator=generator)).bfloat16()
    found = far_from_exact(noise, exact, magnitude, sum_error=0.1, frobenius=1.0)
    assert found is not None and "cosine is 0.99" in found


@pytest.mark.parametrize("value", (math.nan, math.inf, -math.inf))
def test_non_finite_values_have_to_agree(value, generator):
    got, exact, magnitude = product(generator)
    exact[2, 5] = value
    found = far_from_exact(got, exact, magnitude)
    assert found is not None and f"exact {value!r}" in found
    got[2, 5] = value
    assert far_from_exact(got, exact, magnitude) is None
    exact[2, 5] = 1.0
    found = far_from_exact(got, exact, magnitude)
    assert found is not None and f"got {value!r}" in found
    got[2, 5], exact[2, 5] = -value, value
    assert math.isnan(value) or far_from_exact(got, exact, magnitude) is not None


def test_infinity_is_right_where_rounding_leads_there():
    largest = torch.finfo(torch.bfloat16).max
    exact = torch.tensor([largest * 1.001, largest * 4, largest * 0.99], dtype=torch.float64)
    magnitude = exact.abs()
    inf = torch.tensor([math.inf] * 3, dtype=torch.bfloat16)
    found = far_from_exact(inf, exact, magnitude)
    assert found is not None and found.startswith("1 of 3") and "[2]" in found
    assert far_from_exact(exact.float().bfloat16(), exact, magnitude) is None
    assert far_from_exact(-inf[:2], exact[:2], magnitude[:2]) is not None


def test_subnormals_have_their_own_spacing():
    smallest = 2.0**-133
    exact = torch.tensor([0.4 * smallest, 1.4 * smallest, 0.0], dtype=torch.float64)
    got = torch.tensor([0.0, smallest, 0.0], dtype=torch.bfloat16)
    assert far_from_exact(got, exact, exact) is None
    assert far_from_exact(got + 3 * smallest, exact, exact) is not None


def test_shapes_and_empty_tensors():
    x = torch.zeros(2, 3, dtype=torch.bfloat16)
    found = far_from_exact(x, torch.zeros(3, 2).double(), torch.tensor(0.0))
    assert found == "shape is [2, 3], needed [3, 2]"
    assert far_from_exact(x[:0], x[:0].double(), x[:0].double()) is None
    assert far_from_exact(x, x.double(), x.double()) is None
