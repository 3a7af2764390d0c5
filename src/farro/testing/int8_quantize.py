"""The edge cases of quantize_int8_groups, as data."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from ..checks import FLOATS
from ..dispatch import Kernel
from ..formats.int8_group import GROUP_SIZES, group_count
from ..ops.int8_quantize import quantize_int8_groups
from .case import Call, Case, generator
from .layouts import laid_out

_BF16, _FP32, _FP64 = torch.bfloat16, torch.float32, torch.float64


@dataclass(frozen=True)
class QuantizeCase(Case):
    """One input of quantize_int8_groups; `layout` is a name of `farro.testing.LAYOUTS`."""

    name: str
    shape: tuple[int, ...] = (5, 300)
    dtype: torch.dtype = _FP32
    group_size: int = 256
    layout: str = "contiguous"
    values: str = "normal"
    quick: bool = False

    def __str__(self) -> str:
        return self.name

    def build(self, device: torch.device | str = "cpu", seed: int = 0) -> QuantizeCall:
        values = _values(self.values, self, generator(seed, self.name)).to(self.dtype)
        inputs = {"x": laid_out(values, self.layout, device)}
        return QuantizeCall(quantize_int8_groups, inputs, {"group_size": self.group_size})


class QuantizeCall(Call):
    def direct(self, kernel: Kernel) -> tuple[torch.Tensor, ...]:
        x, group_size = self.arguments["x"], self.arguments["group_size"]
        groups = group_count(x.shape[-1], group_size)
        q = torch.empty(x.shape, dtype=torch.int8, device=x.device)
        scale = torch.empty((*x.shape[:-1], groups), dtype=torch.float32, device=x.device)
        if q.numel():
            kernel.function()(kernel.config(self.problem), x, q, scale, group_size)
        return q, scale


def _values(kind: str, case: QuantizeCase, random: torch.Generator) -> torch.Tensor:
    """float64 values of `case.shape`; the case's dtype rounds them."""
    shape = case.shape
    x = torch.randn(shape, generator=random, dtype=_FP64)
    if kind == "normal":
        return x
    if kind == "wide":
        return x * torch.exp2(torch.rand(shape, generator=random, dtype=_FP64) * 24 - 14)
    if kind == "zero":
        return x * 0.0  # of both signs
    if kind == "tiny":
        return x * 1e-37
    if kind == "subnormal":
        return x * 1e-42
    if kind == "floor":  # max|x| / 127 on both sides of the floor of the scale
        return x * 127e-12 * 0.4
    if kind == "largest":
        limit = torch.finfo(case.dtype).max
        return torch.where(torch.rand(shape, generator=random) < 0.1, x.sign() * limit, x)
    if kind == "halves":  # with max = 127 * 2^e the quotients are n + 1/2 exactly
        n = torch.randint(-127, 127, shape, generator=random, dtype=torch.int64) + 0.5
        n[..., :: case.group_size] = 127.0
        return n * 2.0**-6
    flat = x.reshape(-1, shape[-1])
    row, column = flat.shape[0] // 2, min(case.group_size + 3, shape[-1] - 1)
    if kind == "zero group":
        flat[row, : case.group_size] = 0
        return flat.reshape(shape)
    flat[row, column] = {"nan": float("nan"), "inf": float("inf"), "-inf": -float("inf")}[
        kind.partition(" ")[0]
    ]
    if kind == "inf and nan":
        flat[row, column - 1] = float("nan")
    return flat.reshape(shape)


_KINDS = ("wide", "zero", "zero group", "tiny", "subnormal", "floor", "largest", "halves")
_NONFINITE = ("nan", "inf", "-inf", "inf and nan")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _groups() -> list[QuantizeCase]:
    cases = []
    for g in GROUP_SIZES:
        for k in (1, g - 1, g, g + 1, 4 * g, 5 * g - 1):
            for dtype in (_FP32, _BF16):
                name = f"g={g} k={k} {_short(dtype)}"
                quick = k in (g + 1, 4 * g) and dtype is _BF16
                cases.append(QuantizeCase(name, (6, k), dtype, g, quick=quick))
    for rows, k in ((577, 7), (9, 727), (1, 4096), (859, 300), (3, 20000)):
        cases.append(QuantizeCase(f"rows={rows} k={k}", (rows, k), _BF16, 64))
    return cases


def _layouts() -> list[QuantizeCase]:
    plain = ("offset", "columns", "padded", "transposed", "transposed columns", "strided")
    cases = []
    for dtype, view in itertools.product(FLOATS, plain):
        name = f"{_short(dtype)} {view}"
        quick = view == "columns"
        cases.append(QuantizeCase(name, (6, 300), dtype, 64, view, quick=quick))
    for shape in ((3, 4, 300), (2, 3, 4, 70)):
        views = ("contiguous", "columns", "permuted", "permuted columns", "transposed", "windows")
        for view in views:
            name = f"{len(shape)}-D {view}"
            quick = view == "permuted columns"
            cases.append(QuantizeCase(name, shape, _BF16, 64, view, quick=quick))
    for view in ("contiguous", "offset", "strided"):
        cases.append(QuantizeCase(f"1-D {view}", (300,), _FP32, 128, view))
    return cases


def _special() -> list[QuantizeCase]:
    cases = []
    for dtype, kind in itertools.product(FLOATS, (*_KINDS, *_NONFINITE)):
        name = f"{kind} {_short(dtype)}"
        quick = kind in ("halves", "nan", "inf", "subnormal") and dtype in (_FP32, _BF16)
        cases.append(QuantizeCase(name, (7, 290), dtype, 64, values=kind, quick=quick))
    cases += [
        QuantizeCase(f"halves g={g}", (4, 2 * g), _FP32, g, values="halves") for g in GROUP_SIZES
    ]
    cases.append(
        QuantizeCase("one row of nan, 3-D permuted", (2, 3, 70), _BF16, 32, "permuted", "nan")
    )
    return cases


def _empties() -> list[QuantizeCase]:
    shapes = ((0,), (0, 300), (5, 0), (0, 0), (2, 0, 70), (2, 3, 0))
    return [
        QuantizeCase(f"empty {'x'.join(map(str, shape))}", shape, quick=len(shape) < 3)
        for shape in shapes
    ]


def quantize_cases() -> list[QuantizeCase]:
    """The edge cases of the specification: dtypes, groups, views, values, empty inputs."""
    return [*_groups(), *_layouts(), *_special(), *_empties()]
