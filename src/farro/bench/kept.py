"""What was made of a weight, kept for the next problem that has the same one.

A run that measures the most important points first comes back to each model's weights; making them
again, quantized for every peer, would take most of its time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

_SHARE = 0.5  # of a GPU's memory
_CPU_BYTES = 1 << 30
_KEPT: dict[Hashable, tuple[Any, int]] = {}  # the oldest first


def kept(key: Hashable, make: Callable[[], Any]) -> Any:
    """make(), or what it gave the last time for this key; the oldest leave for want of memory."""
    if key in _KEPT:
        _KEPT[key] = _KEPT.pop(key)  # the newest now
        return _KEPT[key][0]
    made = make()
    _KEPT[key] = made, _nbytes(made)
    while len(_KEPT) > 1 and sum(size for _, size in _KEPT.values()) > _limit():
        _KEPT.pop(next(iter(_KEPT)))
    return made


def forget() -> None:
    _KEPT.clear()


def _limit() -> int:
    if not torch.cuda.is_available():
        return _CPU_BYTES
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory * _SHARE)


def _nbytes(made: Any) -> int:
    if isinstance(made, torch.Tensor):
        return made.nbytes
    if isinstance(made, torch.nn.Module):
        return sum(tensor.nbytes for tensor in made.state_dict(keep_vars=True).values())
    if hasattr(made, "parts"):
        return _nbytes(made.parts)
    return sum(map(_nbytes, made)) if isinstance(made, tuple) else 0
