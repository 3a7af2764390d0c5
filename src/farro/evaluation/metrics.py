"""The figures of an evaluation, as pure functions of tensors and numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import torch

_ROWS = 64  # of logits at a time: 64 x 50,000 FP32 values are 13 MB


def negative_log_likelihood(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """sum over t of -log softmax(logits[t])[labels[t]], in nats.

    logits [T, V] of any float dtype, labels int64 [T]; log softmax in FP32, the sum in float64.
    """
    total = torch.zeros((), dtype=torch.float64, device=logits.device)
    for rows, targets in zip(torch.split(logits, _ROWS), torch.split(labels, _ROWS)):
        losses = torch.nn.functional.cross_entropy(rows.float(), targets, reduction="none")
        total += losses.double().sum()
    return total.item()


def perplexity(nll: float, tokens: int) -> float:
    """exp of the mean negative log likelihood; infinite past the range of a float."""
    mean = nll / tokens
    return math.exp(mean) if mean < 700 else math.inf


def kl_divergence(reference: torch.Tensor, other: torch.Tensor) -> float:
    """sum over t of KL(softmax(reference[t]) || softmax(other[t])), in nats.

    Both are logits [T, V] of any float dtype; log softmax and a token's sum in FP32, the sum over
    tokens in float64.
    """
    total = torch.zeros((), dtype=torch.float64, device=reference.device)
    for p, q in zip(torch.split(reference, _ROWS), torch.split(other, _ROWS)):
        log_p = torch.log_softmax(p.float(), -1)
        difference = log_p - torch.log_softmax(q.float(), -1)
        total += (log_p.exp_() * difference).sum(-1).double().sum()
    return total.item()


@dataclass
class SignalAndNoise:
    """sum x^2 and sum (x - q)^2 in float64, added up over any number of tensors."""

    signal: float = 0.0
    noise: float = 0.0

    def add(self, x: torch.Tensor, q: torch.Tensor) -> None:
        """x [R, C] is the value, q its approximation."""
        for exact, near in zip(torch.split(x, _ROWS), torch.split(q, _ROWS)):
            exact = exact.double()
            self.noise += (exact - near.double()).square_().sum().item()
            self.signal += exact.square_().sum().item()

    @property
    def db(self) -> float:
        """10 log10(signal / noise); infinite without noise, NaN where a value was not finite."""
        if math.isnan(self.signal) or math.isnan(self.noise) or math.isinf(self.signal):
            return math.nan
        if self.noise == 0:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf


@dataclass(frozen=True)
class NoiseSummary:
    """Signal-to-noise of every layer in dB, and the two numbers that a table has room for."""

    layers: Mapping[str, float]

    @property
    def median(self) -> float:
        return statistics.median(_rank(db) for db in self.layers.values())

    @property
    def worst_layer(self) -> str:
        """The layer with the least dB; one that is not a number is worse than any."""
        return min(self.layers, key=lambda name: _rank(self.layers[name]))

    @property
    def worst(self) -> float:
        return self.layers[self.worst_layer]


def _rank(db: float) -> float:
    return -math.inf if math.isnan(db) else db
