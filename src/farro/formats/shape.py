"""Tensor.unflatten under a name that type checkers know."""

from __future__ import annotations

import torch


def split(x: torch.Tensor, dim: int, *sizes: int) -> torch.Tensor:
    """One dimension as several, a view; one of `sizes` may be -1."""
    view: torch.Tensor = x.unflatten(dim, sizes)  # type: ignore[no-untyped-call]
    return view
