"""The benchmark of fp8_linear on the CPU: its forms, its truth, its shapes, and its tuning."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch

from farro.bench import adapter, plans, tuner
from farro.bench.case import Missing, Options
from farro.bench.fp8_linear import SHAPES, VARIANTS
from farro.bench.fp8_peers import elementwise
from farro.bench.runner import relative_error
from farro.ops import fp8_linear
from farro.ops.fp8_linear import cpu

CPU = torch.device("cpu")
SIZES = {"m": 33, "n": 48, "k": 160}


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_form_gives_the_truth(variant):
    case = adapter("fp8_linear").build(SIZES, Options(CPU, variant=variant))
    result = case.function(*case.args, **case.kwargs)
    assert relative_error(result, case.truth()) < 4e-3
    _, problem = case.problem()
    assert problem.param("fast_accum") == variant.endswith("fast")
    forced = case.run(cpu.run, cpu.config(problem))
    assert torch.equal(forced, case.function(*case.args, **case.kwargs, backend="cpu"))
    terms = [case.kwargs[name] for name in ("bias", "residual") if name in case.kwargs]
    assert case.nbytes == 33 * 160 + 48 * 160 + 2 * 33 * 48 + sum(t.nbytes for t in terms)


@pytest.mark.parametrize("variant", ("bias", "residual", "gelu"))
def test_the_peer_s_epilogue_is_the_same(variant):
    case = adapter("fp8_linear").build(SIZES, Options(CPU, variant=variant))
    plain = {"alpha": case.kwargs["alpha"]}
    product = fp8_linear.fp8_linear_bf16(*case.args, **plain)
    bias, residual = case.kwargs.get("bias"), case.kwargs.get("residual")
    peer = elementwise(product, bias, residual, variant == "gelu")
    assert relative_error(peer, case.truth()) < 6e-3  # it rounds twice
    missing = [s for s in case.peers() if isinstance(s, Missing)]
    assert [s.name for s in missing] == ["torch._scaled_mm"]


def test_model_shapes_have_their_own_rows():
    found = adapter("fp8_linear")
    sets = plans.parse_shapes(found, "models")
    listed = list(plans.cases(found, sets, None, [Options(CPU, variant="default")]))
    assert [plan.sizes for plan in listed] == list(SHAPES["models"]) and len(listed) == 14
    assert {"m": 768, "n": 2048, "k": 16384} in SHAPES["models"]
    assert {"n": 28672, "k": 4096} in SHAPES["default"]


def test_a_run_with_a_limit_begins_with_what_matters():
    found = adapter("fp8_linear")
    sets = plans.parse_shapes(found, "default,models")
    options = [Options(CPU, variant=name) for name in ("bias", "default", "fast")]
    every = list(plans.cases(found, sets, None, options))
    listed = sorted(every, key=lambda plan: found.rank(plan.sizes, plan.options))
    first = 2 * (5 * 4 + 14 + 1)  # two forms; five shapes with four M, and models': one of both
    for plan in listed[:first]:
        assert plan.options.variant != "bias"
        assert plan.sizes in SHAPES["models"] or plan.sizes["m"] in (1, 64, 1024, 8192)
    assert [p.options.variant for p in listed[:first]].count("default") == first // 2
    rest = first + 2 * (5 * 3 - 1)
    assert {p.options.variant for p in listed[first:rest]} == {"default", "fast"}
    assert {p.options.variant for p in listed[rest:]} == {"bias"}


def test_configurations_of_other_bits_are_tuned(tmp_path, monkeypatch):
    """Their sums differ in the last bits, as their orders do; each is held to the truth."""

    def rows(problem):
        return [cpu.Config("fp32", 16), cpu.Config("fp32", 64), cpu.Config("fp32", 256)]

    def wrong(config, x, weight, alpha, bias, residual, out, epilogue, fast_accum):
        right(config, x, weight, alpha, bias, residual, out, epilogue, fast_accum)
        if config.rows == 64:
            out[3] = 0

    right = cpu.run
    monkeypatch.setattr(cpu, "run", wrong)
    kernels = tuple(
        dataclasses.replace(k, configs=rows) if k.backend == "cpu" else k
        for k in fp8_linear.OPERATOR.kernels
    )
    operator = dataclasses.replace(fp8_linear.OPERATOR, kernels=kernels)
    monkeypatch.setattr("farro.ops.fp8_linear.calls.OPERATOR", operator)
    said: list[str] = []
    session = tuner.Tuner(
        *(adapter("fp8_linear"), CPU, "cpu", tmp_path / "cpu.json"),
        jobs=0,
        deadline=time.monotonic() + 60,
        say=said.append,
        progress=lambda *a: None,
        log=tmp_path / "log.json",
        backends=("cpu",),
    )
    shapes = {"given": ({"n": 48, "k": 160},)}
    options = [Options(CPU, variant=name) for name in ("default", "bias")]
    entries = tuner.tune(session, list(plans.cases(session.adapter, shapes, (33,), options)))
    measured = {config["rows"] for config, _ in entries[0]["times"]}
    assert {16, 256} <= measured and 64 not in measured
    assert any("WRONG" in line and "rows=64" in line for line in said)
    assert len(entries) == 1  # a bias makes no other row of the table
    assert entries[0]["problem"]["fast_accum"] is False
