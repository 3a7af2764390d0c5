"""Device functions on tiles that Triton kernels of several operators share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def banded_tile(m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Tile coordinates of this program; GROUP_M row tiles share their columns while in L2."""
    pid = tl.program_id(0)
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    per_band = GROUP_M * tiles_n
    first = (pid // per_band) * GROUP_M
    height = min(tiles_m - first, GROUP_M)
    within = pid % per_band
    return first + within % height, within // height
