"""quantize_int8_groups and dequantize_int8_groups against rational arithmetic and each other."""

from __future__ import annotations

import dataclasses
import math
import re
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import farro
from farro.arch import interpreting
from farro.catalogue import operator_named
from farro.testing import LAYOUTS, QuantizeCase, assert_bit_equal, laid_out, quantize_cases

from .exact_arithmetic import product, quantized_group, rounded, sign

BACKENDS = ("reference", "cpu")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
GROUP_SIZES = (32, 64, 128, 256)
KERNELS = {k.backend: k for k in operator_named("int8_quantize").kernels if k.backend in BACKENDS}
SMALL = [case for case in quantize_cases() if 0 < math.prod(case.shape) <= 4000]


def seed_of(generator: torch.Generator) -> int:
    return int(torch.randint(2**31, (1,), generator=generator))


def by_fractions(x: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of every group, each in rational arithmetic."""
    codes, scales = [], []
    for row in x.double().reshape(-1, x.shape[-1]).tolist():
        groups = [
            quantized_group(row[start : start + group_size])
            for start in range(0, len(row), group_size)
        ]
        codes.append([code for group, _ in groups for code in group])
        scales.append([scale for _, scale in groups])
    groups = -(-x.shape[-1] // group_size)
    q = torch.tensor(codes, dtype=torch.int8).view(x.shape)
    return q, torch.tensor(scales, dtype=torch.float64).float().view(*x.shape[:-1], groups)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_rational_arithmetic(case, generator):
    x = case.build(seed=seed_of(generator)).arguments["x"]
    q, scale = farro.quantize_int8_groups(x, case.group_size, backend="reference")
    want_q, want_scale = by_fractions(x, case.group_size)
    assert_bit_equal(scale, want_scale, "scale")
    assert_bit_equal(q, want_q, "q")


@pytest.mark.parametrize("case", quantize_cases(), ids=str)
def test_cpu_equals_reference(case, generator):
    outcome = case.build(seed=seed_of(generator)).check(KERNELS["cpu"])
    assert outcome.status == "ok", outcome.detail


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_halves_round_to_even(group_size, dtype, backend):
    """With max = 127 * 2^e the scale is 2^e, and n + 1/2 is a quotient without rounding."""
    x = torch.full((2, 256 + group_size), 127.0)
    x[0, 1:127] = torch.arange(126) + 0.5
    x[0, ::group_size] = 127.0  # the largest of each group
    x[1] = -x[0]
    q, scale = farro.quantize_int8_groups((x * 2.0**-5).to(dtype), group_size, backend=backend)
    assert (scale == 2.0**-5).all()
    assert_bit_equal(
        q, torch.tensor([[round(v) for v in row] for row in x.tolist()]).to(torch.int8)
    )
    assert (q.long() % 2 == 0)[x % 1 == 0.5].all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_small_scales_stop_at_the_floor(backend):
    """The floor is on the scale: 1e-12, whatever is below 127e-12."""
    x = torch.tensor([[0.0] * 64, [1e-37] * 64, [-1e-42] * 64, [126e-12] * 64, [128e-12] * 64])
    q, scale = farro.quantize_int8_groups(x, 64, backend=backend)
    floor = torch.tensor(1e-12)
    assert (scale[:4] == floor).all() and scale[4] > floor
    assert q[:, 0].tolist() == [0, 0, 0, 126, 127]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", (math.nan, math.inf, -math.inf))
def test_nonfinite_values_spoil_their_group_alone(value, dtype, backend, generator):
    x = torch.randn(4, 290, generator=generator).to(dtype)
    clean_q, clean_scale = farro.quantize_int8_groups(x, 64, backend=backend)
    x[1, 100] = value
    q, scale = farro.quantize_int8_groups(x, 64, backend=backend)
    assert (q[1, 64:128] == 0).all()
    assert_bit_equal(scale[1, 1], torch.tensor(abs(value)))
    q[1, 64:128], scale[1, 1] = clean_q[1, 64:128], clean_scale[1, 1]
    assert_bit_equal(q, clean_q)
    assert_bit_equal(scale, clean_scale)


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_are_contiguous_int8_and_float32(backend, generator):
    x = torch.randn(3, 5, 70, generator=generator).half().transpose(0, 1)
    q, scale = farro.quantize_int8_groups(x, 32, backend=backend)
    assert (q.shape, q.dtype, q.is_contiguous()) == (x.shape, torch.int8, True)
    assert (scale.shape, scale.dtype, scale.is_contiguous()) == ((5, 3, 3), torch.float32, True)
    default_q, default_scale = farro.quantize_int8_groups(x, backend=backend)
    assert_bit_equal(default_scale, farro.quantize_int8_groups(x, 256, backend=backend)[1])
    assert default_q.shape == x.shape


@st.composite
def quantize_problems(draw) -> QuantizeCase:
    case = QuantizeCase(
        "drawn",
        tuple(draw(st.lists(st.integers(0, 6), max_size=3))) + (draw(st.integers(0, 600)),),
        draw(st.sampled_from(FLOATS)),
        draw(st.sampled_from(GROUP_SIZES)),
        draw(st.sampled_from(sorted(LAYOUTS))),
    )
    if 0 in case.shape:
        return case
    kinds = ("normal", "wide", "zero", "tiny", "subnormal", "floor", "largest", "halves", "nan")
    return dataclasses.replace(case, values=draw(st.sampled_from(kinds)))


SEEDS = st.integers(0, 2**31)


@settings(max_examples=150, deadline=None)
@given(case=quantize_problems(), seed=SEEDS)
def test_cpu_equals_reference_on_anything(case, seed):
    outcome = case.build(seed=seed).check(KERNELS["cpu"])
    assert outcome.status == "ok", outcome.detail


@settings(max_examples=60, deadline=None)
@given(
    k=st.integers(1, 600),
    group_size=st.sampled_from(GROUP_SIZES),
    dtype=st.sampled_from(FLOATS),
    kind=st.sampled_from(("normal", "wide", "tiny", "floor", "halves")),
    seed=SEEDS,
)
def test_what_is_restored_is_within_half_a_step(k, group_size, dtype, kind, seed):
    """|x - q * s| <= s / 2 in exact arithmetic, but for the one rounding of x / s to float32."""
    case = QuantizeCase("drawn", (3, k), dtype, group_size, values=kind)
    x = case.build(seed=seed).arguments["x"].float()
    q, scale = farro.quantize_int8_groups(x, group_size)
    s = scale.double().repeat_interleave(group_size, dim=-1)[:, :k]
    error = (x.double() - q.double() * s).abs()
    assert (error <= s / 2 + x.double().abs() * 2.0**-24).all()
    assert int(q.min()) >= -127
    codes = torch.nn.functional.pad(q, (0, -k % group_size)).view(3, -1, group_size)
    used = codes.int().abs().amax(-1)  # the whole range, but on the floor
    assert ((used == 127) | (scale == torch.tensor(1e-12))).all()


@settings(max_examples=25, deadline=None)
@given(k=st.integers(1, 300), seed=SEEDS, power=st.integers(-8, 15))
def test_powers_of_two_and_signs_pass_through(k, seed, power):
    x = QuantizeCase("drawn", (3, k), group_size=32).build(seed=seed).arguments["x"]
    q, scale = farro.quantize_int8_groups(x, 32)
    for factor in (2.0**power, -1.0):
        other_q, other_scale = farro.quantize_int8_groups(x * factor, 32)
        assert_bit_equal(other_scale, scale * abs(factor))
        assert_bit_equal(other_q, q if factor > 0 else -q)


# dequantize_int8_groups


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_dequantize_is_one_product_and_one_conversion(group_size, dtype, generator):
    k = 2 * group_size + 5
    q = torch.randint(-128, 128, (2, 3, k), generator=generator, dtype=torch.int16).to(torch.int8)
    scale = torch.exp2(torch.rand(2, 3, 3, generator=generator) * 30 - 20)
    scale[0, 0, 0] *= -1
    form = {torch.float16: "float16", torch.bfloat16: "bfloat16"}.get(dtype, "float32")
    want = []
    for codes, scales in zip(q.view(-1, k).tolist(), scale.view(-1, 3).tolist()):
        wide = [product(float(code), scales[i // group_size]) for i, code in enumerate(codes)]
        want.append([rounded(Fraction(v), form, sign(v)) for v in wide])
    result = farro.dequantize_int8_groups(q, scale, group_size, dtype)
    assert_bit_equal(result, torch.tensor(want, dtype=torch.float64).to(dtype).view(2, 3, k))


def test_dequantize_reads_views_and_nonfinite_scales(generator):
    q = laid_out(torch.randint(-5, 5, (4, 70), generator=generator).to(torch.int8), "strided").view
    scale = laid_out(torch.rand(4, 3, generator=generator), "transposed").view
    scale[1, 1], scale[2, 0] = math.nan, math.inf
    result = farro.dequantize_int8_groups(q, scale, 32)
    assert_bit_equal(result, farro.dequantize_int8_groups(q.contiguous(), scale.clone(), 32))
    assert result[1, 32:64].isnan().all()
    assert not result[2, :32].isfinite().any()
    assert result[0].isfinite().all() and result[1, :32].isfinite().all()
    assert_bit_equal(
        farro.dequantize_int8_groups(torch.zeros(3, 0, dtype=torch.int8), torch.zeros(3, 0)),
        torch.zeros(3, 0),
    )


X = torch.ones(3, 64)
Q, SCALE = torch.ones(3, 64, dtype=torch.int8), torch.ones(3, 1)
QUANTIZE_ERRORS = {
    "missing": ({"x": None}, TypeError, "x must be a tensor, got NoneType"),
    "a list": ({"x": [1.0]}, TypeError, "x must be a tensor, got list"),
    "integers": ({"x": X.int()}, TypeError, "x has dtype int32; needed float16 or bfloat16 or"),
    "codes": ({"x": Q}, TypeError, "x has dtype int8; needed"),
    "complex": ({"x": X.cfloat()}, TypeError, "x has dtype complex64; needed"),
    "no dimensions": ({"x": torch.tensor(1.0)}, ValueError, r"no dimensions; needed .* \[K\]"),
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
    "q of floats": ({"q": X}, TypeError, "q has dtype float32; needed int8"),
    "scale of bfloat16": (
        {"scale": SCALE.bfloat16()},
        TypeError,
        r"scale has dtype bfloat16; needed float32: pass scale.float\(\)",
    ),
    "scale of bytes": ({"scale": SCALE.byte()}, TypeError, "scale has dtype uint8; needed float32"),
    "dtype a name": ({"dtype": "float32"}, TypeError, "dtype must be a torch.dtype, got str"),
    "dtype of integers": ({"dtype": torch.int32}, TypeError, "dtype is torch.int32; needed a fl"),
    "no dimensions": ({"q": Q[0, 0]}, ValueError, "q has no dimensions"),
    "scale of another K": (
        {"scale": torch.ones(3, 2)},
        ValueError,
        r"scale has shape \[3, 2\]; needed \[3, 1\], that is \[..., ceil\(K/G\)\]",
    ),
    "two devices": ({"scale": SCALE.to("meta")}, ValueError, "scale is on meta and q on cpu"),
}
GROUPS = {
    f"group_size {value!r}": (
        {"group_size": value},
        ValueError,
        rf"group_size is {re.escape(repr(value))} \({type(value).__name__}\); needed an int among",
    )
    for value in (0, 16, 48, 512, -64, True, 64.0, "64", None)
}
QUANTIZE_ERRORS |= GROUPS
DEQUANTIZE_ERRORS |= GROUPS


@pytest.mark.parametrize(
    "change, exception, message", QUANTIZE_ERRORS.values(), ids=QUANTIZE_ERRORS
)
def test_a_wrong_argument_of_quantize_is_named(change, exception, message):
    with pytest.raises(exception, match=f"^quantize_int8_groups: .*{message}"):
        farro.quantize_int8_groups(**{"x": X, "group_size": 64, **change})


@pytest.mark.parametrize(
    "change, exception, message", DEQUANTIZE_ERRORS.values(), ids=DEQUANTIZE_ERRORS
)
def test_a_wrong_argument_of_dequantize_is_named(change, exception, message):
    with pytest.raises(exception, match=f"^dequantize_int8_groups: .*{message}"):
        farro.dequantize_int8_groups(**{"q": Q, "scale": SCALE, "group_size": 64, **change})


@pytest.mark.parametrize("backend", ("triton", "cuda"))
@pytest.mark.skipif(interpreting(), reason="Triton's interpreter runs on the CPU")
def test_a_back_end_that_cannot_run_says_why(backend):
    message = f"backend='{backend}' cannot run this on cpu: .*Use backend='cpu'"
    with pytest.raises(farro.UnsupportedError, match=message):
        farro.quantize_int8_groups(X, 64, backend=backend)
