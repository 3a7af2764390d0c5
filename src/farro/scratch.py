"""Scratch memory of CPU kernels, kept by the thread from call to call."""

from __future__ import annotations

import threading

import torch

_THREAD = threading.local()
_KEPT_ELEMENTS = 1 << 22  # 16 MiB a thread at the most


def take(count: int) -> torch.Tensor:
    """At least `count` uninitialized floats, kept by the thread from call to call (`keep`).

    Memory of this size given back goes to the system, and then every call pays for its page
    faults, up to its own time. It is taken out while in use: a signal handler or a finalizer may
    call an operator in the middle of a call. Dtype and device are named: a caller may have set
    other defaults.
    """
    kept: torch.Tensor | None = _THREAD.__dict__.pop("memory", None)
    if kept is not None and kept.numel() >= count:
        return kept
    with torch.inference_mode(False):  # to be of use outside of it too
        return torch.empty(count, dtype=torch.float32, device="cpu")


def keep(memory: torch.Tensor) -> None:
    """Give back what `take` gave."""
    if memory.numel() <= _KEPT_ELEMENTS:
        _THREAD.memory = memory
