"""NVFP4 in rational numbers, from the definition of its formats; nothing is the library's."""

from __future__ import annotations

import math
from fractions import Fraction

from .exact_arithmetic import product, rounded

E2M1 = [Fraction(v) for v in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]


def ue4m3_value(byte: int) -> Fraction:
    """Of bytes 0 .. 0x7e: 4 bits of exponent with bias 7, 3 of mantissa."""
    exponent, mantissa = byte >> 3, byte & 7
    if exponent == 0:
        return Fraction(mantissa, 512)
    return Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7)


UE4M3 = [ue4m3_value(byte) for byte in range(0x7F)]


def nearest(x: Fraction, values: list[Fraction]) -> int:
    """Index of the value next to x; of two equally near, the even one."""
    distances = [abs(x - v) for v in values]
    least = min(distances)
    found = [i for i, d in enumerate(distances) if d == least]
    return found[0] if len(found) == 1 else next(i for i in found if i % 2 == 0)


def e2m1_code(x: float) -> int:
    if math.isnan(x):
        return 0
    magnitude = E2M1[-1] if math.isinf(x) else Fraction(abs(x))
    code = nearest(magnitude, E2M1)
    return code | 8 if x < 0 and code else code


def scale_byte(largest: float, gscale: float) -> int:
    """Of a block whose values and factor are finite."""
    scale = gscale if largest == 0 else product(rounded(Fraction(largest) / 6), gscale)
    bounded = min(max(Fraction(min(scale, 1e30)), Fraction(1, 512)), Fraction(448))
    return nearest(bounded, UE4M3)


def quantized_block(values: list[float], gscale: float) -> tuple[list[int], int]:
    """Codes and scale byte of one block of FP32 values, a positive factor or NaN or Inf."""
    if not all(map(math.isfinite, (*values, gscale))):
        return [0] * len(values), 0x7F
    byte = scale_byte(max(map(abs, values)), gscale)
    ratio = rounded(Fraction(gscale) / UE4M3[byte])
    return [e2m1_code(product(v, ratio)) for v in values], byte
