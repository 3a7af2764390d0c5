"""The edge cases of quantize_fp8_*, as data."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from ..checks import FLOATS
from ..dispatch import Kernel
from ..formats.fp8 import BLOCK, E4M3, KINDS, scale_shape
from ..ops import fp8_quantize
from .case import Call, Case, generator
from .layouts import laid_out

_BF16, _FP32, _FP64 = torch.bfloat16, torch.float32, torch.float64
_SHORT = {kind: kind.replace("per_", "") for kind in KINDS}


@dataclass(frozen=True)
class Fp8QuantizeCase(Case):
    """One input of quantize_fp8_<kind>; `layout` is a name of `farro.testing.LAYOUTS`."""

    name: str
    kind: str = "1x128"
    shape: tuple[int, ...] = (5, 300)
    dtype: torch.dtype = _FP32
    layout: str = "contiguous"
    values: str = "normal"
    quick: bool = False

    def __str__(self) -> str:
        return self.name

    def build(self, device: torch.device | str = "cpu", seed: int = 0) -> Fp8QuantizeCall:
        values = _values(self, generator(seed, self.name)).to(self.dtype)
        inputs = {"x": laid_out(values, self.layout, device)}
        return Fp8QuantizeCall(fp8_quantize.FUNCTIONS[self.kind], inputs, {})


class Fp8QuantizeCall(Call):
    def direct(self, kernel: Kernel) -> tuple[torch.Tensor, ...]:
        x, kind = self.arguments["x"], str(self.problem.param("kind"))
        q = torch.empty(x.shape, dtype=E4M3, device=x.device)
        scale = torch.empty(scale_shape(x.shape, kind), dtype=_FP32, device=x.device)
        if q.numel():
            kernel.function()(kernel.config(self.problem), x, q, scale, kind)
        return q, scale


def _e4m3_ties(shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    """Values in the middle between two neighbours of E4M3, subnormal ones too, of both signs."""
    grid = torch.arange(127, dtype=torch.uint8).view(E4M3).double()
    middle = (grid[1:] + grid[:-1]) / 2
    sign = torch.randint(0, 2, shape, generator=random) * 2 - 1
    return middle[torch.randint(0, len(middle), shape, generator=random)] * sign


def _values(case: Fp8QuantizeCase, random: torch.Generator) -> torch.Tensor:
    """float64 values of `case.shape`; the case's dtype rounds them."""
    shape, kind = case.shape, case.values
    x = torch.randn(shape, generator=random, dtype=_FP64)
    if kind == "normal":
        return x
    if kind == "wide":
        return x * torch.exp2(torch.rand(shape, generator=random, dtype=_FP64) * 30 - 16)
    if kind == "zero":
        return x * 0.0  # of both signs
    if kind == "tiny":
        return x * 1e-37
    if kind == "subnormal":
        return x * 1e-42
    if kind == "floor":  # max|x| / 448 on both sides of the floor of the scale
        return x * 448e-12 * 0.4
    if kind == "largest":
        limit = torch.finfo(case.dtype).max
        return torch.where(torch.rand(shape, generator=random) < 0.1, x.sign() * limit, x)
    if kind == "ties":  # with max = 448 * 2^e every product is exact
        ties = _e4m3_ties(shape, random)
        ties[..., ::BLOCK] = 448.0
        return ties * 2.0**-5
    flat = x.reshape(-1, shape[-1])
    row, column = flat.shape[0] // 2, min(BLOCK + 3, shape[-1] - 1)
    if kind == "zero group":
        flat[row, :BLOCK] = 0
        return flat.reshape(shape)
    value = {"nan": float("nan"), "inf": float("inf"), "-inf": -float("inf")}
    flat[row, column] = value[kind.partition(" ")[0]]
    if kind == "inf and nan":
        flat[row, column - 1] = -float("nan")
    return flat.reshape(shape)


_KINDS = ("wide", "zero", "zero group", "tiny", "subnormal", "floor", "largest", "ties")
_NONFINITE = ("nan", "inf", "-inf", "inf and nan")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sizes() -> list[Fp8QuantizeCase]:
    """Whole groups, tails, one element; sizes past each threshold of the kernels."""
    cases = []
    for kind in KINDS:
        for rows, k in ((1, 1), (6, 127), (6, 129), (6, 512), (129, 128), (300, 257)):
            name = f"{_SHORT[kind]} {rows}x{k}"
            quick = (rows, k) == (6, 129)
            cases.append(Fp8QuantizeCase(name, kind, (rows, k), _BF16, quick=quick))
        for rows, k in ((577, 7), (9, 727), (1, 4096), (3, 20000), (40, 1024)):
            name = f"{_SHORT[kind]} {rows}x{k}"
            cases.append(Fp8QuantizeCase(name, kind, (rows, k), _BF16))
    return cases


def _layouts() -> list[Fp8QuantizeCase]:
    plain = ("offset", "columns", "padded", "transposed", "transposed columns", "strided")
    cases = []
    for (i, kind), view in itertools.product(enumerate(KINDS), plain):
        dtype = FLOATS[(i + plain.index(view)) % len(FLOATS)]
        name = f"{_SHORT[kind]} {view}"
        quick = view == "columns"
        cases.append(Fp8QuantizeCase(name, kind, (6, 300), dtype, view, quick=quick))
    for kind, view in itertools.product(
        ("per_tensor", "per_row", "1x128"),
        ("contiguous", "permuted", "permuted columns", "transposed", "windows"),
    ):
        for shape in ((3, 4, 300), (2, 3, 4, 70)):
            name = f"{_SHORT[kind]} {len(shape)}-D {view}"
            quick = view == "permuted columns" and len(shape) == 3
            cases.append(Fp8QuantizeCase(name, kind, shape, _BF16, view, quick=quick))
        name = f"{_SHORT[kind]} 1-D {view}"
        if view == "contiguous":
            cases.append(Fp8QuantizeCase(name, kind, (300,), _FP32, "strided"))
    return cases


def _special() -> list[Fp8QuantizeCase]:
    cases = []
    for kind, values in itertools.product(KINDS, (*_KINDS, *_NONFINITE)):
        for dtype in (_FP32, _BF16):
            name = f"{_SHORT[kind]} {values} {_name(dtype)}"
            quick = values in ("ties", "nan", "inf") and dtype is _FP32
            case = Fp8QuantizeCase(name, kind, (7, 290), dtype, values=values, quick=quick)
            cases.append(case)
    for dtype, values in itertools.product((torch.float16, _FP64), ("largest", "nan", "ties")):
        name = f"{values} {_name(dtype)}"
        cases.append(Fp8QuantizeCase(name, "1x128", (7, 290), dtype, values=values))
    name = "128x128 inf in one of four"
    cases.append(Fp8QuantizeCase(name, "128x128", (200, 200), _BF16, values="inf"))
    return cases


def _empties() -> list[Fp8QuantizeCase]:
    cases = []
    for kind in KINDS:
        shapes = ((0, 300), (5, 0), (0, 0)) if kind == "128x128" else ((0,), (2, 0, 70), (2, 3, 0))
        for shape in shapes:
            name = f"{_SHORT[kind]} empty {'x'.join(map(str, shape))}"
            cases.append(Fp8QuantizeCase(name, kind, shape, quick=shape == shapes[0]))
    return cases


def fp8_quantize_cases() -> list[Fp8QuantizeCase]:
    """The edge cases of the specification: kinds, dtypes, views, values, empty inputs."""
    return [*_sizes(), *_layouts(), *_special(), *_empties()]
