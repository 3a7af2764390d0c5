"""fp8_quantize through Triton: in the interpreter, compiled for chips not here, and on a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import farro
from farro.arch import arch_named
from farro.formats.fp8 import KINDS, quantize, scale_shape
from farro.ops.fp8_quantize import triton
from farro.problem import Problem
from farro.testing import assert_bit_equal

pytest.importorskip("triton")
from farro.triton_launch import compile_only, resources

from .triton_interpreter import run_again

ARCHS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FUNCTIONS = {kind: getattr(farro, f"quantize_fp8_{kind}") for kind in KINDS}
EVERY_SHAPE = [pytest.param(dtype, 1, marks=pytest.mark.slow) for dtype in FLOATS]
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.slow  # half a minute; the kernels are compiled for five architectures in any run
def test_in_the_interpreter():
    run_again("fp8_quantize.py")


def meta(shape, dtype):
    return torch.empty(shape, dtype=dtype, device="meta")


def problem_of(shape, kind, arch="sm_90", dtype=torch.bfloat16):
    return Problem.of("fp8_quantize", {"x": meta(shape, dtype)}, {"kind": kind}, arch_named(arch))


@each_kind
def test_choices_are_legal(kind):
    for rows in (0, 1, 3, 63, 64, 1000, 8192, 1 << 20):
        for k in (0, 1, 40, 300, 4096, 7168, 13824, 3_000_016):
            problem = problem_of((rows, k), kind)
            assert triton.why_not(problem) is None
            assert triton.refuses(triton.config(problem), problem) is None
            found = triton.configs(problem)
            assert triton.heuristic(problem) == triton.config(problem)
            for config in found:
                assert triton.refuses(config, problem) is None
                assert triton.Config.from_dict(config.as_dict()) == config


def test_illegal_configurations_say_why():
    problem = problem_of((300, 1000), "1x128", "sm_80")
    good = triton.config(problem)
    for changes, reason in (
        ({"rows": 3}, "powers of two"),
        ({"convert": True}, "SM89"),
        ({"rows": 1024}, "spill"),
        ({"width": 256}, "groups are not those of 1x128"),
        ({"policy": "two launches", "programs": 8}, "whole tensor"),
        ({"policy": "rows in two passes"}, "single rows"),
        ({"policy": "magic"}, "no policy"),
    ):
        told = triton.refuses(dataclasses.replace(good, **changes), problem)
        assert told is not None and reason in told


@pytest.mark.parametrize("arch", ARCHS)
@each_kind
def test_compiles(kind, arch):
    """No spills, wide loads, IEEE divisions; the chip's own conversion from SM89 on."""
    capability = arch_named(arch).capability
    others = {
        "sm_80": [((3, 300), torch.float32)],
        "sm_90": [((4096, 4096), torch.float64), ((4, 40000), torch.float16)],
    }
    cases = [((4096, 4096), torch.bfloat16), *others.get(arch, [])]
    for shape, dtype in cases:
        problem = problem_of(shape, kind, arch, dtype)
        config = triton.config(problem)
        partial = meta((config.programs,), torch.int32)
        q, scale = meta(shape, torch.uint8), meta(scale_shape(shape, kind), torch.float32)
        calls = triton.prepare(config, meta(shape, dtype), q, scale, kind, partial)
        assert len(calls) == (2 if config.programs else 1)
        for kernel, _, args, options in calls:
            code = compile_only(kernel, args, options, capability)
            ptx = code.asm["ptx"]
            assert f".target sm_{capability[0]}" in ptx
            assert resources(code)[1] == 0
            if kernel is calls[-1][0]:
                assert "div.rn.f32" in ptx and "div.full" not in ptx
                assert ("cvt.rn.satfinite.e4m3x2.f32" in ptx) == (arch != "sm_80")
            if shape[1] == 4096:
                wide = "ld.global.v2.b64" if dtype is torch.float64 else "ld.global.v4.b32"
                assert wide in ptx


def same_bytes(actual, expected) -> None:
    for result, want in zip(actual, expected):
        assert_bit_equal(result.reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, step", [*((d, 3) for d in FLOATS), *EVERY_SHAPE])
@each_kind
def test_equals_the_reference_on_a_gpu(kind, dtype, step, generator):
    """Every third shape, another with each type; all of them in the exhaustive run."""
    shapes = ((1, 4096), (3, 300), (70, 7168), (2048, 4096), (100, 1001), (5, 40000))
    for shape in shapes[(FLOATS.index(dtype) + KINDS.index(kind)) % step :: step]:
        x = torch.randn(shape, generator=generator).to("cuda", dtype)
        views = [x, x.T.contiguous().T, x[:, ::2]]
        spoiled = x.clone()
        spoiled[0, 0], spoiled[-1, -1] = -float("nan"), float("inf")
        for view in (*views, spoiled):
            result = FUNCTIONS[kind](view, backend="triton")
            same_bytes(result, FUNCTIONS[kind](view, backend="reference"))
            same_bytes([r.cpu() for r in result], quantize(view.cpu(), kind))


@pytest.mark.gpu
@each_kind
def test_both_conversions_give_the_same_bytes(kind, generator):
    """The chip's and the integer arithmetic for chips without: on midpoints and random values."""
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (grid[1:] + grid[:-1]) / 2
    near = [torch.nextafter(middle, torch.tensor(way)) for way in (float("inf"), 0.0)]
    some = torch.exp2(torch.rand(130 * 1000 - 3 * 126, generator=generator) * 30 - 21.2)
    x = torch.cat([middle, *near, some]).view(130, 1000)
    x = (x * (torch.randint(0, 2, x.shape, generator=generator) * 2 - 1)).cuda()
    x[:, ::64] = 448.0
    problem = Problem.of("fp8_quantize", {"x": x}, {"kind": kind})
    for convert in (False, True):
        config = dataclasses.replace(triton.config(problem), convert=convert)
        if triton.refuses(config, problem) is not None:
            continue
        q = torch.full(x.shape, 0x55, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
        scale = torch.full(scale_shape(x.shape, kind), -1.0, device="cuda")
        triton.run(config, x, q, scale, kind)
        same_bytes((q.cpu(), scale.cpu()), quantize(x.cpu(), kind))


@pytest.mark.gpu
@each_kind
def test_nothing_synchronizes(kind):
    x = torch.randn(64, 4096, device="cuda")
    FUNCTIONS[kind](x)
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        FUNCTIONS[kind](x)
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.gpu
@each_kind
def test_scenario_01_offsets_past_31_bits(kind, generator):
    """The last rows of more than 2^31 elements have the codes that they have alone."""
    rows, k = 33024, 65536  # whole squares of 128
    x = torch.empty(rows, k, dtype=torch.bfloat16, device="cuda")
    for start in range(0, rows, 4128):
        x[start : start + 4128].normal_()
    x[-1, -1] = 32.0  # the largest, so that a tensor's scale is known
    q, scale = FUNCTIONS[kind](x, backend="triton")
    want_q, want_scale = quantize(x[-128:], kind)
    same_bytes((q[-128:],), (want_q,))
    same_bytes((scale if kind == "per_tensor" else scale[-len(want_scale) :],), (want_scale,))
