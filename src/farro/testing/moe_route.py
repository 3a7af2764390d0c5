"""The edge cases of dispatch_plan, dispatch_plan_ragged and moe_finalize, as data."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

import torch

from ..dispatch import Kernel
from ..ops.moe_route import dispatch_plan, dispatch_plan_ragged, moe_finalize
from .case import Call, Case, allocating, generator
from .layouts import guarded, laid_out

_INT32, _INT64 = torch.int32, torch.int64


# --- plans ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlanCase(Case):
    """One input of dispatch_plan, or of dispatch_plan_ragged where `cap` is None.

    `ids` is "uniform" (a few outside any range), "skewed", "one" (all to one expert), "sorted",
    "foreign" (all to other ranks) or "extreme" (the largest and smallest integers among them).
    """

    name: str
    tokens: int = 37
    topk: int = 4
    experts: int = 9
    cap: int | None = 24
    first: int = 0
    ids: str = "uniform"
    dtype: torch.dtype = _INT32
    layout: str = "contiguous"
    quick: bool = False

    def __str__(self) -> str:
        return self.name

    def build(self, device: torch.device | str = "cpu", seed: int = 0) -> PlanCall:
        ids = _ids(self, generator(seed, self.name)).to(self.dtype)
        keywords: dict[str, Any] = {"first_expert": self.first, "num_local_experts": self.experts}
        if self.cap is not None:
            keywords["cap"] = self.cap
        function = dispatch_plan_ragged if self.cap is None else dispatch_plan
        return PlanCall(function, {"topk_ids": laid_out(ids, self.layout, device)}, keywords)


class PlanCall(Call):
    def direct(self, kernel: Kernel) -> tuple[torch.Tensor, ...]:
        given = self.arguments
        ids, experts, cap = given["topk_ids"], given["num_local_experts"], given.get("cap")
        rows = ids.numel() if cap is None else experts * cap
        shapes = ((experts + (cap is None),), tuple(ids.shape), (rows,), (rows,))
        made = tuple(torch.empty(shape, dtype=_INT32, device=ids.device) for shape in shapes)
        kernel.function()(kernel.config(self.problem), ids, *made, given["first_expert"], cap)
        return made


def _ids(case: PlanCase, random: torch.Generator) -> torch.Tensor:
    """int64 ids [tokens, topk]; uniform ones are of this rank, of its neighbours, and of nobody."""
    shape, first, stop = (case.tokens, case.topk), case.first, case.first + case.experts
    ids = torch.randint(max(first - 2, -1), stop + 2, shape, generator=random)
    if case.ids == "skewed":
        powers = torch.rand(shape, generator=random, dtype=torch.float64) ** 6
        ids = first + (powers * case.experts).long()
    elif case.ids == "one":
        ids = torch.full(shape, stop - 1)
    elif case.ids == "sorted":
        ids = ids.flatten().sort().values.view(shape)
    elif case.ids == "foreign":
        ids = torch.where(torch.rand(shape, generator=random) < 0.5, first - 1, stop)
    elif case.ids == "extreme":
        limits = torch.iinfo(case.dtype)
        wild = torch.rand(shape, generator=random)
        ids = ids.where(wild > 0.2, limits.min).where(wild > 0.1, limits.max)
        if case.dtype is _INT64:  # ids that are local ones in their lower 32 bits
            ids = torch.where(wild > 0.9, ids + (1 << 32), ids)
    return ids


def plan_cases() -> list[PlanCase]:
    """The edge cases of plans: sizes, capacities, ids that nobody has, views."""
    cases = []
    for tokens, topk, experts in (
        *((1, 1, 1), (1, 8, 128), (17, 3, 5), (64, 2, 8), (127, 1, 4), (129, 4, 3)),
        *((577, 7, 13), (1000, 8, 128), (2048, 8, 32), (3000, 6, 257), (8192, 8, 128)),
    ):
        for cap, dtype in ((tokens * topk // experts + 1, _INT32), (None, _INT64)):
            name = f"T={tokens} topk={topk} E={experts} cap={cap}"
            quick = tokens in (17, 577)
            sizes = (tokens, topk, experts, cap)
            cases.append(PlanCase(name, *sizes, first=3, dtype=dtype, quick=quick))
    for cap, ids, dtype in itertools.product(
        (0, 1, 24, 200, None),
        ("uniform", "skewed", "one", "sorted", "foreign", "extreme"),
        (_INT32, _INT64),
    ):
        name = f"{ids} cap={cap} {str(dtype).removeprefix('torch.')}"
        quick = cap in (24, None)
        cases.append(PlanCase(name, cap=cap, first=40, ids=ids, dtype=dtype, quick=quick))
    for layout in ("offset", "columns", "padded", "transposed", "transposed strided", "strided"):
        cases.append(
            PlanCase(f"ids {layout}", tokens=200, layout=layout, quick=layout == "columns")
        )
        cases.append(PlanCase(f"ragged ids {layout}", tokens=50, cap=None, layout=layout))
    for tokens, topk in ((0, 4), (5, 0), (0, 0)):
        for cap in (3, 0, None):
            cases.append(PlanCase(f"empty T={tokens} topk={topk} cap={cap}", tokens, topk, 3, cap))
    cases.append(PlanCase("4096 experts", 300, 8, 4096, 4, ids="skewed"))
    cases.append(PlanCase("4096 experts, ragged", 300, 8, 4096, None))
    return cases


# --- sums ----------------------------------------------------------------------------------------


def _place(**arguments: Any) -> torch.Tensor:
    """NaN [T, K] for a call of moe_finalize; anything for arguments that it will refuse."""
    fused, dest = arguments.get("fused"), arguments.get("route_dest")
    if not (isinstance(fused, torch.Tensor) and isinstance(dest, torch.Tensor)):
        return torch.empty(0, 0, dtype=torch.bfloat16, device="cpu")
    shape = (*dest.shape[:1], *fused.shape[-1:])
    return torch.full(shape, float("nan"), dtype=torch.bfloat16, device=fused.device)


finalize = allocating(moe_finalize, _place)


@dataclass(frozen=True)
class FinalizeCase(Case):
    """One input of moe_finalize; rows are [experts, cap, k], or [experts * cap, k] where flat.

    `values` is "normal", "wide" (sums that depend on their order), "exact" (no rounding anywhere,
    so that Triton's interpreter can run it), "nonfinite" or "signed zeros".
    """

    name: str
    tokens: int = 13
    topk: int = 4
    experts: int = 3
    cap: int = 7
    k: int = 40
    flat: bool = False
    weights: bool = True
    values: str = "normal"
    dest: str = "uniform"  # "none": no route is kept
    fused: str = "contiguous"
    routes: str = "contiguous"
    out: str = "contiguous"
    quick: bool = False

    def __str__(self) -> str:
        return self.name

    def build(self, device: torch.device | str = "cpu", seed: int = 0) -> FinalizeCall:
        random = generator(seed, self.name)
        rows = self.experts * self.cap
        fused, weights = _values(self, random)
        dest = torch.randint(-2, rows + 1, (self.tokens, self.topk), generator=random)
        if self.dest == "none":
            dest = torch.where(dest % 2 == 0, -1, rows + dest.abs())
        inputs = {
            "fused": laid_out(fused.flatten(0, 1) if self.flat else fused, self.fused, device),
            "route_dest": laid_out(dest.int(), self.routes, device),
            "topk_weights": laid_out(weights, self.routes, device) if self.weights else None,
        }
        shape = (self.tokens, self.k)
        out = guarded(shape, torch.bfloat16, self.out, device)
        return FinalizeCall(finalize, inputs, {}, out, exact=self.values == "exact")


class FinalizeCall(Call):
    def __init__(self, *arguments: Any, exact: bool) -> None:
        super().__init__(*arguments)
        self.exact = exact

    @property
    def gives_bfloat16(self) -> bool:
        return not self.exact

    def direct(self, kernel: Kernel) -> tuple[torch.Tensor, ...]:
        given = self.arguments
        out = given["out"]
        names = ("fused", "route_dest", "topk_weights")
        if out.numel():
            kernel.function()(kernel.config(self.problem), out, *(given[n] for n in names))
        return (out,)


def _values(case: FinalizeCase, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows BF16 [experts, cap, k], and weights FP32 [tokens, topk]."""
    shape, routes = (case.experts, case.cap, case.k), (case.tokens, case.topk)
    fused = torch.randn(shape, generator=random)
    weights = torch.rand(routes, generator=random)
    if case.values == "wide":
        fused *= torch.exp2(torch.rand(shape, generator=random) * 16 - 8)
        weights = torch.randn(routes, generator=random)
    elif case.values == "exact":
        fused = torch.randint(-4, 5, shape, generator=random).float()
        weights = torch.exp2(torch.randint(-1, 2, routes, generator=random).float())
    elif case.values == "signed zeros":
        fused = fused.sign() * 0.0
    elif case.values == "nonfinite" and fused.numel() and weights.numel():
        wild = torch.tensor([float("nan"), float("inf"), -float("inf")])
        fused.view(-1)[:: fused.numel() // 9 + 1] = wild[torch.randint(3, (), generator=random)]
        weights.view(-1)[:: weights.numel() // 3 + 1] = wild[torch.randint(3, (), generator=random)]
    return fused.bfloat16(), weights


def finalize_cases() -> list[FinalizeCase]:
    """The edge cases of moe_finalize: sizes, weights, dropped routes, values, views."""
    cases = []
    for tokens, topk, experts, cap, k in (
        *((1, 1, 1, 1, 1), (1, 8, 128, 2, 2048), (16, 8, 8, 20, 768), (7, 2, 3, 4, 1024)),
        *((9, 10, 2, 30, 1023), (5, 17, 4, 9, 1025), (3, 33, 1, 50, 72), (300, 6, 5, 99, 257)),
    ):
        sizes = (tokens, topk, experts, cap, k)
        name = " ".join(f"{n}={v}" for n, v in zip(("T", "topk", "E", "cap", "K"), sizes))
        cases.append(FinalizeCase(name, *sizes, quick=tokens == 16))
    for values, weights in itertools.product(
        ("normal", "wide", "exact", "nonfinite", "signed zeros"), (True, False)
    ):
        name = f"{values}{'' if weights else ', no weights'}"
        quick = values != "normal"
        cases.append(FinalizeCase(name, weights=weights, values=values, quick=quick))
    kept = FinalizeCase("exact", values="exact", quick=True)
    for view in ("offset", "columns", "transposed", "strided", "permuted", "permuted columns"):
        cases.append(dataclasses.replace(kept, name=f"fused {view}", fused=view))
        flat = dataclasses.replace(kept, name=f"flat fused {view}", fused=view, flat=True)
        cases.append(flat)
    for view in ("columns", "transposed", "strided"):
        routes = dataclasses.replace(kept, name=f"routes {view}", routes=view)
        cases += [routes, dataclasses.replace(kept, name=f"out {view}", out=view)]
    cases.append(dataclasses.replace(kept, name="no route kept", dest="none", quick=True))
    for sizes in (
        (0, 4, 3, 7, 8),
        (5, 0, 3, 7, 8),
        (5, 4, 0, 7, 8),
        (5, 4, 3, 0, 8),
        (5, 4, 3, 7, 0),
    ):
        name = " ".join(f"{n}={v}" for n, v in zip(("T", "topk", "E", "cap", "K"), sizes))
        cases.append(FinalizeCase(f"empty {name}", *sizes, values="exact", quick=True))
    return cases
