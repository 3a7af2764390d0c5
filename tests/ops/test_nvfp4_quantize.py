"""Quantizers of activations against rational arithmetic, torch's own SiLU, and each other."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from farro import nvfp4
from farro.catalogue import operator_named
from farro.exact import fma32
from farro.formats.nvfp4 import unpack_codes
from farro.ops.nvfp4_quantize import activation, cpu, triton_configs
from farro.ops.nvfp4_quantize.activation import Gated
from farro.testing import CASES, assert_bit_equal

from .exact_arithmetic import product, rounded
from .exact_nvfp4 import E2M1, UE4M3, quantized_block

BACKENDS = ("reference", "cpu")
OPERATORS = ("nvfp4_quantize", "nvfp4_scatter", "nvfp4_scatter_fp4", "nvfp4_dequantize")
FEW = [(n, case) for n in OPERATORS for case in CASES[n]() if case.quick]
ALL = [(n, case) for n in OPERATORS for case in CASES[n]() if not case.quick]


def seed_of(generator: torch.Generator) -> int:
    return int(torch.randint(2**31, (1,), generator=generator))


def every_bfloat16() -> torch.Tensor:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    return bits.view(torch.bfloat16)


@pytest.mark.parametrize("operator, case", FEW + ALL, ids=lambda v: str(v))
def test_cpu_equals_reference(operator, case, generator) -> None:
    kernel = next(k for k in operator_named(operator).kernels if k.backend == "cpu")
    outcome = case.build(seed=seed_of(generator)).check(kernel)
    assert outcome.status == "ok", outcome.detail


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_wrong_byte_is_found(operator, generator, monkeypatch) -> None:
    """The comparison above sees codes and scales of used rows, and scales of the others."""
    kernel = next(k for k in operator_named(operator).kernels if k.backend == "cpu")
    case = next(c for c in CASES[operator]() if c.quick and "bad" not in c.name)
    call = case.build(seed=seed_of(generator))
    results = call.through("cpu")
    used = None if call.used is None else call.used.nonzero()[0]
    for index, result in enumerate(results):
        wrong = result.clone()
        place = tuple(used) if used is not None and index == 0 else (0,) * (result.dim() - 1)
        wrong[place] = wrong[place] + 1
        spoilt = tuple(wrong if i == index else r for i, r in enumerate(results))
        monkeypatch.setattr(call, "results", lambda kernel, r=spoilt: r)
        assert call.check(kernel).status == "failed", index


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["normal", "wide", "halves", "subnormal", "zero", "nan", "inf"])
def test_rows_in_rational_arithmetic(kind, backend, generator) -> None:
    case = next(c for c in CASES["nvfp4_quantize"]() if c.name == "quant_rows wide")
    changed = type(case)(f"drawn {kind}", "quant_rows", values=kind, tokens=3, k=96)
    given = changed.build(seed=seed_of(generator)).arguments
    for gscale in (1.0, float(given["gscale"]), 1e-3, 5e4):
        packed, scales = nvfp4.quant_rows(given["x"], torch.tensor(gscale), backend=backend)
        codes = unpack_codes(packed)
        factor = float(torch.tensor(gscale))
        for row, values in enumerate(given["x"].float().tolist()):
            for block in range(3):
                here = slice(32 * block, 32 * block + 32)
                want = quantized_block(values[here], factor)
                assert (codes[row, here].tolist(), int(scales[row, block])) == want


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gscale", [[1.0], [0.3, 40.0, 2e3]], ids=["one", "experts"])
def test_experts_one_by_one(gscale, backend, generator) -> None:
    """quant_act is quant_rows of each expert's used rows; the others hold 0x38 and are not read."""
    x = torch.randn(3, 5, 64, generator=generator).bfloat16()
    counts = torch.tensor([5, 0, 2], dtype=torch.int32)
    factors = torch.tensor(gscale)
    b_act, sfb = nvfp4.quant_act(x, factors, counts, 1, backend=backend)
    x[1], x[2, 2:] = math.nan, math.inf
    again = nvfp4.quant_act(x, factors, counts, 4096, backend=backend)
    assert_bit_equal(again[1], sfb)
    for e, count in enumerate(counts.tolist()):
        q, sf = nvfp4.quant_rows(x[e, :count], factors[e % len(gscale)], backend=backend)
        assert_bit_equal(b_act[e, :count], q)
        assert_bit_equal(again[0][e, :count], q)
        assert_bit_equal(sfb[e, :count], sf)
        assert (sfb[e, count:] == 0x38).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_counts_are_clamped(backend, generator) -> None:
    x = torch.randn(4, 3, 32, generator=generator).bfloat16()
    wild = torch.tensor([-1, 4, 2**31 - 1, -(2**31)], dtype=torch.int32)
    clamped = torch.tensor([0, 3, 3, 0], dtype=torch.int32)
    one = torch.ones(1)
    got, want = (nvfp4.quant_act(x, one, c, 0, backend=backend) for c in (wild, clamped))
    assert_bit_equal(got[1], want[1])
    assert_bit_equal(got[0][1:3], want[0][1:3])


# gated activations


def chain(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """BF16 silu-and-mul, as torch writes it."""
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("backend", BACKENDS)
def test_silu_of_every_value_is_the_chain_of_torch_then_quant_act(
    backend, interleaved, generator
) -> None:
    gate = every_bfloat16().view(1, 128, 512)
    up = torch.randn(gate.shape, generator=generator).bfloat16()
    counts, gscale = torch.tensor([128], dtype=torch.int32), torch.tensor([3.0])
    x2 = torch.cat((gate, up), -1)
    if interleaved:
        x2 = x2[..., nvfp4.interleave_gate_up_rows(512)].contiguous()
    got = nvfp4.silu_mul_quant_act(x2, gscale, counts, 0, interleaved, backend=backend)
    want = nvfp4.quant_act(chain(gate, up), gscale, counts, 0, backend=backend)
    assert_bit_equal(got[0], want[0])
    assert_bit_equal(got[1], want[1])
    with_ones = torch.cat((gate, torch.ones_like(up)), -1)  # and silu itself
    got = nvfp4.silu_mul_quant_act(with_ones, gscale, counts, 0, backend=backend)
    want = nvfp4.quant_act(torch.nn.functional.silu(gate), gscale, counts, 0, backend=backend)
    assert_bit_equal(got[0], want[0])
    assert_bit_equal(got[1], want[1])


def test_silu_of_every_value_is_correctly_rounded() -> None:
    """To FP32, then to BF16: by Python's floats, whose exponential is another library's."""
    every = every_bfloat16()

    def exact(g: float) -> float:
        if math.isinf(g):
            return math.nan if g < 0 else g
        if g < -88.73:  # the exponential is past FP32
            return -0.0
        return g / (1 + math.exp(-g))

    wide = torch.tensor([exact(g) for g in every.tolist()], dtype=torch.float64)
    assert_bit_equal(activation.silu(every), wide.float().bfloat16())


def test_the_arithmetic_of_the_triton_kernel_gives_the_same_silu() -> None:
    """Each operation of triton_gated._silu rounds as IEEE 754 says, so that this holds on a GPU."""
    constant = lambda v: torch.tensor(v, dtype=torch.float32)  # noqa: E731
    gate = every_bfloat16().float()
    round_, high, low = constant(12582912.0), constant(0.693145751953125), constant(1.428606765e-06)
    t = torch.nan_to_num(-gate, 0.0).clamp(-50.0, 89.0)
    shifted = fma32(t, constant(1.4426950216293335), round_)
    n = shifted - round_
    r = fma32(-n, low, fma32(-n, high, t))
    p = constant(1.0 / 5040).expand_as(r)
    for coefficient in (1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0):
        p = fma32(p, r, constant(coefficient))
    power = ((shifted.view(torch.int32) - (0x4B400000 - 126)) << 23).view(torch.float32)
    y = gate / fma32(p * power, constant(2.0), constant(1.0))
    assert_bit_equal(y.bfloat16(), activation.silu(every_bfloat16()))


def test_a_processor_with_another_silu_takes_the_formula(monkeypatch) -> None:
    silu = torch.nn.functional.silu

    def off_by_one(x: torch.Tensor) -> torch.Tensor:
        y = silu(x)
        y[x == 1.0] = torch.nextafter(y[x == 1.0], torch.tensor(9.0).bfloat16())
        return y

    assert cpu._silu.__wrapped__() is silu
    monkeypatch.setattr(torch.nn.functional, "silu", off_by_one)
    assert cpu._silu.__wrapped__() is activation.silu


@pytest.mark.parametrize("linear_beta", [-1.0, 0.0, 2.5])
@pytest.mark.parametrize("backend", BACKENDS)
def test_situ_in_python_floats(backend, linear_beta, generator) -> None:
    """One rounding of the FP32 value; bytes are those of quant_act of it."""
    x2 = torch.randn(1, 3, 128, generator=generator).mul(4).bfloat16()
    beta = 1.75
    values = []
    for row in x2[0].tolist():
        for g, u in zip(row[:64], row[64:]):
            if linear_beta > 0:
                u = linear_beta * math.tanh(u / linear_beta)
            exact = Fraction(beta * math.tanh(g / beta) / (1 + math.exp(-g)) * u)
            values.append(rounded(Fraction(rounded(exact)), "bfloat16"))
    y = torch.tensor(values).view(1, 3, 64).bfloat16()
    counts, gscale = torch.tensor([3], dtype=torch.int32), torch.tensor([2.0])
    got = nvfp4.silu_mul_quant_act(
        x2, gscale, counts, 0, False, "situ", beta, linear_beta, backend=backend
    )
    want = nvfp4.quant_act(y, gscale, counts, 0, backend=backend)
    assert_bit_equal(got[0], want[0])
    assert_bit_equal(got[1], want[1])


def test_numbers_of_another_activation_change_nothing() -> None:
    """So that they compile nothing anew."""
    from farro.ops.nvfp4_quantize.dense import gating

    assert gating(True, "silu", 2.0, 3.0) == Gated(True, "silu", 1.0, -1.0)
    assert gating(False, "situ", 0.1, -7.0) == Gated(False, "situ", rounded(Fraction(0.1)), -1.0)


# scatter


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("weighted", (False, True))
def test_the_three_plans_agree(weighted, backend, generator) -> None:
    """Row by row: bf16(a1 * weight) in rational arithmetic, then quant_rows with its gscale."""
    tokens, topk, experts, cap, k = 9, 3, 4, 5, 64
    a1 = torch.randn(tokens, k, generator=generator).bfloat16()
    weights = torch.rand(tokens, topk, generator=generator)
    gscale = torch.tensor([0.5, 1.0, 300.0, 7.0])
    ids = torch.randint(experts - 1, (tokens, topk), generator=generator)  # the last has none
    routes = [(t, j, int(ids[t, j])) for t in range(tokens) for j in range(topk)]
    rows = {e: [r for r in routes if r[2] == e] for e in range(experts)}
    dest = torch.full((tokens * topk,), experts * cap)
    src_tok = torch.full((experts * cap,), -1, dtype=torch.int32)
    src_route = src_tok.clone()
    for e, own in rows.items():
        for r, (t, j, _) in enumerate(own[:cap]):
            dest[t * topk + j] = e * cap + r
            src_tok[e * cap + r], src_route[e * cap + r] = t, t * topk + j
    counts = torch.tensor([min(len(own), cap) for own in rows.values()], dtype=torch.int32)
    for result, made in zip(nvfp4.dispatch_plan(ids, 0, experts, cap)[::2], (counts, src_tok)):
        assert_bit_equal(result, made)
    flat = torch.arange(tokens).repeat_interleave(topk)
    given = weights if weighted else None
    by_routes = nvfp4.scatter_quant_act(
        *(a1, flat, dest, given if given is None else given.flatten(), gscale, counts, cap),
        backend=backend,
    )
    planned = nvfp4.scatter_quant_act_planned(
        a1, src_tok, src_route, given, gscale, counts, cap, backend=backend
    )
    sorted_routes = [route for e in range(experts) for route in rows[e]]
    offsets = torch.tensor([0, *(len(own) for own in rows.values())]).cumsum(0).int()
    ragged = nvfp4.scatter_quant_act_ragged(
        a1,
        torch.tensor([t for t, _, _ in sorted_routes], dtype=torch.int32),
        torch.tensor([t * topk + j for t, j, _ in sorted_routes], dtype=torch.int32),
        given,
        gscale,
        offsets,
        backend=backend,
    )
    for e, own in rows.items():
        for r, (t, j, _) in enumerate(own):
            x = a1[t].tolist()
            if weighted:
                x = [rounded(Fraction(product(v, float(weights[t, j]))), "bfloat16") for v in x]
            q, sf = nvfp4.quant_rows(torch.tensor([x]).bfloat16(), gscale[e])
            assert_bit_equal(ragged[0][int(offsets[e]) + r], q[0])
            assert_bit_equal(ragged[1][int(offsets[e]) + r], sf[0])
            for b_act, sfb in (by_routes, planned) if r < cap else ():
                assert_bit_equal(b_act[e, r], q[0])
                assert_bit_equal(sfb[e, r], sf[0])
        for _, sfb in (by_routes, planned):
            assert (sfb[e, len(own) :] == 0x38).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_ids_outside_every_range_are_unused_rows(backend, generator) -> None:
    a1 = torch.randn(3, 32, generator=generator).bfloat16()
    one, counts = torch.ones(1), torch.tensor([4, 4], dtype=torch.int32)
    tok = torch.tensor([0, -1, 3, 2, 2**31 - 1, 1, -(2**31), 0], dtype=torch.int32)
    used = [0, 3, 5, 7]
    _, sfb = nvfp4.scatter_quant_act_planned(a1, tok, tok, None, one, counts, 4, backend=backend)
    unused = (sfb.flatten() == 0x38).nonzero().flatten().tolist()
    assert set(range(8)) - set(used) <= set(unused)
    route = torch.tensor([0, 0, 0, 6, 0, -1, 0, 2**31 - 1], dtype=torch.int32)  # six weights
    weights = torch.rand(3, 2, generator=generator) + 0.1
    far = torch.tensor([0.001])  # scales below 0x38
    _, sfb = nvfp4.scatter_quant_act_planned(
        a1, tok, route, weights, far, counts, 4, backend=backend
    )
    assert (sfb.flatten()[1:] == 0x38).all() and int(sfb.flatten()[0]) < 0x38
    dest = torch.tensor([8, -1, 2**62, 5, -(2**62)])
    flat = torch.tensor([0, 1, 2, 2, 2])
    counts = torch.tensor([0, 2], dtype=torch.int32)
    b_act, sfb = nvfp4.scatter_quant_act(a1, flat, dest, None, far, counts, 4, backend=backend)
    q, sf = nvfp4.quant_rows(a1[2:], far)
    assert_bit_equal(b_act[1, 1], q[0])
    assert_bit_equal(sfb[1, 1], sf[0])
    assert (sfb[0] == 0x38).all() and (sfb[1, 2:] == 0x38).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_route_past_the_count_is_dropped(backend, generator) -> None:
    a1 = torch.randn(2, 32, generator=generator).bfloat16()
    dest, flat = torch.tensor([0, 1]), torch.tensor([0, 1])
    counts = torch.tensor([1], dtype=torch.int32)
    gscale = torch.tensor([0.001])
    _, sfb = nvfp4.scatter_quant_act(a1, flat, dest, None, gscale, counts, 3, backend=backend)
    assert int(sfb[0, 0]) < 0x38 and (sfb[0, 1:] == 0x38).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_quantizing_once_and_copying_is_the_planned_scatter(backend, generator) -> None:
    a1 = torch.randn(9, 96, generator=generator).bfloat16()
    tok = torch.randint(9, (12,), generator=generator, dtype=torch.int32)
    counts = torch.tensor([3, 0, 4], dtype=torch.int32)
    gscale = torch.tensor([2.5])
    q, q_sf = nvfp4.quant_rows(a1, gscale, backend=backend)
    copied = nvfp4.scatter_fp4_planned(q, q_sf, tok, counts, 4, backend=backend)
    direct = nvfp4.scatter_quant_act_planned(a1, tok, tok, None, gscale, counts, 4, backend=backend)
    assert_bit_equal(copied[1], direct[1])
    for e, count in enumerate(counts.tolist()):
        assert_bit_equal(copied[0][e, :count], direct[0][e, :count])


# dequantize_act


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_code_and_scale_is_restored_exactly(backend) -> None:
    packed = torch.arange(16, dtype=torch.uint8).repeat(128, 1) * 0x11
    scales = torch.arange(128, dtype=torch.uint8)[:, None]
    values = nvfp4.dequantize_act(packed, scales, backend=backend)
    divided = nvfp4.dequantize_act(packed, scales, torch.tensor(3.0), backend=backend)
    for byte in range(127):
        for code in range(16):
            exact = E2M1[code % 8] * UE4M3[byte] * (-1 if code >= 8 else 1)
            assert values[byte, 2 * code : 2 * code + 2].tolist() == [float(exact)] * 2
            assert float(divided[byte, 2 * code]) == rounded(exact / 3)
    assert values[127].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_restored_activations_are_near(backend, generator) -> None:
    x = torch.randn(3, 40, 256, generator=generator).bfloat16()
    gscale = torch.tensor([1.0, 448 * 6 / 4.0, 20.0])
    counts = torch.full((3,), 40, dtype=torch.int32)
    b_act, sfb = nvfp4.quant_act(x, gscale, counts, 0, backend=backend)
    restored = nvfp4.dequantize_act(b_act, sfb, gscale, backend=backend)
    for e in range(3):
        # half a step of the coarsest codes, and half a step of the scale
        block = x[e].float().abs().view(40, 8, 32).amax(-1, keepdim=True)
        error = (restored[e] - x[e].float()).view(40, 8, 32).abs()
        assert (error <= block * (1 / 6 + 1 / 16)).all()
        assert error.norm() < 0.12 * x[e].float().norm()


# the choice among configurations


def test_choices_are_legal() -> None:
    for operator in OPERATORS:
        for case in CASES[operator]():
            problem = case.build("cpu", 0).problem
            assert triton_configs.why_not(problem) is None
            assert triton_configs.refuses(triton_configs.config(problem), problem) is None
            legal = triton_configs.configs(problem)
            assert len(legal) > 3
            for config in legal:
                assert triton_configs.refuses(config, problem) is None
                assert triton_configs.Config.from_dict(config.as_dict()) == config


def test_a_tuned_table_is_asked_by_variant_and_sizes(monkeypatch) -> None:
    """A row that `farro tune` wrote for an adapter's case is the one its problem finds."""
    from farro.bench import adapter
    from farro.bench.case import Options

    for operator in ("nvfp4_quantize", "nvfp4_scatter"):
        options = [Options(torch.device("cpu"), variant=v) for v in adapter(operator).variants]
        cases = [adapter(operator).build({"m": 24, "n": 4, "k": 96}, o) for o in options]
        for own, case in zip(options, cases):
            want = triton_configs.Config(2, 2, 77)
            rows = [
                {
                    **{"backend": "triton", **o.settings, **c.sizes},
                    "config": (want if o is own else triton_configs.Config(4, 2, 99)).as_dict(),
                }
                for o, c in zip(options, cases)
            ]
            far = {
                **rows[options.index(own)],
                "k": 9600,
                "config": triton_configs.Config(4, 2, 5).as_dict(),
            }
            table = lambda name, device, r=(far, *rows): r  # noqa: E731
            monkeypatch.setattr(triton_configs, "table", table)
            assert triton_configs.config(case.problem()[1]) == want


def test_more_than_a_grid_holds_is_refused() -> None:
    from farro import explain

    x = torch.empty(70_000, 1, 32, dtype=torch.bfloat16, device="meta")
    counts = torch.empty(70_000, dtype=torch.int32, device="meta")
    told = explain(nvfp4.quant_act, x, torch.empty(1, device="meta"), counts, 0, arch="sm_90")
    assert told.chosen == "nvfp4_quantize.reference"
    assert "65535 experts" in str(told)
    x = torch.empty(1, 2**31 - 1, 32, dtype=torch.bfloat16, device="meta")
    told = explain(
        *(nvfp4.quant_act, x, torch.empty(1, device="meta"), counts[:1], 0), arch="sm_90"
    )
    assert "blocks of 32" in str(told)
