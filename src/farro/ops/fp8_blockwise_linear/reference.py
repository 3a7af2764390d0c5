"""fp8_blockwise_linear_bf16 by its formula: sums and epilogue in float64, rounded at the end.

The product of two scales is rounded to FP32, as it is on every back end, so that overflow and
NaN come from the same places. Nothing else is rounded before the result: a sum over 128 products
of E4M3 codes is exact in float64 (all are multiples of 2^-18 below 2^25), in whatever order.
"""

from __future__ import annotations

import math

import torch

from ...formats.fp8 import BLOCK, blocks

_BLOCK_ELEMENTS = 1 << 24  # outputs at a time: float64 temporaries of a big problem must fit


def product(
    x: torch.Tensor, weight: torch.Tensor, input_scale: torch.Tensor, weight_scale: torch.Tensor
) -> torch.Tensor:
    """sum over blocks of fp32(input_scale * weight_scale) * (x @ weight.T), float64 [M,N]."""
    (m, k), n = x.shape, weight.shape[0]
    total = torch.zeros(m, n, dtype=torch.float64, device=x.device)
    for b in range(blocks(k)):
        here = slice(b * BLOCK, (b + 1) * BLOCK)
        partial = x[:, here].double() @ weight[:, here].double().T
        scale = input_scale[:, b, None] * weight_scale[None, :, b]
        total += scale.repeat_interleave(BLOCK, dim=1)[:, :n].double() * partial
    return total


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """x / 2 * (1 + tanh(u)), u = sqrt(2/pi) (x + 0.044715 x^3), as x * sigmoid(2u).

    The two are equal, but 1 + tanh(u) cancels where x is negative.
    """
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def run(
    config: None,
    x: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    gelu: bool,
) -> None:
    m, n = out.shape
    rows = max(1, _BLOCK_ELEMENTS // n)
    for top in range(0, m, rows):
        block = slice(top, min(top + rows, m))
        total = product(x[block], weight, input_scale[block], weight_scale)
        if bias is not None:
            total += bias.double()
        if gelu:
            total = gelu_tanh(total)
        out[block] = total.float().bfloat16()
