"""int8_gemm by its formula: exact group sums in float64, one fused multiply-add a group."""

from __future__ import annotations

import torch

from ...exact import fma32
from ...formats.int8_group import group_bounds

_BLOCK_ELEMENTS = 1 << 24  # outputs at a time: float64 temporaries of a big problem must fit


def run(
    config: None,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    group_size: int,
) -> None:
    m, n = out.shape
    rows = max(1, _BLOCK_ELEMENTS // n)
    for top in range(0, m, rows):
        block = slice(top, min(top + rows, m))
        total = torch.zeros(block.stop - top, n, dtype=torch.float32, device=out.device)
        for g, (start, stop) in enumerate(group_bounds(a.shape[1], group_size)):
            weight = b[g, : stop - start] if b.dim() == 3 else b[start:stop]
            partial = a[block, start:stop].double() @ weight.double()  # exact: below 2^24
            scales = scale_a[block, g, None] * scale_b[None, g]
            total = fma32(partial, scales, total)
        if bias is not None:
            total += bias.float()
        out[block] = total.to(out.dtype)
