"""The GPU's timer with a clock in the place of the GPU: what it times, flushes and counts."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch

from farro.bench import timing


class Clock:
    """Device events on a stream: work begins once it is enqueued and the work before it is done."""

    now = 0.0  # when the device will be done with all that was enqueued
    host = 0.0  # stands still unless a test moves it: the host enqueues in no time

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = None

    @classmethod
    def work(cls, us: float) -> None:
        cls.now = max(cls.now, cls.host) + us

    def record(self) -> None:
        self.work(0.0)
        self.at = Clock.now

    def query(self) -> bool:
        return self.at < Clock.host

    def elapsed_time(self, other: Clock) -> float:
        return (other.at - self.at) / 1e3


class Graph:
    call = None

    def replay(self) -> None:
        Clock.work(3.0)


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(timing, "_FLUSH_BYTES", 1 << 12)
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: catch_up())
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: Clock.work(cycles / 2000))
    monkeypatch.setattr(timing, "_WAKE_S", 1e-3)
    Clock.now = Clock.host = 0.0
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    zero = torch.Tensor.zero_

    def flush(tensor):
        Clock.work(60.0)
        return zero(tensor)

    monkeypatch.setattr(torch.Tensor, "zero_", flush)
    return timing.GpuTimer(torch.device("cpu"))


def catch_up() -> None:
    Clock.host = max(Clock.host, Clock.now)


class Stream:
    def wait_stream(self, other) -> None:
        pass


def call_of(us: float):
    def call():
        Clock.work(us)

    return call


def test_the_flush_is_outside_the_events(clock):
    assert clock._flush_us == 60.0
    assert set(clock.samples(call_of(12.5))) == {12.5}
    assert clock.few(call_of(7.0), 3) == [7.0] * 3


@pytest.mark.parametrize("host_us", (20.0, 61.0, 200.0, 1500.0))
def test_host_time_between_the_events_does_not_count(clock, host_us):
    """The device waits for a slow host: a run counts only where the host was ahead."""

    def call():
        Clock.host += host_us
        Clock.work(12.5)

    assert clock.samples(call) == pytest.approx([12.5] * len(clock.samples(call)))
    assert clock.few(call, 3) == pytest.approx([12.5] * 3)
    assert clock._lead_us < 4 * host_us
    clock.samples(call_of(5.0))
    assert clock._lead_us == 0.0  # the next call may be fast


def test_a_call_that_waits_for_the_device_is_timed_all_the_same(clock):
    calls = []

    def call():
        calls.append(1)
        Clock.work(12.5)
        catch_up()
        Clock.host += 30.0

    assert clock.few(call, 5) == pytest.approx([42.5] * 5)
    assert len(calls) < 20


def test_a_device_that_idled_is_warmed_up_first(clock, monkeypatch):
    """Clocks come back while the first calls run, and those are not in the samples."""
    clock._last -= 1.0
    began = time.monotonic()

    def call():
        Clock.work(12.5 if time.monotonic() - began > 1e-3 else 44.0)

    assert set(clock.samples(call)) == {12.5}
    calls = []
    monkeypatch.setattr(clock, "_last", time.monotonic())
    clock.samples(lambda: calls.append(1), timing.Budget(0.0, 5, 30))
    assert len(calls) == 4 + 5


def test_runs_fit_the_budget(clock):
    least, most = clock.default.least, clock.default.most
    assert len(clock.samples(call_of(5.0))) == most
    assert len(clock.samples(call_of(1e6))) == least
    wanted = int(clock.default.ms * 1e3 / (400 + 60 + 5))
    assert len(clock.samples(call_of(400.0))) == wanted and least < wanted < most


def test_graphs_are_replayed_and_a_refusal_is_told(clock):
    assert clock.graph_us(call_of(9.0)) == 3.0

    def refuses():
        raise RuntimeError("not compiled\nmore")

    assert clock.graph_us(refuses) == "no CUDA graph: RuntimeError: not compiled"


def test_host_time_is_the_clock_of_the_host(clock):
    calls = []

    def call():
        calls.append(1)
        time.sleep(2e-4)

    assert 200 <= clock.host_us(call, 1e5) < 2000
    assert len(calls) == 50
    calls.clear()
    clock.host_us(lambda: calls.append(1), 5.0)
    assert len(calls) == 1000
