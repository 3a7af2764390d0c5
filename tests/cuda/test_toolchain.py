"""An unusable native toolchain is a reason to run elsewhere, not an error of every call."""

from __future__ import annotations

import pytest
import torch

import farro
from farro import dispatch
from farro.cuda import jit

pytest.importorskip("cuda.core")


@pytest.fixture(autouse=True)
def _forget():
    dispatch.forget()
    yield
    dispatch.forget()


def _native_verdict() -> str:
    a, w = (torch.empty(16, 256, dtype=torch.int8, device="meta") for _ in range(2))
    scales = torch.empty(16, 1, device="meta"), torch.empty(1, 16, device="meta")
    found = farro.explain(farro.int8_gemm, a, w.T, *scales, arch="sm_90")
    return next(row.verdict for row in found.rows if row.backend == "cuda")


def test_a_driver_of_the_same_or_a_newer_major_serves(monkeypatch):
    for driver in (None, jit.compiler_version(), (jit.compiler_version()[0], 0), (99, 1)):
        dispatch.forget()
        monkeypatch.setattr(jit, "driver_version", lambda driver=driver: driver)
        assert _native_verdict() == "runs"


def test_an_older_driver_is_named(monkeypatch):
    monkeypatch.setattr(jit, "driver_version", lambda: (12, 8))
    monkeypatch.setattr(jit, "compiler_version", lambda: (13, 5))
    assert "NVRTC 13.5 is newer than the driver, which knows CUDA 12.8" in _native_verdict()


def test_a_library_that_does_not_load_is_named(monkeypatch):
    def broken():
        raise RuntimeError("Failed to dlopen libnvrtc.so.13\nmore")

    monkeypatch.setattr(jit, "compiler_version", broken)
    verdict = _native_verdict()
    assert "NVRTC does not load (Failed to dlopen libnvrtc.so.13)" in verdict
    assert "farro[cuda]" in verdict
