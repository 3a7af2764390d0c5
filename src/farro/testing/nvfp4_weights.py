"""The edge cases of NVFP4 weights, as data: the reference on another device against the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..dispatch import Kernel
from ..formats.nvfp4 import quantize_blocks
from ..formats.paired_sparsity import prune
from ..ops import nvfp4_weights as weights
from .case import Call, Case, generator
from .layouts import laid_out

_FP32, _BF16, _FP64 = torch.float32, torch.bfloat16, torch.float64


@dataclass(frozen=True)
class WeightCase(Case):
    """A weight [e, m, k] and what to do with it; `layout` is a name of `farro.testing.LAYOUTS`."""

    name: str
    function: str
    e: int = 2
    m: int = 96
    k: int = 160
    dtype: torch.dtype = _FP32
    layout: str = "contiguous"
    values: str = "normal"  # normal, ties, tiny, zero
    quick: bool = False

    def __str__(self) -> str:
        return self.name

    def build(self, device: torch.device | str = "cpu", seed: int = 0) -> WeightCall:
        w = _values(self, generator(seed, self.name))
        if self.function in ("prune_paired_4of8", "quantize_weight"):
            given: dict[str, torch.Tensor] = {"w": w.to(self.dtype)}
            keywords: dict[str, Any] = {}
        else:
            packed, scales = quantize_blocks(prune(w.float()), torch.ones(1))
            given, keywords = {"w_packed": packed, "w_blockscale": scales}, {"k": self.k}
            if self.function == "decompress":
                made = weights.compress(packed, scales, self.k, backend="reference")
                given = dict(zip(("a_comp", "e_meta", "sfa"), made))
            if self.function == "dequantize_weight":
                keywords = {}
        inputs = {name: laid_out(tensor, self.layout, device) for name, tensor in given.items()}
        function: Callable[..., Any] = getattr(weights, self.function)
        return WeightCall(function, inputs, keywords)


class WeightCall(Call):
    def direct(self, kernel: Kernel) -> tuple[torch.Tensor, ...]:
        raise NotImplementedError("one kernel serves these functions")


def _values(case: WeightCase, random: torch.Generator) -> torch.Tensor:
    w = torch.randn(case.e, case.m, case.k, generator=random, dtype=_FP64)
    if case.values == "ties":
        return torch.randint(-3, 4, w.shape, generator=random).double()
    return w * {"normal": 0.02, "tiny": 1e-37, "zero": 0.0}[case.values]


def weight_cases() -> list[WeightCase]:
    """Whole and short tiles, dtypes, views, ties between pairs, tiny weights, zeros."""
    cases = []
    for function in ("prune_paired_4of8", "quantize_weight"):
        for dtype in (_BF16, _FP32, _FP64):
            name = f"{function} {str(dtype).removeprefix('torch.')}"
            cases.append(WeightCase(name, function, dtype=dtype, quick=dtype is not _FP64))
        for values in ("ties", "tiny", "zero"):
            name = f"{function} {values}"
            cases.append(WeightCase(name, function, values=values, quick=values != "zero"))
        for layout in ("offset", "transposed", "strided"):
            cases.append(WeightCase(f"{function} {layout}", function, layout=layout))
    for function in ("dequantize_weight", "compress", "decompress"):
        for m, k in ((64, 128), (32, 32), (96, 160), (160, 352)):
            name = f"{function} m={m} k={k}"
            cases.append(WeightCase(name, function, m=m, k=k, quick=m in (32, 96)))
        cases.append(WeightCase(f"{function} zero", function, values="zero"))
        cases.append(WeightCase(f"{function} empty", function, e=0))
    return cases
