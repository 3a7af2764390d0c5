"""Times of a call: on a GPU by device events, CUDA graphs and host clock; on a CPU by host clock.

Cold means that a buffer larger than the last-level cache is overwritten before each timed run, so
that every operand comes from memory, as weights do in a model of many layers.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_FLUSH_BYTES = 1 << 28  # well over any GPU's L2, and what triton.testing.do_bench flushes with


@dataclass(frozen=True)
class Budget:
    """How long one subject is timed, and how often at least and at most."""

    ms: float
    least: int
    most: int


QUICK = Budget(4.0, 5, 30)
GPU = Budget(25.0, 10, 150)
CPU = Budget(400.0, 5, 60)


def median(samples: list[float]) -> float:
    return statistics.median(samples)


class GpuTimer:
    """Device time of calls on the current stream of one GPU, in microseconds."""

    def __init__(self, device: torch.device, cold: bool = True) -> None:
        self.device = device
        self.cold = cold
        self.default = GPU
        self._flush = torch.empty(
            _FLUSH_BYTES // 4 if cold else 1, dtype=torch.int32, device=device
        )
        self._flush_us = 0.0
        self._flush_us = median(self._run(lambda: None, 10, whole=True))

    def samples(self, call: Callable[[], Any], budget: Budget | None = None) -> list[float]:
        """Microseconds of single runs, after a warm-up."""
        budget = budget or self.default
        once = median(self._run(call, 4)[1:])
        runs = int(budget.ms * 1e3 / (once + self._flush_us + 5.0))
        return self._run(call, max(budget.least, min(budget.most, runs)))

    def few(self, call: Callable[[], Any], runs: int) -> list[float]:
        """Microseconds of `runs` runs, without a warm-up."""
        return self._run(call, runs)

    def _run(self, call: Callable[[], Any], runs: int, whole: bool = False) -> list[float]:
        """Device events around each run; `whole` times the flush with it."""
        event: Any = torch.cuda.Event
        starts = [event(enable_timing=True) for _ in range(runs)]
        stops = [event(enable_timing=True) for _ in range(runs)]
        for start, stop in zip(starts, stops):
            if whole:
                start.record()
            self._flush.zero_()
            if not whole:
                start.record()
            call()
            stop.record()
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(stop) * 1e3 for start, stop in zip(starts, stops)]

    def graph_us(self, call: Callable[[], Any], budget: Budget = QUICK) -> float | str:
        """Median of replays of a CUDA graph of one call, or why it cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        try:
            new_stream: Any = torch.cuda.Stream
            side = new_stream(self.device)
            side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(side):
                call()
            torch.cuda.current_stream(self.device).wait_stream(side)
            with torch.cuda.graph(graph):
                call()
        except Exception as error:  # what a peer raises under capture is its own
            torch.cuda.synchronize(self.device)
            return f"no CUDA graph: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
        return median(self.samples(graph.replay, budget))

    def host_us(self, call: Callable[[], Any], device_us: float) -> float:
        """Host time to enqueue a call without waiting: the best of three series of calls."""
        count = int(max(5, min(100, 2e4 / max(device_us, 1.0))))
        series = []
        for _ in range(3):
            torch.cuda.synchronize(self.device)
            began = time.perf_counter()
            for _ in range(count):
                call()
            series.append((time.perf_counter() - began) / count * 1e6)
        torch.cuda.synchronize(self.device)
        return min(series)

    def peak_bytes(self, call: Callable[[], Any]) -> int | None:
        """The most that a call holds at once, its result included."""
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        call()
        return torch.cuda.max_memory_allocated(self.device) - before


class CpuTimer:
    """Wall time of calls on the CPU, in microseconds."""

    def __init__(self, cold: bool = False) -> None:
        self.device = torch.device("cpu")
        self.cold = cold
        self.default = CPU
        self._flush = torch.empty(4 * cache_bytes() if cold else 1, dtype=torch.int8)

    def samples(self, call: Callable[[], Any], budget: Budget | None = None) -> list[float]:
        budget = budget or self.default
        once = self._once(call)
        runs = int(budget.ms * 1e3 / max(once, 1.0))
        return [self._once(call) for _ in range(max(budget.least, min(budget.most, runs)))]

    def few(self, call: Callable[[], Any], runs: int) -> list[float]:
        return [self._once(call) for _ in range(runs)]

    def _once(self, call: Callable[[], Any]) -> float:
        if self.cold:
            self._flush.add_(1)
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e6

    def graph_us(self, call: Callable[[], Any], budget: Budget = QUICK) -> float | str | None:
        return None

    def host_us(self, call: Callable[[], Any], device_us: float) -> float | None:
        return None

    def peak_bytes(self, call: Callable[[], Any]) -> int | None:
        """Growth of the process's resident memory during a call, its result included (Linux)."""
        status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
        try:
            ctypes.CDLL(None).malloc_trim(0)  # memory kept from earlier calls would hide growth
            reset.write_text("5")  # sets the high-water mark to what is resident now
            before = _kib(status, "VmRSS")
            call()
            return max(0, _kib(status, "VmHWM") - before) * 1024
        except (OSError, ValueError, AttributeError):
            return None


Timer = GpuTimer | CpuTimer


def timer(device: torch.device, cold: bool | None = None) -> Timer:
    """A timer for a device; GPUs are timed cold and CPUs warm where not said."""
    if device.type == "cuda":
        return GpuTimer(device, True if cold is None else cold)
    return CpuTimer(False if cold is None else cold)


def cache_bytes() -> int:
    """The size of the last-level cache (64 MiB where the system does not tell)."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
        if text[:-1].isdigit() and text[-1] in units:
            sizes.append(int(text[:-1]) * units[text[-1]])
    return max(sizes, default=1 << 26)


def _kib(status: Path, name: str) -> int:
    for line in status.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise ValueError(f"{name} is not told")
