"""The Triton routing kernels in the interpreter, byte for byte."""

from __future__ import annotations

import pytest
import torch

from farro.arch import interpreting
from farro.catalogue import operator_named
from farro.ops.moe_route import reference, triton_finalize, triton_plan
from farro.testing import PlanCase, assert_bit_equal, finalize_cases, plan_cases

pytestmark = [
    pytest.mark.skipif(not interpreting(), reason="run by run_again"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's
]
KERNELS = {
    name: next(k for k in operator_named(name).kernels if k.backend == "triton")
    for name in ("moe_route", "moe_finalize")
}
# programs are slow here: a few experts, and sums that the interpreter does not truncate
PLANS = [c for c in plan_cases() if c.experts <= 16 and c.tokens <= 200]
PLANS = [c for c in PLANS if c.quick or c.layout != "contiguous" or c.tokens == 129]
SUMS = [c for c in finalize_cases() if c.values == "exact"]


def seed_of(generator: torch.Generator) -> int:
    return int(torch.randint(2**31, (1,), generator=generator))


@pytest.mark.parametrize("case", (*PLANS, *SUMS), ids=str)
def test_cases(case, generator):
    call = case.build(seed=seed_of(generator))
    outcome = call.check(KERNELS[call.problem.operator])
    assert outcome.status == "ok", outcome.detail


slow = pytest.mark.slow
SLICES = [
    (triton_plan.Config(rows=2, slices=3, warps=1), 30, 157, "skewed"),
    (triton_plan.Config(rows=2, slices=3, warps=1), None, 192, "uniform"),
    *(
        pytest.param(triton_plan.Config(rows, slices, 1), cap, tokens, ids, marks=slow)
        for rows, slices in ((1, 3), (2, 4), (4, 2), (2, 50), (16, 1))
        for cap in (0, 30, 2000, None)
        for tokens, ids in ((157, "skewed"), (256, "uniform"), (300, "one"))
    ),
]


@pytest.mark.parametrize("config, cap, tokens, ids", SLICES)
def test_slices_count_what_is_before_them(config, cap, tokens, ids, generator):
    """Several tiles a slice, slices that do not fill the last tile, whole tiles alone."""
    case = PlanCase("drawn", tokens, 4, 6, cap, 5, ids, torch.int64)
    given = case.build(seed=seed_of(generator)).arguments["topk_ids"]
    rows = given.numel() if cap is None else 6 * cap
    results = []
    for run, how in ((triton_plan.run, config), (reference.plan, None)):
        shapes = ((6 + (cap is None),), tuple(given.shape), (rows,), (rows,))
        made = [torch.full(shape, 99, dtype=torch.int32) for shape in shapes]
        run(how, given, *made, 5, cap)
        results.append(made)
    for got, want in zip(*results):
        assert_bit_equal(got, want)


@slow
def test_more_tiles_than_bytes_can_count(generator):
    """130 tiles before the last slice, all to one expert: counts pass what a byte holds."""
    ids = torch.full((131 * 128, 1), 2, dtype=torch.int32)
    ids[::7] = 1
    config = triton_plan.Config(rows=1, slices=131, warps=1)
    made = [torch.empty(n, dtype=torch.int32) for n in (4, ids.numel(), 3 * 20000, 3 * 20000)]
    want = [torch.empty_like(t) for t in made]
    triton_plan.run(config, ids, made[0][:3], made[1].view_as(ids), *made[2:], 0, 20000)
    reference.plan(None, ids, want[0][:3], want[1].view_as(ids), *want[2:], 0, 20000)
    for got, expected in zip((made[0][:3], *made[1:]), (want[0][:3], *want[1:])):
        assert_bit_equal(got, expected)


@pytest.mark.parametrize("topk", (1, 7, 9))
def test_sums_of_any_width(topk, generator):
    block = 64
    for k in (1, block, 3 * block - 1):
        fused = torch.randint(-4, 5, (3, 5, k), generator=generator).bfloat16()
        dest = torch.randint(-1, 16, (3, topk), generator=generator).int()
        weights = torch.exp2(torch.randint(0, 2, (3, topk), generator=generator).float())
        out, want = torch.full((3, k), 9.0).bfloat16(), torch.empty(3, k).bfloat16()
        reference.finalize(None, want, fused, dest, weights)
        triton_finalize.run(triton_finalize.Config(block, 1), out, fused, dest, weights)
        assert_bit_equal(out, want, f"k={k}")
