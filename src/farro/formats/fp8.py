"""FP8 E4M3 codes with FP32 scales: one for a tensor, a row, 1x128 or 128x128 values.

For each group of values that shares a scale, all in FP32 (source of the element format: OCP 8-bit
Floating Point Specification, revision 1.0):

    scale = max(max|x| / 448, 1e-12)        IEEE division; the factor that restores values
    q     = e4m3(clamp(x * (1 / scale), -448, 448))        IEEE reciprocal, one FP32 product,
                                                           round half to even, subnormals kept

Zeros keep their sign. A group that holds NaN or Inf keeps that as its scale (NaN before Inf; a NaN
is always 0x7fc00000) and all its codes are NaN (0x7f); no other group changes. The last groups of
a row and of a column are smaller where 128 does not divide a size. A group of no values has the
scale 1e-12.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

E4M3 = torch.float8_e4m3fn
MAX = 448.0
SCALE_FLOOR = 1e-12
BLOCK = 128
NAN_CODE = 0x7F
KINDS = ("per_tensor", "per_row", "1x128", "128x128")


def blocks(size: int) -> int:
    """ceil(size / 128)."""
    return -(-size // BLOCK)


def scale_shape(shape: Sequence[int], kind: str) -> tuple[int, ...]:
    """Shape of the scale of x [..., K] ([M, K] for 128x128)."""
    if kind == "per_tensor":
        return ()
    if kind == "per_row":
        return (*shape[:-1], 1)
    if kind == "1x128":
        return (*shape[:-1], blocks(shape[-1]))
    return blocks(shape[0]), blocks(shape[1])


def encode(values: torch.Tensor) -> torch.Tensor:
    """FP32 -> E4M3, clamped to +-448, rounded half to even; NaN gives 0x7f."""
    codes = values.clamp(-MAX, MAX).to(E4M3)  # without the clamp torch 2.11 makes NaN of 464
    return codes.view(torch.uint8).masked_fill(values.isnan(), NAN_CODE).view(E4M3)


def scale_of(largest: torch.Tensor) -> torch.Tensor:
    """max(largest / 448, 1e-12) of FP32 magnitudes; Inf stays, NaN becomes 0x7fc00000."""
    # a tensor on the same device: on a GPU torch divides by a number through its reciprocal
    divisor = torch.full((), MAX, dtype=torch.float32, device=largest.device)
    scale = (largest / divisor).clamp_min(SCALE_FLOOR)
    return scale.masked_fill(scale.isnan(), math.nan)


def inverse_of(scale: torch.Tensor) -> torch.Tensor:
    """1 / scale, correctly rounded; NaN where the scale is not finite, so that all codes are."""
    one = torch.ones((), dtype=torch.float32, device=scale.device)
    return (one / scale).masked_fill(~torch.isfinite(scale), math.nan)


def spread(scale: torch.Tensor, shape: Sequence[int], kind: str) -> torch.Tensor:
    """The scale of each element of a tensor of `shape`, as a tensor that broadcasts to it."""
    if kind in ("per_tensor", "per_row"):
        return scale
    scale = scale.repeat_interleave(BLOCK, dim=-1)[..., : shape[-1]]
    return scale if kind == "1x128" else scale.repeat_interleave(BLOCK, dim=0)[: shape[0]]


def _largest(x: torch.Tensor, kind: str) -> torch.Tensor:
    """max|x| of each group, in the scale's shape; NaN where a group holds one."""
    shape = scale_shape(x.shape, kind)
    if x.numel() == 0:
        return x.new_zeros(shape)
    size = x.abs()
    if kind == "per_tensor":
        return size.amax()
    if kind == "per_row":
        return size.amax(-1, keepdim=True)
    size = torch.nn.functional.pad(size, (0, -x.shape[-1] % BLOCK))
    if kind == "1x128":
        return size.view(*shape, BLOCK).amax(-1)
    size = torch.nn.functional.pad(size, (0, 0, 0, -x.shape[0] % BLOCK))
    return size.view(shape[0], BLOCK, shape[1], BLOCK).amax((1, 3))


def quantize(x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., K] -> codes E4M3 of its shape and scale FP32 of `scale_shape`: the formula."""
    x = x.float()
    scale = scale_of(_largest(x, kind))
    return encode(x * spread(inverse_of(scale), x.shape, kind)), scale


def dequantize(q: torch.Tensor, scale: torch.Tensor, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """dtype(fp32(q) * scale): one product in FP32, one conversion."""
    return (q.float() * spread(scale, q.shape, kind)).to(dtype)


DECODED = 2.0**-8  # `Decoder` gives values times this


class Decoder:
    """fp32(codes) * DECODED, exactly: on a CPU ten times as fast as torch's own conversion.

    With its bits moved up by seven a code is a float16 number of the same sign, exponent field and
    mantissa, subnormal ones too; the biases of the two formats differ by 8. Only NaN has no such
    place. Takes up to `size` codes at a time, in buffers of its own.
    """

    def __init__(self, size: int) -> None:
        # dtype and device are named: a caller may have set other defaults
        self._bits = torch.empty(size, dtype=torch.int16, device="cpu")
        self._sizes = torch.empty(size, dtype=torch.uint8, device="cpu")

    def __call__(self, codes: torch.Tensor, into: torch.Tensor) -> None:
        """into <- codes decoded: E4M3 of any strides into FP32 of the same shape."""
        if codes.numel() == 0:
            return
        bits = self._bits[: codes.numel()].view(codes.shape)
        bits.copy_(codes.view(torch.int8)).mul_(128)
        bits &= -0x4080  # the sign was extended over a bit of the exponent
        into.copy_(bits.view(torch.float16))
        size = self._sizes[: codes.numel()].view(codes.shape)
        torch.bitwise_and(codes.view(torch.uint8), NAN_CODE, out=size)
        if int(size.amax()) == NAN_CODE:
            into.masked_fill_(size == NAN_CODE, math.nan)
