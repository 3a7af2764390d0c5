"""What explain says is what runs; what a kernel must run it does; unknown chips are served.

Scenario 14: a new architecture taken for its family, silent fallback. Scenario 17: autotuning.
"""

from __future__ import annotations

import functools
import json
import types
from typing import Any

import pytest
import torch

import farro
from farro import arch as architectures
from farro import dispatch, problem
from farro.arch import arch_named
from farro.checks import BACKENDS
from farro.dispatch import Kernel, explain, select
from farro.testing import laid_out

from .samples import tensors

# name -> features that kernels may rely on there; those NVIDIA ties to a chip never carry over
PRETENDED = {
    "sm_75": {"gpu"},
    "sm_80": {"gpu", "triton"},
    "sm_89": {"gpu", "triton", "fp8_mma"},
    "sm_90": {"gpu", "triton", "fp8_mma", "tma", "wgmma"},
    "sm_100": {"gpu", "triton", "fp8_mma", "tma"},
    "sm_110": {"gpu", "triton"},
    "sm_120": {"gpu", "triton", "fp8_mma", "tma"},
    "sm_121": {"gpu", "triton"},
}


@pytest.fixture
def all_installed(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    """As on a machine with Triton and cuda.core: only the problem can be a reason to refuse."""
    monkeypatch.setattr(dispatch, "not_installed", functools.lru_cache(lambda backend: None))


def _problems(sample, generator):
    """Every variant, empty problem, size and layout of an argument, on every architecture."""
    calls = [
        sample.inputs(generator, "meta", **options)
        for options in (*sample.variants.values(), *sample.empties.values())
    ]
    sizes = [{}, *({s: 1} for s in sample.sizes), *({s: 1024} for s in sample.sizes)]
    for m in (1, 2, 16, 17, 64, 65, 1000):
        calls += [sample.first(generator, "meta", m=m, **size) for size in sizes]
    inputs = sample.first(generator)
    for argument, tensor in sample.present(inputs).items():
        layouts = sample.arguments[argument].layouts
        calls += [{**inputs, argument: laid_out(tensor, layout).view} for layout in layouts]
    describe = dispatch._DESCRIBERS[sample.function]
    for call in calls:
        for name in ("cpu", *PRETENDED):
            yield describe(**call, arch=arch_named(name))[1]


def test_required_problems(sample, kernel, generator, all_installed) -> None:
    """A kernel runs what it declares, and declares what the specification asks of it."""
    declared = 0
    for question in _problems(sample, generator):
        if question.arch.lacks(kernel.needs) is not None:
            assert kernel.refuses(question) is not None
            continue
        must = kernel.must_run(question)
        assert isinstance(must, bool)
        declared += must
        if sample.required(kernel.backend, question):
            others = sample.catalogued.kernels
            family = [k for k in others if k.backend == kernel.backend]
            assert any(k.must_run(question) for k in family if not question.arch.lacks(k.needs))
        if must:
            assert kernel.refuses(question) is None, question
            assert kernel.config(question) == kernel.config(question)
    assert declared > 0, "must_run holds for none of these problems: refusing would pass"


def test_a_kernel_that_refuses_what_it_must_run_is_found(sample, generator, monkeypatch) -> None:
    if not sample.kernels:
        return
    lazy = Kernel(
        f"{sample.operator}.reference",
        "reference",
        "nowhere:run",
        why_not=lambda problem: "too much work" if problem.arch.name == "sm_90" else None,
        must_run=lambda problem: True,
    )
    with pytest.raises(AssertionError, match="too much work"):
        test_required_problems(sample, lazy, generator, None)


def test_select_takes_the_first_that_runs(sample, takes_backend, generator, all_installed) -> None:
    """Explicit back ends: the first kernel that does not refuse. auto: that, or a faster one."""
    for question in _problems(sample, generator):
        rows = [(k, k.refuses(question)) for k in sample.catalogued.kernels]
        for backend in BACKENDS:
            fit = [k for k, why in rows if why is None and backend in ("auto", k.backend)]
            if not fit:
                assert backend != "auto", "auto runs wherever any back end can"
                with pytest.raises(farro.UnsupportedError, match=f"backend='{backend}'"):
                    select(sample.catalogued, question, backend)
                continue
            choice = select(sample.catalogued, question, backend)
            passed = fit[: fit.index(choice.kernel)]
            assert passed == [] or backend == "auto"
            assert all(kernel.yields(question) is not None for kernel in passed)
            assert choice.config == choice.kernel.config(question)


def _toy(first: str | None, second: str | None, yields: str | None, monkeypatch):
    """A function with two kernels and a reference: what refuses, and what leaves to a faster."""

    def kernel(name: str, backend: str, why: str | None, **more: Any) -> Kernel:
        return Kernel(f"toy.{name}", backend, "x:y", why_not=lambda problem: why, **more)

    operator = dispatch.Operator(
        "toy",
        (
            kernel("first", "cpu", first, yields=lambda problem: yields),
            kernel("second", "cpu", second),
            kernel("reference", "reference", None),
        ),
    )
    question = problem.Problem.of("toy", {"x": torch.empty(1)}, {})

    def function() -> None:
        raise AssertionError("explain calls nothing")

    def describe(*, backend: str = "auto", arch=None):
        return operator, question, backend

    monkeypatch.setitem(dispatch._DESCRIBERS, function, describe)
    return operator, question, function


@pytest.mark.parametrize(
    "first, second, yields, auto, cpu",
    [
        (None, None, None, "first", "first"),
        (None, None, "second is faster", "second", "first"),
        (None, "broken", "second is faster", "first", "first"),  # nothing faster is there
        ("odd", None, "second is faster", "second", "second"),
        ("odd", "broken", None, "reference", None),
    ],
)
def test_explain_and_select_agree(first, second, yields, auto, cpu, monkeypatch, fresh) -> None:
    """Over every way in which a kernel is passed over; an explicit back end never falls back."""
    operator, question, function = _toy(first, second, yields, monkeypatch)
    for backend, want in (("auto", auto), ("cpu", cpu), ("reference", "reference")):
        told = explain(function, backend=backend)
        assert told.chosen == (want and f"toy.{want}")
        if want is None:
            with pytest.raises(farro.UnsupportedError, match=r"toy.first: odd; toy.second: broken"):
                select(operator, question, backend)
            assert "nothing runs this" in str(told)
        else:
            choice = select(operator, question, backend)
            assert choice.kernel.name == told.chosen
            before = told.rows[: [r.kernel for r in told.rows].index(told.chosen)]
            reasons = {r.kernel: r.passed or r.verdict for r in before}
            assert all(reasons[name] == reason for name, reason in choice.refused)
    told = explain(function)
    verdicts = [row["reason"] for row in told.as_dict()["kernels"]]
    assert verdicts == [first, second, None]


def _recorded(monkeypatch) -> list[tuple[str, Any]]:
    """(kernel, configuration) of every run from now on."""
    called: list[tuple[str, Any]] = []
    bound = dispatch.Choice.run.func

    def run(choice: dispatch.Choice):
        function = bound(choice)

        def record(*args):
            called.append((choice.kernel.name, choice.config))
            return function(*args)

        return record

    monkeypatch.setattr(dispatch.Choice, "run", property(run))
    return called


def test_explain_tells_the_kernel_that_runs(
    sample, takes_backend, device, generator, monkeypatch, fresh
) -> None:
    """For every variant and back end: the function that is called is the one explain named."""
    called = _recorded(monkeypatch)
    for options in sample.variants.values():
        inputs = sample.inputs(generator, device, **options)
        for backend in BACKENDS:
            told = explain(sample.function, **inputs, backend=backend)
            called.clear()
            if told.chosen is None:
                with pytest.raises(farro.UnsupportedError):
                    sample.function(**inputs, backend=backend)
                assert called == []
                continue
            sample.function(**inputs, backend=backend)
            config = next(row.config for row in told.rows if row.kernel == told.chosen)
            assert called == [(told.chosen, config)]


def test_explanation(sample, takes_backend, device, generator, capsys) -> None:
    inputs = sample.first(generator, device)
    told = explain(sample.function, **inputs)
    assert capsys.readouterr() == ("", "")
    given = json.loads(json.dumps(told.as_dict()))
    assert given["operator"] == sample.operator
    assert given["arch"] == ("cpu" if device.type == "cpu" else problem.arch_of(device).name)
    assert [k["kernel"] for k in given["kernels"]] == [k.name for k in sample.catalogued.kernels]
    runs = [k["kernel"] for k in given["kernels"] if k["runs"] and k["passed"] is None]
    assert given["chosen"] == runs[0]
    for entry in given["kernels"]:
        assert entry["runs"] == (entry["reason"] is None)
        line = next(line for line in str(told).splitlines() if entry["kernel"] in line.split())
        assert line.startswith("->") == (entry["kernel"] == given["chosen"])
        assert ("runs" if entry["runs"] else entry["reason"]) in line
    for name, tensor in sample.present(inputs).items():
        shape = given["tensors"][name]["shape"]  # of one row for all, as it is read
        assert shape == list(tensor.shape) or sample.arguments[name].rows is None
        assert given["tensors"][name]["stride"] == list(tensor.expand(shape).stride())


def test_explain_takes_meta_tensors_and_computes_nothing(
    sample, takes_backend, generator, monkeypatch
) -> None:
    monkeypatch.setattr(dispatch, "_load", lambda path: pytest.fail(f"explain loads {path}"))
    for options in sample.variants.values():
        real, meta = (sample.inputs(generator, d, **options) for d in ("cpu", "meta"))
        assert explain(sample.function, **meta).chosen == explain(sample.function, **real).chosen


@pytest.mark.parametrize("name", PRETENDED)
def test_scenario_14_pretended_architectures(
    name, sample, takes_backend, generator, all_installed
) -> None:
    """explain(arch=...) serves every chip, and no kernel takes a chip for one it is not."""
    assert arch_named(name).features == PRETENDED[name]
    for options in (*sample.variants.values(), *sample.empties.values()):
        inputs = sample.inputs(generator, "meta", **options)
        told = explain(sample.function, **inputs, arch=name)
        assert told.chosen is not None
        for kernel, row in zip(sample.catalogued.kernels, told.rows):
            if not kernel.needs <= PRETENDED[name]:
                assert row.verdict.startswith("needs ") and name in row.verdict
            if kernel.backend == "cpu":
                assert row.verdict == f"needs a CPU; this is {name}"
            if kernel.backend == "triton" and name == "sm_75":
                assert row.verdict == "needs a GPU of SM80 or newer; this is sm_75"


@pytest.mark.parametrize("name", PRETENDED)
def test_scenario_14_calls_on_pretended_architectures(
    name, sample, takes_backend, device, generator, monkeypatch, fresh
) -> None:
    """Explicit back ends raise with explain's reason, auto runs what explain names."""
    arch = arch_named(name)
    monkeypatch.setattr(problem, "arch_of", lambda device: arch)
    inputs = sample.first(generator, device)
    want = tensors(sample.function(**inputs, backend="reference"))
    # the kernels of a GPU cannot run here on the CPU, whatever it pretends to be
    foreign = device.type == "cpu"
    told = explain(sample.function, **inputs)
    assert told.as_dict()["arch"] == name
    backends = dict.fromkeys(row.backend for row in told.rows)
    for backend in backends:
        rows = [row for row in told.rows if row.backend == backend]
        if all(row.verdict != "runs" for row in rows):
            with pytest.raises(farro.UnsupportedError) as error:
                sample.function(**inputs, backend=backend)
            assert name in str(error.value)
            assert all(row.verdict in str(error.value) for row in rows)
            assert "backend='auto'" in str(error.value)
    chosen = next(k for k in sample.catalogued.kernels if k.name == told.chosen)
    if foreign and chosen.backend != "reference":
        return
    for result, expected in zip(tensors(sample.function(**inputs)), want):
        sample.compare(result, expected, told.chosen)


def test_an_amd_gpu_is_no_hopper(monkeypatch) -> None:
    """ROCm reports its own numbers as a capability: an MI200 says (9, 0)."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    architectures._cuda_arch.cache_clear()
    try:
        found = architectures.arch_of(torch.device("cuda", 0))
        assert (found.name, found.features) == ("hip", frozenset())
    finally:
        architectures._cuda_arch.cache_clear()


@pytest.mark.parametrize("name", ["sm_75", "sm_110", "sm_121"])
def test_scenario_14_the_table_is_asked_by_capability(name, monkeypatch) -> None:
    """arch_of reads the device's capability, and gives a chip without a row portable features."""
    capability = (int(name[3:-1]), int(name[-1]))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA Pretended X1")
    properties = types.SimpleNamespace(multi_processor_count=77)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    architectures._cuda_arch.cache_clear()
    try:
        arch = architectures.arch_of(torch.device("cuda", 0))
    finally:
        architectures._cuda_arch.cache_clear()
    assert arch.name == name
    assert arch.features == PRETENDED[name]
    assert arch.capability == capability
    assert arch.device == "nvidia_pretended_x1"
    assert arch.multiprocessors == 77


def test_scenario_17_first_calls_tune_nothing(
    run, accepted, sample, kernel, device, monkeypatch
) -> None:
    """A kernel is launched once a call, the first one too: candidates are not timed."""
    called = _recorded(monkeypatch)
    for count, (_, inputs) in enumerate(accepted(), 1):
        run(inputs)
        assert len(called) == count
