"""Triton kernels that only read: the floor of a product that is bound by its operands' bytes."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def read_blocks(source, sums, count, BLOCK: tl.constexpr):
    """Programs take blocks of BLOCK int32 in turn, by 16-byte loads; one sum each is written."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    while start + BLOCK <= count:
        block = tl.load(source + start + lanes, eviction_policy="evict_first")
        total = total ^ block
        start += step
    total = total ^ tl.load(source + start + lanes, mask=start + lanes < count, other=0)
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def read_boxes(source, sums, rows, ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr):
    """Programs take boxes of ROWS x WIDTH int32 in turn, by the bulk copy engine."""
    boxes = tl.cdiv(rows, ROWS)
    total = tl.zeros((ROWS, WIDTH), tl.int32)
    for box in tl.range(tl.program_id(0), boxes, tl.num_programs(0), num_stages=STAGES):
        total = total ^ source.load([box * ROWS, 0])
    tl.store(sums + tl.program_id(0), tl.sum(tl.sum(total, 1), 0))
