"""What signal to noise a block's crest factor allows, for normal values.

With the crest factor c = max|x| / rms(x) of a block of g values, and rho >= 1 for what rounding the
scale up adds to the step (E8M0: 1 to 2, about 1.5), noise / signal is, for integers up to Q,

    (rho c / Q)^2 / 12

and for floating point of M mantissa bits, bias B and largest number Q, where w is the share of the
signal's energy in normal numbers, p the share of values in subnormal ones, z the energy of what
rounds to zero:

    w / (24 * 4^M)  +  (rho c / Q)^2 * 4^(1-B-M) / 12 * p  +  z

A scale that is not rounded (FP32) represents the block's largest value exactly, which takes 1/g off
the integers' noise and c^2 / g off w. Source: Chen et al., "INT v.s. FP", arXiv 2510.25602,
theorems 1 and 2; with Q = 2^(b-1) the first is its 4.78 + 6.02 b - 20 log10(rho) - 20 log10(c).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from .formats import Element, Scale

# Averages over the tensors of language models with E8M0 scales and blocks of 32, in dB, and the
# crest factor from which FP8 has less noise than INT8 (arXiv 2510.25602)
PAPER = {"int8": 40.35, "fp8": 31.50, "crossover": 7.55}


def decibels(noise: float) -> float:
    """10 log10(signal / noise) of a relative noise power."""
    return math.inf if noise <= 0 else -10 * math.log10(noise)


def noise(element: Element, crest: float, rho: float, block: int | None = None) -> float:
    """Relative noise power of normal values; `block` where the scale is exact."""
    step = rho * crest / element.largest
    if element.mantissa is None:
        return step**2 / 12 * (1 - 1 / block if block else 1)
    subnormal = step * 2.0 ** (1 - element.bias)  # the smallest normal number, in units of rms
    zero = subnormal * 2.0 ** (-element.mantissa - 1)  # half of the smallest subnormal one
    normal = 1 - _energy_below(subnormal) - (crest**2 / block if block else 0)
    share = _share_below(subnormal) - _share_below(zero)
    last = step * 2.0 ** (1 - element.bias - element.mantissa)
    rounding = max(normal, 0.0) / (24 * 4.0**element.mantissa)
    return rounding + last**2 / 12 * share + _energy_below(zero)


def _share_below(t: float) -> float:
    """Of normal values: how many have |x| < t rms."""
    return math.erf(t / math.sqrt(2))


def _energy_below(t: float) -> float:
    """Of normal values: the share of sum x^2 in those."""
    return _share_below(t) - t * math.sqrt(2 / math.pi) * math.exp(-(t**2) / 2)


def predicted(element: Element, scale: Scale, crest: float, block: int | None = None) -> float:
    """dB of blocks of a crest factor; `block` matters for exact scales alone."""
    exact = block if scale.rho == 1 else None
    return decibels(noise(element, crest, scale.rho, exact))


def crossover(
    low: Callable[[float], float], high: Callable[[float], float], start: float, end: float
) -> float | None:
    """Where `low`, above `high` at `start`, falls below it; None where it does not until `end`."""
    if low(start) < high(start) or low(end) > high(end):
        return None
    for _ in range(60):
        middle = (start + end) / 2
        if low(middle) >= high(middle):
            start = middle
        else:
            end = middle
    return start
