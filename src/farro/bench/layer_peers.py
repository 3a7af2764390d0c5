"""A whole layer of experts in torch's own operators: what a user would run in BF16."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from .case import Missing, Options, Subject
from .peers import wanted

_NAME = "torch BF16 layer"


def layers(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    options: Options,
) -> Iterator[Subject | Missing]:
    """x bf16 [T, H], routes [T, topk], and the weights [E, 2I, H] and [E, H, I] of the experts.

    Routes to other experts come last when they are sorted, and are left out: how many there are is
    told to the peer, which would have to wait for the device to know it.
    """
    if not wanted(options, "bf16"):
        return
    gate_up, down = experts()
    count, topk = gate_up.shape[0], ids.shape[1]
    used = int((ids < count).sum())

    def call() -> torch.Tensor:
        flat = ids.flatten()
        order = flat.argsort(stable=True)[:used]
        ends = torch.searchsorted(flat[order], torch.arange(1, count + 1, device=x.device))
        token, offsets = order // topk, ends.int()
        both = torch._grouped_mm(x[token], gate_up.mT, offs=offsets)
        gate, up = both.chunk(2, -1)
        rows = torch._grouped_mm(torch.nn.functional.silu(gate) * up, down.mT, offs=offsets)
        rows = rows * weights.flatten()[order].bfloat16().unsqueeze(1)
        return torch.zeros_like(x).index_add_(0, token, rows)

    try:
        call()
    except Exception as error:  # an older torch, or a shape that it does not take
        yield Missing(_NAME, f"{type(error).__name__}: {error}"[:200])
        return
    yield Subject(_NAME, "peer", call)
