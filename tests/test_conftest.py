"""What pytest is asked for and cannot do is an error, and no run that skips everything."""

from __future__ import annotations

import types

import pytest
import torch

from . import conftest


def configure(monkeypatch, expression, gpu=False, collectonly=False):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    option = types.SimpleNamespace(markexpr=expression, collectonly=collectonly)
    conftest.pytest_configure(types.SimpleNamespace(option=option))


@pytest.mark.parametrize("expression", ("gpu", "gpu and not slow", "gpu or slow", "slow and gpu"))
def test_gpu_tests_without_a_gpu_are_an_error(expression, monkeypatch):
    with pytest.raises(pytest.UsageError, match=r"asks for .* NVIDIA GPU"):
        configure(monkeypatch, expression)
    configure(monkeypatch, expression, gpu=True)
    configure(monkeypatch, expression, collectonly=True)


@pytest.mark.parametrize("expression", ("", None, "not gpu and not slow", "slow", "not  gpu"))
def test_other_runs_go_on(expression, monkeypatch):
    configure(monkeypatch, expression)
