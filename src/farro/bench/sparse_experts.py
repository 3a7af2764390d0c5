"""Weights and activations of the benchmarks of paired-4:8 NVFP4 products, made on the device."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from ..formats.nvfp4 import MAX_CODE, MAX_SCALE
from ..nn import CompressedWeight
from ..ops.nvfp4_weights import (
    compress,
    decompress,
    dequantize_weight,
    prune_paired_4of8,
    quantize_weight,
)
from .kept import kept

_BYTES = 11 / 32  # of a dense weight: codes, metadata and scales


@dataclass(frozen=True, eq=False)
class Weight:
    """One projection of all experts, compressed: [E, N, K] of normal values over sqrt(K)."""

    a_comp: torch.Tensor
    e_meta: torch.Tensor
    sfa: torch.Tensor
    alpha: torch.Tensor
    n: int
    k: int
    key: Hashable

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.a_comp, self.e_meta, self.sfa

    def module(self) -> CompressedWeight:
        made = CompressedWeight(self.alpha.shape[0], self.n, self.k, device="meta")
        made.codes, made.metadata, made.block_scale = self.parts
        made.alpha = self.alpha
        return made

    def dense(self, expert: int) -> torch.Tensor:
        """What the codes of one expert stand for, fp32 [N, K]."""
        one = slice(expert, expert + 1)
        parts = self.a_comp[one], self.e_meta[one], self.sfa[one]
        packed, scales = decompress(*parts, self.k)
        return dequantize_weight(packed, scales, self.alpha[one])[0]

    def bf16(self) -> torch.Tensor:
        """What all codes stand for, rounded: bf16 [E, N, K]."""
        experts = range(self.alpha.shape[0])
        make = lambda: torch.stack([self.dense(e).bfloat16() for e in experts])  # noqa: E731
        values: torch.Tensor = kept(("bf16", self.key), make)
        return values

    def nbytes(self, experts: int) -> int:
        """Of so many of the experts."""
        return int(experts * self.n * self.k * _BYTES)


def weight(experts: int, n: int, k: int, device: torch.device) -> Weight:
    """The same for the same sizes, in every run."""
    key = (experts, n, k, device)
    made: Weight = kept(key, lambda: _weight(key))
    return made


def _weight(key: tuple[int, int, int, torch.device]) -> Weight:
    experts, n, k, device = key
    random = torch.Generator(device=device).manual_seed(n * 1000003 + k)
    made = []
    for _ in range(experts):
        w = torch.randn(1, n, k, device=device, generator=random) * k**-0.5
        packed, scales, alpha = quantize_weight(prune_paired_4of8(w))
        made.append((*compress(packed, scales, k), alpha))
    a_comp, e_meta, sfa, alpha = (torch.cat(parts) for parts in zip(*made))
    return Weight(a_comp, e_meta, sfa, alpha, n, k, key)


def factor(x: torch.Tensor) -> torch.Tensor:
    """gscale [1] of activations: their largest magnitude becomes the largest of NVFP4."""
    return (MAX_SCALE * MAX_CODE / x.abs().amax().float().clamp_min(1e-6)).reshape(1)


def multiple_of_32(size: int) -> int:
    return -(-size // 32) * 32
