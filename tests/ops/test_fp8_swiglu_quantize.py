"""fp8_blockwise_swiglu_quantize_fp8: the formula by hand, kernels against exact sums, errors."""

from __future__ import annotations

import dataclasses
import functools
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
    SwigluCase,
    assert_bit_equal,
    guarded,
    swiglu_cases,
)
from farro.testing.fp8_swiglu_quantize import codes_that_differ, far_from_swiglu

from .fp8_far_gates import check_far_gates

NAME = "fp8_blockwise_swiglu_quantize_fp8"
E4M3 = torch.float8_e4m3fn
BACKENDS = ("reference", "cpu")
KERNELS = {
    k.backend: k for k in operator_named("fp8_swiglu_quantize").kernels if k.backend in BACKENDS
}
backends = pytest.mark.parametrize("backend", KERNELS)
SEEDS = st.integers(0, 2**31)


def seed_of(generator: torch.Generator) -> int:
    return int(torch.randint(2**31, (1,), generator=generator))


def swiglu(*args, **kwargs):
    return farro.fp8_blockwise_swiglu_quantize_fp8(*args, **kwargs)


def made(m, n, k, seed, **fields):
    return SwigluCase("made", m, n, k, **fields).build(seed=seed)


def test_far_gates():
    config = KERNELS["cpu"].config(made(9, 256, 16, 0).problem)
    check_far_gates(functools.partial(KERNELS["cpu"].function(), config), "cpu")


def to_bf16(x: float) -> float:
    """x rounded to a BF16 number (normal ones), half to even, in plain Python."""
    if x == 0 or not math.isfinite(x):
        return x
    unit = 2.0 ** (math.frexp(x)[1] - 8)
    return round(x / unit) * unit


def to_e4m3(x: float) -> float:
    x = max(-448.0, min(448.0, x))
    unit = 2.0 ** max(math.frexp(x)[1] - 4, -9)
    return round(x / unit) * unit


@backends
def test_the_formula_by_hand(backend):
    """Row by row in plain Python: gate and up are exact here, one value of K."""
    gates = torch.tensor([1.0, -2.0, 0.5, 3.5, -0.25, 8.0, 0.0, -6.0] * 17)[:130]
    ups = torch.tensor([2.0, 1.5, -4.0, 0.0, 7.0, -1.0, 3.0, 0.125, 5.0] * 15)[:130]
    weight = torch.cat([gates, ups]).to(E4M3)[:, None]
    x = torch.tensor([1.0, -0.5, 2.0]).to(E4M3)[:, None]
    input_scale = torch.tensor([[1.0], [3.0], [0.25]])
    weight_scale = torch.tensor([[0.5], [2.0], [1.0], [0.75]])  # gate's two, then up's two
    q, scale = swiglu(x, weight, input_scale, weight_scale, backend=backend)
    for row in range(3):
        code = float(x[row]) * float(input_scale[row])
        v = []
        for n in range(130):
            gate = code * float(gates[n]) * float(weight_scale[n // 128])
            up = code * float(ups[n]) * float(weight_scale[2 + n // 128])
            v.append(to_bf16(to_bf16(gate / (1 + math.exp(-gate))) * up))
        for g, (start, stop) in enumerate(((0, 128), (128, 130))):
            want = max(max(map(abs, v[start:stop])) / 448, 1e-12)
            assert float(scale[row, g]) == pytest.approx(want, rel=1e-6)
            got = q[row, start:stop].float().tolist()
            assert got == [to_e4m3(value / want) for value in v[start:stop]]


@backends
@pytest.mark.parametrize("case", swiglu_cases(), ids=str)
def test_cases(case, backend, generator):
    outcome = case.build(seed=seed_of(generator)).check(KERNELS[backend])
    assert outcome.status == "ok", outcome.detail


def test_independent_float64(generator):
    """The reference against products of dequantized matrices, followed through the formula."""
    call = made(40, 300, 500, seed_of(generator))
    given = call.arguments
    x = farro.dequantize_fp8(given["input"], given["input_scale"], torch.float64)
    halves = []
    for half in (0, 1):
        codes = given["gate_up_weight"][half * 300 : half * 300 + 300]
        scale = given["gate_up_weight_scale"][half * 3 : half * 3 + 3]
        weight = farro.dequantize_fp8(codes, scale, torch.float64)
        halves.append((x @ weight.T, x.abs() @ weight.abs().T))
    (gate, gate_size), (up, up_size) = halves
    q, scale = swiglu(**given, backend="reference")
    assert far_from_swiglu(q, scale, gate, up, gate_size, up_size, FP32_SUM) is None


def test_it_is_the_two_launches_without_the_rounding_between(generator):
    """Against the composition of farro's own parts on exact sums: the same but for BF16 sums."""
    call = made(33, 200, 400, seed_of(generator), codes="small", scales="powers")
    given = call.arguments
    q, scale = swiglu(**given)
    x, input_scale = given["input"], given["input_scale"]
    weight, weight_scale = given["gate_up_weight"], given["gate_up_weight_scale"]
    gate, up = (
        farro.fp8_blockwise_linear_bf16(
            x, weight[half * 200 :][:200], input_scale, weight_scale[half * 2 :][:2]
        )
        for half in (0, 1)
    )
    v = (torch.nn.functional.silu(gate.float()).bfloat16().float() * up.float()).bfloat16()
    want, want_scale = farro.quantize_fp8_1x128(v)
    got = farro.dequantize_fp8(q, scale)
    error = (got - farro.dequantize_fp8(want, want_scale)).norm() / got.norm()
    assert error < 0.04  # rounding gate and up to BF16 moves v by two steps, and some codes by one


def test_the_comparison_can_fail(generator):
    call = made(64, 256, 1024, seed_of(generator))
    q, scale = call.expected
    products = call.products
    assert far_from_swiglu(q, scale, *products, FP32_SUM) is None
    caught = 0
    for row, column in ((i, (i * 37) % 256) for i in range(64)):
        off = q.clone()
        off.view(torch.uint8)[row, column] ^= 2  # two steps away
        caught += far_from_swiglu(off, scale, *products, FP32_SUM) is not None
    assert caught > 50  # all but those where the sums cancel
    off = scale.clone()
    off[3, 1] *= 1 + 2.0**-6
    assert "scale: 1 of 128" in str(far_from_swiglu(q, off, *products, FP32_SUM))
    swapped = (products[1], products[0], products[3], products[2])
    assert far_from_swiglu(q, scale, *swapped, FP32_SUM) is not None
    assert far_from_swiglu(q, scale.T.contiguous().T[:, :1], *products, FP32_SUM) is not None
    moved = q.clone()
    moved.view(torch.uint8)[:, ::10] ^= 1
    assert "needed 99.5 %" in str(codes_that_differ(moved, q, FP32_SUM))


@backends
@pytest.mark.parametrize("bad", (math.nan, math.inf))
def test_what_is_not_finite_stays_in_its_group(bad, backend, generator):
    given = made(6, 300, 300, seed_of(generator)).arguments
    clean = swiglu(**given, backend=backend)
    given["input_scale"][2, 1] = bad
    given["gate_up_weight"].view(torch.uint8)[300 + 140, 5] = 0x7F  # of up, second group
    q, scale = swiglu(**given, backend=backend)
    assert not scale[2].isfinite().any() and q[2].float().isnan().all()
    assert not scale[:, 1].isfinite().any() and q[:, 128:256].float().isnan().all()
    rows, groups = [0, 1, 3, 4, 5], [0, 2]
    columns = [c for c in range(300) if not 128 <= c < 256]
    assert_bit_equal(scale[rows][:, groups], clean[1][rows][:, groups])
    assert_bit_equal(q[rows][:, columns], clean[0][rows][:, columns])


@backends
@pytest.mark.parametrize("layout", ("contiguous", "transposed", "columns", "transposed padded"))
def test_outputs_are_written_in_place(layout, backend, generator):
    given = made(17, 200, 300, seed_of(generator)).arguments
    want = swiglu(**given, backend=backend)
    q = guarded((17, 200), E4M3, layout, "cpu")
    scale = guarded((17, 2), torch.float32, layout, "cpu")
    for outputs in (
        {"output": q},
        {"output_scale": scale},
        {"output": q, "output_scale": scale},
    ):
        for place in outputs.values():
            place.restore()
        views = {name: place.view for name, place in outputs.items()}
        got = dict(zip(("output", "output_scale"), swiglu(**given, **views, backend=backend)))
        assert_bit_equal(got["output"], want[0])
        assert_bit_equal(got["output_scale"], want[1])
        for name, place in outputs.items():
            assert got[name] is place.view and place.overwritten() == 0


@backends
def test_a_row_does_not_depend_on_the_others(backend, generator):
    given = made(600, 300, 400, seed_of(generator)).arguments
    results = []
    for m in (1, 2, 3, 5, 7, 17, 33, 64, 65, 128, 257, 513, 600):
        part = {**given, "input": given["input"][:m], "input_scale": given["input_scale"][:m]}
        results.append(swiglu(**part, backend=backend))
    for q, scale in results:
        assert_bit_equal(q, results[-1][0][: len(q)])
        assert_bit_equal(scale, results[-1][1][: len(q)])


MATRIX_LAYOUTS = sorted(name for name in LAYOUTS if "permuted" not in name)
OUT_LAYOUTS = [None, *(name for name in MATRIX_LAYOUTS if name != "windows")]


@st.composite
def cases(draw) -> SwigluCase:
    sizes = draw(st.tuples(st.integers(0, 40), st.integers(0, 300), st.integers(0, 400)))
    return dataclasses.replace(
        SwigluCase("drawn", *sizes),
        input=draw(st.sampled_from(MATRIX_LAYOUTS)),
        weight=draw(st.sampled_from(MATRIX_LAYOUTS)),
        input_scale=draw(st.sampled_from(MATRIX_LAYOUTS)),
        weight_scale=draw(st.sampled_from(MATRIX_LAYOUTS)),
        output=draw(st.sampled_from(OUT_LAYOUTS)),
        output_scale=draw(st.sampled_from(OUT_LAYOUTS)),
        codes=draw(st.sampled_from(("normal", "full", "largest", "subnormal", "nan"))),
        scales=draw(st.sampled_from(("usual", "signed", "zero", "nonfinite", "wide"))),
    )


@backends
@settings(max_examples=60, deadline=None)
@given(case=cases(), seed=SEEDS)
def test_anything(backend, case, seed):
    outcome = case.build(seed=seed).check(KERNELS[backend])
    assert outcome.status == "ok", outcome.detail


# --- errors --------------------------------------------------------------------------------------

M, N, K = 4, 200, 300


def arguments():
    return {
        "input": torch.ones(M, K).to(E4M3),
        "gate_up_weight": torch.ones(2 * N, K).to(E4M3),
        "input_scale": torch.ones(M, 3),
        "gate_up_weight_scale": torch.ones(4, 3),
        "output": torch.full((M, N), 2.0).to(E4M3),
        "output_scale": torch.full((M, 2), 42.0),
    }


def overlapping():
    memory = torch.full((M * N * 4,), 2.0).to(E4M3)
    return memory[: M * N].view(M, N), memory[: M * 8].view(torch.float32).view(M, 2)


ERRORS = {
    "input missing": ({"input": None}, TypeError, "input must be a tensor, got NoneType"),
    "weight a list": ({"gate_up_weight": []}, TypeError, "gate_up_weight must be a tensor"),
    "scale missing": ({"gate_up_weight_scale": None}, TypeError, "gate_up_weight_scale must be"),
    "output a list": ({"output": []}, TypeError, "output must be a tensor, got list"),
    "output_scale a list": ({"output_scale": []}, TypeError, "output_scale must be a tensor"),
    "input bfloat16": (
        {"input": torch.ones(M, K, dtype=torch.bfloat16)},
        TypeError,
        "input has dtype bfloat16; needed float8_e4m3fn: quantize_fp8_1x128",
    ),
    "weight e5m2": (
        {"gate_up_weight": torch.ones(2 * N, K).to(torch.float8_e5m2)},
        TypeError,
        "gate_up_weight has dtype float8_e5m2; needed float8_e4m3fn",
    ),
    "weight_scale bfloat16": (
        {"gate_up_weight_scale": torch.ones(4, 3, dtype=torch.bfloat16)},
        TypeError,
        r"gate_up_weight_scale has dtype bfloat16; .*gate_up_weight_scale.float\(\)",
    ),
    "output bfloat16": (
        {"output": torch.ones(M, N, dtype=torch.bfloat16)},
        TypeError,
        "output has dtype bfloat16; needed float8_e4m3fn",
    ),
    "output_scale float64": (
        {"output_scale": torch.ones(M, 2, dtype=torch.float64)},
        TypeError,
        "output_scale has dtype float64; needed float32",
    ),
    "backend unknown": ({"backend": "gpu"}, ValueError, "backend is 'gpu'"),
    "backend not a name": ({"backend": None}, TypeError, "backend must be a str"),
    "input 3-D": ({"input": torch.ones(1, M, K).to(E4M3)}, ValueError, r"needed \[M,K\]: flatten"),
    "weight of another K": (
        {"gate_up_weight": torch.ones(2 * N, K + 1).to(E4M3)},
        ValueError,
        r"gate_up_weight has shape \[400, 301\]; needed \[2N,K\] with K = 300",
    ),
    "an odd number of rows": (
        {"gate_up_weight": torch.ones(2 * N - 1, K).to(E4M3)},
        ValueError,
        r"gate_up_weight has shape \[399, 300\]; needed \[2N,K\], N rows of the gate and then",
    ),
    "weight scales of one matrix": (
        {"gate_up_weight_scale": torch.ones(-(-2 * N // 128) - 1, 3)},
        ValueError,
        r"\[3, 3\]; needed \[4, 3\].*quantized apart",
    ),
    "input_scale transposed": (
        {"input_scale": torch.ones(3, M)},
        ValueError,
        r"input_scale has shape \[3, 4\]; needed \[4, 3\]",
    ),
    "output of both halves": (
        {"output": torch.ones(M, 2 * N).to(E4M3)},
        ValueError,
        r"output has shape \[4, 400\]; needed \[4, 200\]",
    ),
    "output_scale of a row": (
        {"output_scale": torch.ones(M, 1)},
        ValueError,
        r"output_scale has shape \[4, 1\]; needed \[4, 2\], that is \[M, ceil\(N/128\)\]",
    ),
    "output elements overlap": (
        {"output": torch.ones(300).to(E4M3).as_strided((M, N), (9, 1))},
        ValueError,
        r"output has strides \[9, 1\].*overlap",
    ),
    "outputs overlap": (
        dict(zip(("output", "output_scale"), overlapping())),
        ValueError,
        "output shares memory with output_scale",
    ),
    "input expanded": (
        {"input": torch.ones(1, K).to(E4M3).expand(M, K)},
        ValueError,
        "input has strides .*zero stride",
    ),
    "output_scale expanded": (
        {"output_scale": torch.ones(M, 1).expand(M, 2)},
        ValueError,
        "output_scale has strides .*zero stride",
    ),
    "output elsewhere": (
        {"output": torch.empty(M, N, dtype=E4M3, device="meta")},
        ValueError,
        "output is on meta and input on cpu",
    ),
}


@pytest.mark.parametrize("change, exception, message", ERRORS.values(), ids=ERRORS)
def test_a_wrong_argument_is_named_and_nothing_is_written(change, exception, message):
    for left_out in ((), ("output",), ("output_scale",), ("output", "output_scale")):
        if set(left_out) & set(change):
            continue
        given = {k: v for k, v in {**arguments(), **change}.items() if k not in left_out}
        with pytest.raises(exception, match=rf"^{NAME}: .*{message}"):
            swiglu(**given)
        for name in ("output", "output_scale"):
            if name in given and name not in change:
                assert_bit_equal(given[name], arguments()[name])


@pytest.mark.parametrize("name", ["input", "gate_up_weight", "input_scale", "gate_up_weight_scale"])
def test_outputs_may_not_share_memory_with_an_input(name):
    for output in ("output", "output_scale"):
        given = arguments()
        value, shape = given[output], given[output].shape
        memory = torch.zeros(max(value.nbytes, given[name].nbytes), dtype=torch.uint8)
        place = memory[: given[name].nbytes].view(given[name].dtype).view(given[name].shape)
        given[name] = place.copy_(given[name])
        given[output] = memory[: value.nbytes].view(value.dtype).view(shape)
        before = memory.clone()
        with pytest.raises(ValueError, match=f"{NAME}: {output} shares memory with {name}"):
            swiglu(**given)
        assert torch.equal(memory, before)


def test_the_unchanged_arguments_are_legal_and_backward_refuses():
    given = arguments()
    q, scale = swiglu(**given)
    assert q is given["output"] and scale is given["output_scale"]
    assert (q.float() == 448).all() and (scale * 448 == scale[0, 0] * 448).all()
    del given["output"], given["output_scale"]
    given["input_scale"].requires_grad_()
    _, scale = swiglu(**given)
    with pytest.raises(RuntimeError, match="fp8_swiglu_quantize is for inference"):
        scale.sum().backward()
