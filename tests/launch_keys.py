"""What Triton would have to compile for some calls, found with no GPU: launches are recorded.

A launch's key says what Triton compiles differently. A kernel that a graph capture would find cold
is one whose key no launch before it had.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from farro import dispatch
from farro.arch import arch_named
from farro.triton_launch import Launcher

ARCHS = ("sm_80", "sm_120")  # where nothing but Triton's kernels run


@contextlib.contextmanager
def recorded_launches(arch: str) -> Iterator[dict[Any, str]]:
    """Calls on CPU tensors choose as on `arch` and launch nothing: keys, with kernels' names."""
    found: dict[Any, str] = {}

    def record(self: Launcher, *tensors: torch.Tensor) -> None:
        found[self.key] = self.kernel.__name__

    dispatch.forget()
    with pytest.MonkeyPatch.context() as patch:
        for module in [m for name, m in sys.modules.items() if name.startswith("farro.")]:
            if hasattr(module, "arch_of"):
                patch.setattr(module, "arch_of", lambda device: arch_named(arch))
        device = types.SimpleNamespace(multi_processor_count=132)
        patch.setattr(torch.cuda, "get_device_properties", lambda index: device)
        patch.setattr(Launcher, "__call__", record)
        try:
            yield found
        finally:
            dispatch.forget()
