"""int8_gemm: the reference against rational arithmetic, the CPU path against the reference."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import farro
from farro.catalogue import operator_named
from farro.exact import FMA_TRIPLE
from farro.testing import LAYOUTS, GemmCase, assert_bit_equal, int8_gemm_cases

from .exact_arithmetic import gemm_element, multiply_add

BACKENDS = ("reference", "cpu")
OUTPUTS = (torch.float32, torch.bfloat16, torch.float16)
KERNELS = {k.backend: k for k in operator_named("int8_gemm").kernels if k.backend in BACKENDS}
SEEDS = st.integers(0, 2**31)


def seed_of(generator: torch.Generator) -> int:
    return int(torch.randint(2**31, (1,), generator=generator))


def product(m, n, k, group_size, seed, scales="signed", **fields):
    """Keyword arguments of int8_gemm with random operands."""
    return (
        GemmCase("random", m, n, k, group_size, scales=scales, **fields).build(seed=seed).arguments
    )


def by_fractions(given) -> torch.Tensor:
    """What a call must give, element by element in rational arithmetic."""
    a, b = given["a"].tolist(), given["b"].T.tolist()
    scale_a, scale_b = given["scale_a"].tolist(), given["scale_b"].T.tolist()
    bias = [None] * len(b) if given["bias"] is None else given["bias"].tolist()
    form = str(given["output_dtype"]).removeprefix("torch.")
    rows = [
        [
            gemm_element(a[m], b[n], scale_a[m], scale_b[n], given["group_size"], bias[n], form)
            for n in range(len(b))
        ]
        for m in range(len(a))
    ]
    return torch.tensor(rows, dtype=torch.float64).to(given["output_dtype"])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("scales", ("usual", "signed", "zero", "tiny", "wide"))
def test_rational_arithmetic(scales, output, backend, generator):
    for bias in (None, *OUTPUTS):
        given = product(4, 5, 200, 32, seed_of(generator), scales, output=output, bias=bias)
        assert_bit_equal(farro.int8_gemm(**given, backend=backend), by_fractions(given))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("group_size", (32, 64, 128, 256))
def test_rational_arithmetic_of_every_group_size_and_tail(group_size, backend, generator):
    for k in (1, group_size - 1, group_size, 2 * group_size + 1):
        for codes in ("full", "lowest", "extremes"):
            given = product(3, 3, k, group_size, seed_of(generator), codes=codes)
            assert_bit_equal(farro.int8_gemm(**given, backend=backend), by_fractions(given))


@pytest.mark.parametrize("k", (300, 2048))
def test_float64(k, generator):
    """Against one float64 product of dequantized operands, within the rounding of each step."""
    given = product(65, 129, k, 32, seed_of(generator))
    groups = torch.arange(k) // 32
    a = given["a"].double() * given["scale_a"].double()[:, groups]
    b = given["b"].double() * given["scale_b"].double()[groups]
    result = farro.int8_gemm(**given, backend="reference").double()
    # a rounding of each scale product and of each running sum; none passes the sum of all terms
    bound = (len(groups.unique()) + 1) * 2.0**-24 * (a.abs() @ b.abs())
    error = (result - a @ b).abs()
    assert (error <= bound).all()
    assert (error > 0).any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("k", (64, 300))
def test_one_fused_multiply_add_for_each_group(k, backend):
    """Terms -1 and 4097 * (1/4097) give exactly 2^-36; two roundings give 0."""
    given = GemmCase("telling", 3, 70, k, 32, codes="telling").build().arguments
    result = farro.int8_gemm(**given, backend=backend)
    assert_bit_equal(result, torch.full((3, 70), 2.0**-36))


@pytest.mark.parametrize("backend", BACKENDS)
def test_float64_is_not_a_fused_multiply_add(backend):
    """p * s + t of common.md, p the sum of a group's products: a float64 sum rounds it twice."""
    p, s, t = FMA_TRIPLE
    sixteens, rest = divmod(int(p), 128 * 128)
    tens, ones = divmod(rest, 127)
    assert sixteens + 2 <= 256 and tens < 128
    a, b = torch.zeros(1, 512, dtype=torch.int8), torch.zeros(512, 1, dtype=torch.int8)
    a[0, 0] = b[0] = 1  # group 0: the term t = 1
    a[0, 256 : 256 + sixteens] = b[256 : 256 + sixteens] = -128
    a[0, -2], b[-2], a[0, -1], b[-1] = 127, tens, 1, ones
    scale_a, scale_b = torch.ones(1, 2), torch.tensor([[1.0], [s]])
    result = farro.int8_gemm(a, b, scale_a, scale_b, output_dtype=torch.float32, backend=backend)
    assert float(result) == multiply_add(p, s, t)
    assert float(result) != float(torch.tensor(p * s + t, dtype=torch.float64).float())


@pytest.mark.parametrize("case", int8_gemm_cases(), ids=str)
def test_cpu_equals_reference(case, generator):
    outcome = case.build(seed=seed_of(generator)).check(KERNELS["cpu"])
    assert outcome.status == "ok", outcome.detail


@pytest.mark.parametrize("backend", BACKENDS)
def test_out_is_returned_and_equals_the_result_without_it(backend, generator):
    for output in OUTPUTS:
        given = product(17, 33, 300, 64, seed_of(generator), output=output, bias=torch.float32)
        out = torch.full((33, 17), math.nan, dtype=output).T
        assert farro.int8_gemm(**given, out=out, backend=backend) is out
        assert_bit_equal(out, farro.int8_gemm(**given, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("m, n, k", ((0, 7, 64), (9, 0, 64), (0, 0, 0), (9, 7, 0), (0, 7, 0)))
def test_empty_dimensions_sum_to_nothing(m, n, k, backend):
    given = product(m, n, k, 64, 0)
    assert_bit_equal(farro.int8_gemm(**given, backend=backend), torch.zeros(m, n))
    given["bias"] = torch.arange(1.0, n + 1)
    want = torch.arange(1.0, n + 1).expand(m, n)
    assert_bit_equal(farro.int8_gemm(**given, backend=backend), want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nonfinite_scales_stay_in_their_row_and_column(backend, generator):
    given = product(6, 8, 300, 64, seed_of(generator))
    clean = farro.int8_gemm(**given, backend=backend)
    given["scale_a"][2, 1], given["scale_b"][3, 5] = math.nan, math.inf
    spoiled = farro.int8_gemm(**given, backend=backend)
    rows = [r for r in range(6) if r != 2]
    columns = [c for c in range(8) if c != 5]
    assert spoiled[2].isnan().all() and not spoiled[:, 5].isfinite().any()
    assert_bit_equal(spoiled[rows][:, columns], clean[rows][:, columns])


@pytest.mark.parametrize("group_size", (32, 256))
@pytest.mark.parametrize("output", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("b", ("transposed", "contiguous", "packed"))
def test_a_row_does_not_depend_on_the_others(b, output, group_size, generator):
    """Row 0 has the same bits whatever M, across every block and operand order of the CPU path."""
    given = product(257, 700, 600, group_size, seed_of(generator), output=output, b=b)
    rows = []
    for m in (1, 2, 17, 33, 64, 65, 128, 257):
        part = {**given, "a": given["a"][:m], "scale_a": given["scale_a"][:m]}
        rows.append(farro.int8_gemm(**part, backend="cpu")[:1])
    for row in rows[1:]:
        assert_bit_equal(row, rows[0])
    assert_bit_equal(rows[0], farro.int8_gemm(**part, backend="reference")[:1])


def test_repeats_have_the_same_bits(generator):
    given = product(33, 700, 600, 64, seed_of(generator))
    first = farro.int8_gemm(**given)
    for _ in range(20):
        assert_bit_equal(farro.int8_gemm(**given), first)


SHAPES = st.tuples(st.integers(0, 40), st.integers(0, 70), st.integers(0, 300))
MATRIX_LAYOUTS = sorted(name for name in LAYOUTS if "permuted" not in name)
OUT_LAYOUTS = [None, *(name for name in MATRIX_LAYOUTS if name != "windows")]


@st.composite
def gemm_cases(draw) -> GemmCase:
    m, n, k = draw(SHAPES)
    case = GemmCase("drawn", m, n, k, draw(st.sampled_from((32, 64, 128, 256))))
    return dataclasses.replace(
        case,
        output=draw(st.sampled_from(OUTPUTS)),
        a=draw(st.sampled_from(MATRIX_LAYOUTS)),
        b=draw(st.sampled_from([*MATRIX_LAYOUTS, "packed"])),
        scale_a=draw(st.sampled_from(MATRIX_LAYOUTS)),
        scale_b=draw(st.sampled_from(MATRIX_LAYOUTS)),
        out=draw(st.sampled_from(OUT_LAYOUTS)),
        bias=draw(st.sampled_from((None, *OUTPUTS))),
        codes=draw(st.sampled_from(("full", "lowest", "extremes"))),
        scales=draw(st.sampled_from(("usual", "signed", "zero", "nonfinite", "tiny", "wide"))),
    )


@settings(max_examples=150, deadline=None)
@given(case=gemm_cases(), seed=SEEDS)
def test_cpu_equals_reference_on_anything(case, seed):
    outcome = case.build(seed=seed).check(KERNELS["cpu"])
    assert outcome.status == "ok", outcome.detail


@pytest.mark.parametrize("backend", BACKENDS)
class TestProperties:
    """Of FP32 outputs, bit for bit; sizes large enough for more than one vector and group."""

    PROPERTY = settings(max_examples=15, deadline=None)
    SIZES = st.tuples(st.integers(1, 20), st.integers(1, 70), st.integers(1, 200))

    @PROPERTY
    @given(sizes=SIZES, seed=SEEDS)
    def test_negated_scales_negate(self, backend, sizes, seed):
        given = product(*sizes, 32, seed, "wide")
        result = farro.int8_gemm(**given, backend=backend)
        given["scale_a"].neg_()
        negated = farro.int8_gemm(**given, backend=backend)
        assert_bit_equal(0.0 - negated, 0.0 + result)  # a sum of zero is +0 both times

    @PROPERTY
    @given(sizes=SIZES, seed=SEEDS, power=st.integers(-20, 20))
    def test_a_power_of_two_in_a_scale_is_one_in_the_result(self, backend, sizes, seed, power):
        given = product(*sizes, 32, seed)
        result = farro.int8_gemm(**given, backend=backend)
        given["scale_b"].mul_(2.0**power)
        assert_bit_equal(farro.int8_gemm(**given, backend=backend), result * 2.0**power)

    @PROPERTY
    @given(sizes=SIZES, seed=SEEDS)
    def test_permuted_rows_and_columns_permute(self, backend, sizes, seed):
        m, n, _ = sizes
        given = product(*sizes, 32, seed, bias=torch.float32)
        result = farro.int8_gemm(**given, backend=backend)
        random = torch.Generator().manual_seed(seed)
        rows, columns = torch.randperm(m, generator=random), torch.randperm(n, generator=random)
        moved = {
            **given,
            "a": given["a"][rows],
            "b": given["b"][:, columns],
            "scale_a": given["scale_a"][rows],
            "scale_b": given["scale_b"][:, columns],
            "bias": given["bias"][columns],
        }
        assert_bit_equal(farro.int8_gemm(**moved, backend=backend), result[rows][:, columns])

    @PROPERTY
    @given(sizes=SIZES, seed=SEEDS)
    def test_transposed_operands_transpose(self, backend, sizes, seed):
        given = product(*sizes, 32, seed)
        turned = {
            **given,
            "a": given["b"].T,
            "b": given["a"].T,
            "scale_a": given["scale_b"].T,
            "scale_b": given["scale_a"].T,
        }
        result = farro.int8_gemm(**given, backend=backend)
        assert_bit_equal(farro.int8_gemm(**turned, backend=backend).T, result)

    @PROPERTY
    @given(sizes=SIZES, seed=SEEDS)
    def test_codes_of_zero_in_a_group_count_as_no_group(self, backend, sizes, seed):
        m, n, k = sizes
        given = product(m, n, k, 32, seed)
        longer = product(m, n, -(-k // 32) * 32 + 32, 32, seed)
        longer["a"].zero_()
        longer["a"][:, :k] = given["a"]
        longer["b"][:k] = given["b"]
        longer["scale_a"][:, :-1], longer["scale_b"][:-1] = given["scale_a"], given["scale_b"]
        result = farro.int8_gemm(**given, backend=backend)
        assert_bit_equal(farro.int8_gemm(**longer, backend=backend) + 0.0, result + 0.0)
