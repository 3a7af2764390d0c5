"""Floors measured in the same run: how fast this machine reads, and copies, that many bytes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .timing import QUICK, Budget, GpuTimer, Timer, median

_STEP = 1 << 16  # a floor is measured for a multiple of this, and within 1 % of what is asked
_FEW = Budget(6.0, 8, 60)


class Floors:
    """The read floor in microseconds for a number of bytes, each measured once."""

    def __init__(self, timer: Timer) -> None:
        self._timer = timer
        self._known: dict[int, tuple[float, str]] = {}
        self.problems: list[str] = []  # ways of reading that do not run here
        # makes of a call what is timed, or tells why it cannot
        self.prepare: Callable[[Callable[[], Any]], Callable[[], Any] | str] = lambda call: call

    def read(self, nbytes: int) -> tuple[float, str]:
        """Microseconds of the fastest way found to read `nbytes`, and its name."""
        step = max(_STEP, 1 << max(0, nbytes.bit_length() - 7))
        size = max(1, round(nbytes / step)) * step
        if size not in self._known:
            self._known[size] = self._measure(size)
        return self._known[size]

    def _measure(self, size: int) -> tuple[float, str]:
        # random bits: what is read must not be kinder than real codes
        source = torch.randint(
            -(2**31), 2**31, (size // 4,), dtype=torch.int32, device=self._timer.device
        )
        best: tuple[float, str] | None = None
        for name, call in _readers(self._timer, source):
            if name in self.problems:
                continue
            try:
                call()
                prepared = self.prepare(call)
                call = call if isinstance(prepared, str) else prepared
                us = median(self._timer.samples(call, _FEW))
            except Exception as error:  # another Triton may not compile one of them
                self.problems.append(name)
                text = f"read floor: {name} does not run: {type(error).__name__}: {error}"
                print(text[:200], file=sys.stderr)
                continue
            if best is None or us < best[0]:
                best = us, name
        assert best is not None, "no way to read runs here"
        return best

    def copy_gbs(self, nbytes: int) -> float:
        """Bytes read and written by a copy of `nbytes` / 2, in GB/s."""
        source = torch.randint(
            -(2**31), 2**31, (nbytes // 8,), dtype=torch.int32, device=self._timer.device
        )
        target = torch.empty_like(source)
        us = median(self._timer.samples(lambda: target.copy_(source), QUICK))
        return 2 * source.nbytes / us / 1e3


def _readers(timer: Timer, source: torch.Tensor) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Ways to read all of `source`."""
    # torch's own reductions serve where there is no Triton, and on CPUs
    wide = source.view(torch.int64)
    if isinstance(timer, GpuTimer) and _triton():
        yield from _triton_readers(timer, source)
        return
    yield "torch int64 sum", wide.sum
    yield "torch int32 max", source.amax


def _triton() -> bool:
    import importlib.util

    return importlib.util.find_spec("triton") is not None


def _triton_readers(
    timer: GpuTimer, source: torch.Tensor
) -> Iterator[tuple[str, Callable[[], Any]]]:
    from .read_kernel import read_blocks, read_boxes

    count = source.numel()
    sms = torch.cuda.get_device_properties(timer.device).multi_processor_count
    sums = torch.empty(8 * sms, dtype=torch.int32, device=timer.device)
    for per_sm, block, warps in ((1, 16384, 16), (2, 16384, 16), (4, 8192, 8), (8, 4096, 4)):
        grid = (per_sm * sms,)
        launch = functools.partial(read_blocks[grid], source, sums, count, BLOCK=block)
        yield f"blocks {per_sm} a SM", functools.partial(launch, num_warps=warps)
    if torch.cuda.get_device_capability(timer.device) < (9, 0):
        return
    from triton.tools.tensor_descriptor import TensorDescriptor

    width, rows = 64, count // 64
    for per_sm, box_rows, stages in ((1, 64, 12), (2, 32, 12), (4, 16, 12)):
        view = TensorDescriptor(source, [rows, width], [width, 1], [box_rows, width])
        launch = functools.partial(read_boxes[(per_sm * sms,)], view, sums, rows, ROWS=box_rows)
        yield (
            f"boxes {per_sm} a SM",
            functools.partial(launch, WIDTH=width, STAGES=stages, num_warps=4),
        )
