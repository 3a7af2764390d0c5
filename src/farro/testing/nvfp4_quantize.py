"""The edge cases of the NVFP4 quantizers of activations, as data."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..dispatch import Kernel
from ..ops import nvfp4_quantize as quantizers
from .case import Call, Case, generator
from .compare import difference
from .layouts import Guarded, laid_out

_BF16 = torch.bfloat16


@dataclass(frozen=True)
class ActCase(Case):
    """One call of a quantizer: `e` experts of `cap` rows, or `tokens` that a plan sends to them."""

    name: str
    function: str
    e: int = 3
    cap: int = 6
    tokens: int = 7
    topk: int = 2
    k: int = 96
    counts: str = "some"  # full, some (one expert has none), over (clamped), none
    factors: str = "experts"  # a gscale for each expert, or one
    weights: bool = False
    values: str = "normal"
    plan: str = "good"  # good, or bad (ids outside every range)
    keywords: tuple[tuple[str, Any], ...] = ()
    layout: str = "contiguous"
    quick: bool = False

    def __str__(self) -> str:
        return self.name

    def build(self, device: torch.device | str = "cpu", seed: int = 0) -> ActCall:
        random = generator(seed, self.name)
        given, used = _BUILDERS[self.function](self, random)
        keywords = {n: v for n, v in given.items() if not isinstance(v, torch.Tensor)}
        inputs: dict[str, Guarded | None] = {
            name: laid_out(value, self.layout, device)
            for name, value in given.items()
            if isinstance(value, torch.Tensor)
        }
        function: Callable[..., Any] = getattr(quantizers, self.function)
        return ActCall(function, inputs, {**keywords, **dict(self.keywords)}, used)


class ActCall(Call):
    """`used` tells rows whose codes are specified; None: all."""

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: dict[str, Guarded | None],
        keywords: dict[str, Any],
        used: torch.Tensor | None,
    ) -> None:
        super().__init__(function, inputs, keywords)
        self.used = used

    def differs(self, index: int, actual: torch.Tensor, expected: torch.Tensor) -> str | None:
        if index == 0 and self.used is not None and actual.shape == expected.shape:
            return difference(actual.cpu()[self.used], expected[self.used])
        return difference(actual, expected)

    def direct(self, kernel: Kernel) -> tuple[torch.Tensor, ...]:
        raise NotImplementedError("each back end has one kernel of these functions")


def _values(kind: str, shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    x = torch.randn(shape, generator=random)
    if kind == "wide":
        x = x * torch.exp2(torch.rand(shape, generator=random) * 40 - 20)
    elif kind == "halves":  # ties of e2m1, with max|x| = 6 in each block
        x = torch.randint(-24, 25, shape, generator=random) / 4
        x[..., ::32] = 6.0
    elif kind == "all":  # every BF16 value
        bits = torch.randperm(65536, generator=random).to(torch.int32).to(torch.int16)
        return bits.view(_BF16).view(shape)
    elif kind == "zero":
        x = x * 0.0
    elif kind == "subnormal":
        x = x * 1e-39
    elif kind == "largest":
        x = torch.where(torch.rand(shape, generator=random) < 0.05, x.sign() * 3e38, x)
    elif kind in ("nan", "inf"):
        spoilt = torch.rand(shape, generator=random) < 0.02
        x = torch.where(spoilt, x.sign() * float(kind), x)
    return x.to(_BF16)


def _counts(case: ActCase) -> torch.Tensor:
    some = [(case.cap * i // 2 + i) % (case.cap + 1) if i % 3 else 0 for i in range(case.e)]
    over = [(-5, case.cap + 3, 2**31 - 1, -(2**31), 1)[i % 5] for i in range(case.e)]
    kinds = {"full": [case.cap] * case.e, "none": [0] * case.e, "some": some, "over": over}
    return torch.tensor(kinds[case.counts], dtype=torch.int32)


def _used(counts: torch.Tensor, cap: int) -> torch.Tensor:
    return torch.arange(cap) < counts[:, None]


def _gscale(case: ActCase, random: torch.Generator) -> torch.Tensor:
    size = case.e if case.factors == "experts" else 1
    return torch.exp2(torch.rand(size, generator=random) * 10 - 3)


def _padded(case: ActCase, random: torch.Generator) -> tuple[dict[str, Any], torch.Tensor]:
    counts = _counts(case)
    used = _used(counts, case.cap)
    gated = case.function == "silu_mul_quant_act"
    x = _values(case.values, (case.e, case.cap, case.k * (2 if gated else 1)), random)
    x[~used] = torch.nan  # never read
    given = {
        "x2" if gated else "x": x,
        "gscale": _gscale(case, random),
        "expert_num_tokens": counts,
        "features": 4096,
    }
    return given, used


def _rows(case: ActCase, random: torch.Generator) -> tuple[dict[str, Any], None]:
    one = dataclasses.replace(case, factors="one")
    x = _values(case.values, (case.tokens, case.k), random)
    return {"x": x, "gscale": _gscale(one, random)}, None


def _plan(case: ActCase, random: torch.Generator) -> dict[str, torch.Tensor]:
    """Routes to random experts: their rows, and for each row its token and route."""
    routes = case.tokens * case.topk
    ids = torch.randint(case.e, (routes,), generator=random).tolist()
    counts = [0] * case.e
    size = case.e * case.cap
    dest = torch.full((routes,), size, dtype=torch.int64)
    src_tok = torch.full((size,), -1, dtype=torch.int32)
    src_route = torch.full((size,), -1, dtype=torch.int32)
    for route, expert in enumerate(ids):
        if counts[expert] < case.cap:
            row = expert * case.cap + counts[expert]
            dest[route], src_tok[row], src_route[row] = row, route // case.topk, route
            counts[expert] += 1
    return {
        "dest": dest,
        "src_tok": src_tok,
        "src_route": src_route,
        "counts": torch.tensor(counts, dtype=torch.int32),
    }


_BAD = (-1, -(2**31), 2**31 - 1, 10**6)


def _spoilt(index: torch.Tensor) -> torch.Tensor:
    """Every third entry is outside every range."""
    index = index.clone()
    for i in range(0, index.shape[0], 3):
        index[i] = _BAD[i // 3 % len(_BAD)]
    return index


def _by_routes(case: ActCase, random: torch.Generator) -> tuple[dict[str, Any], torch.Tensor]:
    plan = _plan(case, random)
    tok = torch.arange(case.tokens).repeat_interleave(case.topk)
    used = _used(plan["counts"], case.cap)
    if case.plan == "bad":
        tok = _spoilt(tok)
        for route in range(0, tok.shape[0], 3):  # their rows are unused
            row = int(plan["dest"][route])
            if row < used.numel():
                used.view(-1)[row] = False
        dropped = plan["dest"] == used.numel()
        plan["dest"][dropped] = -(2**40)
    weights = torch.rand(tok.shape[0], generator=random) if case.weights else None
    given = {
        "a1": _values(case.values, (case.tokens, case.k), random),
        "flat_tok": tok,
        "dest_global": plan["dest"],
        "topk_weights": weights,
        "gscale": _gscale(case, random),
        "expert_num_tokens": plan["counts"],
        "cap": case.cap,
    }
    return given, used


def _by_plan(case: ActCase, random: torch.Generator) -> tuple[dict[str, Any], torch.Tensor]:
    plan = _plan(case, random)
    used = _used(plan["counts"], case.cap)
    tok, route = plan["src_tok"], plan["src_route"]
    if case.plan == "bad":
        tok = _spoilt(tok)
        used.view(-1)[::3] = False
    weights = torch.rand(case.tokens, case.topk, generator=random) if case.weights else None
    given: dict[str, Any] = {
        "a1": _values(case.values, (case.tokens, case.k), random),
        "src_tok": tok,
        "src_route": route,
        "topk_weights": weights,
        "gscale": _gscale(case, random),
        "expert_num_tokens": plan["counts"],
        "cap": case.cap,
    }
    if case.function == "scatter_fp4_planned":
        rows = case.tokens, case.k // 2
        q = torch.randint(256, rows, generator=random, dtype=torch.uint8)
        rows = case.tokens, case.k // 32
        q_sf = torch.randint(128, rows, generator=random, dtype=torch.uint8)
        names = ("src_tok", "expert_num_tokens", "cap")
        given = {"q": q, "q_sf": q_sf, **{name: given[name] for name in names}}
    return given, used


def _ragged(case: ActCase, random: torch.Generator) -> tuple[dict[str, Any], torch.Tensor]:
    """Routes sorted by expert; the last tenth of them were dropped."""
    routes = case.tokens * case.topk
    kept = routes - routes // 10
    ids = torch.randint(case.e, (kept,), generator=random).sort().values
    counts = torch.bincount(ids, minlength=case.e)
    order = torch.randperm(routes, generator=random)
    src_route = torch.full((routes,), -1, dtype=torch.int32)
    src_route[:kept] = order[:kept].int()
    src_tok = torch.where(src_route < 0, -1, src_route // max(case.topk, 1))
    used = torch.arange(routes) < kept
    if case.plan == "bad":
        src_tok = _spoilt(src_tok)
        used[::3] = False
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).int()
    weights = torch.rand(case.tokens, case.topk, generator=random) if case.weights else None
    given = {
        "a1": _values(case.values, (case.tokens, case.k), random),
        "src_tok": src_tok,
        "src_route": src_route,
        "topk_weights": weights,
        "gscale": _gscale(case, random),
        "expert_offsets": offsets,
    }
    return given, used


def _restore(case: ActCase, random: torch.Generator) -> tuple[dict[str, Any], None]:
    """Any bytes, of scales too."""

    def some(size: int) -> torch.Tensor:
        shape = (case.e, case.cap, size)
        return torch.randint(256, shape, generator=random, dtype=torch.uint8)

    gscale = None if case.factors == "none" else _gscale(case, random)
    return {"b_act": some(case.k // 2), "sfb": some(case.k // 32), "gscale": gscale}, None


_BUILDERS: dict[str, Callable[[ActCase, torch.Generator], tuple[dict[str, Any], Any]]] = {
    "quant_act": _padded,
    "silu_mul_quant_act": _padded,
    "quant_rows": _rows,
    "scatter_quant_act": _by_routes,
    "scatter_quant_act_planned": _by_plan,
    "scatter_quant_act_ragged": _ragged,
    "scatter_fp4_planned": _by_plan,
    "dequantize_act": _restore,
}
_KINDS = ("wide", "halves", "zero", "subnormal", "largest", "nan", "inf")
_SIZES = ((1, 1, 32), (2, 5, 64), (5, 3, 1088), (1, 40, 416), (9, 2, 96))


def act_cases() -> list[ActCase]:
    """Of quant_act, silu_mul_quant_act and quant_rows: counts, sizes, values, activations."""
    cases = []
    for function in ("quant_act", "silu_mul_quant_act", "quant_rows"):
        for kind in _KINDS:
            quick = kind in ("halves", "nan", "subnormal")
            cases.append(ActCase(f"{function} {kind}", function, values=kind, quick=quick))
        for e, cap, k in _SIZES:
            name = f"{function} {e}x{cap}x{k}"
            cases.append(ActCase(name, function, e=e, cap=cap, tokens=e * cap, k=k, quick=k == 416))
        cases.append(ActCase(f"{function} offset", function, layout="offset", quick=True))
        cases.append(ActCase(f"{function} empty", function, e=2, cap=0, tokens=0))
    cases.append(ActCase("quant_rows all", "quant_rows", tokens=128, k=512, values="all"))
    for function in ("quant_act", "silu_mul_quant_act"):
        for counts, factors in itertools.product(("full", "over", "none"), ("experts", "one")):
            name = f"{function} {counts}, {factors}"
            quick = factors == "one"
            cases.append(ActCase(name, function, e=5, counts=counts, factors=factors, quick=quick))
    gated = "silu_mul_quant_act"
    for interleaved, activation in itertools.product((False, True), ("silu", "situ")):
        for kind in ("normal", "wide"):
            name = f"{gated} {activation} interleaved={interleaved} {kind}"
            how: tuple[tuple[str, Any], ...] = (
                ("interleaved", interleaved),
                ("activation", activation),
            )
            if kind == "wide":
                how = (*how, ("beta", 1.7), ("linear_beta", 7.1))
            quick = kind == "normal"
            cases.append(ActCase(name, gated, values=kind, keywords=how, quick=quick))
    cases.append(ActCase(f"{gated} all", gated, e=1, cap=64, k=512, counts="full", values="all"))
    return cases


def scatter_cases() -> list[ActCase]:
    """Of the three scatter_quant_act: plans good and bad, weights, factors, sizes, values."""
    cases = []
    for function in ("scatter_quant_act", "scatter_quant_act_planned", "scatter_quant_act_ragged"):
        for weights, factors in itertools.product((False, True), ("experts", "one")):
            name = f"{function} weights={weights} {factors}"
            quick = weights != (factors == "one")
            cases.append(ActCase(name, function, weights=weights, factors=factors, quick=quick))
            name = f"{function} bad plan, weights={weights} {factors}"
            bad = ActCase(name, function, weights=weights, factors=factors, plan="bad")
            cases.append(dataclasses.replace(bad, quick=not quick))
        for kind in ("wide", "nan", "inf"):
            cases.append(ActCase(f"{function} {kind}", function, weights=True, values=kind))
        for e, tokens, k in ((1, 1, 32), (17, 40, 64), (4, 5, 1088), (130, 9, 96)):
            name = f"{function} e={e} tokens={tokens} k={k}"
            cases.append(ActCase(name, function, e=e, tokens=tokens, k=k, topk=3, cap=4))
        cases.append(ActCase(f"{function} offset", function, layout="offset", weights=True))
        cases.append(ActCase(f"{function} no tokens", function, tokens=0, weights=True))
        cases.append(ActCase(f"{function} no rows", function, cap=0, weights=True))
    return cases


def scatter_fp4_cases() -> list[ActCase]:
    """Of scatter_fp4_planned: plans good and bad, sizes."""
    function = "scatter_fp4_planned"
    cases = []
    for e, tokens, k in itertools.product((1, 3, 33), (1, 12, 40), (32, 96, 1088)):
        name = f"e={e} tokens={tokens} k={k}"
        case = ActCase(name, function, e=e, tokens=tokens, k=k, cap=5, quick=k == 96)
        cases.append(case)
        if tokens == 12:
            cases.append(dataclasses.replace(case, name=f"{name}, bad plan", plan="bad"))
    for name, changes in (
        ("offset", {"layout": "offset"}),
        ("no tokens", {"tokens": 0}),
        ("no rows", {"cap": 0}),
    ):
        cases.append(dataclasses.replace(cases[0], name=name, quick=True, **changes))
    return cases


def dequantize_cases() -> list[ActCase]:
    """Of dequantize_act: any bytes, with a factor, one for each expert, or none."""
    cases = []
    for factors in ("experts", "one", "none"):
        for e, cap, k in (*_SIZES, (3, 70, 544), (2, 64, 256), (1, 1, 2048), (33, 1, 32)):
            name = f"{factors} {e}x{cap}x{k}"
            quick = k in (32, 64, 96, 1088)
            cases.append(
                ActCase(name, "dequantize_act", e=e, cap=cap, k=k, factors=factors, quick=quick)
            )
        name = f"{factors} offset"
        cases.append(ActCase(name, "dequantize_act", factors=factors, layout="offset"))
        cases.append(ActCase(f"{factors} empty", "dequantize_act", factors=factors, cap=0))
    return cases
