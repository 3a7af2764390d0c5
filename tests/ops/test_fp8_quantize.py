"""quantize_fp8_* and dequantize_fp8 against rational arithmetic and each other."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import farro
from farro.arch import interpreting
from farro.catalogue import operator_named
from farro.formats.fp8 import E4M3, KINDS, scale_shape
from farro.testing import (
    LAYOUTS,
    Fp8QuantizeCase,
    assert_bit_equal,
    fp8_quantize_cases,
    laid_out,
)

from .exact_arithmetic import product, quantized_fp8_group, rounded, sign

BACKENDS = ("reference", "cpu")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
KERNELS = {k.backend: k for k in operator_named("fp8_quantize").kernels if k.backend in BACKENDS}
FUNCTIONS = {kind: getattr(farro, f"quantize_fp8_{kind}") for kind in KINDS}
# those of special values smaller, since rational numbers are slow
SMALL = [
    dataclasses.replace(c, shape=(3, 140)) if c.shape == (7, 290) else c
    for c in fp8_quantize_cases()
    if c.shape == (7, 290) or 0 < math.prod(c.shape) <= 800
]
each_kind = pytest.mark.parametrize("kind", KINDS)
each_backend = pytest.mark.parametrize("backend", BACKENDS)


def seed_of(generator: torch.Generator) -> int:
    return int(torch.randint(2**31, (1,), generator=generator))


def group_of(kind: str, row: int, column: int) -> tuple[int, ...]:
    """Where an element's scale lies, x taken as a matrix."""
    place = {"per_tensor": (), "per_row": (row, 0), "1x128": (row, column // 128)}
    return place.get(kind, (row // 128, column // 128))


def by_fractions(x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of every group, each in rational arithmetic."""
    rows = x.double().reshape(-1, x.shape[-1]).tolist()
    groups: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for i, row in enumerate(rows):
        for j in range(len(row)):
            groups.setdefault(group_of(kind, i, j), []).append((i, j))
    codes = torch.zeros(len(rows), x.shape[-1], dtype=torch.uint8)
    scales = torch.zeros(scale_shape(codes.shape, kind))
    for group, places in groups.items():
        found, scales[group] = quantized_fp8_group([rows[i][j] for i, j in places])
        codes[tuple(zip(*places))] = torch.tensor(found, dtype=torch.uint8)
    return codes.view(x.shape).view(E4M3), scales.view(scale_shape(x.shape, kind))


def assert_same_bytes(actual, expected, what: str = "") -> None:
    """NaN too: it has one code, and one pattern as a scale."""
    for result, want in zip(actual, expected):
        assert result.dtype == want.dtype
        actual_bytes = result.reshape(-1).view(torch.uint8)
        assert_bit_equal(actual_bytes, want.reshape(-1).view(torch.uint8), what)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_rational_arithmetic(case, generator):
    x = case.build(seed=seed_of(generator)).arguments["x"]
    result = FUNCTIONS[case.kind](x, backend="reference")
    want = by_fractions(x, case.kind)
    for actual, expected in zip(result, want):
        assert_bit_equal(actual, expected)


@pytest.mark.parametrize("case", fp8_quantize_cases(), ids=str)
def test_cpu_equals_reference(case, generator):
    call = case.build(seed=seed_of(generator))
    outcome = call.check(KERNELS["cpu"])
    assert outcome.status == "ok", outcome.detail
    assert_same_bytes(call.through("cpu"), call.expected)


@each_backend
@pytest.mark.parametrize("dtype", FLOATS)
@each_kind
def test_halves_round_to_even(kind, dtype, backend):
    """With max = 448 * 2^e the scale is 2^e, and products are midpoints of E4M3 exactly."""
    middles = torch.tensor([17.0, 19.0, 21.0, 2.0**-10, 3 * 2.0**-10, 15 * 2.0**-10, 13 / 64])
    x = torch.zeros(2, 256)
    x[:, ::128] = 448.0
    x[0, 1:8], x[1, 1:8] = middles, -middles
    q, scale = FUNCTIONS[kind]((x * 2.0**-3).to(dtype), backend=backend)
    assert (scale == 2.0**-3).all()
    want = torch.tensor([16.0, 20.0, 20.0, 0.0, 2.0**-8, 2.0**-6, 13 / 64])
    assert_bit_equal(q[:, 1:8].float(), torch.stack([want, -want]))


@each_backend
@each_kind
def test_small_scales_stop_at_the_floor(kind, backend):
    """The floor is on the scale: 1e-12, whatever is below 448e-12."""
    for value in (0.0, 1e-37, -1e-42, 440e-12, 456e-12):
        x = torch.full((3, 130), value)
        q, scale = FUNCTIONS[kind](x, backend=backend)
        floor = torch.tensor(1e-12)
        assert ((scale > floor) if value > 448e-12 else (scale == floor)).all()
        code = 0.0 if abs(value) < 1e-12 else 448.0  # 440 rounds to 448
        assert_bit_equal(q.float(), torch.full((3, 130), math.copysign(code, value)))


@each_backend
@pytest.mark.parametrize("value", (math.nan, math.inf, -math.inf))
@each_kind
def test_nonfinite_values_spoil_their_group_alone(kind, value, backend, generator):
    x = torch.randn(200, 290, generator=generator)
    clean_q, clean_scale = FUNCTIONS[kind](x, backend=backend)
    x[150, 200], x[151, 201] = value, x[151, 201]
    q, scale = FUNCTIONS[kind](x, backend=backend)
    places = torch.zeros(x.shape, dtype=torch.bool)
    group = group_of(kind, 150, 200)
    for row in range(200):
        places[row] = torch.tensor([group_of(kind, row, j) == group for j in range(290)])
    assert (q.view(torch.uint8)[places] == 0x7F).all()
    assert_bit_equal(scale[group], torch.tensor(abs(value)))
    assert_bit_equal(q.view(torch.uint8)[~places], clean_q.view(torch.uint8)[~places])
    scale[group] = clean_scale[group]
    assert_bit_equal(scale, clean_scale)


@each_backend
@each_kind
def test_nan_comes_before_infinity_and_has_one_pattern(kind, backend):
    """Whatever its sign and payload: bytes can be compared."""
    x = torch.ones(5, 100)
    x[2, 7] = math.inf
    x.view(torch.int32)[2, 9] = -1  # a negative NaN, all bits set
    q, scale = FUNCTIONS[kind](x, backend=backend)
    place = group_of(kind, 2, 9)
    assert scale[place].view(torch.int32) == 0x7FC00000
    assert (q.view(torch.uint8)[2] == 0x7F).all()


@each_backend
def test_results_are_contiguous(backend, generator):
    x = torch.randn(3, 5, 300, generator=generator).half().transpose(0, 1)
    for kind, shape in (("per_tensor", ()), ("per_row", (5, 3, 1)), ("1x128", (5, 3, 3))):
        q, scale = FUNCTIONS[kind](x, backend=backend)
        assert (q.shape, q.dtype, q.is_contiguous()) == (x.shape, E4M3, True)
        assert (scale.shape, scale.dtype, scale.is_contiguous()) == (shape, torch.float32, True)
    q, scale = farro.quantize_fp8_128x128(x[:, 0].T, backend=backend)
    assert q.is_contiguous() and (scale.shape, scale.is_contiguous()) == ((3, 1), True)


@st.composite
def quantize_problems(draw) -> Fp8QuantizeCase:
    kind = draw(st.sampled_from(KINDS))
    leading = st.integers(0, 300).map(lambda m: [m])
    if kind != "128x128":
        leading = st.lists(st.integers(0, 6), max_size=3)
    case = Fp8QuantizeCase(
        "drawn",
        kind,
        (*draw(leading), draw(st.integers(0, 600))),
        draw(st.sampled_from(FLOATS)),
        draw(st.sampled_from(sorted(LAYOUTS))),
    )
    if 0 in case.shape:
        return case
    values = ("normal", "wide", "zero", "tiny", "subnormal", "floor", "largest", "ties", "nan")
    return dataclasses.replace(case, values=draw(st.sampled_from(values)))


SEEDS = st.integers(0, 2**31)


@settings(max_examples=150, deadline=None)
@given(case=quantize_problems(), seed=SEEDS)
def test_cpu_equals_reference_on_anything(case, seed):
    call = case.build(seed=seed)
    outcome = call.check(KERNELS["cpu"])
    assert outcome.status == "ok", outcome.detail


@settings(max_examples=60, deadline=None)
@given(
    k=st.integers(1, 600),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(FLOATS),
    values=st.sampled_from(("normal", "wide", "tiny", "floor", "ties")),
    seed=SEEDS,
)
def test_what_is_restored_is_within_half_a_step(k, kind, dtype, values, seed):
    """|x - q * s| is at most 2^-4 |x|, or 2^-10 s where codes are subnormal, but for FP32 rounding.

    1/s and x * (1/s) are rounded once each, s once more where it is not 2^e.
    """
    case = Fp8QuantizeCase("drawn", kind, (3, k), dtype, values=values)
    x = case.build(seed=seed).arguments["x"].float()
    q, scale = FUNCTIONS[kind](x)
    s = torch.stack([scale[group_of(kind, i, j)] for i in range(3) for j in range(k)]).view(3, k)
    error = (x.double() - q.double() * s.double()).abs()
    size = x.double().abs()
    allowed = torch.maximum(size * 2.0**-4, s.double() * 2.0**-10)
    assert (error <= allowed + size * 2.0**-21).all()
    floor = torch.tensor(1e-12)
    assert (q.float().abs().max() == 448) or (scale == floor).any()


@settings(max_examples=25, deadline=None)
@given(k=st.integers(1, 300), kind=st.sampled_from(KINDS), seed=SEEDS, power=st.integers(-8, 15))
def test_powers_of_two_and_signs_pass_through(k, kind, seed, power):
    x = Fp8QuantizeCase("drawn", kind, (3, k)).build(seed=seed).arguments["x"]
    q, scale = FUNCTIONS[kind](x)
    for factor in (2.0**power, -1.0):
        other_q, other_scale = FUNCTIONS[kind](x * factor)
        assert_bit_equal(other_scale, scale * abs(factor))
        assert_bit_equal(other_q.float(), q.float() * math.copysign(1, factor))


@each_backend
def test_kinds_agree_where_their_groups_do(backend, generator):
    """One row of 128, or a square of 128: the same groups under other names."""
    row = torch.randn(1, 128, generator=generator)
    results = [function(row, backend=backend) for function in FUNCTIONS.values()]
    for q, scale in results[1:]:
        assert_bit_equal(q, results[0][0])
        assert scale.item() == results[0][1].item()
    square = torch.randn(128, 128, generator=generator)
    whole = farro.quantize_fp8_per_tensor(square, backend=backend)
    assert_bit_equal(farro.quantize_fp8_128x128(square, backend=backend)[0], whole[0])


# dequantize_fp8


@pytest.mark.parametrize("dtype", FLOATS)
@each_kind
def test_dequantize_is_one_product_and_one_conversion(kind, dtype, generator):
    q = torch.randint(0, 255, (130, 150), generator=generator).to(torch.uint8)
    q = torch.where(q & 127 == 127, 0, q).view(E4M3)
    scale = torch.exp2(torch.rand(scale_shape(q.shape, kind), generator=generator) * 30 - 20)
    form = {torch.float16: "float16", torch.bfloat16: "bfloat16"}.get(dtype, "float32")
    result = farro.dequantize_fp8(q, scale, dtype)
    assert result.dtype == dtype and result.shape == q.shape
    for row in range(0, 130, 43):
        codes = q[row].float().tolist()
        wide = [product(c, float(scale[group_of(kind, row, j)])) for j, c in enumerate(codes)]
        want = [rounded(Fraction(v), form, sign(v)) for v in wide]
        assert_bit_equal(result[row], torch.tensor(want, dtype=torch.float64).to(dtype))


def test_dequantize_reads_views_and_nonfinite_scales(generator):
    q = laid_out(torch.randn(4, 300, generator=generator).to(E4M3), "columns").view
    scale = laid_out(torch.rand(4, 3, generator=generator), "transposed").view
    scale[1, 1], scale[2, 0] = math.nan, math.inf
    result = farro.dequantize_fp8(q, scale)
    assert_bit_equal(result, farro.dequantize_fp8(q.contiguous(), scale.clone()))
    assert result[1, 128:256].isnan().all()
    assert not result[2, :128].isfinite().any()
    assert result[0].isfinite().all() and result[1, :128].isfinite().all()
    one = farro.dequantize_fp8(q, torch.tensor([2.0]))  # a scale [1], as alpha may be
    assert_bit_equal(one, q.float() * 2)


@each_kind
def test_what_was_not_finite_comes_back_as_nan(kind):
    x = torch.ones(3, 200)
    x[1, 150] = math.inf
    restored = farro.dequantize_fp8(*FUNCTIONS[kind](x))
    spoiled = {"per_tensor": 600, "per_row": 200, "1x128": 72, "128x128": 216}[kind]
    assert restored.isnan().sum() == spoiled


X = torch.ones(3, 64)
Q, SCALE = torch.ones(3, 64).to(E4M3), torch.ones(3, 1)
QUANTIZE_ERRORS = {
    "missing": ({"x": None}, TypeError, "x must be a tensor, got NoneType"),
    "a list": ({"x": [1.0]}, TypeError, "x must be a tensor, got list"),
    "integers": ({"x": X.int()}, TypeError, "x has dtype int32; needed float16 or bfloat16 or"),
    "codes": ({"x": Q}, TypeError, "x has dtype float8_e4m3fn; needed"),
    "expanded": (
        {"x": X[:1].expand(3, 64)},
        ValueError,
        r"x has strides \[0, 1\] for shape \[3, 64\]; a zero stride .* pass x.contiguous\(\)",
    ),
    "sparse": ({"x": X.to_sparse()}, ValueError, "x has layout torch.sparse_coo; needed a strided"),
    "backend unknown": ({"backend": "gpu"}, ValueError, "backend is 'gpu'; needed one of auto"),
    "backend not a name": ({"backend": None}, TypeError, "backend must be a str, got NoneType"),
}
DEQUANTIZE_ERRORS = {
    "q missing": ({"q": None}, TypeError, "q must be a tensor, got NoneType"),
    "scale missing": ({"scale": None}, TypeError, "scale must be a tensor, got NoneType"),
    "q of floats": ({"q": X}, TypeError, "q has dtype float32; needed float8_e4m3fn"),
    "q of E5M2": (
        {"q": X.to(torch.float8_e5m2)},
        TypeError,
        "q has dtype float8_e5m2; needed float8_e4m3fn",
    ),
    "scale of bfloat16": (
        {"scale": SCALE.bfloat16()},
        TypeError,
        r"scale has dtype bfloat16; needed float32: pass scale.float\(\)",
    ),
    "dtype a name": ({"dtype": "float32"}, TypeError, "dtype must be a torch.dtype, got str"),
    "dtype of codes": ({"dtype": E4M3}, TypeError, "dtype is torch.float8_e4m3fn; needed a fl"),
    "no dimensions": ({"q": Q[0, 0]}, ValueError, "q has no dimensions"),
    "scale of other groups": (
        {"scale": torch.ones(3, 2)},
        ValueError,
        r"scale has shape \[3, 2\]; needed one of \[\] \(per_tensor\), \[3, 1\] \(per_row\), ",
    ),
    "two devices": ({"scale": SCALE.to("meta")}, ValueError, "scale is on meta and q on cpu"),
}


@pytest.mark.parametrize(
    "change, exception, message", QUANTIZE_ERRORS.values(), ids=QUANTIZE_ERRORS
)
@each_kind
def test_a_wrong_argument_of_a_quantizer_is_named(kind, change, exception, message):
    with pytest.raises(exception, match=f"^quantize_fp8_{kind}: .*{message}"):
        FUNCTIONS[kind](**{"x": X, **change})


@pytest.mark.parametrize(
    "change, exception, message", DEQUANTIZE_ERRORS.values(), ids=DEQUANTIZE_ERRORS
)
def test_a_wrong_argument_of_dequantize_is_named(change, exception, message):
    with pytest.raises(exception, match=f"^dequantize_fp8: .*{message}"):
        farro.dequantize_fp8(**{"q": Q, "scale": SCALE, **change})


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4)])
def test_squares_need_a_matrix(shape):
    message = r"^quantize_fp8_128x128: x has shape \[.*\]; needed \[M, K\]"
    with pytest.raises(ValueError, match=message):
        farro.quantize_fp8_128x128(torch.ones(shape))


def test_the_torch_operator_knows_its_kinds():
    with pytest.raises(ValueError, match="kind is '1x64'; needed one of per_tensor, per_row, 1x"):
        torch.ops.farro.fp8_quantize(X, "1x64", "auto")


@pytest.mark.parametrize("backend", ("triton", "cuda"))
@pytest.mark.skipif(interpreting(), reason="Triton's interpreter runs on the CPU")
@each_kind
def test_a_back_end_that_cannot_run_says_why(kind, backend):
    message = f"backend='{backend}' cannot run this on cpu: .*Use backend='cpu'"
    with pytest.raises(farro.UnsupportedError, match=message):
        FUNCTIONS[kind](X, backend=backend)
