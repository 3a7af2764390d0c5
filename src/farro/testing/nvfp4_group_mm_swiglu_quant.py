"""The edge cases of group_mm_swiglu_quant, as data: those of group_mm, and the activation after."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import torch

from ..catalogue import operator_named
from ..dispatch import Kernel
from ..ops import nvfp4_group_mm as products
from ..ops.nvfp4_quantize import silu_mul_quant_act
from ..ops.nvfp4_quantize.dense import gating, quantized
from .case import Call, Case, Outcome, generator
from .compare import difference
from .layouts import laid_out
from .nvfp4_group_mm import GroupCase, group_mm, used_rows


@dataclass(frozen=True)
class FusedCase(Case):
    """A GroupCase whose m rows are gate and up, padded, and the gated activation after it."""

    name: str
    product: GroupCase
    interleaved: bool = False
    activation: str = "silu"
    beta: float = 1.0
    linear_beta: float = -1.0
    factors: int = 1  # of gscale: 1, or one an expert
    quick: bool = True

    def build(self, device: torch.device | str = "cpu", seed: int = 0) -> FusedCall:
        product = dataclasses.replace(self.product, name=self.name).build(device, seed)
        random = generator(seed, f"{self.name} gscale")
        gscale = torch.exp2(torch.rand(self.factors, generator=random) * 6)
        inputs = {**product.inputs, "gscale": laid_out(gscale, self.product.layout, device)}
        how = {name: getattr(self, name) for name in ("interleaved", "activation")}
        betas = {"beta": self.beta, "linear_beta": self.linear_beta}
        keywords = {**product.keywords, **how, **betas}
        return FusedCall(products.group_mm_swiglu_quant, inputs, keywords)


class FusedCall(Call):
    """Compared byte for byte with group_mm and silu_mul_quant_act of the same back end."""

    backend = "reference"

    def check(self, kernel: Kernel) -> Outcome:
        if kernel.backend != self.backend:
            self.backend = kernel.backend
            self.__dict__.pop("expected", None)
        return super().check(kernel)

    @functools.cached_property
    def expected(self) -> tuple[torch.Tensor, ...]:
        given = dict(self.arguments)
        how = {name: given.pop(name) for name in ("interleaved", "activation")}
        how |= {name: given.pop(name) for name in ("beta", "linear_beta")}
        gscale, counts = given.pop("gscale"), given["expert_num_tokens"]
        x2 = group_mm(**given, backend=self.backend)
        known = {kernel.backend for kernel in operator_named("nvfp4_quantize").kernels}
        native = self.backend != "cuda" or how["activation"] == "silu"  # its quantizer's only one
        backend = self.backend if self.backend in known and native else "auto"
        return silu_mul_quant_act(x2, gscale, counts, 0, **how, backend=backend)

    def differs(self, index: int, actual: torch.Tensor, expected: torch.Tensor) -> str | None:
        if index == 0:  # codes of rows without a token are unspecified
            counts = self.arguments["expert_num_tokens"].cpu()
            used = used_rows(counts, tuple(actual.shape[:2]), False).any(1).view(actual.shape[:2])
            actual, expected = actual.cpu()[used], expected.cpu()[used]
        return difference(actual, expected)

    def direct(self, kernel: Kernel) -> tuple[torch.Tensor, ...]:
        given = self.arguments
        how = [given[n] for n in ("interleaved", "activation", "beta", "linear_beta")]
        tensors = [given[name] for name in self.inputs]
        rows, features = tensors[3].shape[:2], given["features"]
        made = quantized(tensors[0], *rows, features // 2)
        kernel.function()(kernel.config(self.problem), *tensors, gating(*how), *made)
        return made


def fused_cases() -> list[FusedCase]:
    """Sizes, counts, both orders of rows, both activations, BF16 inputs, values that overflow."""
    base = GroupCase("", 3, 128, 160, 9)
    cases = [
        FusedCase(f"E={e} 2N={m} K={k} cap={cap}", GroupCase("", e, m, k, cap))
        for e, m, k, cap in (
            *((1, 64, 32, 1), (2, 64, 128, 17), (3, 192, 352, 33), (2, 320, 64, 130)),
            *((9, 64, 64, 3), (1, 1024, 256, 8)),
        )
    ]
    for interleaved in (False, True):
        order = "interleaved" if interleaved else "halves"
        for activation, beta, linear in (
            *(("silu", 1.0, -1.0), ("situ", 1.0, -1.0), ("situ", 0.7, 7.0)),
        ):
            name = f"{order} {activation} {beta} {linear}"
            case = FusedCase(name, base, interleaved, activation, beta, linear)
            cases += [case, dataclasses.replace(case, name=f"{name} gscale [E]", factors=3)]
    for counts in ("full", "none", "one", "wild"):
        product = dataclasses.replace(base, counts=counts)
        cases.append(FusedCase(f"counts {counts}", product))
    for values in ("exact", "wide", "nan", "zero"):
        product = dataclasses.replace(base, values=values)
        cases.append(FusedCase(values, product))
        product = dataclasses.replace(product, coded=False, layout="offset")
        cases.append(FusedCase(f"{values} W4A16 offset", product, interleaved=True))
    for m, k, cap in ((0, 64, 3), (64, 0, 3), (64, 64, 0)):
        product = GroupCase("", 2, m, k, cap, values="exact")
        cases.append(FusedCase(f"empty 2N={m} K={k} cap={cap}", product))
    return cases
