"""silu of every BF16 gate, held against the exact result."""

from __future__ import annotations

from collections.abc import Callable

import torch

from farro.ops.moe_ffn import swiglu


def check_every_gate(silu: Callable[[torch.Tensor], torch.Tensor], smallest: float) -> None:
    """`silu` of 65536 gates in FP32 is right but for its last bits, or but for `smallest`."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    gates = bits.view(torch.bfloat16)
    got, want = silu(gates.float()).cpu().double(), swiglu.silu(gates).double()
    assert torch.equal(got.isnan(), want.isnan())
    number = want.isfinite()
    far = (got - want).abs() > 2.0**-21 * want.abs() + smallest
    assert not (far & number).any(), gates[far & number][:5]
    clear = (gates >= 20) | (gates == 0)
    assert torch.equal(got[clear], gates[clear].double())
