"""The epilogues of fp8_linear in FP32, by torch's operators: for the reference and the CPU."""

from __future__ import annotations

import math

import torch

GELU_SLOPE = 2.0 * math.sqrt(2.0 / math.pi)
GELU_CUBE = 0.044715


def finish(
    total: torch.Tensor,
    alpha: float | torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    epilogue: str,
) -> torch.Tensor:
    """The epilogue of FP32 sums, in FP32 and in place: (alpha * total + bias) + residual, or GELU.

    `bias` [N] and `residual` [M,N] may be of any floating-point dtype.
    """
    total *= alpha
    if bias is not None:
        total += bias.float()
    if residual is not None:
        total += residual.float()
    return gelu_tanh(total) if epilogue == "bias_gelu" else total


def gelu_tanh(v: torch.Tensor) -> torch.Tensor:
    """0.5 * v * (1 + tanh(u)), u = sqrt(2/pi) * (v + 0.044715 * v^3), as v * sigmoid(2 * u).

    The two are equal; 1 + tanh(u) loses all its digits where u is far below zero.
    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units (GELUs)", arXiv 1606.08415.
    """
    return v * torch.sigmoid(GELU_SLOPE * (v + GELU_CUBE * (v * v * v)))
