"""silu of the Triton moe_ffn alone: every BF16 gate through it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from farro.ops.moe_ffn.triton_kernel import _silu

from .silu_of_gates import check_every_gate


@triton.jit
def _run(x, y, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, _silu(tl.load(x + at)))


def check_silu(device: str) -> None:
    def through_triton(gates: torch.Tensor) -> torch.Tensor:
        got = torch.empty(1 << 16, device=device)
        _run[(16,)](gates.to(device), got, BLOCK=4096)
        return got

    # below the normal numbers of FP32 results may be flushed to zero
    check_every_gate(through_triton, 2.0**-125)
