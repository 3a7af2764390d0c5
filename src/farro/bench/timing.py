"""Times of a call: on a GPU by device events, CUDA graphs and host clock; on a CPU by host clock.

Cold means that a buffer larger than the last-level cache is overwritten before each timed run, so
that every operand comes from memory, as weights do in a model of many layers.
"""

from __future__ import annotations

import ctypes
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_FLUSH_BYTES = 1 << 28  # well over any GPU's L2, and what triton.testing.do_bench flushes with
_CYCLES_PER_US = 2000  # of a GPU's clock at its fastest
_LEAD_US = 32.0  # the first lead that the host is given over the device
_LONGEST_LEAD_US = 4096.0
_IDLE_S = 0.05  # after as long without runs a device may have lowered its clocks
_WAKE_S = 0.05  # and is kept busy this long before it is timed


@dataclass(frozen=True)
class Budget:
    """How long one subject is timed, and how often at least and at most."""

    ms: float
    least: int
    most: int


QUICK = Budget(4.0, 5, 30)
BRIEF = Budget(2.5, 6, 14)
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
        self.wake_s = _WAKE_S
        self._flush = torch.empty(
            _FLUSH_BYTES // 4 if cold else 1, dtype=torch.int32, device=device
        )
        self._events: list[tuple[Any, Any]] = []  # made once: making one can take as long as a run
        self._lead_us = 0.0
        self._last = -math.inf
        self._flush_us = 0.0
        self._flush_us = median(self._run(lambda: None, 10, whole=True))

    def samples(self, call: Callable[[], Any], budget: Budget | None = None) -> list[float]:
        """Microseconds of single runs, after a warm-up."""
        budget = budget or self.default
        self._lead_us = 0.0  # another call, another host time
        self._wake(call)
        once = median(self._run(call, 4)[1:])
        runs = int(budget.ms * 1e3 / (once + self._flush_us + self._lead_us + 5.0))
        return self._run(call, max(budget.least, min(budget.most, runs)))

    def _wake(self, call: Callable[[], Any]) -> None:
        """Bring up the clocks of a device that idled, as it does while the host compiles."""
        began = time.monotonic()
        if began - self._last < _IDLE_S:
            return
        while time.monotonic() - began < self.wake_s:
            self._run(call, 4)

    def few(self, call: Callable[[], Any], runs: int) -> list[float]:
        """Microseconds of `runs` runs, without a warm-up."""
        self._lead_us = 0.0
        return self._run(call, runs)

    def _run(self, call: Callable[[], Any], runs: int, whole: bool = False) -> list[float]:
        """Device events around each run; `whole` times the flush with it.

        Where the device is at a run's start before the host has enqueued all of the run, it waits
        for the host between the events, and these tell the host's time. Such a run is repeated
        behind a longer spin, which holds the device back while the host gets ahead.
        """
        event: Any = torch.cuda.Event
        while len(self._events) < runs:
            self._events.append((event(enable_timing=True), event(enable_timing=True)))
        pairs = self._events[:runs]
        for pair in pairs:
            while self._late(call, *pair, whole):
                # a call that waits for the device itself is late behind any spin
                if self._lead_us >= _LONGEST_LEAD_US:
                    break
                self._lead_us = max(_LEAD_US, 2 * self._lead_us)
        torch.cuda.synchronize(self.device)
        self._last = time.monotonic()
        return [start.elapsed_time(stop) * 1e3 for start, stop in pairs]

    def _late(self, call: Callable[[], Any], start: Any, stop: Any, whole: bool) -> bool:
        """Enqueue one run; whether the host was too late for its time to be the device's."""
        if self._lead_us:
            spin: Any = torch.cuda._sleep
            spin(int(self._lead_us * _CYCLES_PER_US))
        if whole:
            start.record()
        self._flush.zero_()
        if not whole:
            start.record()
        call()
        stop.record()
        return not whole and bool(start.query())

    def graph_us(self, call: Callable[[], Any], budget: Budget = QUICK) -> float | str:
        """Median of replays of a CUDA graph of one call, or why it cannot be captured."""
        replay = self.graphed(call)
        return replay if isinstance(replay, str) else median(self.samples(replay, budget))

    def graphed(self, call: Callable[[], Any]) -> Callable[[], Any] | str:
        """The replay of a CUDA graph of one call, or why it cannot be captured."""
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
        return graph.replay

    def host_us(self, call: Callable[[], Any], device_us: float) -> float:
        """Host time to enqueue a call without waiting: the best of ten series of calls.

        Other work on the host's cores makes series longer and none shorter.
        """
        count = int(max(5, min(100, 2e4 / max(device_us, 1.0))))
        series = []
        for _ in range(10):
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
        self._flush = torch.zeros(4 * cache_bytes() // 8 if cold else 1, dtype=torch.int64)

    def samples(self, call: Callable[[], Any], budget: Budget | None = None) -> list[float]:
        budget = budget or self.default
        once = self._once(call)
        runs = int(budget.ms * 1e3 / max(once, 1.0))
        return [self._once(call) for _ in range(max(budget.least, min(budget.most, runs)))]

    def few(self, call: Callable[[], Any], runs: int) -> list[float]:
        return [self._once(call) for _ in range(runs)]

    def _once(self, call: Callable[[], Any]) -> float:
        if self.cold:
            self._flush.sum()  # read: written lines would go back to memory during the call
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
