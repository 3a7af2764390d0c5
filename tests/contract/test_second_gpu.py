"""Calls on one GPU while another is current. Scenario 2: the wrong current device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from farro.testing import assert_bit_equal

from .samples import tensors

_PRODUCER = 40_000_000  # clock cycles, some 20 ms: a call on another stream would be long done


@pytest.fixture
def elsewhere(device) -> torch.device:
    """A GPU that is not the current one."""
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"needs two GPUs, there is {count}")
    return torch.device("cuda", (torch.cuda.current_device() + 1) % count)


def _moved(inputs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The call with its tensors on `device`, their strides kept."""
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}


def _check(sample, results, want, device: torch.device, what: str) -> None:
    for result, expected in zip(results, want):
        assert result.device == device, what
        sample.compare(result, expected, what)


def test_scenario_02_another_device_is_current(
    run, accepted, sample, cuda_only, kernel, device, elsewhere
) -> None:
    for name, here in accepted():
        want = tensors(sample.function(**here, backend="reference"))
        current = torch.cuda.current_device()
        results = run(_moved(here, elsewhere))
        assert torch.cuda.current_device() == current
        _check(sample, results, want, elsewhere, name)


def test_scenario_02_auto_while_another_device_is_current(
    accepted, sample, cuda_only, kernel, device, elsewhere
) -> None:
    """What auto chooses, the reference's sums among it."""
    for name, here in accepted():
        want = tensors(sample.function(**here, backend="reference"))
        _check(sample, tensors(sample.function(**_moved(here, elsewhere))), want, elsewhere, name)


def test_scenario_02_devices_take_turns(
    run, accepted, sample, cuda_only, kernel, device, elsewhere
) -> None:
    """What a call prepared (tensor maps, launches, scratch) serves its own device alone.

    Both devices' allocators may give the same addresses, so these tell no device.
    """
    for name, here in accepted():
        want = tensors(sample.function(**here, backend="reference"))
        there = _moved(here, elsewhere)
        for turn in range(3):
            _check(sample, run(here), want, device, f"{name}, turn {turn} here")
            _check(sample, run(there), want, elsewhere, f"{name}, turn {turn} there")
        with torch.cuda.device(elsewhere):
            _check(sample, run(here), want, device, f"{name}, here from there")


def test_scenario_02_out_on_another_device(
    run, accepted, sample, takes_out, cuda_only, kernel, device, elsewhere
) -> None:
    _, here = accepted()[0]
    (want,) = tensors(sample.function(**here, backend="reference"))
    shape, dtype = sample.out(here)
    out = sample.place(torch.empty(shape, dtype=dtype, device=elsewhere))
    (result,) = run(_moved(here, elsewhere), out=out)
    assert result is out
    sample.compare(out, want, "out")


def test_scenario_03_side_stream_of_another_device(
    run, accepted, sample, cuda_only, kernel, device, elsewhere
) -> None:
    """The current stream of the tensors' device counts, not that of the current device."""
    _, here = accepted()[0]
    ready = _moved(here, elsewhere)
    want = run(ready)  # compiles, too
    late = {k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else v for k, v in ready.items()}
    torch.cuda.synchronize(elsewhere)
    current = torch.cuda.current_device()
    with torch.cuda.stream(torch.cuda.Stream(elsewhere)):
        torch.cuda._sleep(_PRODUCER)
        for name, value in late.items():
            if isinstance(value, torch.Tensor):
                value.copy_(ready[name])
        with torch.cuda.device(current):
            results = run(late)
        results = tuple(result.clone() for result in results)
    torch.cuda.synchronize(elsewhere)
    for result, expected in zip(results, want):
        assert_bit_equal(result, expected, kernel.name)


def test_scenario_13_graph_of_another_device(
    run, accepted, sample, is_forward, cuda_only, kernel, device, elsewhere
) -> None:
    """Captured there, with that device current and with another, and replayed from here."""
    changes = dict(accepted())
    for name, here in accepted():
        static, new = _moved(here, elsewhere), _moved(changes[name], elsewhere)
        run(static)
        want = run(new)
        for inside in (elsewhere, device):
            for argument, tensor in sample.present(static).items():
                tensor.copy_(here[argument])
            graph = torch.cuda.CUDAGraph()
            stream = torch.cuda.Stream(elsewhere)  # torch's own would be the current device's
            with torch.cuda.graph(graph, stream=stream), torch.cuda.device(inside):
                results = run(static)
            for argument, tensor in sample.present(static).items():
                tensor.copy_(new[argument])
            for result in results:
                result.fill_(99)
            graph.replay()
            for result, expected in zip(results, want):
                assert_bit_equal(result, expected, f"{name}, {inside} current in the capture")
