"""Plans against loops over Python numbers, and sums of rows against rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import farro
from farro.arch import interpreting
from farro.catalogue import operator_named
from farro.testing import PlanCase, assert_bit_equal, finalize_cases, plan_cases

from .exact_arithmetic import rounded, sign

BACKENDS = ("reference", "cpu")
PLANS = [case for case in plan_cases() if case.tokens * case.topk * case.experts <= 40_000]
SUMS = [case for case in finalize_cases() if case.tokens * case.k * case.topk <= 2500]
SUMS = [case for case in SUMS if case.values != "nonfinite"]


def seed_of(generator: torch.Generator) -> int:
    return int(torch.randint(2**31, (1,), generator=generator))


def kernel(operator: str, backend: str):
    return next(k for k in operator_named(operator).kernels if k.backend == backend)


# --- plans ---------------------------------------------------------------------------------------


def plan_by_loops(ids: torch.Tensor, first: int, experts: int, cap: int | None):
    """Lists of counts (or offsets), destinations, and tokens and routes of the rows."""
    topk, routes = ids.shape[1], ids.reshape(-1).tolist()
    to = [[i for i, e in enumerate(routes) if e == first + local] for local in range(experts)]
    if cap is None:
        starts = [sum(map(len, to[:e])) for e in range(experts + 1)]
        counts, rows = starts, len(routes)
    else:
        starts = [e * cap for e in range(experts)]
        to = [given[:cap] for given in to]
        counts, rows = list(map(len, to)), experts * cap
    dest, token, route = [-1] * len(routes), [-1] * rows, [-1] * rows
    for start, mine in zip(starts, to):
        for rank, i in enumerate(mine):
            dest[i] = start + rank
            token[start + rank], route[start + rank] = i // topk, i
    return counts, dest, token, route


def assert_plan(plan, ids, first, experts, cap):
    for got, want in zip(plan, plan_by_loops(ids, first, experts, cap)):
        assert got.dtype == torch.int32 and got.is_contiguous()
        assert got.reshape(-1).tolist() == want
    assert plan[1].shape == ids.shape


def planned(ids, first, experts, cap, backend):
    if cap is None:
        return farro.dispatch_plan_ragged(ids, first, experts, backend=backend)
    return farro.dispatch_plan(ids, first, experts, cap, backend=backend)


@pytest.mark.parametrize("case", PLANS, ids=str)
def test_plans_by_loops(case, generator):
    ids = case.build(seed=seed_of(generator)).arguments["topk_ids"]
    plan = planned(ids, case.first, case.experts, case.cap, "reference")
    assert_plan(plan, ids, case.first, case.experts, case.cap)


@pytest.mark.parametrize("case", plan_cases(), ids=str)
def test_plans_on_a_cpu_equal_the_reference(case, generator):
    outcome = case.build(seed=seed_of(generator)).check(kernel("moe_route", "cpu"))
    assert outcome.status == "ok", outcome.detail


@settings(max_examples=100, deadline=None)
@given(
    ids=st.integers(0, 6).flatmap(
        lambda topk: st.lists(st.lists(st.integers(-3, 12), min_size=topk, max_size=topk))
    ),
    first=st.integers(0, 9),
    experts=st.integers(1, 9),
    cap=st.none() | st.integers(0, 20),
    backend=st.sampled_from(BACKENDS),
    dtype=st.sampled_from((torch.int32, torch.int64)),
)
def test_plans_of_anything(ids, first, experts, cap, backend, dtype):
    ids = torch.tensor(ids, dtype=dtype).view(len(ids), -1) if ids else torch.zeros(0, 3).to(dtype)
    assert_plan(planned(ids, first, experts, cap, backend), ids, first, experts, cap)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_plan_moves_tokens_there_and_back(backend, generator):
    """What a layer does with it: rows gathered by src_tok come back through route_dest."""
    x = torch.randn(50, 8, generator=generator).bfloat16()
    ids = torch.stack([torch.randperm(6, generator=generator)[:3] for _ in range(50)])
    counts, dest, token, route = farro.dispatch_plan(ids, 0, 6, 50, backend=backend)
    rows = torch.full((6 * 50, 8), math.nan).bfloat16()
    used = token >= 0
    rows[used] = x[token[used]]
    out = torch.empty(50, 8).bfloat16()
    weights = torch.full((50, 3), 0.5)
    farro.moe_finalize(out, rows.view(6, 50, 8), dest, weights, backend=backend)
    assert_bit_equal(out, (x.float() * 1.5).bfloat16())
    assert int(counts.sum()) == int(used.sum()) == 150
    assert sorted(route[used].tolist()) == list(range(150))


def test_the_largest_sizes_are_refused_or_planned():
    ids = torch.zeros(3, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"dispatch_plan: cap is 1073741824, so 2 experts"):
        farro.dispatch_plan(ids, 0, 2, 1 << 30)
    meta = torch.empty(1 << 28, 8, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match="topk_ids has 2147483648 routes; needed less than 2"):
        farro.dispatch_plan_ragged(meta, 0, 4)
    first = (1 << 31) - 6
    plan = farro.dispatch_plan(torch.tensor([[first + 1, first - 1]]), first, 4, 1)
    assert [t.flatten().tolist() for t in plan[:2]] == [[0, 1, 0, 0], [1, -1]]


# --- moe_finalize --------------------------------------------------------------------------------


def bf16(x: Fraction, negative: bool = False) -> float:
    return rounded(x, "bfloat16", negative)


def sum_by_fractions(rows, dest, weights) -> list[float]:
    """One token: rows (lists of numbers), its destinations and weights (or None)."""
    width = len(rows[0]) if rows else 0
    totals = [0.0] * width
    for j, d in enumerate(dest):
        if not 0 <= d < len(rows):
            continue
        for i, value in enumerate(rows[d]):
            if weights is not None:
                weight = bf16(Fraction(weights[j]))
                negative = sign(value) != sign(weight)
                value = bf16(Fraction(value) * Fraction(weight), negative)
            # -0 only if both terms are: never, since the first total is +0
            totals[i] = rounded(Fraction(totals[i]) + Fraction(value))
    return [bf16(Fraction(total)) for total in totals]


@pytest.mark.parametrize("case", SUMS, ids=str)
def test_sums_by_fractions(case, generator):
    given = case.build(seed=seed_of(generator)).arguments
    fused, dest, weights = given["fused"], given["route_dest"], given["topk_weights"]
    out = given["out"]
    farro.moe_finalize(out, fused, dest, weights, backend="reference")
    rows = fused.reshape(-1, case.k).tolist() if fused.numel() else []
    given_weights = [None] * case.tokens if weights is None else weights.tolist()
    want = [sum_by_fractions(rows, d, w) for d, w in zip(dest.tolist(), given_weights)]
    if not rows:
        want = torch.zeros(case.tokens, case.k)
    assert_bit_equal(out, torch.as_tensor(want, dtype=torch.float64).bfloat16().view(out.shape))


@pytest.mark.parametrize("case", finalize_cases(), ids=str)
def test_sums_on_a_cpu_equal_the_reference(case, generator):
    outcome = case.build(seed=seed_of(generator)).check(kernel("moe_finalize", "cpu"))
    assert outcome.status == "ok", outcome.detail


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_order_of_the_sum_is_that_of_the_routes(backend):
    """2^25 + 1 - 2^25 is 0 in FP32, and 2^25 - 2^25 + 1 is 1."""
    rows = torch.tensor([[2.0**25], [1.0], [-(2.0**25)]]).bfloat16()
    dest = torch.tensor([[0, 1, 2], [0, 2, 1]], dtype=torch.int32)
    out = torch.empty(2, 1).bfloat16()
    farro.moe_finalize(out, rows, dest, None, backend=backend)
    assert out.flatten().tolist() == [0.0, 1.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_and_products_are_rounded_to_bfloat16(backend):
    """w = 1 + 2^-9 rounds to 1, and 1.0078125^2 to 1.015625."""
    rows = torch.tensor([[1.0, 1.0078125]]).bfloat16()
    dest = torch.zeros(2, 1, dtype=torch.int32)
    weights = torch.tensor([[1 + 2.0**-9], [1.0078125]])
    out = torch.empty(2, 2).bfloat16()
    farro.moe_finalize(out, rows, dest, weights, backend=backend)
    assert out.tolist() == [[1.0, 1.0078125], [1.0078125, 1.015625]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_no_route_points_to_are_not_read(backend, generator):
    fused = torch.randn(2, 5, 9, generator=generator).bfloat16()
    dest = torch.tensor([[0, 7, -1], [-1, 10, 1 << 30]], dtype=torch.int32)
    weights = torch.tensor([[0.5, 0.25, math.nan], [math.nan, math.inf, 1.0]])
    want = farro.moe_finalize(torch.empty(2, 9).bfloat16(), fused, dest, weights, backend=backend)
    spoiled = torch.full_like(fused, math.nan)
    for row in (0, 7):
        spoiled.view(10, 9)[row] = fused.view(10, 9)[row]
    out = torch.full((2, 9), 7.0).bfloat16()
    farro.moe_finalize(out, spoiled, dest, weights, backend=backend)
    assert_bit_equal(out, want)
    assert_bit_equal(out[1], torch.zeros(9).bfloat16())


def test_an_output_that_overlaps_an_input_is_refused():
    fused = torch.zeros(6, 4).bfloat16()
    dest = torch.zeros(3, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"moe_finalize: out shares memory with fused.*clone"):
        farro.moe_finalize(fused[2:5], fused, dest, None)
    with pytest.raises(ValueError, match=r"moe_finalize: out has shape \[3, 5\]; needed \[3, 4\]"):
        farro.moe_finalize(torch.zeros(3, 5).bfloat16(), fused, dest, None)


def test_offsets_pass_two_to_the_31():
    """Rows of one element, 2^31 bytes and more apart."""
    if interpreting():
        pytest.skip("4 GiB, too slow in Triton's interpreter")
    space = torch.empty((1 << 31) + 8, dtype=torch.int8).view(torch.bfloat16)
    rows = space.as_strided((2, 1), ((1 << 30) + 1, 1))
    rows.copy_(torch.tensor([[3.0], [5.0]]))
    dest = torch.tensor([[1, 0]], dtype=torch.int32)
    for backend in BACKENDS:
        out = farro.moe_finalize(torch.empty(1, 1).bfloat16(), rows, dest, None, backend=backend)
        assert out.item() == 8.0


# --- check_routing -------------------------------------------------------------------------------


IDS = torch.tensor([[0, 3], [2, 1], [3, 3]])
WEIGHTS = torch.ones(3, 2)


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
def test_good_routing_passes(dtype):
    ids = IDS.to(dtype)
    for view in (ids, ids.T.contiguous().T, ids[:0], ids[:, :0]):
        weights = torch.ones(view.shape)
        assert farro.check_routing(view, 4, weights, cap=3) is None
    assert farro.check_routing(ids[:2], 4, unique=True) is None


ROUTING_ERRORS = {
    "id too large": ({"num_experts": 3}, ValueError, r"token 0, route 1 goes to expert 3; .* 2 \("),
    "id negative": (
        {"topk_ids": torch.tensor([[0, 1], [-1, 9]])},
        ValueError,
        "token 1, route 0 goes to expert -1; needed 0 to 3",
    ),
    "weight": (
        {"topk_weights": torch.tensor([[1.0, 1.0], [1.0, math.inf], [math.nan, 1.0]])},
        ValueError,
        "token 1, route 1 has the weight inf",
    ),
    "twice": ({"unique": True}, ValueError, "token 2, route 1 goes to expert 3, to which an earl"),
    "capacity": (
        {"cap": 2},
        ValueError,
        "token 2, route 1 is past the capacity of expert 3, which 3 routes go to; .* least 3",
    ),
    "ids of floats": ({"topk_ids": WEIGHTS}, TypeError, "topk_ids has dtype float32; needed int32"),
    "one dimension": ({"topk_ids": IDS[0]}, ValueError, r"topk_ids has shape \[2\]; needed \[T, t"),
    "missing": ({"topk_ids": None}, TypeError, "topk_ids must be a tensor, got NoneType"),
    "experts": ({"num_experts": 4.0}, TypeError, "num_experts must be an int, got float"),
    "cap negative": ({"cap": -1}, ValueError, "cap is -1; needed 0 or more"),
    "weights of bfloat16": (
        {"topk_weights": WEIGHTS.bfloat16()},
        TypeError,
        r"topk_weights has dtype bfloat16; needed float32: pass topk_weights.float\(\)",
    ),
    "weights of another shape": (
        {"topk_weights": WEIGHTS[:2]},
        ValueError,
        r"topk_weights has shape \[2, 2\]; needed \[3, 2\]",
    ),
    "two devices": ({"topk_weights": WEIGHTS.to("meta")}, ValueError, "topk_weights is on meta an"),
}


@pytest.mark.parametrize("change, error, message", ROUTING_ERRORS.values(), ids=ROUTING_ERRORS)
def test_bad_routing_is_named(change, error, message):
    with pytest.raises(error, match=f"^check_routing: {message}"):
        farro.check_routing(**{"topk_ids": IDS, "num_experts": 4, **change})


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), cap=st.integers(0, 6))
def test_what_is_past_a_capacity_is_what_a_plan_drops(seed, cap):
    ids = PlanCase("drawn", 8, 3, 4, ids="skewed").build(seed=seed).arguments["topk_ids"]
    dest = farro.dispatch_plan(ids, 0, 4, cap)[1]
    dropped = (dest < 0).nonzero().tolist()
    if not dropped:
        return farro.check_routing(ids, 4, cap=cap)
    t, j = dropped[0]
    with pytest.raises(ValueError, match=f"token {t}, route {j} is past the capacity"):
        farro.check_routing(ids, 4, cap=cap)
