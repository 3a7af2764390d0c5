"""The edge cases of group_mm and group_mm_ragged, as data."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch

from ..dispatch import Kernel
from ..formats.nvfp4 import NAN_SCALE, dequantize_blocks, positive_zeros
from ..formats.paired_sparsity import compress, decompress, patterns_of, unpack_metadata
from ..ops import nvfp4_group_mm as products
from .case import Call, Case, allocating, generator
from .compare import far_from_exact
from .layouts import Guarded, laid_out

_BF16, _UINT8 = torch.bfloat16, torch.uint8
UNTOUCHED = 7  # in rows of `out` that no token has


def place(**arguments: Any) -> torch.Tensor:
    """`out` for a call without one; anything for arguments that will be refused."""
    b_act, a_comp = arguments.get("b_act"), arguments.get("a_comp")
    if not (isinstance(b_act, torch.Tensor) and isinstance(a_comp, torch.Tensor)):
        return torch.empty(0, dtype=_BF16, device="cpu")
    shape = (*b_act.shape[:-1], *a_comp.shape[1:2])
    return torch.full(shape, UNTOUCHED, dtype=_BF16, device=b_act.device)


group_mm = allocating(products.group_mm, place)
group_mm_ragged = allocating(products.group_mm_ragged, place)


@dataclass(frozen=True)
class GroupCase(Case):
    """One grouped product: `cap` rows an expert, or that many on average where ragged.

    `counts` is "random", "full", "none", "one" (all tokens to one expert) or "wild" (negative, and
    more than there are). `values` is "normal", "exact" (sums and results without rounding, so that
    Triton's interpreter can run it), "wide" (every scale), "nan" or "zero".
    """

    name: str
    experts: int = 3
    m: int = 96
    k: int = 160
    cap: int = 9
    ragged: bool = False
    coded: bool = True
    counts: str = "random"
    values: str = "normal"
    layout: str = "contiguous"  # of every operand; "offset" is not aligned to anything
    tactic: int = 0
    quick: bool = False

    def __str__(self) -> str:
        return self.name

    def build(self, device: torch.device | str = "cpu", seed: int = 0) -> GroupCall:
        random = generator(seed, self.name)
        weights = weight_of(self.experts, self.m, self.k, random, self.values)
        rows = (self.experts * self.cap,) if self.ragged else (self.experts, self.cap)
        activations = activations_of(rows, self.k, random, self.values, self.coded)
        alphas = torch.ones(self.experts)
        if self.values != "exact":
            alphas = torch.exp2(torch.rand(self.experts, generator=random) * 8 - 9)
        counts = _counts(self, random)
        spoil(activations, counts, self.ragged)
        name = "expert_offsets" if self.ragged else "expert_num_tokens"
        given = {**weights, **activations, "alphas": alphas, name: counts}
        inputs: dict[str, Guarded | None] = {
            key: None if tensor is None else laid_out(tensor, self.layout, device)
            for key, tensor in given.items()
        }
        out = laid_out(torch.full((*rows, self.m), UNTOUCHED, dtype=_BF16), "offset", device)
        keywords = {"features": self.m, "k": self.k, "config_id": self.tactic}
        function = group_mm_ragged if self.ragged else group_mm
        return GroupCall(function, inputs, keywords, out, exact=self.values == "exact")


class GroupCall(Call):
    """`expected` is the exact result in float64, of the rows that tokens have."""

    def __init__(self, *arguments: Any, exact: bool) -> None:
        super().__init__(*arguments)
        self.exact = exact

    @property
    def gives_bfloat16(self) -> bool:
        return not self.exact

    @functools.cached_property
    def _exact(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        given = {
            name: value.cpu() if isinstance(value, torch.Tensor) else value
            for name, value in self.arguments.items()
        }
        return exact_product(**given)

    @functools.cached_property
    def expected(self) -> tuple[torch.Tensor, ...]:
        return (self._exact[0],)

    def differs(self, index: int, actual: torch.Tensor, expected: torch.Tensor) -> str | None:
        _, magnitude, used = self._exact
        rows = actual.detach().cpu().flatten(0, -2)
        if bool((rows[~used] != UNTOUCHED).any()):
            return "rows that no token has were written"
        if actual.dtype != _BF16:
            return f"dtype is {actual.dtype}, needed {_BF16}"
        magnitude = magnitude.nan_to_num(0.0, posinf=0.0)
        return far_from_exact(rows[used], expected[used], magnitude[used])

    def direct(self, kernel: Kernel) -> tuple[torch.Tensor, ...]:
        given = self.arguments
        out = given["out"]
        if out.numel():
            kernel.function()(kernel.config(self.problem), out, *self.operands)
        return (out,)

    @property
    def operands(self) -> tuple[torch.Tensor, ...]:
        """What a kernel takes after `out`."""
        return tuple(g if g is None else g.view for g in self.inputs.values())  # type: ignore


def weight_of(
    experts: int, m: int, k: int, random: torch.Generator, values: str = "normal"
) -> dict[str, torch.Tensor]:
    """A compressed weight of random codes, scales and patterns."""
    shape = (experts, m, k // 8, 4)  # bytes, that is pairs, in groups of four
    codes = torch.randint(0, 256, shape, generator=random).to(_UINT8)
    if values == "exact":  # 0, 0.5 and 1, and their negatives
        codes &= 0xBB
        codes = codes & ~((codes & 0x22) >> 1)
    kept = torch.rand(shape, generator=random).argsort(-1) < torch.randint(
        3, (*shape[:-1], 1), generator=random
    )
    packed = positive_zeros((codes * kept).flatten(2))
    scales = _scales((experts, m, k // 32), random, values)
    parts = compress(packed, patterns_of(packed), scales)
    return dict(zip(("a_comp", "e_meta", "sfa"), parts))


def activations_of(
    rows: tuple[int, ...], k: int, random: torch.Generator, values: str, coded: bool
) -> dict[str, torch.Tensor | None]:
    """Codes and scales, or BF16 values and no scales."""
    if not coded:
        x = torch.randn(*rows, k, generator=random)
        if values == "exact":
            x = torch.randint(-1, 2, x.shape, generator=random).float()
        if values == "nan" and x.numel():
            x.view(-1)[:: x.numel() // 3 + 1] = torch.tensor(float("nan"))
        return {"b_act": (x * 0 if values == "zero" else x).bfloat16(), "sfb": None}
    codes = torch.randint(0, 256, (*rows, k // 2), generator=random).to(_UINT8)
    if values == "exact":
        codes &= 0xAA  # 0 and 1, and their negatives
    scales = _scales((*rows, k // 32), random, values)
    return {"b_act": positive_zeros(codes), "sfb": scales}


def _scales(shape: tuple[int, ...], random: torch.Generator, values: str) -> torch.Tensor:
    """UE4M3 bytes."""
    low, high = {"exact": (0x38, 0x39), "wide": (0, 0x7F), "zero": (0, 1)}.get(values, (0x30, 0x48))
    scales = torch.randint(low, high, shape, generator=random).to(_UINT8)
    if values == "nan" and scales.numel():
        scales.view(-1)[:: scales.numel() // 3 + 1] = NAN_SCALE
    return scales


def _counts(case: GroupCase, random: torch.Generator) -> torch.Tensor:
    """int32 [E], or offsets [E + 1]."""
    e, cap = case.experts, case.cap
    counts = {
        "random": torch.randint(0, cap + 1, (e,), generator=random),
        "full": torch.full((e,), cap),
        "none": torch.zeros(e),
        "one": torch.eye(e)[e // 2] * (e * cap if case.ragged else cap),
        "wild": torch.tensor([cap + 5, -3, 1 << 30])[torch.arange(e) % 3],
    }[case.counts].long()
    if not case.ragged:
        return counts.int()
    ends = counts.clamp(-(1 << 20), 1 << 20).cumsum(0) - (2 if case.counts == "wild" else 0)
    ends = ends.cummax(0).values  # a row that two experts claim has no one result
    return torch.cat((ends[:1] * 0 - (2 if case.counts == "wild" else 0), ends)).int()


def used_rows(counts: torch.Tensor, rows: tuple[int, ...], ragged: bool) -> torch.Tensor:
    """bool [rows, E]: which row is a token of which expert."""
    if ragged:
        at = torch.arange(rows[0]).unsqueeze(1)
        return (at >= counts[:-1]) & (at < counts[1:])
    e, cap = rows
    used = torch.arange(cap).unsqueeze(0) < counts.unsqueeze(1)
    return (used.unsqueeze(2) & torch.eye(e, dtype=torch.bool).unsqueeze(1)).flatten(0, 1)


def spoil(activations: dict[str, torch.Tensor | None], counts: torch.Tensor, ragged: bool) -> None:
    """NaN in rows that no token has: whoever reads them shows it."""
    x, scales = activations["b_act"], activations["sfb"]
    assert x is not None
    used = used_rows(counts, tuple(x.shape[:-1]), ragged).any(1).view(x.shape[:-1])
    if scales is None:
        x[~used] = torch.nan
    else:
        scales[~used] = NAN_SCALE


def exact_product(
    a_comp: torch.Tensor,
    e_meta: torch.Tensor,
    sfa: torch.Tensor,
    b_act: torch.Tensor,
    sfb: torch.Tensor | None,
    alphas: torch.Tensor,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float64 [rows, M] of the result, of the sum of magnitudes, and which rows have a token."""
    ragged = b_act.dim() == 2
    counts = others["expert_offsets" if ragged else "expert_num_tokens"]
    packed, scales = decompress(a_comp, unpack_metadata(e_meta), sfa)
    weight = dequantize_blocks(packed, scales).double()
    x = (b_act if sfb is None else dequantize_blocks(b_act, sfb)).double().flatten(0, -2)
    mine = used_rows(counts, tuple(b_act.shape[:-1]), ragged)
    total = torch.zeros(x.shape[0], weight.shape[1], dtype=torch.float64)
    magnitude = torch.zeros_like(total)
    for e in range(weight.shape[0]):
        rows = mine[:, e]
        total[rows] = alphas[e].double() * (x[rows] @ weight[e].T)
        magnitude[rows] = alphas[e].double().abs() * (x[rows].abs() @ weight[e].abs().T)
    return total, magnitude, mine.any(1)


# --- the cases -----------------------------------------------------------------------------------


def _sizes() -> list[GroupCase]:
    cases = []
    for experts, m, k, cap in (
        *((1, 32, 32, 1), (1, 64, 128, 16), (2, 96, 96, 17), (3, 160, 352, 33), (2, 128, 64, 65)),
        *((5, 32, 256, 7), (2, 64, 1024, 129), (1, 320, 544, 200), (9, 64, 64, 3)),
    ):
        for ragged, coded in ((False, True), (True, True), (False, False)):
            kind = f"{'ragged ' if ragged else ''}{'W4A4' if coded else 'W4A16'}"
            name = f"{kind} E={experts} M={m} K={k} cap={cap}"
            quick = (m, ragged) == (96, False) or (experts, ragged) == (5, True)
            cases.append(GroupCase(name, experts, m, k, cap, ragged, coded, quick=quick))
    return cases


def _special() -> list[GroupCase]:
    cases = []
    for ragged in (False, True):
        prefix = "ragged " if ragged else ""
        base = GroupCase("", ragged=ragged)
        for counts in ("full", "none", "one", "wild"):
            name = f"{prefix}counts {counts}"
            cases.append(dataclasses.replace(base, name=name, counts=counts, quick=True))
        for values in ("exact", "wide", "nan", "zero"):
            for coded in (True, False):
                name = f"{prefix}{values}{'' if coded else ' W4A16'}"
                quick = coded or not ragged
                case = dataclasses.replace(base, name=name, values=values, coded=coded)
                cases.append(dataclasses.replace(case, quick=quick))
        for coded in (True, False):
            name = f"{prefix}offset{'' if coded else ' W4A16'}"
            case = dataclasses.replace(base, name=name, layout="offset", coded=coded)
            cases.append(dataclasses.replace(case, values="exact", quick=True))
    for m, k, cap in ((32, 64, 1), (64, 128, 20), (160, 288, 40)):
        for coded in (True, False):
            name = f"exact M={m} K={k} cap={cap}{'' if coded else ' W4A16'}"
            case = GroupCase(name, 2, m, k, cap, coded=coded, values="exact")
            cases.append(dataclasses.replace(case, quick=m == 160))
    return cases


def _tactics() -> list[GroupCase]:
    """Each tactic; those that a kernel does not have it refuses."""
    return [
        GroupCase(f"tactic {name}", 2, 128, 512, 20, tactic=config_id)
        for config_id, name in enumerate(products.group_mm_configs())
    ]


def _empties() -> list[GroupCase]:
    cases = []
    for m, k, cap in ((0, 64, 3), (64, 0, 3), (64, 64, 0), (0, 0, 0)):
        for ragged, coded in ((False, True), (True, False)):
            name = f"empty M={m} K={k} cap={cap}{' ragged W4A16' if ragged else ''}"
            case = GroupCase(name, 2, m, k, cap, ragged, coded, values="exact", quick=True)
            cases.append(case)
    return cases


def group_mm_cases() -> list[GroupCase]:
    """The edge cases of the specification: sizes, layouts, counts, values, tactics, empties."""
    return [*_sizes(), *_special(), *_tactics(), *_empties()]
