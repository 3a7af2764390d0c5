"""Forcing configurations of the native FP8 products of SM90a in tests on a GPU."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

from farro.cuda.fp8 import configs, gemm
from farro.cuda.fp8.configs import BIAS, GELU, RESIDUAL, Config, Kind
from farro.formats.fp8 import E4M3, blocks
from farro.ops.fp8_blockwise_linear.reference import product
from farro.testing import (
    FP8_FAST_SUM,
    FP8_PROMOTED_SUM,
    FP32_SUM,
    assert_bit_equal,
    assert_close_to_exact,
)
from farro.testing.fp8_blockwise_linear import codes_of, magnitude_of, scales_of

DEVICE = "cuda"
BF16, FP32 = torch.bfloat16, torch.float32
SCALED, PROMOTED, FAST = Kind(True), Kind(False), Kind(False, True)
KINDS = {"scaled": SCALED, "promoted": PROMOTED, "fast": FAST}
EPILOGUES = {  # those that an operator asks for
    "scaled": (0, BIAS, GELU, BIAS | GELU),
    "promoted": (0, RESIDUAL, BIAS, BIAS | RESIDUAL, BIAS | GELU),
    "fast": (0, RESIDUAL, BIAS, BIAS | RESIDUAL, BIAS | GELU),
}
GELU_SLOPE = 1.13  # the steepest of GELU


def shapes(kind: Kind) -> list[Config]:
    """Of each kernel the configuration with the shallowest ring."""
    found: dict[Any, Config] = {}
    for c in configs.configs(kind, 1):
        found.setdefault(but_its_ring(c), replace(c, raster=4))
    return list(found.values())


def but_its_ring(c: Config) -> tuple[Any, ...]:
    return c.policy, c.tile, c.cluster, c.staged, c.ahead, c.multicast


def usual(kind: Kind, n: int) -> list[Config]:
    """Those that every run takes, for outputs of n columns; the others are for exhaustive runs.

    Every kernel without an epilogue, where rows of the output are no multiple of 32; a few with
    each epilogue, for one of both kinds of rows.
    """
    name = next(m for m, k in KINDS.items() if (k.scaled, k.fast) == (kind.scaled, kind.fast))
    if not kind.epilogue:
        return shapes(kind) if n % 32 else some(kind)
    aligned = EPILOGUES[name].index(kind.epilogue) % 2 == 0
    return some(kind) if (n % 32 == 0) == aligned else []


def depths(kind: Kind) -> list[Config]:
    """Every ring of some()."""
    wanted = [but_its_ring(c) for c in some(kind)]
    legal = (c for c in configs.configs(kind, 1) if c.raster == 8)
    return [c for c in legal if but_its_ring(c) in wanted]


def some(kind: Kind) -> list[Config]:
    """A few that differ in all that a kernel branches on."""
    found = [
        Config("large", 256, 96, 3, raster=4),
        Config("large", 128, 256 if kind.fast else 144, 3, raster=4),
        Config("large", 128, 192, 4, raster=4, staged=kind.fast),
        Config("large", 128, 256, 3, raster=4, staged=True)
        if kind.fast
        else Config("large", 256, 128, 4, raster=4),
        Config("large", 128, 80, 4, raster=4),
        Config("small", 16, 64, 6),
        Config("small", 64, 64, 4, 4),
    ]
    if kind.scaled:
        found += [
            Config("small", 32, 64, 6, multicast=2),
            Config("small", 64, 64, 3, ahead=False),
            Config("large", 128, 176, 4, raster=4),  # scales of three blocks of columns
        ]
    if kind.fast:
        found.append(Config("large", 128, 240, 3, raster=4, staged=True))
    return found


@dataclass
class Operands:
    """What one product takes; `kind.epilogue` says which of bias and residual it uses."""

    x: torch.Tensor
    weight: torch.Tensor
    kind: Kind
    input_scale: torch.Tensor | None = None
    weight_scale: torch.Tensor | None = None
    alpha: float | torch.Tensor = 1.0
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None

    @property
    def more(self) -> dict[str, Any]:
        """The arguments of gemm.prepare beside operands."""
        epilogue = self.kind.epilogue
        given: dict[str, Any] = {
            "bias": self.bias if epilogue & BIAS else None,
            "residual": self.residual if epilogue & RESIDUAL else None,
        }
        if self.kind.scaled:
            return {**given, "input_scale": self.input_scale, "weight_scale": self.weight_scale}
        return {**given, "alpha": self.alpha}

    def rows(self, rows: slice) -> Operands:
        """The product of some rows of the input."""
        names = ("x", "input_scale", "residual")
        part = {name: getattr(self, name) for name in names}
        return replace(self, **{name: t if t is None else t[rows] for name, t in part.items()})

    @functools.cached_property
    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The result in float64, and the sum of the magnitudes of its terms."""
        if self.kind.scaled:
            given = (self.x, self.weight, self.input_scale, self.weight_scale)
            exact, magnitude = product(*given), magnitude_of(*given)
        else:
            x, weight = self.x.double(), self.weight.double()
            alpha = torch.as_tensor(self.alpha, dtype=FP32, device=x.device).double()
            exact, magnitude = alpha * (x @ weight.T), alpha.abs() * (x.abs() @ weight.abs().T)
        for term in (self.more["bias"], self.more["residual"]):
            if term is not None:
                exact, magnitude = exact + term.double(), magnitude + term.double().abs()
        if self.kind.epilogue & GELU:
            exact = torch.nn.functional.gelu(exact, approximate="tanh")
            magnitude = GELU_SLOPE * magnitude
        return exact, magnitude


def padded(values: torch.Tensor) -> torch.Tensor:
    """On the GPU, a slice of a wider matrix of NaN codes: rows begin at multiples of 16 bytes."""
    rows, columns = values.shape
    whole = torch.full((rows, -(-columns // 16) * 16 + 48), 0x7F, dtype=torch.uint8, device=DEVICE)
    view = whole.view(E4M3)[:, 16 : 16 + columns]
    view.view(torch.uint8).copy_(values.view(torch.uint8))
    return view


def operands(m, n, k, kind, generator, exact=False) -> Operands:
    """Random operands. With `exact`, sums have few bits: all orders, and tensor cores, agree.

    They are then small enough for GELU's bend too.
    """
    codes = "small" if exact else "normal"
    x, weight = (padded(codes_of(codes, (size, k), generator)) for size in (m, n))
    found = Operands(x, weight, kind)
    if kind.scaled:
        scales = "powers" if exact else "signed"
        of_input, of_weight = (m, blocks(k)), (blocks(n), blocks(k))
        found.input_scale = scales_of(scales, of_input, generator).to(DEVICE) * 2.0 ** (-6 * exact)
        found.weight_scale = scales_of(scales, of_weight, generator).to(DEVICE)
    else:
        found.alpha = -(2.0**-6) if exact else -0.0371
    size = 1.0 if exact else 200.0 * k**0.5  # a bias that counts

    def addend(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=generator) * size
        return ((values * 8).round() / 8).to(BF16).to(DEVICE)

    found.bias = addend(n).float() if n % 32 else addend(n)  # both types
    found.residual = addend(m, n)
    return found


def run(config: Config, given: Operands, out: torch.Tensor) -> None:
    kind = given.kind
    gemm.prepare(config, kind, given.x, given.weight, out, **given.more).on_current_stream()


def forced(config: Config, given: Operands, out: torch.Tensor | None = None) -> torch.Tensor:
    """The kernel with one configuration, into poisoned memory; a plain `out` has guards around."""
    guard = None
    if out is None:
        shape = given.x.shape[0] + 2, given.weight.shape[0]
        guard = torch.empty(shape, dtype=BF16, device=DEVICE).fill_(float("nan"))
        out = guard[1:-1]
    out.fill_(float("nan"))
    run(config, given, out)
    if guard is not None:
        assert guard[0].isnan().all() and guard[-1].isnan().all(), f"{config} wrote beside out"
    return out


def same(out: torch.Tensor, want: torch.Tensor, what: object) -> None:
    """Bit equality, judged on the GPU where nothing differs."""
    if not torch.equal(out.contiguous().view(torch.int16), want.contiguous().view(torch.int16)):
        assert_bit_equal(out, want, str(what))


def check(out: torch.Tensor, given: Operands, exact: bool, what: object) -> None:
    """Compare with the float64 result; `exact` as the operands were made."""
    want, magnitude = given.exact
    if exact and not given.kind.epilogue & GELU:  # nothing is rounded but the result
        rounded = want.float().to(BF16) + 0.0  # +0 is as good as -0
        same(out + 0.0, rounded, what)
    elif exact:
        assert_close_to_exact(out, want, magnitude, FP32_SUM, what=str(what))
    elif given.kind.fast:
        assert_close_to_exact(out, want, magnitude, FP8_FAST_SUM, 1.5e-2, what=str(what))
    else:
        assert_close_to_exact(out, want, magnitude, FP8_PROMOTED_SUM, what=str(what))
