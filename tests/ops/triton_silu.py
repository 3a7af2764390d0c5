"""silu of the Triton moe_ffn alone: every BF16 gate through it, held against the exact result."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from farro.ops.moe_ffn import swiglu
from farro.ops.moe_ffn.triton_kernel import _silu


@triton.jit
def _run(x, y, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, _silu(tl.load(x + at)))


def check_silu(device: str) -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    gates = bits.view(torch.bfloat16)
    got = torch.empty(1 << 16, device=device)
    _run[(16,)](gates.float().to(device), got, BLOCK=4096)
    got, want = got.cpu().double(), swiglu.silu(gates).double()
    assert torch.equal(got.isnan(), want.isnan())
    number = want.isfinite()
    # below the normal numbers of FP32 results may be flushed to zero
    far = (got - want).abs() > 2.0**-21 * want.abs() + 2.0**-125
    assert not (far & number).any(), gates[far & number][:5]
    clear = (gates >= 20) | (gates == 0)
    assert torch.equal(got[clear], gates[clear].double())
