"""h = silu(gate) * up of gate and up in BF16: the same bits wherever silu is read from a table.

There are 65536 values of a gate. Each one's silu is computed in float64 and rounded once, so no
library's exp, and no vector width, has a say in a result.
"""

from __future__ import annotations

import functools

import torch


def silu(gate: torch.Tensor) -> torch.Tensor:
    """x / (1 + exp(-x)) of a BF16 tensor, correctly rounded to FP32; -Inf gives NaN."""
    return torch.nn.functional.silu(gate.double()).float()


@functools.lru_cache(maxsize=1)
def _table() -> torch.Tensor:
    """silu of all 65536 gates, in the order of their bits, on the CPU."""
    with torch.inference_mode(False):  # to be of use outside of it too
        bits = torch.arange(1 << 16, dtype=torch.int32, device="cpu").to(torch.int16)
        return silu(bits.view(torch.bfloat16))


def looked_up(gate: torch.Tensor) -> torch.Tensor:
    """`silu` on a CPU, from the table; contiguous."""
    bits = gate.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    return _table().index_select(0, bits.view(-1)).view(gate.shape)


def gate_and_up(y: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of gate and up, each [..., I], of the first product [..., 2I]."""
    if interleaved:
        return y[..., 0::2], y[..., 1::2]
    half = y.shape[-1] // 2
    return y[..., :half], y[..., half:]
