"""fp8_swiglu_quantize through Triton: configurations, the interpreter, compilers, and a GPU."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farro import tuning
from farro.arch import arch_named
from farro.catalogue import operator_named
from farro.ops.fp8_swiglu_quantize import triton
from farro.ops.fp8_swiglu_quantize.triton import Config
from farro.problem import Problem, TensorSpec
from farro.testing import FP8_PROMOTED_SUM, SwigluCase, assert_bit_equal, swiglu_cases
from farro.testing.fp8_swiglu_quantize import codes_that_differ, far_from_swiglu

from .fp8_far_gates import check_far_gates
from .triton_interpreter import run_again

pytest.importorskip("triton")
from farro.triton_launch import compile_only, resources

E4M3, FP32 = torch.float8_e4m3fn, torch.float32
ARCHS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")


def test_in_the_interpreter():
    run_again("fp8_swiglu_quantize.py")


def spec(shape, dtype=E4M3, stride=None, align=16):
    return TensorSpec(shape, stride or (shape[1], 1), dtype, align)


def shapes(m, n, k):
    blocks = -(-n // 128), -(-k // 128)
    return {
        "input": ((m, k), E4M3),
        "gate_up_weight": ((2 * n, k), E4M3),
        "input_scale": ((m, blocks[1]), FP32),
        "gate_up_weight_scale": ((2 * blocks[0], blocks[1]), FP32),
        "output": ((m, n), E4M3),
        "output_scale": ((m, blocks[0]), FP32),
    }


def problem_of(m, n, k, arch="sm_90", **tensors):
    given = {name: spec(*about) for name, about in shapes(m, n, k).items()} | tensors
    return Problem("fp8_swiglu_quantize", arch_named(arch), tuple(given.items()))


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.tuples(*[st.sampled_from([0, 1, 2, 16, 33, 64, 65, 128, 257, 1000, 8192, 24576])] * 3),
    arch=st.sampled_from((*ARCHS, "sm_86", "sm_121")),
    align=st.sampled_from([1, 4, 16]),
    pitch=st.sampled_from([0, 1, 16]),
    turned=st.booleans(),
)
def test_a_choice_for_every_problem(sizes, arch, align, pitch, turned):
    m, n, k = sizes
    stride = (1, max(m, 1)) if turned else (k + pitch, 1)
    problem = problem_of(m, n, k, arch, input=spec((m, k), stride=stride, align=align))
    assert triton.why_not(problem) is None and triton.must_run(problem)
    assert triton.refuses(triton.config(problem), problem) is None


@pytest.mark.parametrize("arch", ARCHS)
def test_every_configuration_is_legal_and_survives_a_table(arch):
    for m in (1, 48, 200, 4096):
        problem = problem_of(m, 4096, 4096, arch)
        legal, wanted = triton.configs(problem), triton.candidates(problem)
        assert len(set(legal)) == len(legal) > 20
        assert set(wanted) <= set(legal) and triton.heuristic(problem) in wanted
        assert 2 < len(wanted) < 120
        assert all(Config.from_dict(c.as_dict()) == c for c in wanted)


def test_why_a_configuration_is_refused():
    problem = problem_of(1024, 4096, 4096)
    good = Config("descriptors", False, 128, 128, 8, 8, 3)
    assert triton.refuses(good, problem) is None
    for change, reason in (
        ({"stages": 8}, "shared memory"),
        ({"warps": 4}, "would spill"),
        ({"tokens": 96}, "powers of two"),
        ({"tokens": 8}, "16 tokens"),
        ({"block_k": 64}, "one block of K"),
        ({"block_k": 256}, "one scale covers 128"),
        ({"family": "magic"}, "families are"),
        ({"family": "decoded"}, "there are FP8 tensor cores here"),
    ):
        assert reason in str(triton.refuses(dataclasses.replace(good, **change), problem))
    assert "SM89" in str(triton.refuses(good, problem_of(1024, 4096, 4096, "sm_80")))
    assert "copy engine" in str(triton.refuses(good, problem_of(1024, 4096, 4096, "sm_89")))
    weight = spec((8192, 4096), stride=(1, 8192))
    refused = triton.refuses(good, problem_of(1024, 4096, 4096, gate_up_weight=weight))
    assert "no descriptor of gate_up_weight: dimension 1" in str(refused)
    longest = problem_of(16, 2**30, 16)
    assert "longer" in str(triton.why_not(longest)) and not triton.must_run(longest)


def test_the_tuned_table_is_asked_first(monkeypatch, tmp_path):
    monkeypatch.setenv("FARRO_TUNED_DIR", str(tmp_path))
    best = Config("pointers", True, 32, 64, 8, 8, 2)
    about = {"backend": "triton", "n": 4096, "k": 4096}
    rows = [
        {**about, "m": 24, "config": best.as_dict()},
        {**about, "m": 20, "config": dataclasses.replace(best, stages=9).as_dict()},
        {**about, "m": 19, "config": {"another": "version"}},
    ]
    name = "fp8_swiglu_quantize"
    tuning.write(tuning.user_path(name, "some_gpu"), name, "some_gpu", rows, None)
    problem = problem_of(20, 4096, 4096)
    arch = dataclasses.replace(problem.arch, device="some_gpu")
    assert triton.config(dataclasses.replace(problem, arch=arch)) == best
    assert triton.config(problem) == triton.heuristic(problem) != best


# --- compiled for chips that are not here --------------------------------------------------------


def compiled(m, n, k, arch):
    tensors = {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for name, (shape, dtype) in shapes(m, n, k).items()
    }
    problem = Problem.of("fp8_swiglu_quantize", tensors, {}, arch_named(arch))
    config = triton.config(problem)
    call = triton.prepare(config, *tensors.values())
    arguments = call.args(*tensors.values())
    kernel = compile_only(call.kernel, arguments, call.options, arch_named(arch).capability)
    return kernel, config, problem


@pytest.mark.parametrize(
    "m, arch", [*((1, arch) for arch in ARCHS), *((m, "sm_90") for m in (64, 200, 1024))]
)
def test_chosen_kernels_compile(m, arch):
    """With few spills, the chip's own FP8 products and conversions, and IEEE divisions."""
    kernel, config, problem = compiled(m, 4096, 4096, arch)
    ptx = kernel.asm["ptx"]
    product = {"sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma"}.get(arch, "mma.sync")
    assert product in ptx and "fma.rn.f32" in ptx
    assert ("cvt.rn.satfinite.e4m3x2" in ptx) == (arch != "sm_80")
    assert "div.rn.f32" in ptx and "div.full" not in ptx
    assert ("cp.async.bulk.tensor" in ptx) == (config.family == "descriptors")
    assert resources(kernel)[1] <= 96, config
    assert kernel.metadata.shared <= triton.shared_bytes(config, problem), config


@pytest.mark.parametrize("arch", ("sm_80", "sm_100"))
def test_awkward_problems_compile(arch):
    assert compiled(33, 77, 201, arch)[0].asm["cubin"]


# --- on a GPU ------------------------------------------------------------------------------------

KERNEL = next(k for k in operator_named("fp8_swiglu_quantize").kernels if k.backend == "triton")


def seed_of(generator: torch.Generator) -> int:
    return int(torch.randint(2**31, (1,), generator=generator))


@pytest.mark.gpu
@pytest.mark.parametrize("case", swiglu_cases(), ids=str)
def test_cases_on_a_gpu(case, generator):
    outcome = case.build("cuda", seed_of(generator)).check(KERNEL)
    assert outcome.status == "ok", outcome.detail


def written_by(config, operands, m, n):
    q = torch.full((m, n), 0x55, dtype=torch.uint8, device="cuda").view(E4M3)
    scale = torch.full((m, -(-n // 128)), float("nan"), device="cuda")
    triton.run(config, *operands, q, scale)
    return q, scale


def spread(problem, family, count):
    legal = [c for c in triton.configs(problem) if c.family == family and c.group_m == 8]
    return legal[:: max(1, len(legal) // count)]


@pytest.mark.gpu
@pytest.mark.parametrize("count", (2, pytest.param(8, marks=pytest.mark.slow)))
@pytest.mark.parametrize("family", triton.FAMILIES)
def test_every_family_on_a_gpu(family, count, generator):
    for m, n, k in ((1, 208, 528), (130, 400, 1040), (300, 256, 256)):
        call = SwigluCase("forced", m, n, k).build("cuda", seed_of(generator))
        operands = list(call.arguments.values())[:4]
        exact = SwigluCase("exact", m, n, k, codes="small", scales="powers")
        small = list(exact.build("cuda", seed_of(generator)).arguments.values())[:4]
        bits = None
        for config in spread(call.problem, family, count):
            q, scale = written_by(config, operands, m, n)
            found = far_from_swiglu(q, scale, *call.products, FP8_PROMOTED_SUM)
            found = found or codes_that_differ(q, call.expected[0], FP8_PROMOTED_SUM)
            assert found is None, f"{config} {m}x{n}x{k}: {found}"
            got = written_by(config, small, m, n)  # exact sums: the same bits in each
            bits = bits or got
            for one, other in zip(got, bits):
                assert_bit_equal(one, other, f"{config} {m}x{n}x{k}")


@pytest.mark.gpu
def test_far_gates_on_a_gpu():
    problem = SwigluCase("far", 9, 256, 16).build("cuda").problem
    for config in spread(problem, triton.FAMILIES[0], 3) + [triton.config(problem)]:
        check_far_gates(functools.partial(triton.run, config), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("family", triton.FAMILIES)
def test_rows_do_not_depend_on_the_batch_on_a_gpu(family, generator):
    call = SwigluCase("batch", 257, 400, 1040).build("cuda", seed_of(generator))
    x, weight, input_scale, weight_scale = list(call.arguments.values())[:4]
    for config in spread(call.problem, family, 2):
        whole = written_by(config, (x, weight, input_scale, weight_scale), 257, 400)
        for m in (1, 2, 17, 33, 128):
            part = (x[:m], weight, input_scale[:m], weight_scale)
            for one, other in zip(written_by(config, part, m, 400), whole):
                assert_bit_equal(one, other[:m], f"{config}, {m} rows")
