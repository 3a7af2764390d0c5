"""FP8 E4M3 codes and their scales in Triton kernels; the formulas are those of fp8.py.

Codes are read and written as bytes where CONVERT is not set: below SM89 Triton has no such type.
"""

from __future__ import annotations

import triton
import triton.language as tl

FLOOR = tl.constexpr(1e-12)
INF = tl.constexpr(0x7F800000)
QUIET_NAN = tl.constexpr(0x7FC00000)
NAN_CODE = tl.constexpr(0x7F)


@triton.jit
def magnitude(value):
    """The bits of |value| order as integers do, NaN above Inf: a float maximum drops NaN."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(largest):
    """max(largest / 448, 1e-12) of the bits of a magnitude; NaN as 0x7fc00000."""
    s = tl.div_rn(largest.to(tl.float32, bitcast=True), 448.0)
    s = tl.where(s < FLOOR, FLOOR, s)
    bits = tl.where(largest > INF, QUIET_NAN, s.to(tl.int32, bitcast=True))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def inverse_of(scale, finite):
    """1 / scale, NaN where that is not finite."""
    one = tl.full(scale.shape, 1.0, tl.float32)
    return tl.where(finite, tl.div_rn(one, scale), float("nan"))


@triton.jit
def encode(value, finite, CONVERT: tl.constexpr):
    """value, at most 448 (1 + 2^-22), to the nearest E4M3, half to even, as bytes."""
    if CONVERT:
        return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = value.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # 20 bits of the significand are rounded away, and the exponent's bias goes from 127 to 7
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # below 2^-6 codes count 2^-9, which is the last place of 2^14
    small = (tl.abs(value) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)
    return tl.where(finite, code, NAN_CODE).to(tl.uint8)


@triton.jit
def decode(codes):
    """Bytes of E4M3 to float16, exactly, NaN to NaN.

    Seven bits up, a code is a float16 number of the same sign, exponent field and mantissa; the
    biases of the two formats differ by 8.
    """
    bits = codes.to(tl.int8, bitcast=True).to(tl.int16) << 7
    value = (bits & -0x4080).to(tl.float16, bitcast=True) * 256.0
    return tl.where((codes & NAN_CODE) == NAN_CODE, float("nan"), value).to(tl.float16)
