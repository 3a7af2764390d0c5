"""Routing through Triton: legal configurations, the interpreter, and a GPU."""

from __future__ import annotations

import pytest
import torch

import farro
from farro.arch import arch_named
from farro.catalogue import operator_named
from farro.ops.moe_route import triton_finalize, triton_plan
from farro.problem import Problem
from farro.testing import assert_bit_equal, finalize_cases, plan_cases

from .triton_interpreter import run_again

KERNELS = {
    name: next(k for k in operator_named(name).kernels if k.backend == "triton")
    for name in ("moe_route", "moe_finalize")
}


@pytest.mark.slow  # half a minute; the kernels are compiled for five architectures in any run
def test_in_the_interpreter():
    run_again("moe_route.py")


def plan_problem(tokens, topk, experts, cap, dtype=torch.int32, arch="sm_90"):
    ids = torch.empty(tokens, topk, dtype=dtype, device="meta")
    params = {"num_local_experts": experts, "cap": cap}
    return Problem.of("moe_route", {"topk_ids": ids}, params, arch_named(arch))


def test_chosen_plans_are_legal():
    for tokens in (0, 1, 3, 16, 17, 512, 1000, 8192, 70000):
        for experts in (1, 4, 5, 128, 257, 4096):
            problem = plan_problem(tokens, 8, experts, 100)
            assert triton_plan.why_not(problem) is None and triton_plan.must_run(problem)
            assert triton_plan.refuses(triton_plan.config(problem), problem) is None
            for config in triton_plan.configs(problem):
                assert triton_plan.refuses(config, problem) is None
                assert triton_plan.Config.from_dict(config.as_dict()) == config


def test_sizes_whose_blocks_would_wrap_are_refused():
    assert triton_plan.why_not(plan_problem(1 << 28, 7, 8, None)) is None
    assert "routes" in triton_plan.why_not(plan_problem((1 << 31) - 1, 1, 8, None))
    assert "rows" in triton_plan.why_not(plan_problem(8, 2, 1, (1 << 31) - 1))


def finalize_problem(tokens, topk, k, rows=100):
    tensors = {
        "fused": torch.empty(rows, k, dtype=torch.bfloat16, device="meta"),
        "route_dest": torch.empty(tokens, topk, dtype=torch.int32, device="meta"),
        "topk_weights": None,
        "out": torch.empty(tokens, k, dtype=torch.bfloat16, device="meta"),
    }
    return Problem.of("moe_finalize", tensors, {}, arch_named("sm_90"))


def test_chosen_sums_are_legal():
    for tokens in (0, 1, 16, 512, 8192):
        for k in (0, 1, 72, 768, 2048, 7168, 3_000_016):
            problem = finalize_problem(tokens, 8, k)
            assert triton_finalize.why_not(problem) is None and triton_finalize.must_run(problem)
            assert triton_finalize.refuses(triton_finalize.config(problem), problem) is None
            for config in triton_finalize.configs(problem):
                assert triton_finalize.refuses(config, problem) is None
                assert triton_finalize.Config.from_dict(config.as_dict()) == config
    assert "65 routes a token" in triton_finalize.why_not(finalize_problem(3, 65, 8))


@pytest.mark.gpu
@pytest.mark.parametrize("case", (*plan_cases(), *finalize_cases()), ids=str)
def test_cases_on_a_gpu(case, generator):
    call = case.build("cuda", int(torch.randint(2**31, (1,), generator=generator)))
    outcome = call.check(KERNELS[call.problem.operator])
    assert outcome.status == "ok", outcome.detail


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype, cap",
    [
        *((torch.int32, 300), (torch.int64, None)),
        *(pytest.param(torch.int32, cap, marks=pytest.mark.slow) for cap in (4096, None)),
        *(pytest.param(torch.int64, cap, marks=pytest.mark.slow) for cap in (300, 4096)),
    ],
)
def test_every_plan_configuration_on_a_gpu(dtype, cap, generator):
    ids = torch.randint(-1, 20, (5000, 8), generator=generator).to("cuda", dtype)
    ids[1000:2000] = 3
    offsets = torch.arange(18 + (cap is None)).int().cuda()
    rows = ids.numel() if cap is None else 18 * cap
    problem = Problem.of("moe_route", {"topk_ids": ids}, {"num_local_experts": 18, "cap": cap})

    def planned(run, config):
        made = [torch.full_like(offsets, 99), torch.full_like(ids, 99, dtype=torch.int32)]
        made += [torch.full((rows,), 99, dtype=torch.int32, device="cuda") for _ in range(2)]
        run(config, ids, *made, 1, cap)
        return made

    want = planned(operator_named("moe_route").kernels[-1].function(), None)
    for config in triton_plan.configs(problem):
        for got, expected in zip(planned(triton_plan.run, config), want):
            assert_bit_equal(got, expected, str(config))


@pytest.mark.gpu
def test_every_sum_configuration_on_a_gpu(generator):
    fused = torch.randn(7, 100, 3000, generator=generator).bfloat16().cuda()
    dest = torch.randint(-1, 700, (99, 9), generator=generator).int().cuda()
    weights = torch.rand(99, 9, generator=generator).cuda()
    out = torch.empty(99, 3000, dtype=torch.bfloat16, device="cuda")
    want = farro.moe_finalize(out.clone(), fused, dest, weights, backend="reference")
    tensors = {"fused": fused, "route_dest": dest, "topk_weights": weights, "out": out}
    for config in triton_finalize.configs(Problem.of("moe_finalize", tensors, {})):
        out.fill_(float("nan"))
        triton_finalize.run(config, out, fused, dest, weights)
        assert_bit_equal(out, want, str(config))


@pytest.mark.gpu
def test_a_plan_is_one_launch():
    ids = torch.randint(0, 128, (8192, 8), device="cuda")
    calls = {
        "plan": lambda: farro.dispatch_plan(ids, 0, 128, 1024, backend="triton"),
        "ragged": lambda: farro.dispatch_plan_ragged(ids, 0, 128, backend="triton"),
    }
    for name, call in calls.items():
        call()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            call()
            torch.cuda.synchronize()
        kernels = [e for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        assert len(kernels) == 1, (name, [e.name for e in kernels])


@pytest.mark.gpu
def test_offsets_pass_two_to_the_31_on_a_gpu():
    """Rows of the last experts begin past 2^31 elements."""
    fused = torch.empty(40, 1024, 1 << 16, dtype=torch.bfloat16, device="cuda")
    last = fused.shape[0] * fused.shape[1] - 1
    fused[-1, -1], fused[0, 0] = 3.0, 5.0
    dest = torch.tensor([[last, 0]], dtype=torch.int32, device="cuda")
    out = torch.empty(1, 1 << 16, dtype=torch.bfloat16, device="cuda")
    assert (farro.moe_finalize(out, fused, dest, None, backend="triton") == 8.0).all()
