"""The GPU's timer with a clock in the place of the GPU: what it times, flushes and counts."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch

from farro.bench import timing


class Clock:
    """Device events that read a clock which only the calls below advance."""

    now = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = None

    def record(self) -> None:
        self.at = Clock.now

    def elapsed_time(self, other: Clock) -> float:
        return (other.at - self.at) / 1e3


class Graph:
    call = None

    def replay(self) -> None:
        Clock.now += 3.0


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(timing, "_FLUSH_BYTES", 1 << 12)
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    zero = torch.Tensor.zero_

    def flush(tensor):
        Clock.now += 60.0
        return zero(tensor)

    monkeypatch.setattr(torch.Tensor, "zero_", flush)
    return timing.GpuTimer(torch.device("cpu"))


class Stream:
    def wait_stream(self, other) -> None:
        pass


def call_of(us: float):
    def call():
        Clock.now += us

    return call


def test_the_flush_is_outside_the_events(clock):
    assert clock._flush_us == 60.0
    assert set(clock.samples(call_of(12.5))) == {12.5}
    assert clock.few(call_of(7.0), 3) == [7.0] * 3


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
    assert len(calls) == 15
    calls.clear()
    clock.host_us(lambda: calls.append(1), 5.0)
    assert len(calls) == 300
