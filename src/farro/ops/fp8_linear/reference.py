"""fp8_linear by its formula: sums in float64, the epilogue in FP32, one rounding to BF16.

A product of two E4M3 codes has 8 significant bits between 2^-18 and 2^18, so a float64 sum of up to
2^16 of them is exact whatever its order. acc = float32(sum) is its one rounding before the
epilogue, which rounds each of its operations to FP32 (epilogue.py) and then once to BF16.
"""

from __future__ import annotations

import torch

from .epilogue import finish

_BLOCK_ELEMENTS = 1 << 24  # of float64 operands and sums at a time


def run(
    config: None,
    x: torch.Tensor,
    weight: torch.Tensor,
    alpha: float | torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    epilogue: str,
    fast_accum: bool,
) -> None:
    (m, n), k = out.shape, x.shape[1]
    columns = max(1, _BLOCK_ELEMENTS // max(k, 1))
    rows = max(1, _BLOCK_ELEMENTS // max(k, min(n, columns)))
    for left in range(0, n, columns):
        across = slice(left, min(left + columns, n))
        block = weight[across].double()
        addend = None if bias is None else bias[across]
        for top in range(0, m, rows):
            down = slice(top, min(top + rows, m))
            # + 0.0: a sum of zeros is +0, whichever way a library begins it
            total = (x[down].double() @ block.T + 0.0).float()
            more = None if residual is None else residual[down, across]
            out[down, across] = finish(total, alpha, addend, more, epilogue).to(out.dtype)
