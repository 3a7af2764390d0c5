"""Comparison of tensors: bit for bit, or within rounding of an exact float64 result.

Bit for bit, NaN matches NaN whatever its payload and +0 is not -0. Floating-point sums depend on
their order, so they are held to what rounding allows each single element, and to the relative
error and the cosine of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Errors of sums of signed values, relative to the sum of their magnitudes, with room to spare:
FP32_SUM = 2.0**-18  # accumulated in FP32, in any order
FP8_PROMOTED_SUM = 2.0**-10  # by FP8 tensor cores of 14 bits, promoted every 512 of K or sooner
FP8_FAST_SUM = 2.0**-8  # by the same, never promoted
_ENOUGH = 64  # elements; of fewer, one that cancels decides the error of the whole

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Mismatch:
    """Where two tensors differ: the first place, and how many there are."""

    index: tuple[int, ...]
    actual: str
    expected: str
    count: int
    total: int

    def __str__(self) -> str:
        return (
            f"{self.count} of {self.total} elements differ; first at {list(self.index)}: "
            f"got {self.actual}, needed {self.expected}"
        )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers, contiguous, on the CPU."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor.view(_BITS[tensor.element_size()]) if tensor.numel() else tensor


def _text(value: torch.Tensor) -> str:
    if not value.dtype.is_floating_point:
        return str(value.item())
    number = float(value)
    return f"{number!r} ({number.hex()})"


def first_mismatch(actual: torch.Tensor, expected: torch.Tensor) -> Mismatch | None:
    """The first element whose bits differ, or None; NaN equals NaN, strides do not count.

    Both have the same shape and dtype (`assert_bit_equal` checks that); devices may differ.
    """
    if actual.numel() == 0:
        return None
    different = _bits(actual) != _bits(expected)
    if actual.dtype.is_floating_point:
        # through float32, since not every 8-bit type has isnan
        both_nan = actual.detach().cpu().float().isnan() & expected.detach().cpu().float().isnan()
        different &= ~both_nan
    count = int(different.sum())
    if count == 0:
        return None
    index = tuple(int(i) for i in different.nonzero()[0])
    return Mismatch(index, _text(actual[index]), _text(expected[index]), count, actual.numel())


def difference(actual: torch.Tensor, expected: torch.Tensor) -> str | None:
    """What differs, in one line: shape, dtype or the first element; None where nothing does."""
    if actual.shape != expected.shape:
        return f"shape is {list(actual.shape)}, needed {list(expected.shape)}"
    if actual.dtype != expected.dtype:
        return f"dtype is {actual.dtype}, needed {expected.dtype}"
    mismatch = first_mismatch(actual, expected)
    return None if mismatch is None else str(mismatch)


def assert_bit_equal(actual: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """Same shape, same dtype, same bits; NaN matches NaN whatever its payload, +0 is not -0.

    Args:
        actual: what a kernel gave, any dtype, device and strides.
        expected: what it had to give; may be on another device.
        what: named in the message.

    Raises:
        AssertionError: with the number of elements that differ and the first of them.
    """
    found = difference(actual, expected)
    if found is not None:
        raise AssertionError(f"{what}: {found}" if what else found)


def far_from_exact(
    actual: torch.Tensor,
    exact: torch.Tensor,
    magnitude: torch.Tensor,
    sum_error: float = FP32_SUM,
    frobenius: float = 4e-3,
    cosine: float = 0.9999,
) -> str | None:
    """What lies too far from the exact result, in one line, or None; see assert_close_to_exact."""
    if actual.shape != exact.shape:
        return f"shape is {list(actual.shape)}, needed {list(exact.shape)}"
    if actual.numel() == 0:
        return None
    about = torch.finfo(actual.dtype)
    rounding, smallest = about.eps / 2, about.smallest_normal * about.eps
    got = actual.detach().cpu().double()
    exact = exact.detach().cpu().double()
    room = sum_error * magnitude.detach().cpu().double()
    bound = rounding * (exact.abs() + room) + room + smallest
    # Past the largest number infinity is right, and where rounding may have led there
    may_overflow = (exact.abs() + bound >= about.max) & (got == exact.sign() * torch.inf)
    finite = got.isfinite() & exact.isfinite()
    close = (got - exact).abs() <= bound
    wrong = ~(close & finite | may_overflow | (got == exact) | (got.isnan() & exact.isnan()))
    count = int(wrong.sum())
    if count:
        index = tuple(int(i) for i in wrong.nonzero()[0])
        return (
            f"{count} of {actual.numel()} elements are too far from the exact result; first at "
            f"{list(index)}: got {_text(actual[index])}, exact {float(exact[index])!r}, "
            f"allowed {float(bound.expand(exact.shape)[index]):.3g}"
        )
    return _far_as_a_whole(got[finite], exact[finite], frobenius, cosine)


def _far_as_a_whole(
    got: torch.Tensor, exact: torch.Tensor, frobenius: float, cosine: float
) -> str | None:
    if got.numel() < _ENOUGH or not exact.any():
        return None
    error = float((got - exact).norm() / exact.norm())
    if error > frobenius:
        return f"the relative Frobenius error is {error:.3g}, allowed {frobenius:.3g}"
    angle = float(got @ exact / (got.norm() * exact.norm()))
    return None if angle >= cosine else f"the cosine is {angle:.6f}, needed {cosine}"


def assert_close_to_exact(
    actual: torch.Tensor,
    exact: torch.Tensor,
    magnitude: torch.Tensor,
    sum_error: float = FP32_SUM,
    frobenius: float = 4e-3,
    cosine: float = 0.9999,
    what: str = "",
) -> None:
    """Each element, and the whole, within rounding of an exact result:

        |actual - exact| <= u * |exact| + (1 + u) * sum_error * magnitude

    with u = half the spacing of `actual`'s dtype at 1 (2^-8 for BF16): one rounding, and the error
    of the sum before it. Besides, |actual - exact| <= frobenius * |exact| in the Frobenius norm,
    and the cosine between the two is at least `cosine` (both from 64 elements on).

    Args:
        actual: what a kernel gave, any floating-point dtype, device and strides.
        exact: float64, of the same shape: the result without any rounding.
        magnitude: float64, broadcastable: the sum of the magnitudes of all that was added,
            such as |alpha| * sum |a||b| + |bias|.
        sum_error: of `FP32_SUM`, `FP8_PROMOTED_SUM`, `FP8_FAST_SUM`, or your own.
        frobenius: bound of the relative error of the whole.
        cosine: least cosine of the whole.
        what: named in the message.

    NaN has to be where the exact result has it, and infinity too, or where the largest number is
    within the bound. Raises AssertionError with the count of wrong elements and the first of them.
    """
    found = far_from_exact(actual, exact, magnitude, sum_error, frobenius, cosine)
    if found is not None:
        raise AssertionError(f"{what}: {found}" if what else found)
