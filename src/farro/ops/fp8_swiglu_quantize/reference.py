"""fp8_blockwise_swiglu_quantize_fp8 by its formula, sums in float64."""

from __future__ import annotations

import torch

from ...formats.fp8 import blocks, quantize
from ..fp8_blockwise_linear.reference import product

_BLOCK_ELEMENTS = 1 << 23  # of gate and up each: float64 temporaries of a big problem must fit


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """bf16(bf16(silu(gate)) * up) of float64 sums; gate and up are rounded to FP32 before."""
    silu = torch.nn.functional.silu(gate.float().double()).float().bfloat16()
    return (silu.float() * up.float()).bfloat16()


def run(
    config: None,
    x: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    output: torch.Tensor,
    output_scale: torch.Tensor,
) -> None:
    m, n = output.shape
    of_up = blocks(n)  # where the scales of the up projection begin
    rows = max(1, _BLOCK_ELEMENTS // n)
    for top in range(0, m, rows):
        block = slice(top, min(top + rows, m))
        here = (x[block], input_scale[block])
        gate = product(here[0], weight[:n], here[1], weight_scale[:of_up])
        up = product(here[0], weight[n:], here[1], weight_scale[of_up:])
        codes, scale = quantize(swiglu(gate, up), "1x128")
        output[block] = codes
        output_scale[block] = scale
