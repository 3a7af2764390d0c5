"""NVFP4 in blocks of 32: e2m1 codes, two a byte, and one UE4M3 scale for 32 values along K.

e2m1 is sign, 2 exponent bits and 1 mantissa bit: 0 .5 1 1.5 2 3 4 6. UE4M3 is the non-negative
half of E4M3: 2^-9 .. 448, 0x7f is NaN. For each block, in FP32, with a global factor `gscale`:

    s    = ue4m3(max|x| / 6 * gscale), clamped to [2^-9, 448]; of a zero block ue4m3(gscale)
    code = e2m1(x * (gscale / s)), to nearest even, saturating, -0 as +0

so that x is about code * s / gscale. A block that holds NaN or Inf, or whose gscale is one, has
the scale NaN and codes 0. Source: NVIDIA's NVFP4, whose blocks of 16 are 32 here, and the OCP
Microscaling Formats (MX) Specification 1.0 for e2m1.
"""

from __future__ import annotations

import torch

from .shape import split

BLOCK = 32  # values of one scale
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MAX_CODE = 6.0
MAX_SCALE, MIN_SCALE = 448.0, 2.0**-9
NAN_SCALE = 0x7F
NO_ROW = 0x38  # the scale (1.0) in slots that belong to no row
# 448 * 6 / max|W| would overflow for max|W| < 8e-36, and gscale / s before that
MAX_GLOBAL = 2.0**118


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Codes 0..15 in uint8 of FP32 values: nearest even, saturating, -0 and NaN as 0."""
    return _encode(x).to(torch.uint8)


def _encode(x: torch.Tensor) -> torch.Tensor:
    """Codes in int32. Load-time quantizers run this on whole models, so it counts its passes.

    2^22 times the power of two below |x|, 1 at least, added to |x|, leaves a last bit that is worth
    the step of e2m1 there: 1/2 below 2, 1 below 4, then 2. FP32's own rounding does the rest, the
    low bits count steps, and the exponent tells how many codes lie below.
    """
    size = x.abs().clamp_max_(MAX_CODE)
    power = size.view(torch.int32).clamp_min(0x3F800000).bitwise_and_(0x7F800000)
    bits = size.add_(power.add_(22 << 23).view(torch.float32)).view(torch.int32)
    code = (bits >> 22).sub_(298).add_(bits.bitwise_and_(7))
    code.bitwise_or_((x.view(torch.int32) >> 28).bitwise_and_(8))
    return code.mul_(x.abs() > 0.25)  # what is nearest to 0, and NaN, whose bits mean nothing here


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """FP32 values of codes 0..15; 8 is -0."""
    # by bits rather than from a table, which a GPU would wait for
    magnitude = (codes & 7).to(torch.int32)
    normal = ((magnitude << 22) + 0x3F000000).view(torch.float32)
    value = torch.where(magnitude < 2, magnitude.float() * 0.5, normal)
    return torch.where(codes > 7, -value, value)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K] of codes -> [..., K/2], lower K in the low nibble."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def _pack32(codes: torch.Tensor) -> torch.Tensor:
    """pack_codes of contiguous int32 codes, by pairs of them as one 64-bit number."""
    pairs = codes.view(torch.int64)
    return ((pairs >> 28) | pairs).to(torch.uint8)


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K/2] -> codes [..., K]."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def positive_zeros(packed: torch.Tensor) -> torch.Tensor:
    """Packed codes with -0 as +0."""
    magnitude = packed & 0x77
    nonzero = (magnitude | magnitude >> 1 | magnitude >> 2) & 0x11
    return magnitude | (packed >> 3 & nonzero) << 3


def encode_ue4m3(x: torch.Tensor) -> torch.Tensor:
    """UE4M3 bytes of FP32 values clamped to [2^-9, 448]: nearest even; NaN is 0x7f."""
    # clamped first: torch 2.11 turns overflow into NaN, newer torch saturates
    code = x.clamp(MIN_SCALE, MAX_SCALE).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(x.isnan(), NAN_SCALE, code)


def decode_ue4m3(scales: torch.Tensor) -> torch.Tensor:
    """FP32 values of UE4M3 bytes."""
    return scales.view(torch.float8_e4m3fn).float()


def block_scales(largest: torch.Tensor, gscale: torch.Tensor) -> torch.Tensor:
    """UE4M3 bytes of blocks, from their max|x| and factors (FP32, broadcastable)."""
    # a tensor: on a GPU torch divides by a number through its rounded reciprocal
    six = torch.full((), MAX_CODE, dtype=torch.float32, device=largest.device)
    scale = torch.where(largest == 0, gscale, largest / six * gscale)
    return encode_ue4m3(torch.where(largest.isfinite() & gscale.isfinite(), scale, torch.nan))


def quantize_blocks(
    x: torch.Tensor, gscale: torch.Tensor, block: int = BLOCK
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., K] and gscale FP32 [..., 1] -> packed uint8 [..., K/2], scales uint8 [..., K/block].

    The family's blocks have 32 values; NVIDIA's dense checkpoints have blocks of 16.
    """
    blocks = split(x.float(), -1, -1, block)
    scales = block_scales(blocks.abs().amax(-1), gscale)
    ratio = gscale / decode_ue4m3(scales)
    values = torch.mul(
        blocks,
        ratio.unsqueeze(-1),
        out=torch.empty_like(blocks, memory_format=torch.contiguous_format),
    )
    return _pack32(_encode(values)).flatten(-2), scales


def dequantize_blocks(
    packed: torch.Tensor, scales: torch.Tensor, block: int = BLOCK
) -> torch.Tensor:
    """FP32 [..., K] of code * scale, exact; NaN scales give NaN."""
    values = split(decode_e2m1(unpack_codes(packed)), -1, -1, block)
    return (values * decode_ue4m3(scales).unsqueeze(-1)).flatten(-2)


def automatic_global(w: torch.Tensor) -> torch.Tensor:
    """FP32 [E] of a weight [E, M, K]: 448 * 6 / max|W|, at most 2^118; 1 of an expert of zeros.

    It moves scales to the upper end of UE4M3, away from its subnormals.
    """
    if w.numel() == 0:
        return torch.ones(w.shape[0], dtype=torch.float32, device=w.device)
    largest = torch.maximum(w.amax((1, 2)), w.amin((1, 2)).neg()).float()  # without a copy of w
    span = torch.full((), MAX_SCALE * MAX_CODE, dtype=torch.float32, device=w.device)
    factor = (span / largest).clamp_max(MAX_GLOBAL)
    return torch.where(largest == 0, 1.0, factor)
