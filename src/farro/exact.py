"""Correct rounding in plain torch, for any device: a fused multiply-add, float64 to BF16.

A float64 product and sum rounded to float32 rounds twice and is not a fused multiply-add (see
`FMA_TRIPLE`); rounding the float64 sum to odd first makes the second rounding right.
Source: Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using
rounding to odd", IEEE Transactions on Computers 57(4), 2008.
"""

from __future__ import annotations

import torch

# p, s, t for which fl32(fl64(p*s + t)) differs from fma(p, s, t)
FMA_TRIPLE = (3000351.0, float.fromhex("0x1.65df4p-46"), 1.0)


def fma32(p: torch.Tensor, s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """p * s + t with one rounding to float32; broadcasts; non-finite values as IEEE 754 says."""
    product = p.double() * s.double()  # exact: 24 + 24 bits
    addend = t.double()
    total = product + addend
    # Knuth's two-sum: `error` is what `total` lost, exactly
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    bits = total.view(torch.int64)
    inexact = (error != 0) & torch.isfinite(total) & torch.isfinite(error)
    even = (bits & 1) == 0
    # Round to odd: where the sum is inexact and its last bit even, step toward the lost part
    away = (error > 0) == (total > 0)
    step = torch.where(away, 1, -1)
    odd = torch.where(inexact & even, bits + step, bits)
    return odd.view(torch.float64).float()


def bfloat16_once(x: torch.Tensor) -> torch.Tensor:
    """float64 -> bfloat16 with one rounding, to nearest even; torch rounds to float32 on the way.

    The float32 in between is rounded to odd, which leaves the second rounding right.
    """
    near = x.float()
    bits = near.view(torch.int32)
    inexact = (near.double() != x) & x.isfinite()
    truncated = torch.where(near.double().abs() > x.abs(), bits - 1, bits)
    odd = torch.where(inexact, truncated | 1, bits)
    return odd.view(torch.float32).bfloat16()
