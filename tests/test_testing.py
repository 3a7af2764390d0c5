"""The comparison helpers must see every planted difference, and the cases must be what they say."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from farro.catalogue import OPERATORS, operator_named
from farro.testing import (
    CASES,
    LAYOUTS,
    GemmCase,
    QuantizeCase,
    assert_bit_equal,
    first_mismatch,
    guarded,
    int8_gemm_cases,
    laid_out,
    poisoned_memory,
    quantize_cases,
)

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def kernel_of(operator: str, backend: str = "cpu"):
    return next(k for k in operator_named(operator).kernels if k.backend == backend)


@pytest.mark.parametrize("dtype", (*FLOATS, torch.float8_e4m3fn, torch.int8, torch.int64))
def test_equal_tensors_are_equal(dtype, generator):
    x = (torch.randn(7, 5, generator=generator) * 40).to(dtype)
    assert_bit_equal(x, x.clone())
    assert_bit_equal(x.T, x.clone().T.contiguous())  # strides do not count


@pytest.mark.parametrize("dtype", FLOATS)
def test_one_bit_anywhere_is_found(dtype, generator):
    x = torch.rand(5, 6, generator=generator).to(dtype)
    y = x.clone()
    y[3, 4] = torch.nextafter(y[3, 4], torch.tensor(9.0, dtype=dtype))
    found = first_mismatch(y, x)
    assert found is not None
    assert (found.index, found.count, found.total) == ((3, 4), 1, 30)
    with pytest.raises(AssertionError, match=r"kernel: 1 of 30 elements differ; first at \[3, 4\]"):
        assert_bit_equal(y, x, "kernel")


@pytest.mark.parametrize("dtype", FLOATS)
def test_signs_of_zero_differ_and_nans_match(dtype):
    zero = torch.zeros(3, dtype=dtype)
    with pytest.raises(AssertionError, match=r"3 of 3 elements differ.*got -0.0.*needed 0.0"):
        assert_bit_equal(-zero, zero)
    nan = torch.full((3,), math.nan, dtype=dtype)
    assert_bit_equal(nan, -nan)
    with pytest.raises(AssertionError, match="got nan"):
        assert_bit_equal(nan, zero)
    with pytest.raises(AssertionError, match="needed nan"):
        assert_bit_equal(zero, nan)


def test_nan_payloads_match():
    words = struct.pack("<2I", 0x7FC00000, 0xFF800001)
    a, b = torch.frombuffer(bytearray(words), dtype=torch.float32)
    assert_bit_equal(a, b)


def test_shape_and_dtype_count():
    x = torch.zeros(2, 3)
    with pytest.raises(AssertionError, match=r"shape is \[2, 3\], needed \[3, 2\]"):
        assert_bit_equal(x, torch.zeros(3, 2))
    with pytest.raises(AssertionError, match=r"dtype is torch.float32, needed torch.float16"):
        assert_bit_equal(x, x.half())
    with pytest.raises(AssertionError, match=r"shape is \[0, 3\], needed \[3, 0\]"):
        assert_bit_equal(torch.zeros(0, 3), torch.zeros(3, 0))
    assert_bit_equal(torch.zeros(0, 3), torch.zeros(0, 3))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", ((5, 7), (1, 7), (5, 1), (1, 1), (300,), (2, 3, 5), (0, 4)))
def test_layouts_hold_their_values_and_watch_their_surroundings(layout, shape, generator):
    values = torch.randint(-128, 128, shape, generator=generator).to(torch.int8)
    place = laid_out(values, layout)
    if not LAYOUTS[layout].windows:
        assert_bit_equal(place.view, values)
    assert not place.changed()
    if values.numel():
        place.view[(0,) * len(shape)] += 1
        assert (place.changed(), place.overwritten()) == (1, 0)
        place.base[3] += 1
        place.base[-1] += 1
        assert place.overwritten() == 2
        place.restore()
        assert not place.changed()


def test_layouts_are_the_views_they_are_called():
    def strides(layout, shape=(5, 7)):
        return guarded(shape, torch.float32, layout, "cpu").view.stride()

    assert strides("columns") == (21, 1)
    assert strides("transposed") == (1, 5)
    assert strides("transposed columns") == (1, 15)
    assert min(strides("strided")) > 1
    assert min(strides("transposed strided")) > 1
    assert strides("windows") == (1, 1)
    assert strides("padded")[0] % 16 == 0
    assert guarded((5, 7), torch.int8, "padded", "cpu").view.data_ptr() % 16 == 0
    assert guarded((5, 7), torch.int8, "offset", "cpu").view.data_ptr() % 2 == 1
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        guarded((2, 3, 7), torch.float32, "permuted", "cpu").view.view(6, 7)


def test_sentinels_surround_a_view():
    place = guarded((3, 4), torch.float32, "columns", "cpu")
    place.view.zero_()
    assert int(place.base.isnan().sum()) == place.base.numel() - 12


def test_poisoned_memory_fills_and_restores():
    with poisoned_memory():
        assert torch.empty(9).isnan().all()
        assert torch.empty(9, dtype=torch.int8).eq(127).all()
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_every_operator_has_cases_of_distinct_names():
    assert set(CASES) == {operator.name for operator in OPERATORS}
    for cases in CASES.values():
        names = [case.name for case in cases()]
        assert len(set(names)) == len(names) > 30
        assert 10 < sum(case.quick for case in cases()) < 50


def test_a_seed_gives_the_same_data_and_another_seed_other_data():
    for case in (int8_gemm_cases()[0], quantize_cases()[0]):
        first, again, other = (case.build(seed=seed).inputs for seed in (5, 5, 6))
        name = next(iter(first))
        assert_bit_equal(again[name].view, first[name].view)
        assert first_mismatch(other[name].view, first[name].view) is not None


def test_cases_cover_the_specification():
    """Read from the data themselves, so that a case whose kind means nothing is found."""
    gemm = int8_gemm_cases()
    assert {case.group_size for case in gemm} == {32, 64, 128, 256}
    assert {case.m for case in gemm} | {case.n for case in gemm} >= {0, 1, 7, 9, 577, 727}
    assert {case.bias for case in gemm} >= {None, *FLOATS[:3]}
    assert {case.output for case in gemm} == set(FLOATS[:3])
    built = [(case, case.build(seed=3)) for case in gemm if case.m < 50]
    strides = {call.arguments[name].stride() for _, call in built for name in ("a", "b")}
    assert any(1 not in s for s in strides)
    scales = torch.cat([c.arguments["scale_a"].flatten() for _, c in built])
    assert scales.isnan().any() and scales.isinf().any()
    assert (scales == 0).any() and (scales < 0).any()
    results = torch.cat(
        [c.expected[0].float().flatten() for case, c in built if case.scales in ("tiny", "huge")]
    )
    assert results.isinf().any() and results.isfinite().any()
    subnormal = results.abs() < torch.finfo(torch.float32).tiny
    assert (subnormal & (results != 0)).any()
    quantize = [case.build(seed=3) for case in quantize_cases()]
    assert {call.arguments["x"].dtype for call in quantize} == set(FLOATS)
    assert {call.arguments["x"].dim() for call in quantize} == {1, 2, 3, 4}


def spoil_element(out):
    out[-1, -1] += 1


def spoil_zero(out):
    out[out == 0] *= -1


def skip_last_row(out):
    out[-1] = math.nan


def write_beside(out):
    out.as_strided((1,), (1,), out.storage_offset() - 1).zero_()


def write_input(out, a):
    a[0, 0] ^= 1


@pytest.mark.parametrize(
    ("fault", "case", "message"),
    [
        (spoil_element, GemmCase("x"), "1 of 63 elements differ; first at"),
        (spoil_zero, GemmCase("x", codes="zero"), "63 of 63 elements differ.*got -0.0"),
        (skip_last_row, GemmCase("x"), r"7 of 63 elements differ; first at \[8, 0\]: got nan"),
        (write_beside, GemmCase("x", out="columns"), "1 elements beside out were written"),
        (write_input, GemmCase("x"), "1 elements of a were written"),
        (lambda out: 1 / 0, GemmCase("x"), "raised ZeroDivisionError"),
    ],
)
def test_a_planted_fault_fails_a_case(fault, case, message, monkeypatch):
    """Each kind of wrong kernel is found by `Call.check`, and the right one passes."""
    from farro.dispatch import forget
    from farro.ops.int8_gemm import cpu

    kernel, right = kernel_of("int8_gemm"), cpu.run

    def wrong(config, a, b, scale_a, scale_b, bias, out, group_size):
        right(config, a, b, scale_a, scale_b, bias, out, group_size)
        fault(out, a) if fault is write_input else fault(out)

    forget()
    assert case.build(seed=1).check(kernel).status == "ok"
    monkeypatch.setattr(cpu, "run", wrong)
    forget()
    try:
        outcome = case.build(seed=1).check(kernel)
    finally:
        monkeypatch.undo()
        forget()
    assert outcome.status == "failed"
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(outcome.detail)
    assert case.build(seed=1).check(kernel).status == "ok"


def test_unwritten_output_is_seen(monkeypatch):
    """A kernel that writes nothing cannot pass, not even on a second run over the same memory."""
    from farro.dispatch import forget
    from farro.ops.int8_gemm import cpu
    from farro.ops.int8_quantize import cpu as quantize_cpu

    monkeypatch.setattr(cpu, "run", lambda *args: None)
    monkeypatch.setattr(quantize_cpu, "run", lambda *args: None)
    forget()
    try:
        for operator, case in (
            ("int8_gemm", GemmCase("x")),
            ("int8_gemm", GemmCase("x", out="strided")),
            ("int8_quantize", QuantizeCase("x")),
        ):
            call = case.build(seed=2)
            assert call.expected  # the right answer was in memory a moment ago
            assert call.check(kernel_of(operator)).status == "failed"
    finally:
        monkeypatch.undo()
        forget()


def test_a_kernel_that_refuses_what_it_must_run_fails():
    import dataclasses

    kernel = dataclasses.replace(kernel_of("int8_gemm"), why_not=lambda problem: "no mood")
    outcome = GemmCase("x").build().check(kernel)
    assert (outcome.status, outcome.detail) == ("failed", "no mood")
    kernel = dataclasses.replace(kernel, must_run=lambda problem: False)
    assert GemmCase("x").build().check(kernel).status == "refused"


def test_bfloat16_is_not_asked_of_triton_s_interpreter():
    """Which truncates it on the CPU; a GPU has to round."""
    import dataclasses

    kernel = dataclasses.replace(kernel_of("int8_gemm"), backend="triton")
    if kernel.refuses(GemmCase("x").build().problem):
        pytest.skip("Triton is not installed")
    outcome = GemmCase("x", output=torch.bfloat16).build().check(kernel)
    assert outcome.status == "refused" and "a GPU rounds it" in outcome.detail


@pytest.mark.parametrize("case", (GemmCase("x", out="strided"), QuantizeCase("x")))
def test_a_kernel_behind_another_of_its_back_end_is_run_directly(case):
    """`select` would not pick it, so the kernel itself has to be what runs."""
    import dataclasses

    call = case.build(seed=4)
    twin = dataclasses.replace(kernel_of(call.operator.name), name="twin")
    assert call.check(twin).status == "ok"
    broken = dataclasses.replace(twin, run="ops.int8_gemm.checks:check")
    assert call.check(broken).status == "failed"
