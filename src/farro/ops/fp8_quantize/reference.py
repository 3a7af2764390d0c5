"""The formula of quantize_fp8_*, as formats/fp8.py writes it."""

from __future__ import annotations

import torch

from ...formats.fp8 import quantize


def run(config: None, x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, kind: str) -> None:
    codes, scales = quantize(x, kind)
    q.copy_(codes)
    scale.copy_(scales)
