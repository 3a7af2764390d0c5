"""The formula of quantize_int8_groups, as formats/int8_group.py writes it."""

from __future__ import annotations

import torch

from ...formats.int8_group import quantize


def run(
    config: None, x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, group_size: int
) -> None:
    codes, scales = quantize(x, group_size)
    q.copy_(codes)
    scale.copy_(scales)
