"""Bit-for-bit comparison of tensors: NaN matches NaN whatever its payload, +0 is not -0."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
