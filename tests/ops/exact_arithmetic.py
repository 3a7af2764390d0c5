"""IEEE 754 rounding and the INT8 and FP8 formulas in rational numbers: no torch, NumPy or float.

Every result is computed exactly as a Fraction and rounded once to the format's grid, so it shares
nothing with the library that it judges.
"""

from __future__ import annotations

import math
from fractions import Fraction

# format -> bits of the significand, exponent of the smallest normal, exponent of the largest
FORMATS = {
    "float32": (24, -126, 127),
    "float16": (11, -14, 15),
    "bfloat16": (8, -126, 127),
    "e4m3": (4, -6, 8),  # its largest number is 448, less than this grid's 480
}


def rounded(x: Fraction, form: str = "float32", negative: bool = False) -> float:
    """x rounded half to even to a format; `negative` is the sign of an exact zero."""
    bits, smallest, largest = FORMATS[form]
    if x == 0:
        return -0.0 if negative else 0.0
    magnitude = abs(x)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < Fraction(2) ** exponent:
        exponent -= 1
    quantum = Fraction(2) ** (max(exponent, smallest) - bits + 1)
    value = round(magnitude / quantum) * quantum  # round() of a Fraction is half to even
    result = math.inf if value >= Fraction(2) ** (largest + 1) else float(value)
    return math.copysign(result, x)


def sign(x: float) -> bool:
    return math.copysign(1.0, x) < 0


def product(x: float, y: float) -> float:
    """float32(x * y) of finite numbers."""
    return rounded(Fraction(x) * Fraction(y), negative=sign(x) != sign(y))


def multiply_add(p: float, s: float, t: float) -> float:
    """float32(p * s + t) with one rounding, of finite numbers."""
    negative = sign(p) != sign(s) and sign(t)
    return rounded(Fraction(p) * Fraction(s) + Fraction(t), negative=negative)


def gemm_element(
    a: list[int],
    b: list[int],
    scale_a: list[float],
    scale_b: list[float],
    group_size: int,
    bias: float | None = None,
    form: str = "float32",
) -> float:
    """One element of int8_gemm by its formula; inputs finite, and no overflow before the end."""
    total = 0.0
    for g, start in enumerate(range(0, len(a), group_size)):
        stop = start + group_size
        partial = sum(x * y for x, y in zip(a[start:stop], b[start:stop]))
        total = multiply_add(float(partial), product(scale_a[g], scale_b[g]), total)
    if bias is not None:
        total = multiply_add(1.0, bias, total)
    return total if math.isinf(total) else rounded(Fraction(total), form, sign(total))


def quantized_group(values: list[float]) -> tuple[list[int], float]:
    """Codes and scale of one group of float64 values, each rounded to float32 first."""
    wide = [v if not math.isfinite(v) else rounded(Fraction(v)) for v in values]
    if any(map(math.isnan, wide)):
        return [0] * len(wide), math.nan
    largest = max(map(abs, wide))
    if math.isinf(largest):
        return [0] * len(wide), math.inf
    floor = rounded(Fraction(1e-12))
    scale = max(rounded(Fraction(largest) / 127), floor)
    codes = [round(Fraction(rounded(Fraction(v) / Fraction(scale)))) for v in wide]
    return [max(-127, min(127, code)) for code in codes], scale


def e4m3_code(value: float) -> int:
    """The byte of a number that E4M3 holds exactly; NaN is 0x7f."""
    if math.isnan(value):
        return 0x7F
    magnitude = Fraction(abs(value))
    exponent = max(math.frexp(float(magnitude))[1] - 1, -6) if magnitude else -6
    steps = magnitude / Fraction(2) ** (exponent - 3)
    assert steps.denominator == 1 and steps < 16 and magnitude <= 448
    # a normal number's steps are 8 to 15: the 8 is the leading bit, and adds 1 to the exponent
    return (0x80 if sign(value) else 0) | ((exponent + 6) * 8 + int(steps))


def quantized_fp8_group(values: list[float]) -> tuple[list[int], float]:
    """Codes and scale of one group of float64 values, each rounded to float32 first."""
    wide = [v if not math.isfinite(v) else rounded(Fraction(v), negative=sign(v)) for v in values]
    if any(map(math.isnan, wide)):
        return [0x7F] * len(wide), math.nan
    largest = max(map(abs, wide))
    if math.isinf(largest):
        return [0x7F] * len(wide), math.inf
    scale = max(rounded(Fraction(largest) / 448), rounded(Fraction(1e-12)))
    inverse = rounded(1 / Fraction(scale))
    clamped = [max(-448.0, min(448.0, product(v, inverse))) for v in wide]
    return [e4m3_code(rounded(Fraction(v), "e4m3", sign(v))) for v in clamped], scale
