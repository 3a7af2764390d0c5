"""fp8_blockwise_swiglu_quantize_fp8 on a CPU: gate and up of a tile, and its groups quantized."""

from __future__ import annotations

import torch

from ...formats.fp8 import BLOCK, blocks, quantize
from ...problem import Problem
from ..fp8_blockwise_linear.cpu import Config, tile_of, tiles


def config(problem: Problem) -> Config:
    m, k = problem.spec("input").shape
    return tile_of(m, problem.spec("gate_up_weight").shape[0] // 2, k)


def _silu(gate: torch.Tensor) -> torch.Tensor:
    """Of FP32. torch's is 0 where exp(-gate) overflows, which a large up would show."""
    silu = torch.nn.functional.silu(gate)
    far = gate < -80
    if bool(far.any()):
        exact = gate.double()
        silu = torch.where(far, (exact * exact.exp()).float(), silu)
    return silu


def run(
    config: Config,
    x: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    output: torch.Tensor,
    output_scale: torch.Tensor,
) -> None:
    n = output.shape[1]
    halves = (weight[:n], weight[n:])
    scales = (weight_scale[: blocks(n)], weight_scale[blocks(n) :])
    for down, across, (gate, up) in tiles(config, x, halves, input_scale, scales):
        v = _silu(gate).bfloat16().float().mul_(up).bfloat16()
        codes, scale = quantize(v, "1x128")
        output[down, across] = codes
        output_scale[down, across.start // BLOCK : blocks(across.stop)] = scale
