"""The order of gate and up rows in a fused projection [gate | up], and its interleaved form.

A tensor core's accumulator of 16 rows gives one thread rows r and r + 8. With 8 gate rows before
their 8 up rows that thread has both halves of a SwiGLU, and nothing has to be exchanged.
"""

from __future__ import annotations

import torch

from ..checks import check_size
from .shape import split

GATE_UP_ROWS = 8  # gate rows, then as many up rows


def interleave_gate_up_rows(n: int) -> torch.Tensor:
    """Rows of [gate | up] in interleaved order: `w[:, interleave_gate_up_rows(n)]` interleaves.

    Of each 16 rows the first 8 are gate rows 8i .. 8i+7, the others up rows 8i .. 8i+7.

    Args:
        n: gate rows (and up rows), a multiple of 8.

    Returns:
        int64 [2n] on the CPU: the row of [gate | up] that stands at each place.

    Raises:
        TypeError: n is not an int.
        ValueError: n is negative or no multiple of 8.
    """
    check_size("interleave_gate_up_rows", "n", n)
    if n % GATE_UP_ROWS:
        raise ValueError(f"interleave_gate_up_rows: n is {n}; needed a multiple of {GATE_UP_ROWS}")
    rows = torch.arange(2 * n, dtype=torch.int64, device="cpu")
    return rows.view(2, -1, GATE_UP_ROWS).transpose(0, 1).flatten()


def split_gate_up(x: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of gate and up, each [..., n], of the last dimension [..., 2n]."""
    if not interleaved:
        half = x.shape[-1] // 2
        return x[..., :half], x[..., half:]
    pairs = split(x, -1, -1, 2, GATE_UP_ROWS)
    return pairs[..., 0, :].flatten(-2), pairs[..., 1, :].flatten(-2)
