"""Tiny problems on one thread: waiting for a second one would be most of their time."""

from __future__ import annotations

import pytest
import torch

from farro.bench import int8_gemm


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="package")
def small_ceiling():
    """What tells a processor's speed takes seconds where it has no INT8 instructions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(int8_gemm, "_CPU_CEILING", (32, 64, 64))
        yield
