"""moe_ffn: the reference against rational numbers, the CPU against the reference, routes."""

from __future__ import annotations

import dataclasses
import decimal
from decimal import Decimal
from fractions import Fraction

import pytest
import torch

import farro
from farro.arch import interpreting
from farro.catalogue import operator_named
from farro.ops.moe_ffn import swiglu
from farro.testing import MoeCase, assert_bit_equal, moe_ffn_cases

from .exact_arithmetic import gemm_element, multiply_add, product, quantized_group, rounded

KERNELS = {k.backend: k for k in operator_named("moe_ffn").kernels}
CASES = moe_ffn_cases()


def seed_of(generator: torch.Generator) -> int:
    return int(torch.randint(2**31, (1,), generator=generator))


def exact_silu(gate: float) -> float:
    """gate / (1 + exp(-gate)) with 50 digits, rounded once to float32."""
    with decimal.localcontext(prec=50):
        value = Decimal(gate) / (1 + (-Decimal(gate)).exp())
    return rounded(Fraction(value), negative=gate < 0 or str(gate) == "-0.0")


def expert_row(x, scale_x, w_gate_up, scale_gate_up, w_down, scale_down, group_size, interleaved):
    """y of one row and one expert, as lists of Python numbers."""
    columns = range(len(w_gate_up[0]))

    def column(matrix, n):
        return [row[n] for row in matrix]

    def element(codes, scales, weight, weight_scale, n):
        given = (codes, column(weight, n), scales, column(weight_scale, n), group_size)
        return gemm_element(*given, form="bfloat16")

    both = [element(x, scale_x, w_gate_up, scale_gate_up, n) for n in columns]
    half = len(both) // 2
    gate, up = (both[::2], both[1::2]) if interleaved else (both[:half], both[half:])
    h = [product(exact_silu(g), u) for g, u in zip(gate, up)]
    groups = [quantized_group(h[i : i + group_size]) for i in range(0, half, group_size)]
    codes = [code for group, _ in groups for code in group]
    scales = [scale for _, scale in groups]
    return [element(codes, scales, w_down, scale_down, n) for n in range(len(w_down[0]))]


@pytest.mark.parametrize("layout", ("concatenated", "interleaved"))
def test_reference_against_rational_numbers(layout, generator):
    case = MoeCase("rational", 4, 3, 3, 70, 40, 32, layout, values="usual")
    call = case.build(seed=seed_of(generator))
    given = [t.tolist() for t in call.operands]
    x, scale_x, *weights, ids, slots = given
    want = []
    for t in range(case.tokens):
        total = [0.0] * case.h
        for e, weight in zip(ids[t], slots[t]):
            if 0 <= e < case.experts:
                parts = (w[e] for w in weights)
                y = expert_row(x[t], scale_x[t], *parts, 32, layout == "interleaved")
                terms = [product(weight, value) for value in y]
                total = [multiply_add(1.0, a, b) for a, b in zip(terms, total)]
        want.append(total)
    (got,) = call.through("reference")
    assert_bit_equal(got, torch.tensor(want))
    assert got.abs().max() > 0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(case, generator):
    outcome = case.build(seed=seed_of(generator)).check(KERNELS["cpu"])
    assert outcome.status == "ok", outcome.detail


def test_every_silu_is_rounded_once():
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    gates = bits.view(torch.bfloat16)
    table = swiglu.looked_up(gates.view(256, 256).T).T.flatten()
    assert_bit_equal(table, swiglu.silu(gates))
    few = gates[(gates.float().abs() < 80) & (gates.float().abs() > 1e-6)][::97]
    want = torch.tensor([exact_silu(float(g)) for g in few])
    assert_bit_equal(swiglu.looked_up(few), want)
    assert swiglu.silu(torch.tensor([-torch.inf], dtype=torch.bfloat16)).isnan().all()


@pytest.mark.parametrize("backend", ("reference", "cpu"))
def test_dropped_routes_are_never_read(backend, generator):
    """An id outside [0, E) with any weight, beside an expert whose numbers are NaN."""
    case = MoeCase("dropped", 9, 3, 4)
    call = case.build(seed=seed_of(generator))
    given = dict(call.arguments)
    ids, weights = given["topk_ids"].clone(), given["topk_weights"].clone()
    ids[:, 1] = torch.tensor([4, -1, 5, 1 << 40, -(1 << 40), 4, 4, 1 << 32, -5])
    ids[ids == 3] = 2
    weights[:, 1] = float("nan")
    spoiled = given["scale_down"].clone()
    spoiled[3] = float("nan")
    given |= {"topk_ids": ids, "topk_weights": weights, "scale_down": spoiled}
    got = farro.moe_ffn(**given, backend=backend)
    given["topk_ids"], given["topk_weights"] = ids[:, ::2], weights[:, ::2]
    assert got.isfinite().all()
    assert_bit_equal(got, farro.moe_ffn(**given, backend=backend))


def test_slots_are_added_in_order(generator):
    """y * 2^-25 is less than half a unit of y; two of them together are more than half of one."""
    case = MoeCase("order", 1, 3, 1, 32, 32, 32, ids="one")
    given = case.build(seed=seed_of(generator)).arguments
    y = farro.moe_ffn(**{**given, "topk_weights": torch.tensor([[1.0, 0.0, 0.0]])})
    small = torch.tensor([[1.0, 2.0**-25, 2.0**-25]])
    for backend in ("reference", "cpu"):
        first = farro.moe_ffn(**{**given, "topk_weights": small}, backend=backend)
        last = farro.moe_ffn(**{**given, "topk_weights": small.flip(1)}, backend=backend)
        assert_bit_equal(first, y)
        assert_bit_equal(last, y + y * 2.0**-24)
        assert not torch.equal(first, last)


def test_interleaved_weights_are_the_same_layer(generator):
    """In FP32 gate and up come out the same whichever column they are in."""
    given = MoeCase("layouts", 12).build(seed=seed_of(generator)).arguments
    want = farro.moe_ffn(**given)
    for name in ("w_gate_up", "scale_gate_up"):
        gate, up = given[name].chunk(2, -1)
        given[name] = torch.stack((gate, up), -1).flatten(-2)
    assert not torch.equal(farro.moe_ffn(**given), want)
    assert_bit_equal(farro.moe_ffn(**{**given, "gate_up_layout": "interleaved"}), want)


@pytest.mark.parametrize("backend", ("reference", "cpu"))
def test_one_expert_is_the_operators_one_after_the_other(backend, generator):
    """What a user would write with farro's other functions, for one expert of weight 1."""
    case = MoeCase("chain", 33, 1, 1, 200, 130, 64, values="usual", ids="one")
    given = case.build(seed=seed_of(generator)).arguments
    given["topk_weights"] = torch.ones(33, 1)
    both = farro.int8_gemm(
        *(given[n] for n in ("x_int8",)),
        given["w_gate_up"][0],
        given["scale_x"],
        given["scale_gate_up"][0],
        group_size=64,
    )
    gate, up = both.chunk(2, -1)
    h = torch.nn.functional.silu(gate.double()).float() * up.float()
    q, scale = farro.quantize_int8_groups(h, 64)
    down = (given["w_down"][0], scale, given["scale_down"][0])
    y = farro.int8_gemm(q, *down, group_size=64)
    assert_bit_equal(farro.moe_ffn(**given, backend=backend), y.float())


# --- the judge of kernels whose silu has other last bits -----------------------------------------


def judged(call, results) -> str | None:
    call.precise = False
    return call.differs(0, results, call.expected[0])


@pytest.mark.skipif(interpreting(), reason="about the CPU alone")
def test_the_judge_allows_silus_last_bits_and_no_more(generator, monkeypatch):
    case = MoeCase("judge", 60, 2, 3, 150, 130, 64, values="usual")
    call = case.build(seed=seed_of(generator))
    assert len(call.expected) == 1 and call.slack.min() >= 0  # made by the right silu

    def result(relative: float) -> torch.Tensor:
        right = swiglu.silu(torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16))
        noise = torch.randint(-1, 2, right.shape, generator=generator)
        monkeypatch.setattr(swiglu, "_table", lambda: right * (1 + relative * noise))
        return call.through("cpu")[0]

    assert judged(call, result(2.0**-21)) is None
    assert judged(call, result(2.0**-5)) is not None
    monkeypatch.undo()
    right = call.through("cpu")[0]
    wrong = right.clone()
    wrong[7, 9] += 0.1 * right.abs().max()
    assert "1 of 9000" in str(judged(call, wrong))
    call.precise = True
    assert call.differs(0, result(2.0**-12), call.expected[0]) is not None


def test_exact_cases_do_not_depend_on_the_library_silu(generator, monkeypatch):
    """What compares back ends bit for bit: gates that are 0, or so large that they are silu."""
    case = dataclasses.replace(CASES[0], tokens=40, h=100, i=64)
    call = case.build(seed=seed_of(generator))
    sigmoid = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16).float()
    monkeypatch.setattr(swiglu, "_table", lambda: sigmoid / (1 + torch.exp(-sigmoid)))
    assert_bit_equal(call.through("cpu")[0], call.expected[0])
