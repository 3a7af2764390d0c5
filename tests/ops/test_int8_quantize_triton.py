"""int8_quantize through Triton: in the interpreter, and on a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import farro
from farro.arch import arch_named
from farro.ops.int8_quantize import triton
from farro.problem import Problem
from farro.testing import assert_bit_equal

from .triton_interpreter import run_again

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
EVERY_SHAPE = [pytest.param(dtype, 1, marks=pytest.mark.slow) for dtype in FLOATS]


def test_in_the_interpreter():
    run_again("int8_quantize.py")


def problem_of(shape, group_size, dtype=torch.bfloat16, stride=None):
    x = torch.empty(shape, dtype=dtype, device="meta")
    if stride is not None:
        x = x.as_strided(shape, stride)
    return Problem.of("int8_quantize", {"x": x}, {"group_size": group_size}, arch_named("sm_90"))


@pytest.mark.parametrize("group_size", (32, 64, 128, 256))
def test_choices_are_legal(group_size):
    for rows in (0, 1, 3, 63, 64, 1000, 8192):
        for k in (0, 1, 40, 300, 4096, 7168, 13824):
            problem = problem_of((rows, k), group_size)
            assert triton.why_not(problem) is None
            assert triton.refuses(triton.config(problem), problem) is None
            for config in triton.configs(problem):
                assert triton.refuses(config, problem) is None
                assert triton.Config.from_dict(config.as_dict()) == config
    for k in (2**21, 2**29 + 1, 2**30 - 1, 2**30, 2**30 + 32, 2**31 - 65536 - 1):
        for rows in (0, 1, 100):
            problem = problem_of((rows, k), group_size)
            assert triton.why_not(problem) is None
            chosen = triton.config(problem)
            assert triton.refuses(chosen, problem) is None, (k, chosen)
            assert chosen.rows * chosen.groups * group_size <= 65536  # past k, offsets stay int32
            assert triton.configs(problem)
            assert all(triton.refuses(c, problem) is None for c in triton.configs(problem))
    assert "longer than that" in triton.why_not(problem_of((1, 2**31 - 65536), group_size))


def test_why_a_configuration_is_refused():
    problem = problem_of((64, 4096), 128)
    usual = triton.config(problem)
    assert triton.refuses(usual, problem) is None
    for change, reason in (
        *(({name: value}, "powers of two") for name in ("rows", "groups") for value in (-1, 0, 3)),
        ({"warps": 64}, "at most 32"),
        ({"rows": 4096}, "would spill"),
        ({"policy": "another"}, "no policy"),
    ):
        assert reason in triton.refuses(dataclasses.replace(usual, **change), problem), change
    wide = problem_of((1, 2**30), 32)
    assert "grid" in triton.refuses(dataclasses.replace(usual, rows=1), wide)


def test_leading_dimensions_collapse():
    assert triton.collapse((2, 3, 4, 50), (600, 200, 50, 1)) == [(24, 50)]
    assert triton.collapse((2, 3, 4, 50), (1200, 400, 50, 1)) == [(6, 400), (4, 50)]
    assert triton.collapse((2, 1, 4, 50), (999, 7, 50, 1)) == [(2, 999), (4, 50)]
    assert triton.collapse((50,), (1,)) == [(1, 0)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, step", [*((d, 3) for d in FLOATS), *EVERY_SHAPE])
@pytest.mark.parametrize("group_size", (32, 64, 128, 256))
def test_equals_the_reference_on_a_gpu(group_size, dtype, step, generator):
    """Every third shape, another with each type; all of them in the exhaustive run."""
    shapes = ((1, 4096), (3, 300), (70, 7168), (2048, 4096), (100, 1001))
    first = (FLOATS.index(dtype) + group_size.bit_length()) % step
    for rows, k in shapes[first::step]:
        x = torch.randn(rows, k, generator=generator).to("cuda", dtype)
        x[0, 0], x[-1, -1] = float("nan"), float("inf")
        for view in (x, x.T.contiguous().T, x[:, ::2]):
            q, scale = farro.quantize_int8_groups(view, group_size, backend="triton")
            want_q, want_scale = farro.quantize_int8_groups(view, group_size, backend="reference")
            assert_bit_equal(scale, want_scale)
            assert_bit_equal(q, want_q)


@pytest.mark.gpu
def test_every_configuration_on_a_gpu(generator):
    x = torch.randn(513, 4100, generator=generator).cuda()
    want_q, want_scale = farro.quantize_int8_groups(x, 128, backend="reference")
    for config in triton.configs(Problem.of("int8_quantize", {"x": x}, {"group_size": 128})):
        q, scale = torch.full_like(want_q, 99), torch.full_like(want_scale, -1)
        triton.run(config, x, q, scale, 128)
        assert_bit_equal(scale, want_scale, str(config))
        assert_bit_equal(q, want_q, str(config))
