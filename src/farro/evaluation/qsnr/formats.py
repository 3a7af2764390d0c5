"""The number formats and the scales that are compared: one line each in ELEMENTS and SCALES."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

E4M3_LARGEST = 448.0


@dataclass(frozen=True)
class Element:
    """A number format: an integer has `mantissa` None, else it has that many bits and a bias."""

    name: str
    label: str
    bits: int
    largest: float
    mantissa: int | None = None
    bias: int = 0

    def nearest(self, x: torch.Tensor) -> torch.Tensor:
        """FP32 values to the nearest of this format, half to even, saturating. May overwrite x."""
        if self.mantissa is None:
            return x.round_().clamp_(-self.largest, self.largest)
        # the power of two below |x|, from the smallest normal number on; then its last place
        power = (x.view(torch.int32) >> 23).bitwise_left_shift_(23).view(torch.float32).abs_()
        step = power.clamp_min_(2.0 ** (1 - self.bias)).mul_(2.0**-self.mantissa)
        return x.div_(step).round_().mul_(step).clamp_(-self.largest, self.largest)


@dataclass(frozen=True)
class Scale:
    """How a block's scale is stored; `blocks` are those it is defined for, all where empty."""

    name: str
    label: str
    of: Callable[[torch.Tensor, float], torch.Tensor]  # max|x| of blocks, largest -> scales
    rho: float  # about what its rounding adds: the theory's factor on the step
    blocks: tuple[int, ...] = ()
    bits: tuple[int, ...] = ()  # of the elements that it goes with, all where empty

    def fits(self, element: Element, block: int) -> bool:
        by_block = not self.blocks or block in self.blocks
        return by_block and (not self.bits or element.bits in self.bits)


def _fp32(largest: torch.Tensor, limit: float) -> torch.Tensor:
    return largest / limit


def _e8m0(largest: torch.Tensor, limit: float) -> torch.Tensor:
    """The next power of two, so that nothing saturates (the OCP format's own rule rounds down)."""
    fraction, exponent = torch.frexp(largest / limit)
    exponent = exponent - (fraction == 0.5).int()
    return torch.ldexp(torch.ones_like(largest), exponent.clamp(-127, 127))


def _e4m3(largest: torch.Tensor, limit: float) -> torch.Tensor:
    """As in NVFP4: E4M3 under one FP32 factor that takes the tensor's largest block to 448."""
    scale = largest / limit
    factor = scale.max() / E4M3_LARGEST
    codes = (scale / factor).clamp(2.0**-9, E4M3_LARGEST).to(torch.float8_e4m3fn)
    return codes.float() * factor


ELEMENTS = (
    Element("int8", "INT8", 8, 127.0),
    Element("fp8", "FP8 E4M3", 8, 448.0, mantissa=3, bias=7),
    Element("int4", "INT4", 4, 7.0),
    Element("fp4", "FP4 E2M1", 4, 6.0, mantissa=1, bias=1),
)
SCALES = (
    Scale("fp32", "FP32", _fp32, 1.0),
    Scale("e8m0", "E8M0", _e8m0, 1.5),
    Scale("e4m3", "E4M3", _e4m3, 1.05, blocks=(16, 32), bits=(4,)),
)


def scales_of(scale: Scale, largest: torch.Tensor, element: Element) -> torch.Tensor:
    """Scales of blocks from their max|x|, FP32; 1 for a block of zeros."""
    return torch.where(largest > 0, scale.of(largest, element.largest), 1.0)


def restored(x: torch.Tensor, scale: torch.Tensor, element: Element) -> torch.Tensor:
    """x [blocks, B] quantized and back, under a scale [blocks]."""
    factor = scale.unsqueeze(-1)
    return element.nearest(x / factor).mul_(factor)
