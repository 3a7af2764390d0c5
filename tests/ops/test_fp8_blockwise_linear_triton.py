"""fp8_blockwise_linear through Triton: configurations, the interpreter, compilers, and a GPU."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import farro
from farro import tuning
from farro.arch import arch_named
from farro.catalogue import operator_named
from farro.ops.fp8_blockwise_linear import triton, triton_configs
from farro.ops.fp8_blockwise_linear.triton import Config
from farro.problem import Problem, TensorSpec
from farro.testing import BlockwiseCase, assert_bit_equal, blockwise_cases

from .triton_interpreter import run_again

pytest.importorskip("triton")
from farro.triton_launch import compile_only, resources

E4M3, BF16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
ARCHS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
NAMES = ("input", "weight", "input_scale", "weight_scale", "bias")


def test_in_the_interpreter():
    run_again("fp8_blockwise_linear.py")


def spec(shape, dtype=E4M3, stride=None, align=16):
    return TensorSpec(shape, stride or (shape[1], 1), dtype, align)


def problem_of(m, n, k, arch="sm_90", **tensors):
    blocks = -(-n // 128), -(-k // 128)
    given = {
        "input": spec((m, k)),
        "weight": spec((n, k)),
        "input_scale": spec((m, blocks[1]), FP32),
        "weight_scale": spec(blocks, FP32),
        "bias": None,
        "out": spec((m, n), BF16),
        **tensors,
    }
    params = (("activation", None),)
    return Problem("fp8_blockwise_linear", arch_named(arch), tuple(given.items()), params)


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
        assert len(set(legal)) == len(legal) > 100
        assert set(wanted) <= set(legal) and triton.heuristic(problem) in wanted
        assert 4 < len(wanted) <= 120
        assert all(Config.from_dict(c.as_dict()) == c for c in wanted)
    families = {"sm_80": {"decoded"}, "sm_89": {"pointers"}}
    assert {c.family for c in legal} == families.get(arch, {"pointers", "descriptors"})


def test_why_a_configuration_is_refused():
    problem = problem_of(1024, 4096, 4096)
    good = Config("descriptors", False, 128, 128, 128, 8, 8, 4)
    assert triton.refuses(good, problem) is None
    for change, reason in (
        ({"stages": 8}, "shared memory"),
        ({"warps": 4}, "accumulator registers"),
        ({"block_m": 96}, "powers of two"),
        ({"block_m": 8}, "16 x 16 x 32"),
        ({"block_k": 64}, "one block of K"),
        ({"block_m": 512, "block_n": 16}, "at most 256 rows"),
        ({"group_m": 128}, "row tiles"),
        ({"stages": 0}, "stages"),
        ({"family": "magic"}, "families are"),
        ({"family": "decoded"}, "there are FP8 tensor cores here"),
        ({"block_m": 16, "block_n": 16, "warps": 8}, "more warps than pieces"),
    ):
        assert reason in str(triton.refuses(dataclasses.replace(good, **change), problem))
    assert "SM89" in str(triton.refuses(good, problem_of(1024, 4096, 4096, "sm_80")))
    assert "copy engine" in str(triton.refuses(good, problem_of(1024, 4096, 4096, "sm_89")))
    for tensors, reason in (
        ({"input": spec((1024, 4096), align=8)}, "input: its pointer is not 16-byte aligned"),
        ({"weight": spec((4096, 4096), stride=(1, 4096))}, "weight: dimension 1 is not contiguous"),
        ({"input": spec((1024, 4096), stride=(4104, 1))}, "no multiple of 16"),
    ):
        refused = triton.refuses(good, problem_of(1024, 4096, 4096, **tensors))
        assert reason in str(refused)
    longest = problem_of(2**31, 16, 16)
    assert "longer" in str(triton.why_not(longest)) and not triton.must_run(longest)


def test_the_tuned_table_is_asked_first(monkeypatch, tmp_path):
    monkeypatch.setenv("FARRO_TUNED_DIR", str(tmp_path))
    best = Config("pointers", False, 64, 64, 256, 8, 4, 3)
    illegal = dataclasses.replace(best, stages=6, block_m=256, block_n=256)
    about = {"backend": "triton", "n": 4096, "k": 4096}
    rows = [
        {**about, "m": 1024, "config": best.as_dict()},
        {**about, "m": 1000, "config": illegal.as_dict()},
        {**about, "m": 999, "config": {"another": "version"}},
        {**about, "backend": "cuda", "m": 1001, "config": illegal.as_dict()},
    ]
    name = "fp8_blockwise_linear"
    tuning.write(tuning.user_path(name, "some_gpu"), name, "some_gpu", rows, None)
    problem = problem_of(1000, 4096, 4096)
    arch = dataclasses.replace(problem.arch, device="some_gpu")
    assert triton.config(dataclasses.replace(problem, arch=arch)) == best
    assert triton.config(problem) == triton.heuristic(problem) != best


# --- compiled for chips that are not here --------------------------------------------------------


def meta(*shape, dtype=E4M3):
    return torch.empty(shape, dtype=dtype, device="meta")


def tensors_of(m, n, k, bias=BF16):
    blocks = -(-n // 128), -(-k // 128)
    return {
        "input": meta(m, k),
        "weight": meta(n, k),
        "input_scale": meta(m, blocks[1], dtype=FP32),
        "weight_scale": meta(*blocks, dtype=FP32),
        "bias": None if bias is None else meta(n, dtype=bias),
        "out": meta(m, n, dtype=BF16),
    }


def compiled(config, tensors, arch, gelu=False):
    call = triton.prepare(config, *tensors.values(), gelu)
    arguments = call.args(*tensors.values())
    return compile_only(call.kernel, arguments, call.options, arch_named(arch).capability)


@pytest.mark.parametrize(
    "m, gelu, arch",
    [
        *((1, True, arch) for arch in ARCHS),
        *((1024, False, arch) for arch in ("sm_80", "sm_90", "sm_120")),
        *((m, False, "sm_90") for m in (64, 200)),
    ],
)
def test_chosen_kernels_compile(m, gelu, arch):
    """Without spills, with the chip's own FP8 products; one fused multiply-add a block."""
    tensors = tensors_of(m, 4096, 4096, FP32 if gelu else BF16)
    params = {"activation": "gelu_tanh" if gelu else None}
    problem = Problem.of("fp8_blockwise_linear", tensors, params, arch_named(arch))
    config = triton.config(problem)
    kernel = compiled(config, tensors, arch, gelu)
    ptx = kernel.asm["ptx"]
    product = {"sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma"}.get(arch, "mma.sync")
    assert product in ptx and "fma.rn.f32" in ptx
    assert ("e4m3" in ptx or arch == "sm_100") == (arch != "sm_80")
    assert ("cp.async.bulk.tensor" in ptx) == (config.family == "descriptors")
    assert resources(kernel)[1] <= 64, config
    assert kernel.metadata.shared <= triton_configs.shared_bytes(config), config


@pytest.mark.parametrize("arch", ("sm_80", "sm_100"))
def test_awkward_problems_compile(arch):
    """No alignment anywhere, a tail in every dimension: it must compile, whatever the speed."""
    tensors = tensors_of(33, 77, 201)
    problem = Problem.of("fp8_blockwise_linear", tensors, {"activation": None}, arch_named(arch))
    assert compiled(triton.config(problem), tensors, arch).asm["cubin"]


# --- on a GPU ------------------------------------------------------------------------------------

KERNEL = next(k for k in operator_named("fp8_blockwise_linear").kernels if k.backend == "triton")


def seed_of(generator: torch.Generator) -> int:
    return int(torch.randint(2**31, (1,), generator=generator))


@pytest.mark.gpu
@pytest.mark.parametrize("case", blockwise_cases(), ids=str)
def test_cases_on_a_gpu(case, generator):
    outcome = case.build("cuda", seed_of(generator)).check(KERNEL)
    assert outcome.status == "ok", outcome.detail


def spread(problem, family, count):
    """Configurations of a family, spread over all that are legal."""
    legal = [c for c in triton.configs(problem) if c.family == family and c.group_m == 8]
    return legal[:: max(1, len(legal) // count)]


@pytest.mark.gpu
@pytest.mark.parametrize("count", (2, pytest.param(6, marks=pytest.mark.slow)))
@pytest.mark.parametrize("family", triton_configs.FAMILIES)
def test_every_family_on_a_gpu(family, count, generator):
    for m, n, k in ((1, 208, 528), (130, 400, 1040), (300, 1000, 256)):
        for exact in (False, True):
            values = dict(codes="small", scales="powers") if exact else {}
            case = BlockwiseCase("forced", m, n, k, **values)
            call = case.build("cuda", seed_of(generator))
            for config in spread(call.problem, family, count):
                out = torch.full((m, n), math.nan, dtype=BF16, device="cuda")
                triton.run(config, *(call.arguments[name] for name in NAMES), out, False)
                told = f"{config} {m}x{n}x{k}"
                assert call.differs(0, out, call.expected[0]) is None, told
                if exact:
                    assert_bit_equal(out, call.expected[0].float().bfloat16(), told)


@pytest.mark.gpu
@pytest.mark.parametrize("family", triton_configs.FAMILIES)
def test_rows_do_not_depend_on_the_batch_on_a_gpu(family, generator):
    call = BlockwiseCase("batch", 257, 400, 1040).build("cuda", seed_of(generator))
    operands = [call.arguments[name] for name in NAMES]
    for config in spread(call.problem, family, 2):
        whole = torch.empty(257, 400, dtype=BF16, device="cuda")
        triton.run(config, *operands, whole, False)
        for m in (1, 2, 17, 33, 128):
            part = (operands[0][:m], operands[1], operands[2][:m], *operands[3:])
            out = torch.empty(m, 400, dtype=BF16, device="cuda")
            triton.run(config, *part, out, False)
            assert_bit_equal(out, whole[:m], f"{config}, {m} rows")


@pytest.mark.gpu
def test_launchers_see_new_addresses_streams_and_scale_layouts(generator):
    """The second call of a kind goes past Triton's front door."""
    for turn in range(4):
        call = BlockwiseCase("again", 64, 256, 1024).build("cuda", seed_of(generator))
        for scale in ("contiguous", "transposed"):
            given = {**call.arguments}
            if scale == "transposed":
                given["input_scale"] = given["input_scale"].T.contiguous().T
            stream = torch.cuda.Stream() if turn % 2 else torch.cuda.current_stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                out = farro.fp8_blockwise_linear_bf16(**given, backend="triton")
            stream.synchronize()
            assert call.differs(0, out, call.expected[0]) is None


@pytest.mark.gpu
@pytest.mark.slow
def test_offsets_past_31_bits_on_a_gpu():
    """Scenario 1: the last rows of an output of more than 2^31 elements."""
    m, n, k = 32769, 65536, 16
    x = torch.ones(m, k, device="cuda").to(E4M3)
    x[-1] = torch.full((k,), 2.0).to(E4M3)
    weight = torch.ones(n, k, device="cuda").to(E4M3)
    scales = torch.ones(m, 1, device="cuda"), torch.ones(n // 128, 1, device="cuda")
    out = farro.fp8_blockwise_linear_bf16(x, weight, *scales, backend="triton")
    assert (out[-1] == 32).all() and (out[-2] == 16).all() and (out[0] == 16).all()
