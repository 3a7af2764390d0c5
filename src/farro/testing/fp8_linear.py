"""The edge cases of fp8_linear, as data: each result is held to the exact one."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .. import fp8
from ..dispatch import Kernel
from ..ops.fp8_linear.checks import FUNCTIONS, over_rows
from .case import Call, Case, generator
from .compare import FP8_FAST_SUM, FP8_PROMOTED_SUM, FP32_SUM, far_from_exact
from .layouts import Guarded, guarded, laid_out

_E4M3, _BF16, _FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
_CPU_SUM = 8 * FP32_SUM  # CPUs may carry a sum as two BF16 numbers, 16 bits
_ALPHAS = {
    "usual": 0.037,
    "negative": -1.75,
    "zero": 0.0,
    "tiny": 1e-40,  # subnormal in FP32
    "huge": 1e36,  # most results pass the largest BF16
    "nan": math.nan,
    "inf": math.inf,
}


@dataclass(frozen=True)
class LinearCase(Case):
    """One problem of fp8_linear; layouts are names of `farro.testing.LAYOUTS`.

    `alpha` is a key of _ALPHAS, a number, or with " tensor" or " 0-D tensor" after it a tensor.
    """

    name: str
    m: int = 9
    n: int = 7
    k: int = 300
    epilogue: str = "none"
    alpha: str = "usual"
    bias: torch.dtype = _BF16
    rows: str = "MN"  # the residual's shape: MN, N or 1N
    input: str = "contiguous"
    weight: str = "contiguous"
    bias_layout: str = "contiguous"
    residual: str = "contiguous"
    out: str | None = None
    codes: str = "normal"
    fast_accum: bool = False
    quick: bool = False

    def __str__(self) -> str:
        return self.name

    def build(self, device: torch.device | str = "cpu", seed: int = 0) -> LinearCall:
        random = generator(seed, self.name)
        m, n, k = self.m, self.n, self.k
        inputs: dict[str, Guarded | None] = {
            "input": laid_out(_codes(self.codes, m, k, random), self.input, device),
            "weight": laid_out(_codes(self.codes, n, k, random), self.weight, device),
        }
        keywords: dict[str, Any] = {"fast_accum": self.fast_accum}
        kind, _, form = self.alpha.partition(" ")
        number = _ALPHAS[kind]
        if form:
            value = torch.tensor(number) if form.startswith("0-D") else torch.tensor([number])
            inputs["alpha"] = laid_out(value, "offset", device)
        else:
            keywords["alpha"] = number
        if "bias" in self.epilogue:
            bias = torch.randn(n, generator=random).to(self.bias)
            inputs["bias"] = laid_out(bias, self.bias_layout, device)
        out = None if self.out is None else guarded((m, n), _BF16, self.out, device)
        if "residual" in self.epilogue:
            shape = {"MN": (m, n), "N": (n,), "1N": (1, n)}[self.rows]
            values = torch.randn(shape, generator=random).to(_BF16)
            inputs["residual"] = laid_out(values, self.residual, device)
        if self.epilogue == "bias_residual":
            out = inputs.pop("residual")
        function = getattr(fp8, FUNCTIONS[self.epilogue])
        return LinearCall(function, inputs, keywords, out)


class LinearCall(Call):
    gives_bfloat16 = True

    @property
    def in_place(self) -> bool:
        return self.function is fp8.fp8_linear_bias_residual_bf16

    @property
    def arguments(self) -> dict[str, Any]:
        given = super().arguments
        if self.in_place:
            given["residual"] = given.pop("out")
        return given

    @functools.cached_property
    def _exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        return exact_linear(self.arguments, str(self.problem.param("epilogue")))

    @functools.cached_property
    def expected(self) -> tuple[torch.Tensor, ...]:
        """The exact result, in float64 on the CPU."""
        return (self._exact[0],)

    def direct(self, kernel: Kernel) -> tuple[torch.Tensor, ...]:
        given = self.arguments
        (m, _), (n, _) = given["input"].shape, given["weight"].shape
        residual = given.get("residual")
        out = residual if self.in_place else given.get("out")
        if out is None:
            out = torch.empty(m, n, dtype=_BF16, device=given["input"].device)
        if out.numel():
            kernel.function()(
                kernel.config(self.problem),
                *(given["input"], given["weight"], given["alpha"], given.get("bias")),
                over_rows(residual, m),
                out,
                self.problem.param("epilogue"),
                given["fast_accum"],
            )
        return (out,)

    def differs(self, index: int, actual: torch.Tensor, expected: torch.Tensor) -> str | None:
        fast = self.keywords["fast_accum"]
        on_gpu = FP8_FAST_SUM if fast else FP8_PROMOTED_SUM
        sum_error = _CPU_SUM if actual.device.type == "cpu" else on_gpu
        frobenius = 1.5e-2 if fast else 4e-3
        return far_from_exact(actual, expected, self._exact[1], sum_error, frobenius)


def exact_linear(given: Mapping[str, Any], epilogue: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A call's exact result in float64 on the CPU, and the sum of the magnitudes of its terms.

    `given` holds the arguments of the public function of `epilogue`, on any device; alpha counts
    as the FP32 number that it is rounded to.
    """
    x, weight = given["input"].cpu().double(), given["weight"].cpu().double()
    alpha = torch.as_tensor(given["alpha"], dtype=_FP32).cpu().double()
    exact, magnitude = alpha * (x @ weight.T), alpha.abs() * (x.abs() @ weight.abs().T)
    for name in ("bias", "residual"):
        if given.get(name) is not None:
            term = given[name].cpu().double()
            exact, magnitude = exact + term, magnitude + term.abs()
    if epilogue == "bias_gelu":
        inner = math.sqrt(2 / math.pi) * (exact + 0.044715 * exact**3)
        exact = exact / (1 + torch.exp(-2 * inner))
        magnitude = 1.2 * magnitude  # GELU's slope is below 1.13
    return exact, magnitude


def _codes(kind: str, rows: int, k: int, random: torch.Generator) -> torch.Tensor:
    shape = (rows, k)
    normal = torch.randn(shape, generator=random).to(_E4M3)
    bits = torch.randint(0, 256, shape, generator=random, dtype=torch.int16).to(torch.uint8)
    if kind == "any":  # all codes but NaN
        return torch.where(bits & 0x7F == 0x7F, 0, bits).view(_E4M3)
    if kind == "subnormal":
        return (bits & 0x87).view(_E4M3)
    if kind == "largest":
        return (bits & 0x80 | 0x7E).view(_E4M3)
    if kind == "zero":
        return (bits & 0x80).view(_E4M3)
    if kind == "positive":
        return (normal.view(torch.uint8) & 0x7F).view(_E4M3)
    if kind == "outliers":
        normal.view(torch.uint8)[torch.rand(shape, generator=random) < 0.02] = 0x7E
    if kind == "nan" and rows and k:
        normal.view(torch.uint8)[rows // 2, k // 3] = 0x7F
        normal.view(torch.uint8)[rows // 3, k - 1] = 0xFF
    return normal


def _sizes() -> list[LinearCase]:
    sizes = [
        *((m, 48, 304) for m in (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 127, 129, 257)),
        *((20, n, 304) for n in (1, 2, 15, 16, 31, 33, 65, 127, 128, 129, 192, 259)),
        *((19, 40, k) for k in (1, 2, 15, 16, 17, 31, 33, 63, 65, 127, 129, 255, 257)),
        *((5, 24, k) for k in (511, 512, 513, 527, 1023, 1040, 2064, 5000)),
        *((7, 9, 577), (577, 7, 9), (9, 577, 727), (727, 9, 859), (577, 727, 859)),
        *((1025, 80, 64), (1, 4099, 96), (130, 4112, 48)),
    ]
    cases = []
    for m, n, k in sizes:
        quick = m == 33 or k in (17, 577, 1040)
        cases.append(LinearCase(f"m={m} n={n} k={k}", m, n, k, quick=quick))
    for m, k in ((1, 4112), (48, 2064), (300, 1040)):
        case = LinearCase(f"fast m={m} k={k}", m, 64, k, fast_accum=True, quick=m == 48)
        cases.append(case)
    return cases


def _epilogues() -> list[LinearCase]:
    cases = []
    for epilogue in FUNCTIONS:
        for m, n, k in ((1, 33, 96), (40, 70, 300), (200, 64, 272)):
            for alpha in ("usual", "usual tensor"):
                name = f"{epilogue} m={m} {alpha}"
                quick = m == 40 and alpha != "usual"
                cases.append(LinearCase(name, m, n, k, epilogue, alpha, quick=quick))
        if "bias" in epilogue:
            for fast in (False, True):
                name = f"{epilogue} fp32" + (" fast" if fast else "")
                case = LinearCase(name, 33, 40, 520, epilogue, bias=_FP32, fast_accum=fast)
                cases.append(case)
    for m, rows in itertools.product((1, 5, 130), ("N", "1N")):
        name = f"residual {rows} m={m}"
        cases.append(LinearCase(name, m, 24, 64, "residual", rows=rows, quick=m == 5))
    for alpha, form in itertools.product(_ALPHAS, ("", " 0-D tensor")):
        codes = "positive" if alpha == "inf" else "normal"
        quick = alpha in ("zero", "nan") and not form
        case = LinearCase(f"alpha {alpha}{form}", alpha=alpha + form, codes=codes, quick=quick)
        cases.append(case)
        if alpha != "huge":  # there infinities would cancel, or not, as FP32 rounds
            name = f"bias_gelu alpha {alpha}{form}"
            more = dataclasses.replace(case, name=name, epilogue="bias_gelu", quick=False)
            cases.append(more)
    return cases


def _layouts() -> list[LinearCase]:
    matrix = ("offset", "columns", "padded", "transposed", "transposed columns", "strided")
    cases = []
    for view in (*matrix, "windows", "transposed offset", "transposed padded"):
        quick = view in ("columns", "transposed")
        cases.append(LinearCase(f"input {view}", k=320, input=view, quick=quick))
        cases.append(LinearCase(f"weight {view}", k=320, weight=view, quick=quick))
    for view in matrix:
        cases.append(LinearCase(f"out {view}", out=view, quick=view == "strided"))
        cases.append(LinearCase(f"out {view} gelu", epilogue="bias_gelu", out=view))
        case = LinearCase(f"residual {view}", epilogue="residual", residual=view)
        in_place = dataclasses.replace(case, name=f"in place {view}", epilogue="bias_residual")
        cases += [case, dataclasses.replace(in_place, quick=view == "columns")]
    for view in ("strided", "offset"):
        case = LinearCase(f"bias {view}", epilogue="bias", bias_layout=view, bias=_FP32)
        row = LinearCase(f"residual N {view}", epilogue="residual", rows="N", residual=view)
        cases += [case, row]
    for m, k in ((1, 300), (70, 300), (9, 32)):
        name = f"every operand strided m={m} k={k}"
        every = dict.fromkeys(("input", "weight", "bias_layout", "residual"), "strided")
        case = LinearCase(name, m=m, k=k, epilogue="bias_residual", bias=_FP32, **every)  # type: ignore[arg-type]
        cases.append(case)
    return cases


def _values() -> list[LinearCase]:
    cases = []
    for codes in ("any", "subnormal", "largest", "zero", "positive", "outliers", "nan"):
        for m, k in ((1, 320), (33, 520)):
            name = f"codes {codes} m={m}"
            cases.append(LinearCase(name, m, 65, k, codes=codes, quick=m == 33))
    cases += [
        LinearCase(f"nan {epilogue}", 17, 33, 100, epilogue, codes="nan") for epilogue in FUNCTIONS
    ]
    return cases


def _empties() -> list[LinearCase]:
    cases = []
    for m, n, k in ((0, 7, 64), (9, 0, 64), (9, 7, 0), (0, 0, 0), (0, 7, 0), (9, 0, 0)):
        for epilogue in FUNCTIONS:
            name = f"empty m={m} n={n} k={k} {epilogue}"
            quick = epilogue == "bias_residual" and m + n + k > 9
            cases.append(LinearCase(name, m, n, k, epilogue, quick=quick))
    return cases


def linear_cases() -> list[LinearCase]:
    """The edge cases of the specification: sizes, epilogues, views, values, empty problems."""
    return [*_sizes(), *_epilogues(), *_layouts(), *_values(), *_empties()]
