"""int8_gemm through Triton: its configurations, the interpreter, and every family on a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import farro
from farro import tuning
from farro.arch import arch_named
from farro.ops.int8_gemm import reference, triton, triton_configs
from farro.ops.int8_gemm.triton import Config
from farro.problem import Problem, TensorSpec
from farro.testing import assert_bit_equal

from .triton_interpreter import run_again

ARCHS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "sm_121")
GROUP_SIZES = (32, 64, 128, 256)


def test_in_the_interpreter():
    run_again("int8_gemm.py")


def spec(shape, dtype=torch.int8, stride=None, align=16):
    return TensorSpec(shape, stride or (shape[1], 1), dtype, align)


def problem_of(m, n, k, group_size, arch="sm_90", **tensors):
    groups = -(-k // group_size)
    given = {
        "a": spec((m, k)),
        "b": spec((k, n), stride=(1, k)),
        "scale_a": spec((m, groups), torch.float32),
        "scale_b": spec((groups, n), torch.float32),
        "bias": None,
        "out": spec((m, n), torch.bfloat16),
    }
    given |= tensors
    params = (("group_size", group_size),)
    return Problem("int8_gemm", arch_named(arch), tuple(given.items()), params)


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.tuples(*[st.sampled_from([0, 1, 2, 16, 33, 64, 65, 128, 257, 1000, 8192, 24576])] * 3),
    group_size=st.sampled_from(GROUP_SIZES),
    arch=st.sampled_from(ARCHS),
    output=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    align=st.sampled_from([1, 4, 16]),
    swap_strides=st.booleans(),
)
def test_a_choice_for_every_problem(sizes, group_size, arch, output, align, swap_strides):
    m, n, k = sizes
    tensors = {"out": spec((m, n), output)}
    if swap_strides:
        tensors["a"] = spec((m, k), stride=(1, max(m, 1)), align=align)
    else:
        tensors["b"] = spec((k, n), stride=(1, k + 1), align=align)
    problem = problem_of(m, n, k, group_size, arch, **tensors)
    assert triton.why_not(problem) is None
    assert triton.refuses(triton.config(problem), problem) is None


def test_every_configuration_is_legal_and_survives_a_table():
    for group_size in GROUP_SIZES:
        problem = problem_of(1024, 4096, 4096, group_size)
        legal = triton.configs(problem)
        assert len(set(legal)) == len(legal) > 1000
        wanted = triton.candidates(problem)
        assert set(wanted) <= set(legal)
        assert triton.heuristic(problem) in wanted
        assert 10 < len(wanted) < 300
        assert all(Config.from_dict(c.as_dict()) == c for c in wanted)
    assert {"descriptors", "ring"} <= {c.family for c in wanted}


def test_why_a_configuration_is_refused():
    problem = problem_of(1024, 4096, 4096, 256)
    ring = Config("ring", False, 256, 128, 128, 8, 8, 4)
    assert triton.refuses(ring, problem) is None
    for change, reason in (
        ({"stages": 2}, "more than one group"),
        ({"stages": 5}, "shared memory"),
        ({"block_k": 64}, "covers 128 of K"),
        ({"block_n": 256}, "128 columns would spill"),
        ({"family": "pointers", "block_m": 192}, "powers of two"),
        ({"family": "pointers", "warps": 4}, "registers"),
    ):
        assert reason in triton.refuses(dataclasses.replace(ring, **change), problem)
    plain = Config("pointers", False, 64, 64, 256, 8, 4, 2)
    assert triton.refuses(plain, problem) is None
    for change, reason in (
        ({"block_k": 384}, "whole groups"),  # a loop walks 256 at a time: 384 of K is no multiple
        ({"block_k": 640}, "whole groups"),
        ({"block_k": 96}, "whole groups"),
        ({"block_k": 16}, "32 of K"),
        ({"block_k": 0}, "32 of K"),
        ({"block_n": 48}, "power of two of columns"),
        ({"block_n": -16}, "power of two of columns"),
        ({"block_n": 8}, "16 columns"),
        ({"block_m": 8}, "16 rows"),
        ({"block_m": 512, "block_n": 16}, "at most 256 rows"),
        ({"block_k": 1280, "block_m": 16, "block_n": 16, "warps": 1}, "1024 of K"),
        ({"group_m": 0}, "row tiles"),
        ({"group_m": 128}, "row tiles"),
        ({"stages": 0}, "stages"),
        ({"warps": 0}, "a warp at least"),
        ({"warps": 3}, "powers of two"),
        ({"family": "rings"}, "the families are"),
    ):
        assert reason in triton.refuses(dataclasses.replace(plain, **change), problem), change
    assert "columns" in triton.refuses(dataclasses.replace(ring, block_n=48), problem)
    three = dataclasses.replace(ring, block_m=192, warps=12)
    assert triton.refuses(three, problem) is None  # half a group a stage
    at128 = problem_of(1024, 4096, 4096, 128)
    assert triton.refuses(three, at128) is None
    assert triton.refuses(dataclasses.replace(three, block_k=64), at128) is None
    assert triton.refuses(ring, at128) is None
    assert "SM90" in triton.refuses(ring, problem_of(1024, 4096, 4096, 256, "sm_120"))
    assert "tensor copy engine" in triton.refuses(ring, problem_of(99, 64, 256, 256, "sm_80"))
    for tensors, reason in (
        ({"a": spec((1024, 4096), align=8)}, "16-byte aligned"),
        ({"a": spec((1024, 4096), stride=(1, 1024))}, "not contiguous"),
        ({"a": spec((1024, 4096), stride=(4104, 1))}, "no multiple of 16"),
        ({"a": spec((1024, 4096), stride=(16, 1))}, "rows overlap"),
        ({"scale_b": spec((16, 4096), torch.float32, stride=(1, 16))}, "column scales"),
    ):
        assert reason in triton.refuses(ring, problem_of(1024, 4096, 4096, 256, **tensors))
    empty = problem_of(16, 64, 0, 256)
    assert "empty" in triton.refuses(ring, empty)
    assert triton.config(empty).family == "pointers"


def test_packed_weights_are_refused():
    packed = TensorSpec((2, 256, 64), (16384, 1, 256), torch.int8)
    assert "group-packed" in triton.why_not(problem_of(16, 64, 512, 256, b=packed))


@pytest.mark.parametrize("where", range(3))
def test_dimensions_whose_last_tile_would_pass_int32_are_refused(where):
    """tl.cdiv adds a tile to a dimension before it divides: near 2^31 that wraps."""
    longest = [16, 16, 16]
    longest[where] = 2**31 - 2**10
    problem = problem_of(*longest, 64)
    assert triton.why_not(problem) is None and triton.must_run(problem)
    longest[where] += 16
    problem = problem_of(*longest, 64)
    assert "a dimension is longer" in triton.why_not(problem) and not triton.must_run(problem)


def test_the_tuned_table_is_asked_first(monkeypatch, tmp_path):
    monkeypatch.setenv("FARRO_TUNED_DIR", str(tmp_path))
    best = Config("pointers", False, 64, 64, 256, 8, 4, 3)
    illegal = dataclasses.replace(best, stages=6, block_m=256, block_n=256)
    about = {"backend": "triton", "group_size": 256, "n": 4096, "k": 4096}
    rows = [
        {**about, "m": 1024, "config": best.as_dict()},
        {**about, "m": 1000, "config": illegal.as_dict()},
        {**about, "m": 999, "config": {"another": "version"}},
        {**about, "backend": "cuda", "m": 1001, "config": illegal.as_dict()},
    ]
    tuning.write(tuning.user_path("int8_gemm", "some_gpu"), "int8_gemm", "some_gpu", rows, None)
    problem = problem_of(1000, 4096, 4096, 256)
    arch = dataclasses.replace(problem.arch, device="some_gpu")
    assert triton.config(dataclasses.replace(problem, arch=arch)) == best
    assert triton.config(problem) == triton.heuristic(problem) != best


# --- on a GPU ------------------------------------------------------------------------------------


def operands(m, n, k, group_size, generator, output=torch.float32):
    codes = lambda *shape: torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)  # noqa: E731
    groups = -(-k // group_size)
    scale_a = torch.randn(m, groups, generator=generator)
    scale_b = torch.randn(groups, n, generator=generator)
    bias = torch.randn(n, generator=generator)
    out = torch.full((m, n), float("nan"), dtype=output)
    tensors = (codes(m, k), codes(n, k), scale_a, scale_b, bias, out)
    a, weight, *rest = (t.cuda() for t in tensors)
    return a, weight.T, *rest


def sample(problem, family, count):
    """Configurations of a family, spread over all that are legal."""
    legal = [c for c in triton.configs(problem) if c.family == family and c.group_m == 8]
    return legal[:: max(1, len(legal) // count)]


def on(tensors, group_size):
    names = ("a", "b", "scale_a", "scale_b", "bias", "out")
    return Problem.of("int8_gemm", dict(zip(names, tensors)), {"group_size": group_size})


@pytest.mark.gpu
@pytest.mark.parametrize("count", (2, pytest.param(6, marks=pytest.mark.slow)))
@pytest.mark.parametrize("family", triton_configs.FAMILIES)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_every_family_on_a_gpu(group_size, family, count, generator):
    for m, n, k in ((1, 208, 528), (130, 392, 1040), (300, 1000, 256)):
        tensors = operands(m, n, k, group_size, generator)
        *inputs, out = tensors
        want = torch.empty_like(out)
        reference.run(None, *inputs, want, group_size)
        for config in sample(on(tensors, group_size), family, count):
            out.fill_(float("nan"))
            triton.run(config, *inputs, out, group_size)
            assert_bit_equal(out, want, f"{config} {m}x{n}x{k}")


@pytest.mark.gpu
@pytest.mark.parametrize("output", (torch.bfloat16, torch.float16))
def test_rounding_and_views_on_a_gpu(output, generator):
    for m, n, k, group_size in ((3, 4096, 4096, 256), (100, 1000, 1001, 64), (513, 777, 300, 128)):
        a, b, scale_a, scale_b, bias, out = operands(m, n, k, group_size, generator, output)
        want = torch.empty_like(out)
        reference.run(None, a, b, scale_a, scale_b, bias, want, group_size)
        wide = torch.full((m, 2 * n + 1), float("nan"), dtype=output, device="cuda")
        for target in (out, out.T.contiguous().T, wide[:, 1::2]):
            target.fill_(float("nan"))
            views = (a.T.contiguous().T, b.contiguous(), scale_a.T.contiguous().T, scale_b)
            for layout in ((a, b, scale_a, scale_b), views):
                result = farro.int8_gemm(
                    *layout, group_size=group_size, output_dtype=output, bias=bias, out=target,
                    backend="triton",
                )  # fmt: skip
                assert_bit_equal(result, want)
        assert wide[:, ::2].isnan().all()


@pytest.mark.gpu
def test_launchers_see_new_addresses_and_streams(generator):
    """The second call of a kind goes past Triton's front door: other addresses, another stream."""
    for config in (
        Config("pointers", True, 16, 16, 256, 8, 2, 4),
        Config("descriptors", True, 64, 16, 256, 8, 4, 3),
        Config("ring", False, 128, 128, 128, 8, 8, 5),
    ):
        for turn in range(4):
            *inputs, out = operands(64, 256, 1024, 256, generator)
            if triton.refuses(config, on((*inputs, out), 256)) is not None:
                break
            want = torch.empty_like(out)
            reference.run(None, *inputs, want, 256)
            stream = torch.cuda.Stream() if turn % 2 else torch.cuda.current_stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                triton.run(config, *inputs, out, 256)
            stream.synchronize()
            assert_bit_equal(out, want, f"{config} turn {turn}")
