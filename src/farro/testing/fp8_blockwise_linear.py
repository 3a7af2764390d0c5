"""The edge cases of fp8_blockwise_linear_bf16, as data."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch

from ..dispatch import Kernel
from ..formats.fp8 import E4M3, blocks
from ..ops.fp8_blockwise_linear import fp8_blockwise_linear_bf16
from ..ops.fp8_blockwise_linear.reference import product
from .case import Call, Case, Outcome, generator
from .compare import FP8_PROMOTED_SUM, FP32_SUM, far_from_exact
from .layouts import guarded, laid_out

_BF16, _FP32 = torch.bfloat16, torch.float32
_STEEPEST = 1.13  # slope of GELU


@dataclass(frozen=True)
class BlockwiseCase(Case):
    """One problem of fp8_blockwise_linear_bf16; layouts are names of `farro.testing.LAYOUTS`."""

    name: str
    m: int = 9
    n: int = 150
    k: int = 300
    input: str = "contiguous"
    weight: str = "contiguous"
    input_scale: str = "contiguous"
    weight_scale: str = "contiguous"
    bias: torch.dtype | None = None
    bias_layout: str = "contiguous"
    activation: str | None = None
    out: str | None = None
    codes: str = "normal"  # normal, full, small, largest, subnormal, zero, nan
    scales: str = "usual"  # usual, signed, zero, nonfinite, tiny, huge, wide, powers
    quick: bool = False

    def __str__(self) -> str:
        return self.name

    def build(self, device: torch.device | str = "cpu", seed: int = 0) -> BlockwiseCall:
        random = generator(seed, self.name)
        m, n, k = self.m, self.n, self.k
        tensors = {
            "input": (codes_of(self.codes, (m, k), random), self.input),
            "weight": (codes_of(self.codes, (n, k), random), self.weight),
            "input_scale": (scales_of(self.scales, (m, blocks(k)), random), self.input_scale),
            "weight_scale": (
                scales_of(self.scales, (blocks(n), blocks(k)), random),
                self.weight_scale,
            ),
        }
        inputs = {name: laid_out(*given, device) for name, given in tensors.items()}
        bias = None
        if self.bias is not None:
            values = torch.randn(n, generator=random).to(self.bias)
            bias = laid_out(values, self.bias_layout, device)
        out = None if self.out is None else guarded((m, n), _BF16, self.out, device)
        keywords = {"activation": self.activation}
        return BlockwiseCall(fp8_blockwise_linear_bf16, {**inputs, "bias": bias}, keywords, out)


class BlockwiseCall(Call):
    """`expected` is the exact result, in float64."""

    sum_error = FP8_PROMOTED_SUM

    @property
    def gives_bfloat16(self) -> bool:
        return True

    @functools.cached_property
    def operands(self) -> tuple[torch.Tensor, ...]:
        names = ("input", "weight", "input_scale", "weight_scale")
        return tuple(self.arguments[name].cpu() for name in names)

    @functools.cached_property
    def expected(self) -> tuple[torch.Tensor, ...]:
        total = product(*self.operands)
        bias, activation = self.arguments["bias"], self.arguments["activation"]
        if bias is not None:
            total += bias.cpu().double()
        if activation is not None:
            total = torch.nn.functional.gelu(total, approximate="tanh")
        return (total,)

    @functools.cached_property
    def magnitude(self) -> torch.Tensor:
        """The sum of the magnitudes of all that is added, float64 [M,N]."""
        total = magnitude_of(*self.operands)
        bias = self.arguments["bias"]
        if bias is not None:
            total += bias.cpu().double().abs()
        return total if self.arguments["activation"] is None else _STEEPEST * total

    def check(self, kernel: Kernel) -> Outcome:
        self.sum_error = sum_error_of(kernel)
        return super().check(kernel)

    def differs(self, index: int, actual: torch.Tensor, expected: torch.Tensor) -> str | None:
        if actual.dtype != _BF16:
            return f"dtype is {actual.dtype}, needed {_BF16}"
        # a scale that is not finite, or a NaN code, is no measure of rounding
        magnitude = self.magnitude.nan_to_num(0.0, posinf=0.0)
        whole = (4e-3, 0.9999) if _rounded_once(expected, magnitude) else (1.0, -1.0)
        return far_from_exact(actual, expected, magnitude, self.sum_error, *whole)

    def direct(self, kernel: Kernel) -> tuple[torch.Tensor, ...]:
        given = self.arguments
        out = given.get("out")
        if out is None:
            shape = (given["input"].shape[0], given["weight"].shape[0])
            out = torch.empty(shape, dtype=_BF16, device=given["input"].device)
        if out.numel():
            names = ("input", "weight", "input_scale", "weight_scale", "bias")
            tensors = (given[name] for name in names)
            gelu = given["activation"] is not None
            kernel.function()(kernel.config(self.problem), *tensors, out, gelu)
        return (out,)


def _rounded_once(exact: torch.Tensor, magnitude: torch.Tensor) -> bool:
    """Whether the rounding of results decides the error of the whole.

    Not where they are subnormal in BF16, or sums cancel until their own error is the larger one.
    """
    finite = exact.isfinite()
    size = float(exact[finite].norm())
    least = 2.0**-118 * exact.numel() ** 0.5
    return bool(size > max(least, 2.0**-8 * float(magnitude[finite].norm())))


def sum_error_of(kernel: Kernel) -> float:
    """The error of a kernel's sums, relative to the sum of magnitudes; see compare.py."""
    return FP32_SUM if kernel.backend in ("reference", "cpu") else FP8_PROMOTED_SUM


def magnitude_of(*operands: torch.Tensor) -> torch.Tensor:
    """The product of the magnitudes of input, weight and their scales, float64."""
    x, weight, input_scale, weight_scale = operands
    codes = (x.double().abs().to(E4M3), weight.double().abs().to(E4M3))
    return product(*codes, input_scale.abs(), weight_scale.abs())


def codes_of(kind: str, shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    """E4M3 codes of one of the kinds that `BlockwiseCase` names."""
    if kind == "normal":  # as a quantizer leaves them: the largest of 128 near 448
        return (torch.randn(shape, generator=random) * 160).clamp(-448, 448).to(E4M3)
    if kind == "small":  # sums of their products are exact on tensor cores of 14 bits too
        return (torch.randint(-4, 5, shape, generator=random) / 2).to(E4M3)
    signs = torch.randint(0, 2, shape, generator=random, dtype=torch.uint8) << 7
    low, high = {
        "full": (0, 0x7F),
        "largest": (0x7E, 0x7F),
        "subnormal": (0, 8),
        "zero": (0, 1),
        "nan": (0, 0x7F),
    }[kind]
    values = torch.randint(low, high, shape, generator=random, dtype=torch.uint8)
    if kind == "nan" and values.numel():
        values[shape[0] // 2, shape[1] * 2 // 3] = 0x7F
    return (values | signs).view(E4M3)


def scales_of(kind: str, shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    """FP32 scales of one of the kinds that `BlockwiseCase` names."""
    uniform = torch.rand(shape, generator=random)
    signs = torch.randint(0, 2, shape, generator=random) * 2.0 - 1
    if kind == "usual":
        return torch.exp2(uniform * 4 - 10)
    if kind == "signed":
        return (uniform + 0.5) * signs
    if kind == "powers":
        return torch.exp2(torch.randint(-2, 3, shape, generator=random).float()) * signs
    if kind == "tiny":  # products of two are subnormal or vanish
        return torch.exp2(uniform * 13 - 84) * signs
    if kind == "huge":  # sums near the largest float32
        return torch.exp2(uniform * 2 + 49.5) * signs
    if kind == "wide":
        return torch.exp2(uniform * 40 - 20) * signs
    special = torch.rand(shape, generator=random) < 0.2
    if kind == "zero":
        return torch.where(special, 0.0 * signs, uniform * signs)
    assert kind == "nonfinite", kind
    values = torch.tensor([float("nan"), float("inf"), float("-inf")])
    chosen = values[torch.randint(0, 3, shape, generator=random)]
    return torch.where(special, chosen, uniform * signs)


def _sizes() -> list[BlockwiseCase]:
    sizes = [
        *((m, 160, 320) for m in (1, 2, 15, 16, 17, 33, 64, 65, 128, 129, 257)),
        *((20, n, 320) for n in (1, 2, 63, 127, 128, 129, 192, 256, 257, 576)),
        *((17, 144, k) for k in (1, 15, 16, 64, 127, 128, 129, 192, 255, 256, 576, 1040)),
        *((7, 9, 577), (577, 7, 9), (9, 577, 727), (129, 727, 859)),
        *((1025, 16, 128), (1, 4099, 96), (3, 16, 16640)),  # past a block of the CPU path
    ]
    return [
        BlockwiseCase(f"m={m} n={n} k={k}", m, n, k, scales="signed", quick=m == 33 or k == 577)
        for m, n, k in sizes
    ]


def _layouts() -> list[BlockwiseCase]:
    plain = ("offset", "columns", "padded", "transposed", "transposed columns", "strided")
    inputs = (*plain, "windows")
    cases = []
    for view in inputs:
        quick = view == "columns"
        cases.append(BlockwiseCase(f"input {view}", k=320, input=view, quick=quick))
        cases.append(BlockwiseCase(f"weight {view}", k=320, weight=view, quick=quick))
    for view in ("transposed", "transposed padded", "columns", "offset", "strided", "windows"):
        name = f"scales {view}"
        quick = view == "transposed"
        cases.append(BlockwiseCase(name, input_scale=view, weight_scale=view, quick=quick))
        cases.append(BlockwiseCase(f"{name} m=70", m=70, input_scale=view))
    for view in plain:
        quick = view == "strided"
        cases.append(BlockwiseCase(f"out {view}", out=view, bias=_FP32, quick=quick))
    names = ("input", "weight", "input_scale", "weight_scale", "bias_layout", "out")
    for m, k in ((1, 300), (70, 300), (9, 32)):
        every = dict.fromkeys(names, "strided")
        name = f"every operand strided m={m} k={k}"
        cases.append(BlockwiseCase(name, m=m, k=k, bias=_BF16, **every))  # type: ignore[arg-type]
    return cases


def _values() -> list[BlockwiseCase]:
    cases = []
    for codes in ("full", "small", "largest", "subnormal", "zero", "nan"):
        quick = codes in ("full", "nan")
        cases.append(BlockwiseCase(f"codes {codes}", 17, 145, 520, codes=codes, quick=quick))
    for scales in ("signed", "zero", "nonfinite", "tiny", "huge", "wide", "powers"):
        quick = scales in ("nonfinite", "wide")
        cases.append(BlockwiseCase(f"scales {scales}", 17, 145, 520, scales=scales, quick=quick))
    for bias, activation in itertools.product((None, _BF16, _FP32), (None, "gelu_tanh")):
        name = f"bias {str(bias).removeprefix('torch.')} activation {activation}"
        quick = bias is _FP32
        # scales for which GELU's bend is where the sums are
        case = BlockwiseCase(name, m=33, bias=bias, activation=activation, quick=quick)
        cases.append(case)
    cases += [
        BlockwiseCase(f"bias {view}", bias=_FP32, bias_layout=view)
        for view in ("strided", "offset")
    ]
    cases += [
        BlockwiseCase(f"gelu, scales {scales}", activation="gelu_tanh", scales=scales)
        for scales in ("signed", "nonfinite", "wide", "huge")
    ]
    return cases


def _empties() -> list[BlockwiseCase]:
    cases = []
    for m, n, k in ((0, 7, 64), (9, 0, 64), (9, 7, 0), (0, 0, 0), (0, 7, 0), (9, 0, 0)):
        for bias, out in ((None, None), (_BF16, "strided")):
            name = f"empty m={m} n={n} k={k}" + (" bias and out" if bias else "")
            quick = bias is None
            cases.append(BlockwiseCase(name, m, n, k, bias=bias, out=out, quick=quick))
    cases.append(BlockwiseCase("empty k, gelu", 9, 7, 0, bias=_FP32, activation="gelu_tanh"))
    return cases


def blockwise_cases() -> list[BlockwiseCase]:
    """The edge cases of the specification: sizes, tails, views, values, empty problems.

    Each has a name of its own; `case.build(device, seed)` makes its tensors, and
    `case.build(device, seed).check(kernel)` compares a kernel with the exact result.
    """
    return [*_sizes(), *_layouts(), *_values(), *_empties()]
