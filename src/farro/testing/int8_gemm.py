"""The edge cases of int8_gemm, as data."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

import torch

from ..dispatch import Kernel
from ..formats.int8_group import GROUP_SIZES, group_bounds, group_count, pack_groups
from ..ops.int8_gemm import int8_gemm
from .case import Call, Case, generator
from .layouts import Guarded, guarded, laid_out

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class GemmCase(Case):
    """One problem of int8_gemm; layouts are names of `farro.testing.LAYOUTS`.

    `b` is the layout of the logical [K,N] ("transposed" is a weight's `.T`), or "packed".
    """

    name: str
    m: int = 9
    n: int = 7
    k: int = 300
    group_size: int = 256
    output: torch.dtype = _FP32
    a: str = "contiguous"
    b: str = "transposed"
    scale_a: str = "contiguous"
    scale_b: str = "contiguous"
    bias: torch.dtype | None = None
    bias_layout: str = "contiguous"
    out: str | None = None
    codes: str = "full"  # full, lowest, highest, extremes, zero
    scales: str = "usual"  # usual, signed, zero, nonfinite, tiny, huge, wide
    quick: bool = False

    def __str__(self) -> str:
        return self.name

    def build(self, device: torch.device | str = "cpu", seed: int = 0) -> GemmCall:
        random = generator(seed, self.name)
        m, n, k, groups = self.m, self.n, self.k, group_count(self.k, self.group_size)
        a = _codes(self.codes, (m, k), random)
        b = _codes(self.codes, (k, n), random)
        if self.codes == "telling":
            a, b = _telling_codes(m, n, k, self.group_size)
        if self.b == "packed":
            packed = laid_out(pack_groups(b.T, self.group_size), "offset", device)
            weight = Guarded(packed.view.transpose(1, 2), packed.base, packed.before)
        else:
            weight = laid_out(b, self.b, device)
        bias = None
        if self.bias is not None:
            values = torch.randn(n, generator=random).to(self.bias)
            bias = laid_out(values, self.bias_layout, device)
        scale_a = _scales(self.scales, (m, groups), random)
        scale_b = _scales(self.scales, (groups, n), random)
        if self.codes == "telling":
            scale_a, scale_b = torch.ones_like(scale_a), torch.ones_like(scale_b)
            scale_b[1:] = torch.tensor(1.0) / 4097
        inputs = {
            "a": laid_out(a, self.a, device),
            "b": weight,
            "scale_a": laid_out(scale_a, self.scale_a, device),
            "scale_b": laid_out(scale_b, self.scale_b, device),
            "bias": bias,
        }
        out = None if self.out is None else guarded((m, n), self.output, self.out, device)
        return GemmCall(
            int8_gemm, inputs, {"group_size": self.group_size, "output_dtype": self.output}, out
        )


class GemmCall(Call):
    @property
    def gives_bfloat16(self) -> bool:
        return self.keywords["output_dtype"] is _BF16

    def direct(self, kernel: Kernel) -> tuple[torch.Tensor, ...]:
        given = self.arguments
        shape = (given["a"].shape[0], given["b"].shape[-1])
        out = given.get("out")
        if out is None:
            out = torch.empty(shape, dtype=given["output_dtype"], device=given["a"].device)
        if out.numel():
            kernel.function()(
                kernel.config(self.problem),
                *(given[name] for name in ("a", "b", "scale_a", "scale_b", "bias")),
                out,
                given["group_size"],
            )
        return (out,)


def _codes(kind: str, shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    if kind == "extremes":
        signs = torch.randint(0, 2, shape, generator=random, dtype=torch.int16)
        return (signs * 255 - 128).to(torch.int8)
    low, high = {
        "full": (-128, 128),
        "lowest": (-128, -127),
        "highest": (127, 128),
        "zero": (0, 1),
        "telling": (0, 1),
    }[kind]
    return torch.randint(low, high, shape, generator=random, dtype=torch.int16).to(torch.int8)


def _telling_codes(m: int, n: int, k: int, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first group sums to -1, the second to 4097, all others to 0."""
    a = torch.zeros(m, k, dtype=torch.int8)
    b = torch.ones(k, n, dtype=torch.int8)
    (first, _), (start, _) = group_bounds(k, group_size)[:2]
    a[:, first] = -1
    a[:, start : start + 31] = 127
    a[:, start + 31], b[start + 31] = 10, 16  # 31 * 127 + 160 = 4097
    return a, b


def _scales(kind: str, shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    uniform = torch.rand(shape, generator=random)
    signs = torch.randint(0, 2, shape, generator=random) * 2.0 - 1
    if kind == "usual":
        return torch.exp2(uniform * 8 - 8)
    if kind == "signed":
        return (uniform + 0.5) * signs
    if kind == "tiny":  # products of two are subnormal or vanish, and so do many sums
        return torch.exp2(uniform * 13 - 84) * signs
    if kind == "huge":  # sums pass the largest float32
        return torch.exp2(uniform * 20 + 44) * signs
    if kind == "wide":
        return torch.exp2(uniform * 40 - 20) * signs
    special = torch.rand(shape, generator=random) < 0.2
    if kind == "zero":
        return torch.where(special, 0.0 * signs, uniform * signs)
    assert kind == "nonfinite", kind
    values = torch.tensor([float("nan"), float("inf"), float("-inf")])
    chosen = values[torch.randint(0, 3, shape, generator=random)]
    return torch.where(special, chosen, uniform * signs)


def _sizes() -> list[GemmCase]:
    sizes = [
        *((m, 40, 300) for m in (1, 2, 15, 17, 31, 33, 64, 65, 127, 129, 257)),
        *((20, n, 300) for n in (1, 2, 31, 33, 63, 65, 128, 129, 259)),
        *((7, 9, 577), (577, 7, 9), (9, 577, 727), (727, 9, 859), (577, 727, 859)),
        *((1025, 70, 64), (1, 4099, 96), (130, 4097, 40)),  # past a block of the CPU path
    ]
    return [
        GemmCase(f"m={m} n={n} k={k}", m, n, k, scales="signed", quick=m == 33 or k == 577)
        for m, n, k in sizes
    ]


def _groups() -> list[GemmCase]:
    """Every group size: whole groups, tails of 1 and G - 1, one short group, one element."""
    cases = []
    for g in GROUP_SIZES:
        for k in (1, g - 1, g, g + 1, 3 * g, 5 * g - 1, 9 * g + 16):
            name = f"g={g} k={k}"
            cases.append(GemmCase(name, 17, 21, k, g, scales="signed", quick=k in (g, 9 * g + 16)))
            if k > g:
                cases.append(GemmCase(f"{name} packed", 17, 21, k, g, b="packed", quick=k == g + 1))
    return cases


def _layouts() -> list[GemmCase]:
    matrix = ("offset", "columns", "padded", "transposed", "transposed columns", "strided")
    inputs = (*matrix, "windows")
    cases = [GemmCase(f"a {view}", k=320, a=view, quick=view == "columns") for view in inputs]
    for view in (*inputs, "contiguous", "transposed offset", "transposed padded"):
        cases.append(GemmCase(f"b {view}", k=320, b=view, quick=view == "contiguous"))
    for view in ("transposed", "columns", "transposed strided", "offset", "windows"):
        cases.append(GemmCase(f"scales {view}", scale_a=view, scale_b=view, group_size=32))
    for view, output in itertools.product(matrix, (_FP32, _BF16, _FP16)):
        name = f"out {view} {_short(output)}"
        quick = view == "strided" and output is _FP32
        cases.append(GemmCase(name, out=view, output=output, bias=_FP32, quick=quick))
    for m, k in ((1, 300), (70, 300), (9, 32)):
        name = f"every operand strided m={m} k={k}"
        every = dict.fromkeys(("a", "b", "scale_a", "scale_b", "bias_layout", "out"), "strided")
        cases.append(GemmCase(name, m=m, k=k, group_size=64, bias=_FP16, **every))  # type: ignore[arg-type]
    return cases


def _values() -> list[GemmCase]:
    cases = [
        GemmCase("fused multiply-add tells", k=64, group_size=32, codes="telling", quick=True),
        GemmCase("fused multiply-add tells g=256", k=600, codes="telling"),
    ]
    for codes in ("lowest", "highest", "extremes", "zero"):
        cases.append(GemmCase(f"codes {codes}", 33, 65, 520, codes=codes, quick=codes != "zero"))
    for scales in ("signed", "zero", "nonfinite", "tiny", "huge", "wide"):
        for output in (_FP32, _BF16, _FP16):
            name = f"scales {scales} {_short(output)}"
            quick = output is _FP32
            case = GemmCase(name, 17, 37, 530, 32, output, scales=scales, quick=quick)
            cases += [
                case,
                dataclasses.replace(case, name=f"{name} packed", b="packed", quick=False),
            ]
    for bias, output in itertools.product((_BF16, _FP16, _FP32), repeat=2):
        name = f"bias {_short(bias)} out {_short(output)}"
        cases.append(GemmCase(name, output=output, bias=bias, quick=bias is output))
    cases += [
        GemmCase(f"bias {view}", bias=_FP32, bias_layout=view) for view in ("strided", "offset")
    ]
    return cases


def _empties() -> list[GemmCase]:
    cases = []
    for m, n, k in ((0, 7, 64), (9, 0, 64), (9, 7, 0), (0, 0, 0), (0, 7, 0), (9, 0, 0)):
        for bias, out in ((None, None), (_BF16, "strided")):
            name = f"empty m={m} n={n} k={k}" + (" bias and out" if bias else "")
            cases.append(GemmCase(name, m, n, k, bias=bias, out=out, quick=bias is None))
    cases.append(GemmCase("empty k packed", 9, 7, 0, b="packed"))
    return cases


def _short(dtype: torch.dtype) -> str:
    return {_BF16: "bf16", _FP16: "fp16", _FP32: "fp32"}[dtype]


def int8_gemm_cases() -> list[GemmCase]:
    """The edge cases of the specification: sizes, groups, views, values, empty problems.

    Each has a name of its own; `case.build(device, seed)` makes its tensors, and
    `case.build(device, seed).check(kernel)` compares a kernel with the reference.
    """
    return [*_sizes(), *_groups(), *_layouts(), *_values(), *_empties()]
