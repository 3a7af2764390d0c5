"""Devices and streams. Scenario 3: the default stream. Scenario 13: CUDA graphs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from farro import dispatch
from farro.testing import assert_bit_equal

from .samples import SAMPLES, Sample, tensors

_PRODUCER = 40_000_000  # clock cycles, some 20 ms: a call on another stream would be long done


def _others(device: torch.device) -> list[str]:
    if device.type != "cuda":
        return ["meta"]
    count = torch.cuda.device_count()
    return ["meta", "cpu", *(f"cuda:{i}" for i in range(min(count, 2)) if i != device.index)]


def test_mixed_devices_are_refused(sample, takes_several, device, generator) -> None:
    inputs = sample.first(generator, device)
    for name, tensor in sample.present(inputs).items():
        for other in _others(device):
            moved = {**inputs, name: tensor.to(other)}
            with pytest.raises(ValueError) as error:
                sample.function(**moved)
            message = str(error.value)
            assert message.startswith(f"{sample.name}: ")
            assert other in message and str(device) in message and "one device" in message


def test_out_on_another_device_is_refused(sample, takes_out, device, generator) -> None:
    inputs = sample.first(generator, device)
    shape, dtype = sample.out(inputs)
    for other in _others(device):
        out = torch.full(shape, 7, dtype=dtype, device=other)
        with pytest.raises(ValueError, match=rf"{sample.name}: out is on {other}.*one device"):
            sample.function(**inputs, out=out)
        assert other == "meta" or (out == 7).all()


def test_meta_tensors_give_meta_results(sample, generator) -> None:
    inputs = sample.first(generator)
    real = tensors(sample.function(**inputs))
    meta = sample.first(generator, "meta")
    for result, want in zip(tensors(sample.function(**meta)), real):
        assert result.is_meta
        assert (result.shape, result.dtype, result.stride()) == (
            (want.shape, want.dtype, want.stride())
        )


def test_scenario_03_side_stream(run, accepted, sample, cuda_only, kernel, device) -> None:
    """Inputs that a long producer fills on a side stream are waited for."""
    _, ready = accepted()[0]
    want = run(ready)  # compiles, too
    late = {k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else v for k, v in ready.items()}
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(_PRODUCER)
        for name, value in late.items():
            if isinstance(value, torch.Tensor):
                value.copy_(ready[name])
        results = tuple(result.clone() for result in run(late))
    torch.cuda.synchronize()
    for result, expected in zip(results, want):
        assert_bit_equal(result, expected, kernel.name)


def _capture(call, inputs) -> tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, ...]]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call(inputs)
    return graph, results


def test_scenario_13_graph_sees_inputs_changed_in_place(
    run, accepted, sample, is_forward, cuda_only, kernel, device
) -> None:
    changes = [dict(accepted()) for _ in range(2)]
    for name, static in accepted():
        run(static)
        graph, results = _capture(run, static)
        for new in changes:
            for argument, tensor in sample.present(static).items():
                tensor.copy_(new[name][argument])
            for result in results:
                result.fill_(99)
            graph.replay()
            for result, expected in zip(results, run(new[name])):
                assert_bit_equal(result, expected, name)


def test_scenario_13_graph_with_out(
    run, accepted, sample, takes_out, cuda_only, kernel, device
) -> None:
    (_, static), (_, new) = accepted()[0], accepted()[0]
    shape, dtype = sample.out(static)
    out = sample.place(torch.empty(shape, dtype=dtype, device=device))
    run(static, out=out)
    graph, _ = _capture(lambda inputs: run(inputs, out=out), static)
    for argument, tensor in sample.present(static).items():
        tensor.copy_(new[argument])
    sample.place(out)
    graph.replay()
    assert_bit_equal(out, *run(new))


_COLD = """
import os, sys
import torch
from farro import warmup
from tests.contract.samples import SAMPLES
number, variant, backend, warm = sys.argv[1:]
sample = SAMPLES[int(number)]  # several may be of one function
one = {"n": 1} if "n" in sample.sizes else {}
options = {**one, **sample.variants[variant], "m": 5}
inputs = sample.inputs(torch.Generator().manual_seed(3), "cuda", **options)
if warm == "warm":
    first = inputs[next(iter(sample.arguments))]
    k = first.shape[-1]
    shape = (first.numel() // k, inputs["b"].shape[-1] if "b" in inputs else 1, k)
    warmup("cuda", [sample.name], [sample.warm_shape(inputs) if sample.warm_shape else shape])
torch.cuda.synchronize()
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        sample.function(**inputs, backend=backend)
except RuntimeError as error:
    print("RAISED", error, flush=True)
else:
    print("CAPTURED", flush=True)
os._exit(0)  # a capture that failed leaves CUDA unfit for an orderly exit
"""


def _capture_cold(sample: Sample, variant: str, backend: str, warm: str) -> subprocess.Popen[str]:
    """In a process of its own, so that nothing is compiled yet; what is on disk does not count."""
    number = next(i for i, other in enumerate(SAMPLES) if other is sample)
    return subprocess.Popen(
        [sys.executable, "-c", _COLD, str(number), variant, backend, warm],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def _told(process: subprocess.Popen[str]) -> str:
    with process:
        try:
            told, errors = process.communicate(timeout=240)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    return told


def test_scenario_13_cold_capture_names_warmup(
    accepted, sample, is_compiled, cuda_only, first_of_operator, kernel, device
) -> None:
    name, inputs = accepted(m=5)[0]
    chosen = dispatch.explain(sample.function, **inputs, backend=kernel.backend).chosen
    if chosen != kernel.name:
        pytest.skip(f"{kernel.backend} runs {chosen} for this")
    cold = _capture_cold(sample, name, kernel.backend, "cold")
    # warmup compiles what calls would compile: what auto chooses, on this kernel's variant
    warm = _capture_cold(sample, name, "auto", "warm")
    try:
        told = _told(cold)
    finally:
        ready = _told(warm)
    assert told.startswith("RAISED") and "farro.warmup" in told, told
    assert ready.startswith("CAPTURED"), ready


def _forget_probes() -> None:
    """Clear every cache of farro: what it found out about this machine is found out anew."""
    for name, module in list(sys.modules.items()):
        if name.startswith("farro."):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
    dispatch.forget()


def test_default_device_and_dtype_change_nothing(run, accepted, sample, kernel, device) -> None:
    """A caller may have set them for a model of its own, on a GPU or in BF16."""
    for name, inputs in accepted():
        want, told = run(inputs), str(dispatch.explain(sample.function, **inputs))
        with torch.device("meta"):
            changed = run(inputs)
        for result, expected in zip(changed, want):
            assert_bit_equal(result, expected, f"{name}: default device meta")
        for dtype in (torch.bfloat16, torch.float64):
            _forget_probes()
            torch.set_default_dtype(dtype)
            try:
                changed = run(inputs)
            finally:
                torch.set_default_dtype(torch.float32)
            for result, expected in zip(changed, want):
                assert_bit_equal(result, expected, f"{name}: default dtype {dtype}")
            assert str(dispatch.explain(sample.function, **inputs)) == told


def test_autocast_changes_nothing(run, accepted, sample, kernel, device) -> None:
    for name, inputs in accepted():
        want = run(inputs)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            changed = run(inputs)
        for result, expected in zip(changed, want):
            assert_bit_equal(result, expected, name)
