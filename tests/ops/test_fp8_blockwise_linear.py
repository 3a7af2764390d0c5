"""fp8_blockwise_linear_bf16: the reference against independent float64, kernels against both."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import farro
from farro.catalogue import operator_named
from farro.testing import (
    FP32_SUM,
    LAYOUTS,
    BlockwiseCase,
    assert_bit_equal,
    assert_close_to_exact,
    blockwise_cases,
)

BACKENDS = ("reference", "cpu")
KERNELS = {
    k.backend: k for k in operator_named("fp8_blockwise_linear").kernels if k.backend in BACKENDS
}
SEEDS = st.integers(0, 2**31)
backends = pytest.mark.parametrize("backend", KERNELS)


def seed_of(generator: torch.Generator) -> int:
    return int(torch.randint(2**31, (1,), generator=generator))


def made(m, n, k, seed, **fields):
    """Keyword arguments of fp8_blockwise_linear_bf16 with random operands."""
    return BlockwiseCase("made", m, n, k, **fields).build(seed=seed).arguments


def value_of(byte: int) -> float:
    """An E4M3 code by its definition: sign, exponent of bias 7, mantissa of three bits."""
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    size = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return -size if sign else size


VALUES = torch.tensor([value_of(byte) for byte in range(256)], dtype=torch.float64)


def independent(arguments):
    """Result and sum of magnitudes in float64, from whole matrices, decoded without torch's FP8."""
    x, weight = (VALUES[arguments[n].view(torch.uint8).long()] for n in ("input", "weight"))
    k, n = x.shape[1], weight.shape[0]
    x = x * arguments["input_scale"].double()[:, torch.arange(k) // 128]
    blocks = torch.arange(n)[:, None] // 128, torch.arange(k)[None] // 128
    weight = weight * arguments["weight_scale"].double()[blocks]
    bias = arguments["bias"]
    addend = torch.zeros(n).double() if bias is None else bias.double()
    total, magnitude = x @ weight.T + addend, x.abs() @ weight.abs().T + addend.abs()
    if arguments["activation"] is None:
        return total, magnitude
    inner = math.sqrt(2 / math.pi) * (total + 0.044715 * total**3)
    return total / (1 + torch.exp(-2 * inner)), 1.13 * magnitude


@pytest.mark.parametrize("bias", (None, torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("activation", (None, "gelu_tanh"))
@backends
def test_independent_float64(backend, activation, bias, generator):
    for scales in ("usual", "signed", "zero"):
        fields = dict(bias=bias, activation=activation, scales=scales)
        arguments = made(33, 300, 400, seed_of(generator), **fields)
        result = farro.fp8_blockwise_linear_bf16(**arguments, backend=backend)
        assert_close_to_exact(result, *independent(arguments), FP32_SUM, what=scales)


@backends
def test_every_code(backend):
    """Each of the 256 codes in both operands, by themselves: products of two are exact."""
    codes = torch.arange(256, dtype=torch.uint8)
    one = torch.full((1, 1), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    column = codes.view(torch.float8_e4m3fn)[:, None]
    ones = torch.ones(1, 1), torch.ones(256, 1), torch.ones(2, 1)
    want = VALUES.float().bfloat16() + 0.0  # a sum is never -0
    left = farro.fp8_blockwise_linear_bf16(column, one, ones[1], ones[0], backend=backend)
    assert_bit_equal(left[:, 0], want)
    right = farro.fp8_blockwise_linear_bf16(one, column, ones[0], ones[2], backend=backend)
    assert_bit_equal(right[0], want)
    both = farro.fp8_blockwise_linear_bf16(column, column, ones[1], ones[2], backend=backend)
    product = (VALUES[:, None] * VALUES[None]).float().bfloat16() + 0.0
    assert_bit_equal(both, product)


@backends
@pytest.mark.parametrize("m, n, k", ((17, 260, 520), (1, 129, 128), (70, 64, 1000)))
def test_exact_sums_are_rounded_once(m, n, k, backend, generator):
    """Small codes and scales that are powers of two: every sum is exact, so bits are equal."""
    fields = dict(codes="small", scales="powers", bias=torch.bfloat16)
    arguments = made(m, n, k, seed_of(generator), **fields)
    arguments["bias"].copy_((arguments["bias"] * 16).round() / 16)
    result = farro.fp8_blockwise_linear_bf16(**arguments, backend=backend)
    exact, _ = independent(arguments)
    assert torch.equal(exact.float().double(), exact)
    assert_bit_equal(result, exact.float().bfloat16())


@backends
def test_a_scale_reaches_its_block_alone(backend):
    """One scale of each operand is 2: exactly its rows or columns change, by exactly its block."""
    m, n, k = 3, 300, 300
    ones = torch.ones(m, k).to(torch.float8_e4m3fn), torch.ones(n, k).to(torch.float8_e4m3fn)
    for row in range(m):
        for b, size in enumerate((128, 128, 44)):
            input_scale, weight_scale = torch.ones(m, 3), torch.ones(3, 3)
            input_scale[row, b] = 2
            want = torch.full((m, n), 300.0)
            want[row] += size
            got = farro.fp8_blockwise_linear_bf16(*ones, input_scale, weight_scale, backend=backend)
            assert_bit_equal(got, want.bfloat16())
            weight_scale[row, b] = 3
            want[:, row * 128 : row * 128 + 128] += 2 * size
            want[row, row * 128 : row * 128 + 128] += 2 * size
            got = farro.fp8_blockwise_linear_bf16(*ones, input_scale, weight_scale, backend=backend)
            assert_bit_equal(got, want.bfloat16())


@backends
@pytest.mark.parametrize("case", blockwise_cases(), ids=str)
def test_cases(case, backend, generator):
    outcome = case.build(seed=seed_of(generator)).check(KERNELS[backend])
    assert outcome.status == "ok", outcome.detail


def test_the_cases_can_fail(generator):
    """Plausible mistakes, each found by one case or more."""

    def wrong(**change):
        case = BlockwiseCase("wrong", 20, 260, 400, bias=torch.float32)
        call = case.build(seed=seed_of(generator))
        call.sum_error = FP32_SUM
        arguments = {**call.arguments}
        for name, f in change.items():
            arguments[name] = f(arguments[name])
        result = farro.fp8_blockwise_linear_bf16(**arguments, backend="reference")
        return call.differs(0, result, *call.expected)

    assert wrong() is None
    assert wrong(input_scale=lambda s: s.roll(1, 1)) is not None
    assert wrong(weight_scale=lambda s: s.roll(1, 0)) is not None
    assert wrong(weight_scale=lambda s: s * (1 + 2.0**-6)) is not None
    assert wrong(bias=lambda b: b.roll(1)) is not None
    assert wrong(input=lambda x: torch.cat([x[:, :-1], torch.zeros_like(x[:, :1])], 1)) is not None


@backends
def test_out_is_returned_and_equals_the_result_without_it(backend, generator):
    arguments = made(17, 33, 300, seed_of(generator), bias=torch.float32)
    out = torch.full((33, 17), math.nan, dtype=torch.bfloat16).T
    assert farro.fp8_blockwise_linear_bf16(**arguments, out=out, backend=backend) is out
    assert_bit_equal(out, farro.fp8_blockwise_linear_bf16(**arguments, backend=backend))
    operands = [arguments[n] for n in ("input", "weight", "input_scale", "weight_scale")]
    positional = torch.full((17, 33), math.nan, dtype=torch.bfloat16)
    farro.fp8_blockwise_linear_bf16(*operands, positional, bias=arguments["bias"])
    assert not positional.isnan().any()


@backends
@pytest.mark.parametrize("m, n, k", ((0, 7, 64), (9, 0, 64), (0, 0, 0), (9, 7, 0), (0, 7, 0)))
def test_empty_dimensions_sum_to_nothing(m, n, k, backend):
    arguments = made(m, n, k, 0)
    zeros = torch.zeros(m, n, dtype=torch.bfloat16)
    assert_bit_equal(farro.fp8_blockwise_linear_bf16(**arguments, backend=backend), zeros)
    arguments["bias"] = torch.arange(1.0, n + 1)
    want = arguments["bias"].bfloat16().expand(m, n)
    assert_bit_equal(farro.fp8_blockwise_linear_bf16(**arguments, backend=backend), want)


@backends
@pytest.mark.parametrize("bad", (math.nan, math.inf))
def test_what_is_not_finite_stays_in_its_row_and_column(bad, backend, generator):
    arguments = made(6, 300, 300, seed_of(generator))
    clean = farro.fp8_blockwise_linear_bf16(**arguments, backend=backend)
    arguments["input_scale"][2, 1], arguments["weight_scale"][1, 2] = bad, -bad
    arguments["weight"].view(torch.uint8)[7, 130] = 0xFF
    arguments["input"].view(torch.uint8)[4, 299] = 0x7F
    spoiled = farro.fp8_blockwise_linear_bf16(**arguments, backend=backend)
    rows = [r for r in range(6) if r not in (2, 4)]
    columns = [c for c in range(300) if not 128 <= c < 256 and c != 7]
    assert not spoiled[2].isfinite().any() and not spoiled[:, 128:256].isfinite().any()
    assert spoiled[4].isnan().all() and spoiled[:, 7].isnan().all()
    assert_bit_equal(spoiled[rows][:, columns], clean[rows][:, columns])


@backends
@pytest.mark.parametrize("k", (37, 128, 600))
def test_a_row_does_not_depend_on_the_others(k, backend, generator):
    """Row 0 has the same bits whatever M, across every block of the CPU path."""
    arguments = made(600, 700, k, seed_of(generator))
    rows = []
    for m in (1, 2, 3, 5, 7, 17, 33, 64, 65, 128, 257, 513, 600):
        part = {**arguments}
        part["input"], part["input_scale"] = part["input"][:m], part["input_scale"][:m]
        rows.append(farro.fp8_blockwise_linear_bf16(**part, backend=backend))
    for some in rows:
        assert_bit_equal(some, rows[-1][: len(some)])


def test_scratch_of_the_cpu_path_is_bounded(generator):
    """M = 1024, N = 2048, K = 4096: at most 16 MiB beyond the result, however large the operands.

    Decoded whole, they would be 48 MiB.
    """
    arguments = made(1024, 2048, 4096, seed_of(generator))
    out = torch.empty(1024, 2048, dtype=torch.bfloat16)
    with torch.profiler.profile(profile_memory=True) as found:
        farro.fp8_blockwise_linear_bf16(**arguments, out=out, backend="cpu")
    held = most = 0
    for event in found.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    assert 4 << 20 < most <= 16 << 20, f"{most / 2**20:.1f} MiB"


def test_repeats_have_the_same_bits(generator):
    arguments = made(33, 700, 600, seed_of(generator))
    first = farro.fp8_blockwise_linear_bf16(**arguments)
    for _ in range(20):
        assert_bit_equal(farro.fp8_blockwise_linear_bf16(**arguments), first)


MATRIX_LAYOUTS = sorted(name for name in LAYOUTS if "permuted" not in name)
OUT_LAYOUTS = [None, *(name for name in MATRIX_LAYOUTS if name != "windows")]


@st.composite
def cases(draw) -> BlockwiseCase:
    sizes = draw(st.tuples(st.integers(0, 40), st.integers(0, 300), st.integers(0, 400)))
    return dataclasses.replace(
        BlockwiseCase("drawn", *sizes),
        input=draw(st.sampled_from(MATRIX_LAYOUTS)),
        weight=draw(st.sampled_from(MATRIX_LAYOUTS)),
        input_scale=draw(st.sampled_from(MATRIX_LAYOUTS)),
        weight_scale=draw(st.sampled_from(MATRIX_LAYOUTS)),
        out=draw(st.sampled_from(OUT_LAYOUTS)),
        bias=draw(st.sampled_from((None, torch.bfloat16, torch.float32))),
        activation=draw(st.sampled_from((None, "gelu_tanh"))),
        codes=draw(st.sampled_from(("normal", "full", "largest", "subnormal", "nan"))),
        scales=draw(st.sampled_from(("usual", "signed", "zero", "nonfinite", "wide"))),
    )


@backends
@settings(max_examples=80, deadline=None)
@given(case=cases(), seed=SEEDS)
def test_anything(backend, case, seed):
    outcome = case.build(seed=seed).check(KERNELS[backend])
    assert outcome.status == "ok", outcome.detail
