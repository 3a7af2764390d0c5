"""Tensors laid out as views of a guarded buffer: slices, transposes, offsets, both strides."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.deterministic

_MARGIN = 64  # elements of guard on both sides; keeps 16-byte alignment


@dataclass(frozen=True)
class Layout:
    """How a view lies in its buffer: which dimension is innermost, its step, the pitch of rows."""

    turned: bool = False  # the last two dimensions exchanged in memory
    rotated: bool = False  # the first dimension is the innermost of the leading ones
    step: int = 1  # stride of the innermost dimension
    parts: int = 1  # the middle one of this many equal parts of a wider row
    pitch: int = 1  # rows begin at multiples of this many elements, with a gap
    offset: int = 0  # elements past an aligned address
    windows: bool = False  # rows overlap, each one element after the one before (inputs only)


LAYOUTS = {
    "contiguous": Layout(),
    "offset": Layout(offset=1),
    "columns": Layout(parts=3),  # a slice of a fused projection
    "padded": Layout(pitch=16),
    "transposed": Layout(turned=True),
    "transposed offset": Layout(turned=True, offset=3),
    "transposed columns": Layout(turned=True, parts=3),
    "transposed padded": Layout(turned=True, pitch=16),
    "strided": Layout(step=3, parts=2),
    "transposed strided": Layout(turned=True, step=2, parts=2),
    "windows": Layout(windows=True),
    "permuted": Layout(rotated=True),  # leading dimensions that no view flattens
    "permuted columns": Layout(rotated=True, parts=3),
}


@dataclass(frozen=True)
class Guarded:
    """A view and the buffer around it, with a copy of the buffer's first content."""

    view: torch.Tensor
    base: torch.Tensor
    before: torch.Tensor

    def _changed(self) -> torch.Tensor:
        size = self.base.element_size()
        old, new = self.before.view(torch.uint8), self.base.view(torch.uint8)
        return (old != new).view(-1, size).any(dim=1)

    def overwritten(self) -> int:
        """How many elements of the buffer outside the view have changed."""
        outside = torch.ones(self.base.shape, dtype=torch.bool, device=self.base.device)
        view = self.view
        outside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
        return int((self._changed() & outside).sum())

    def changed(self) -> int:
        """How many elements of the whole buffer have changed."""
        return int(self._changed().sum())

    def restore(self) -> None:
        """Give the buffer its first content again."""
        self.base.copy_(self.before)


def _strides(shape: tuple[int, ...], layout: Layout) -> tuple[tuple[int, ...], int]:
    """Strides of a view of `shape`, and where it begins in its buffer."""
    if layout.windows:
        return (1,) * len(shape), 0
    order = list(range(len(shape)))  # outermost first
    if layout.turned and len(order) > 1:
        order[-2:] = order[:-3:-1]
    if layout.rotated and len(order) > 2:
        order[:-1] = order[1:-1] + order[:1]
    strides = [1] * len(shape)
    reach, begin = layout.step, 0
    for depth, dimension in enumerate(reversed(order)):
        strides[dimension] = reach
        reach *= max(shape[dimension], 1)
        if depth == 0:
            begin = reach if layout.parts > 1 else 0
            reach *= layout.parts
            if layout.pitch > 1:
                reach = (reach // layout.pitch + 2) * layout.pitch
    return tuple(strides), begin + layout.offset


def guarded(shape: tuple[int, ...], dtype: torch.dtype, layout: str, device: object) -> Guarded:
    """A view of `shape` in one of LAYOUTS, in a buffer full of a sentinel (NaN, or bytes 0x5b).

    A kernel that reads beside the view reads the sentinel; one that writes there is found by
    `overwritten()`.
    """
    strides, begin = _strides(shape, LAYOUTS[layout])
    last = sum((size - 1) * stride for size, stride in zip(shape, strides)) if all(shape) else 0
    length = 2 * _MARGIN + begin + last + 1
    place = torch.device(str(device))
    if dtype.is_floating_point:
        base = torch.full((length,), math.nan, dtype=dtype, device=place)
    else:
        base = torch.full((length * dtype.itemsize,), 0x5B, dtype=torch.uint8, device=place)
        base = base.view(dtype)
    view = base.as_strided(shape, strides, _MARGIN + begin)
    return Guarded(view, base, base.clone())


def laid_out(values: torch.Tensor, layout: str, device: object = "cpu") -> Guarded:
    """`values` as a view in one of LAYOUTS, on `device`, with sentinels around it.

    Windows overlap, so they hold the first of the values only.
    """
    place = guarded(tuple(values.shape), values.dtype, layout, device)
    if LAYOUTS[layout].windows and values.numel():
        body = place.base[_MARGIN:-_MARGIN]
        body.copy_(values.flatten()[: body.numel()])
    else:
        place.view.copy_(values)
    return Guarded(place.view, place.base, place.base.clone())


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Within it torch.empty gives NaN and the largest integers, so that unwritten outputs show.

    It is torch's deterministic mode, whose warnings are silenced; the mode before is restored.
    """
    mode: Any = torch.utils.deterministic
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        mode.fill_uninitialized_memory,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic.*")
        torch.use_deterministic_algorithms(True, warn_only=True)
        mode.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            mode.fill_uninitialized_memory = before[2]
