"""What a router gives: the routes of the benchmarks of mixtures of experts."""

from __future__ import annotations

import torch

SEED = 20261129
_BIAS = 0.5  # standard deviation of an expert's own logit: some are asked more often than others
ABOUT = {"logits": "normal, with a normal bias for each expert", "bias": _BIAS, "seed": SEED}


def routed(
    tokens: int, experts: int, topk: int, device: torch.device, seed: int = SEED
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int64 [T, topk] and softmax weights fp32: top-k of normal logits with a bias per expert.

    More routes than experts come round to the same experts again.
    """
    random = torch.Generator().manual_seed(seed)
    bias = torch.randn(experts, generator=random) * _BIAS
    logits = torch.randn(tokens, experts, generator=random) + bias
    top, ids = logits.topk(min(topk, experts), dim=1)
    again = torch.arange(topk) % experts
    return ids[:, again].to(device), torch.softmax(top, 1)[:, again].contiguous().to(device)


def capacity(ids: torch.Tensor, experts: int) -> int:
    """Rows of an expert so that none overflows: the most that one is given, in steps of 8."""
    most = int(torch.bincount(ids.reshape(-1).cpu(), minlength=experts).max()) if ids.numel() else 0
    return max(8, -(-most // 8) * 8)
