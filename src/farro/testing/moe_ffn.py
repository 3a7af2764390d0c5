"""The edge cases of moe_ffn, as data, and how near is near enough where silu's last bits differ."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from ..dispatch import Kernel
from ..formats.int8_group import GROUP_SIZES, group_count
from ..ops.int8_gemm.reference import run as product
from ..ops.moe_ffn import moe_ffn, reference
from .case import Call, Case, generator
from .compare import difference
from .layouts import laid_out

_BF16, _FP32 = torch.bfloat16, torch.float32
_SILU = 2.0**-20  # of FP32 silu, relative: exp and division of a GPU, some units in the last place
_CLEAR = 20.0  # a gate of at least this is its own silu: 1 + exp(-20) is 1 in FP32


@dataclass(frozen=True)
class MoeCase(Case):
    """One problem of moe_ffn. Layouts are names of `farro.testing.LAYOUTS`.

    `values` is "exact" (every gate is 0 or at least 20, where all back ends agree bit for bit),
    "usual", or "nonfinite" (exact, with NaN and Inf among the scales and weights). `ids` is
    "uniform" (some outside any range), "one" (all to the last expert), "none" (all dropped),
    "twice" (both slots of a token to one expert) or "skewed".
    """

    name: str
    tokens: int = 19
    topk: int = 2
    experts: int = 5
    h: int = 150
    i: int = 70
    group_size: int = 64
    layout: str = "concatenated"
    output: torch.dtype = _FP32
    values: str = "exact"
    ids: str = "uniform"
    id_dtype: torch.dtype = torch.int64
    x: str = "contiguous"
    weights: str = "transposed"
    scales: str = "contiguous"
    routes: str = "contiguous"
    quick: bool = False

    def __str__(self) -> str:
        return self.name

    def build(self, device: torch.device | str = "cpu", seed: int = 0) -> MoeCall:
        random = generator(seed, self.name)
        given = operands(random, self)
        if self.values == "nonfinite":
            for name in ("scale_x", "scale_gate_up", "scale_down", "topk_weights"):
                _spoil(given[name], random)
        views = dict.fromkeys(given, self.scales)
        views |= {"x_int8": self.x, "w_gate_up": self.weights, "w_down": self.weights}
        views |= {"topk_ids": self.routes, "topk_weights": self.routes}
        inputs = {name: laid_out(t, views[name], device) for name, t in given.items()}
        keywords = {
            "group_size": self.group_size,
            "gate_up_layout": self.layout,
            "output_dtype": self.output,
        }
        return MoeCall(moe_ffn, inputs, keywords, exact=self.values != "usual")


class MoeCall(Call):
    def __init__(self, *arguments: Any, exact: bool) -> None:
        super().__init__(*arguments)
        self.exact = exact
        self.precise = True  # whether the kernel under test rounds silu correctly

    @property
    def gives_bfloat16(self) -> bool:
        return self.keywords["output_dtype"] is not _FP32

    @property
    def operands(self) -> tuple[torch.Tensor, ...]:
        return tuple(self.arguments[name] for name in self.inputs)

    @property
    def interleaved(self) -> bool:
        return bool(self.keywords["gate_up_layout"] == "interleaved")

    def check(self, kernel: Kernel) -> Any:
        self.precise = kernel.backend in ("cpu", "reference")
        return super().check(kernel)

    def direct(self, kernel: Kernel) -> tuple[torch.Tensor, ...]:
        x = self.arguments["x_int8"]
        out = torch.empty(x.shape, dtype=self.keywords["output_dtype"], device=x.device)
        if out.numel():
            config = kernel.config(self.problem)
            group_size = self.keywords["group_size"]
            kernel.function()(config, *self.operands, out, group_size, self.interleaved)
        return (out,)

    @functools.cached_property
    def slack(self) -> torch.Tensor:
        """How far a result may be off where silu is off by `_SILU` of itself, float64 [T,H].

        A code next to a rounding boundary becomes its neighbour, and a scale moves by as much as
        its largest value; then y moves, and may round to another BF16.
        """
        x, scale_x, w_gate_up, scale_gate_up, w_down, scale_down, ids, weights = (
            t.cpu() for t in self.operands
        )
        size = self.keywords["group_size"]
        slack = torch.zeros(x.shape, dtype=torch.float64)
        for e in range(w_gate_up.shape[0]):
            for j in range(ids.shape[1]):
                t = (ids[:, j] == e).nonzero()[:, 0]
                if not len(t):
                    continue
                gate_up = (w_gate_up[e], scale_gate_up[e])
                codes, scale = reference.hidden(x[t], scale_x[t], *gate_up, size, self.interleaved)
                y = reference.down(codes, scale, w_down[e], scale_down[e], size)
                # every term's magnitude, and that of one step of the largest term's code
                terms = torch.empty(len(t), x.shape[1], dtype=_FP32)
                magnitude = (codes.abs(), w_down[e].clamp_min(-127).abs())
                product(None, *magnitude, scale, scale_down[e].abs(), None, terms, size)
                spread = scale_down[e].repeat_interleave(size, 0)[: codes.shape[1]]
                steps = (w_down[e].float() * spread).abs().amax(0) * scale.amax(1, keepdim=True)
                off = 2 * _SILU * terms.double() + 2 * steps.double()
                off += 2.0**-7 * (y.double().abs() + off)
                slack[t] += weights[t, j, None].double().abs() * off
        return slack

    def differs(self, index: int, actual: torch.Tensor, expected: torch.Tensor) -> str | None:
        found = difference(actual, expected)
        if found is None or self.precise or self.exact or actual.shape != expected.shape:
            return found
        got, want = actual.detach().cpu().double(), expected.double()
        rounding = torch.finfo(actual.dtype).eps
        far = (got - want).abs() > self.slack + rounding * (want.abs() + self.slack)
        if bool(far.any()):
            place = tuple(int(n) for n in far.nonzero()[0])
            return (
                f"{int(far.sum())} of {far.numel()} are farther off than silu's last bits explain; "
                f"first at {list(place)}: got {float(got[place])!r}, needed {float(want[place])!r}"
            )
        same = float((got == want).double().mean())
        if got.numel() >= 1000 and same < 0.8:
            return f"{100 * same:.1f} % of the results are the reference's, needed 80 %"
        return None


def operands(random: torch.Generator, case: MoeCase) -> dict[str, torch.Tensor]:
    """The tensors of a case, contiguous on the CPU, by argument."""
    tokens, topk, experts, h, i = case.tokens, case.topk, case.experts, case.h, case.i
    of_h, of_i = group_count(h, case.group_size), group_count(i, case.group_size)
    exact = case.values != "usual"

    def codes(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=random, dtype=torch.int16).to(torch.int8)

    def signed(*shape: int) -> torch.Tensor:
        sign = torch.randint(0, 2, shape, generator=random) * 2.0 - 1
        return (torch.rand(shape, generator=random) + 0.5) * sign

    if exact:  # positive rows and gates: products of scales of at least 20, or a gate of zeros
        x, scale_x = codes(1, 5, tokens, h), 8 * torch.rand(tokens, of_h, generator=random) + 8
        gate = codes(1, 4, experts, h, i) * codes(0, 5, experts, 1, i).clamp_max(1)
        of_gate = 8 * torch.rand(experts, of_h, i, generator=random) + 4
    else:
        x, scale_x = codes(-128, 128, tokens, h), signed(tokens, of_h) / 64
        gate, of_gate = codes(-128, 128, experts, h, i), signed(experts, of_h, i) / 1024
    up, of_up = codes(-128, 128, experts, h, i), signed(experts, of_h, i) / 1024
    weights = torch.rand(tokens, topk, generator=random)
    weights[torch.rand(tokens, topk, generator=random) < 0.1] = -0.5
    return {
        "x_int8": x,
        "scale_x": scale_x,
        "w_gate_up": _joined(gate, up, case.layout),
        "scale_gate_up": _joined(of_gate, of_up, case.layout),
        "w_down": codes(-128, 128, experts, i, h),
        "scale_down": signed(experts, of_i, h) / 4096,
        "topk_ids": _ids(case, random).to(case.id_dtype),
        "topk_weights": weights,
    }


def _joined(gate: torch.Tensor, up: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "interleaved":
        return torch.stack((gate, up), -1).flatten(-2)
    return torch.cat((gate, up), -1)


def _ids(case: MoeCase, random: torch.Generator) -> torch.Tensor:
    shape, last = (case.tokens, case.topk), case.experts - 1
    ids = torch.randint(-1, case.experts + 1, shape, generator=random)
    if case.ids == "one":
        ids = torch.full(shape, last)
    elif case.ids == "none":
        ids = torch.where(ids % 2 == 0, -1, case.experts)
    elif case.ids == "skewed":
        ids = (torch.rand(shape, generator=random) ** 4 * case.experts).long()
    elif case.ids == "twice":
        ids = ids[:, :1].expand(shape).contiguous()
    elif case.tokens and case.topk and case.experts:  # each token keeps a route
        ids[:, -1] = torch.randint(case.experts, (case.tokens,), generator=random)
    return ids


def _spoil(values: torch.Tensor, random: torch.Generator) -> None:
    """NaN and Inf in a few places."""
    wild = torch.tensor([float("nan"), float("inf"), -float("inf")])
    count = max(1, values.numel() // 40)
    places = torch.randint(values.numel(), (count,), generator=random)
    values.view(-1)[places] = wild[torch.randint(3, (count,), generator=random)]


def _sizes() -> list[MoeCase]:
    cases = []
    for tokens, topk, experts, h, i in (
        *((1, 1, 1, 1, 1), (1, 8, 128, 64, 32), (2, 2, 3, 33, 65), (17, 3, 4, 129, 96)),
        *((33, 1, 2, 256, 257), (64, 8, 16, 96, 64), (65, 4, 3, 31, 512), (130, 2, 2, 577, 63)),
        *((257, 2, 7, 64, 130), (300, 6, 40, 40, 48)),
    ):
        sizes = (tokens, topk, experts, h, i)
        name = " ".join(f"{n}={v}" for n, v in zip(("T", "topk", "E", "H", "I"), sizes))
        for values in ("exact", "usual"):
            quick = tokens in (2, 17)
            cases.append(MoeCase(f"{name} {values}", *sizes, values=values, quick=quick))
    return cases


def _forms() -> list[MoeCase]:
    cases = []
    for group_size in GROUP_SIZES:
        for layout in ("concatenated", "interleaved"):
            for i in (group_size, group_size + 1, 3 * group_size - 1):
                case = MoeCase(
                    f"g={group_size} {layout} I={i}",
                    *(23, 2, 3, 2 * group_size + 5, i, group_size, layout),
                    quick=i == group_size + 1,
                )
                cases.append(case)
    for output in (_BF16, torch.float16):
        name = str(output).removeprefix("torch.")
        cases.append(MoeCase(f"out {name}", output=output, values="usual"))
    cases.append(MoeCase("ids int32", id_dtype=torch.int32, quick=True))
    cases.append(MoeCase("interleaved usual", layout="interleaved", values="usual", quick=True))
    return cases


def _routes() -> list[MoeCase]:
    cases = [
        MoeCase(f"ids {ids} T={tokens}", tokens, ids=ids, experts=7, quick=tokens == 19)
        for ids in ("one", "none", "skewed", "twice")
        for tokens in (19, 150)
    ]
    cases.append(MoeCase("topk 11", 9, 11, 4))
    cases.append(MoeCase("topk 70, repeated experts", 3, 70, 4))
    cases.append(MoeCase("300 experts", 40, 4, 300, 40, 33))
    return cases


def _layouts() -> list[MoeCase]:
    plain = ("offset", "columns", "padded", "transposed", "strided", "contiguous")
    cases = [MoeCase(f"x {view}", x=view, quick=view == "columns") for view in (*plain, "windows")]
    more = ("permuted", "permuted columns", "transposed columns", "transposed strided")
    cases += [MoeCase(f"weights {view}", weights=view) for view in (*plain, *more)]
    cases += [MoeCase(f"scales {view}", scales=view) for view in (*plain, "permuted columns")]
    cases += [MoeCase(f"routes {view}", routes=view) for view in plain]
    return cases


def _empties() -> list[MoeCase]:
    cases = []
    for sizes in (
        *((0, 2, 3, 40, 24), (5, 0, 3, 40, 24), (5, 2, 0, 40, 24), (5, 2, 3, 0, 24)),
        *((5, 2, 3, 40, 0), (0, 0, 0, 0, 0)),
    ):
        name = " ".join(f"{n}={v}" for n, v in zip(("T", "topk", "E", "H", "I"), sizes))
        cases.append(MoeCase(f"empty {name}", *sizes, quick=True))
    return cases


def moe_ffn_cases() -> list[MoeCase]:
    """The edge cases of moe_ffn: sizes, groups, layouts, routing, values, views, empty problems."""
    values = [MoeCase(f"nonfinite {n}", experts=4 + n, values="nonfinite") for n in range(3)]
    return [*_sizes(), *_forms(), *_routes(), *_layouts(), *values, *_empties()]
