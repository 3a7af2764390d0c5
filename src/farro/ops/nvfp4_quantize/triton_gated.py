"""Gated activations in Triton, bit for bit those of activation.py."""

from __future__ import annotations

import triton
import triton.language as tl

from ...arch import interpreting

# Adding 1.5 * 2^23 rounds to an integer, which is then in the low bits
ROUND = tl.constexpr(12582912.0)
LOG2_E = tl.constexpr(1.4426950216293335)  # 1 / ln 2 in FP32
LN2_HIGH = tl.constexpr(0.693145751953125)  # 12 bits short, so that whole multiples are exact
LN2_LOW = tl.constexpr(1.428606765330187e-06)
TRUNCATES = tl.constexpr(interpreting())  # Triton's interpreter does where a GPU rounds to even


@triton.jit
def bf16_rounded(value):
    """FP32 rounded to BF16."""
    if TRUNCATES:
        bits = value.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return tl.where(value == value, rounded, 0x7FC00000).to(tl.float32, bitcast=True)
    else:
        return value.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _silu(gate):
    """FP32 g / (1 + exp(-g)), by operations that round the same on every device.

    exp is 2^n times a polynomial. A test compares the result in BF16 with the correctly rounded one
    for every BF16 value of g.
    """
    t = tl.minimum(tl.maximum(-gate, -50.0), 89.0)  # exp(-50) is lost beside 1, exp(89) overflows
    shifted = tl.fma(t, LOG2_E, ROUND)
    n = shifted - ROUND
    r = tl.fma(-n, LN2_HIGH, t)
    r = tl.fma(-n, LN2_LOW, r)
    p = tl.full(r.shape, 1.0 / 5040, tl.float32)
    p = tl.fma(p, r, 1.0 / 720)
    p = tl.fma(p, r, 1.0 / 120)
    p = tl.fma(p, r, 1.0 / 24)
    p = tl.fma(p, r, 1.0 / 6)
    p = tl.fma(p, r, 0.5)
    p = tl.fma(p, r, 1.0)
    p = tl.fma(p, r, 1.0)
    # 2^(n-1), since n reaches 128
    power = (shifted.to(tl.int32, bitcast=True) - (0x4B400000 - 126)) << 23
    return tl.div_rn(gate, tl.fma(p * power.to(tl.float32, bitcast=True), 2.0, 1.0))


@triton.jit
def _tanh(x):
    """Of float64."""
    size = tl.abs(x)
    e = tl.exp(-2.0 * size)
    value = (1.0 - e) / (1.0 + e)
    # near 0 the difference cancels; the next term is below 2^-53
    s = x * x
    series = 1.0 + s * (-1.0 / 3 + s * (2.0 / 15 + s * (-17.0 / 315 + s * (62.0 / 2835))))
    return tl.where(size < 0.03125, x * series, tl.where(x < 0, -value, value))


@triton.jit
def gated(gate, up, SITU: tl.constexpr, BETA: tl.constexpr, LINEAR: tl.constexpr):
    """FP32 gate and up (of BF16 values) -> FP32 of a BF16 value, by silu or situ.

    LINEAR at or below 0 leaves up as it is.
    """
    if SITU:
        g = gate.to(tl.float64)
        u = up.to(tl.float64)
        value = BETA * _tanh(g / BETA) / (1.0 + tl.exp(-g))
        if LINEAR > 0:
            u = LINEAR * _tanh(u / LINEAR)
        return bf16_rounded((value * u).to(tl.float32))
    else:
        return bf16_rounded(bf16_rounded(_silu(gate)) * up)
