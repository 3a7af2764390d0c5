"""Modules are initialized from torch's global generator: seed it afresh for each test and run."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_data(generator: torch.Generator) -> None:
    torch.manual_seed(generator.initial_seed())
