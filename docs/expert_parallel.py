"""The experts of a layer over several processes; docs/moe.md tells of it.

torchrun --nproc-per-node 2 docs/expert_parallel.py
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
from torch import distributed

from farro.moe import ExpertParallel
from farro.nn import Int8Experts

EXPERTS, HIDDEN, INNER, TOPK = 16, 256, 128, 4


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    # a rank that fails or hangs ends the others within this time
    distributed.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=60))
    rank, world_size = distributed.get_rank(), distributed.get_world_size()

    # a real model would read from its checkpoint what this rank holds, and no more
    random = torch.Generator().manual_seed(0)
    gate_up = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=random) * HIDDEN**-0.5
    down = torch.randn(EXPERTS, HIDDEN, INNER, generator=random) * INNER**-0.5
    first, last = ExpertParallel.share(EXPERTS, rank, world_size)
    mine = Int8Experts.from_dense(gate_up[first:last], down[first:last], group_size=128)
    layer = ExpertParallel(mine.to(device))

    # each rank has tokens of its own, as many as it likes
    x = torch.randn(5 + 3 * rank, HIDDEN).bfloat16().to(device)
    logits = torch.randn(len(x), EXPERTS, device=device)
    weights, ids = torch.softmax(logits, -1).topk(TOPK)
    y = layer(x, ids, weights)

    alone = Int8Experts.from_dense(gate_up, down, group_size=128).to(device)
    assert torch.equal(y, alone(x, ids, weights))
    print(f"rank {rank}: {len(x)} tokens, {layer.extra_repr()}: equal to one process, bit for bit")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
