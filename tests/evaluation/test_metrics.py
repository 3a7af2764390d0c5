"""The figures against the same formulas in numpy's float64."""

from __future__ import annotations

import math

import pytest
import torch

from farro.evaluation.metrics import (
    NoiseSummary,
    SignalAndNoise,
    kl_divergence,
    negative_log_likelihood,
    perplexity,
)

np = pytest.importorskip("numpy")


def log_softmax(logits: torch.Tensor):
    values = logits.double().numpy()
    values = values - values.max(-1, keepdims=True)
    return values - np.log(np.exp(values).sum(-1, keepdims=True))


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_negative_log_likelihood_and_perplexity(rows, dtype):
    logits = (8 * torch.randn(rows, 300)).to(dtype)
    labels = torch.randint(0, 300, (rows,))
    want = -log_softmax(logits)[np.arange(rows), labels.numpy()].sum()
    got = negative_log_likelihood(logits, labels)
    assert got == pytest.approx(want, rel=1e-6)
    assert perplexity(got, rows) == pytest.approx(math.exp(want / rows), rel=1e-5)


def test_perplexity_of_a_uniform_model_is_its_vocabulary():
    nll = negative_log_likelihood(torch.zeros(10, 50), torch.arange(10))
    assert perplexity(nll, 10) == pytest.approx(50, rel=1e-6)
    assert perplexity(1e6, 1) == math.inf


@pytest.mark.parametrize("rows", [1, 64, 130])
def test_kl_divergence(rows):
    p = 5 * torch.randn(rows, 300)
    q = p + 0.3 * torch.randn(rows, 300)
    log_p, log_q = log_softmax(p), log_softmax(q)
    want = (np.exp(log_p) * (log_p - log_q)).sum()
    # the error of an FP32 log softmax does not shrink with a divergence that is near zero
    assert kl_divergence(p, q) == pytest.approx(want, rel=1e-4, abs=1e-6 * rows)


def test_kl_divergence_takes_the_expectation_under_the_first():
    p, q = torch.zeros(1, 2), torch.tensor([[0.0, math.log(3)]])
    assert kl_divergence(p, q) == pytest.approx(math.log(2) - math.log(3) / 2, rel=1e-5)
    assert kl_divergence(q, p) == pytest.approx(0.75 * math.log(3) - math.log(2), rel=1e-5)


def test_kl_divergence_of_a_model_with_itself_is_zero():
    p = (5 * torch.randn(130, 300)).bfloat16()
    assert kl_divergence(p, p.clone()) == 0
    assert kl_divergence(p, p.float() + 3) == pytest.approx(0, abs=1e-4)  # logits have no origin


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_signal_and_noise_over_several_tensors(dtype):
    sums, signal, noise = SignalAndNoise(), 0.0, 0.0
    for rows in (1, 64, 100):
        x = torch.randn(rows, 50).to(dtype)
        q = x + 0.01 * torch.randn(rows, 50)
        sums.add(x, q)
        signal += (x.double().numpy() ** 2).sum()
        noise += ((x.double().numpy() - q.double().numpy()) ** 2).sum()
    assert sums.db == pytest.approx(10 * math.log10(signal / noise), rel=1e-12)


def test_signal_and_noise_at_the_edges():
    exact = SignalAndNoise()
    exact.add(torch.ones(2, 2), torch.ones(2, 2))
    assert exact.db == math.inf
    silent = SignalAndNoise()
    silent.add(torch.zeros(2, 2), torch.ones(2, 2))
    assert silent.db == -math.inf
    broken = SignalAndNoise()
    broken.add(torch.tensor([[math.nan]]), torch.zeros(1, 1))
    assert math.isnan(broken.db)


def test_summary_names_the_worst_layer():
    noise = NoiseSummary({"a": 40.0, "b": 31.5, "c": 42.0})
    assert (noise.median, noise.worst, noise.worst_layer) == (40.0, 31.5, "b")
    assert NoiseSummary({"a": 40.0, "b": math.nan}).worst_layer == "b"
