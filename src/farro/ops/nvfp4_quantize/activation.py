"""Gated activations of a fused projection [gate | up], as every back end has to compute them.

"silu", a chain of BF16 operations: bf16(bf16(silu(gate)) * up), each rounded once, with

    silu(g) = g / (1 + exp(-g)) correctly rounded to FP32; exp overflows as FP32 does, so that
              silu(g) is -0 for finite g below -88.73

"situ", rounded to BF16 once from FP32: beta * tanh(gate / beta) * sigmoid(gate) times
linear_beta * tanh(up / linear_beta), or times up where linear_beta is not positive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...formats.gate_up import split_gate_up

ACTIVATIONS = ("silu", "situ")
LARGEST, SMALLEST = 2.0**128 - 2.0**104, 2.0**-149  # positive FP32 numbers


@dataclass(frozen=True)
class Gated:
    """What to do with [gate | up]. `beta` and `linear_beta` are FP32 values."""

    interleaved: bool
    activation: str
    beta: float
    linear_beta: float


def fp32(value: float) -> float:
    """The value rounded to FP32."""
    return float(torch.tensor(value, dtype=torch.float64, device="cpu").float())


def silu(gate: torch.Tensor) -> torch.Tensor:
    """BF16 of BF16: in float64, which no rounding of a BF16 value comes near enough to spoil."""
    g = gate.double()
    e = torch.exp(-g)
    e = torch.where(e > LARGEST, torch.inf, e)
    return (g / (1 + e)).float().bfloat16()


def gated(x: torch.Tensor, how: Gated, silu: Any = silu) -> torch.Tensor:
    """BF16 [..., 2N] -> BF16 [..., N]."""
    gate, up = split_gate_up(x, how.interleaved)
    if how.activation == "silu":
        y: torch.Tensor = silu(gate).float() * up.float()
        return y.bfloat16()
    g, u = gate.double(), up.double()
    value = how.beta * torch.tanh(g / how.beta) * torch.sigmoid(g)
    if how.linear_beta > 0:
        u = how.linear_beta * torch.tanh(u / how.linear_beta)
    return (value * u).float().bfloat16()
