"""int8_gemm on a CPU: torch's INT8 product (oneDNN VNNI) a group at a time, scaled while in cache.

An output block of rows x columns is finished before the next begins: for each group one INT8
product into int32, its conversion, the scales' outer product and one fused multiply-add, all into
buffers of the block's size. Never an M x N x groups tensor.

Both building blocks are probed once, because both fail silently on some CPUs: torch._int_mm
saturates without VNNI, and torch.addcmul rounds twice without FMA. Where a probe fails an exact
way takes its place: an FP32 product of the codes (every sum is below 2^24) and `fma32`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ...exact import FMA_TRIPLE, fma32
from ...formats.int8_group import group_bounds
from ...problem import Problem
from ...scratch import keep, take

# Measured on two cores with AVX-512 VNNI, N = K = 4096 (docs/performance-notes.md)
_ROWS = 1024
_BLOCK_ELEMENTS = 1 << 19
_MAX_COLUMNS = 4096
# Groups scaled by one call of each operator: of few outputs, calls cost more than their passes
_OUTPUTS_A_CALL = 1 << 19
_MAX_GROUPS = 8
_SWAP_ROWS = 32  # up to here weights are better the left operand; dense ones from 9 rows on


@dataclass(frozen=True)
class Config:
    """One block of the output, and how many groups are scaled by one call of each operator."""

    rows: int
    columns: int
    groups: int
    swap: bool  # weights as the left operand: few rows then need no repacking of the weights
    policy: str

    @property
    def tile(self) -> tuple[int, int]:
        return self.rows, self.columns


def config(problem: Problem) -> Config:
    b = problem.spec("b")
    packed = len(b.shape) == 3
    return blocking(problem.spec("a").shape[0], b.shape[-1], packed, b.stride[-2] == 1)


def blocking(m: int, n: int, packed: bool, along_k: bool) -> Config:
    """The blocks of m x n outputs; `along_k`: the weight's stride along K is 1."""
    rows = min(max(m, 1), _ROWS)
    columns = max(64, min(_MAX_COLUMNS, _BLOCK_ELEMENTS // rows))
    columns = min(columns, max(n, 1))
    groups = min(_MAX_GROUPS, _OUTPUTS_A_CALL // (rows * columns))
    groups = groups if groups >= 4 else 1
    swap = (8 if packed else 1) < m <= _SWAP_ROWS and along_k
    product = "int8 product" if int8_product_is_exact() else "fp32 product of the codes"
    fma = "addcmul" if addcmul_is_fused() else "fma in float64"
    layout = "group-packed weight" if packed else "strided weight"
    return Config(rows, columns, groups, swap, f"{product}, {fma}, {layout}")


@functools.lru_cache(maxsize=1)
def int8_product_is_exact() -> bool:
    """Whether torch._int_mm gives exact sums here, for full-range codes and several shapes."""
    generator = torch.Generator().manual_seed(0)
    for m, n in ((1, 64), (16, 33), (64, 1), (65, 128)):
        for low, high in ((127, 128), (-128, -127), (-128, 128)):
            a = torch.randint(
                low, high, (m, 256), dtype=torch.int8, generator=generator, device="cpu"
            )
            b = torch.randint(
                low, high, (n, 256), dtype=torch.int8, generator=generator, device="cpu"
            )
            try:
                product = torch._int_mm(a, b.T)
            except RuntimeError:
                return False
            if not torch.equal(product.double(), a.double() @ b.T.double()):
                return False
    return True


@functools.lru_cache(maxsize=1)
def addcmul_is_fused() -> bool:
    """Whether torch.addcmul rounds once, in its vector body and in its scalar tail."""
    p, s, t = (torch.full((71,), v, dtype=torch.float32, device="cpu") for v in FMA_TRIPLE)
    want = fma32(p, s, t)
    return all(
        torch.equal(torch.addcmul(t[:count], p[:count], s[:count]), want[:count])
        for count in (1, 7, 16, 71)
    )


def _multiply_add(total: torch.Tensor, partial: torch.Tensor, scales: torch.Tensor) -> None:
    if addcmul_is_fused():
        torch.addcmul(total, partial, scales, out=total)
    else:
        total.copy_(fma32(partial, scales, total))


def _readable(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix itself where torch._int_mm reads it right in place, else a copy of the block.

    One stride must be 1 and the other span a row or column: overlapping windows and a single row of
    strides (1, 1), which is what a weight with K = 1 looks like, give garbage without an error.
    """
    rows, columns = matrix.shape
    down, across = matrix.stride()
    if (across == 1 and down >= columns) or (down == 1 and across >= rows > 1):
        return matrix
    return matrix.clone(memory_format=torch.contiguous_format)


def _sizes(rows: int, columns: int, groups: int) -> list[int]:
    """Elements of a block's buffers: total, partials, scales and, where exact, int32 products."""
    size = rows * columns
    return [size, *[size * groups] * (3 if int8_product_is_exact() else 2)]


class _Block:
    """Buffers for one block of rows x columns and `groups` groups; [columns, rows] where swapped.

    Swapped, the weights are the left operand, which oneDNN does not repack at every call.
    """

    def __init__(
        self, memory: torch.Tensor, rows: int, columns: int, groups: int, swap: bool
    ) -> None:
        shape = (columns, rows) if swap else (rows, columns)
        self.exact = int8_product_is_exact()
        self.swap = swap
        sizes = _sizes(rows, columns, groups)
        parts = memory[: sum(sizes)].split(sizes)  # type: ignore[no-untyped-call]
        total, partials, scales, *products = parts
        self.total = total.view(shape)
        self.partials = partials.view(groups, *shape)
        self.scales = scales.view(groups, *shape)
        self.partial_list = list(self.partials)
        self.scale_list = list(self.scales)
        if self.exact:
            self.products = products[0].view(torch.int32).view(groups, *shape)
            self.product_list = list(self.products)

    def multiply(self, index: int, a: torch.Tensor, b: torch.Tensor) -> None:
        """Group `index` of this chunk: the exact a [rows, G] @ b [G, columns]."""
        if self.swap:
            a, b = b.T, a.T
        if self.exact:
            torch._int_mm(_readable(a), _readable(b), out=self.product_list[index])
        else:
            torch.mm(a.float(), b.float(), out=self.partial_list[index])

    def add_groups(self, scale_a: torch.Tensor, scale_b: torch.Tensor) -> None:
        """total = fma(partial, sA*sB, total); scale_a [groups, rows], scale_b [groups, columns]."""
        count = scale_a.shape[0]
        if self.exact:
            self.partials[:count].copy_(self.products[:count])
        left, right = (scale_b, scale_a) if self.swap else (scale_a, scale_b)
        torch.mul(left.unsqueeze(2), right.unsqueeze(1), out=self.scales[:count])
        for i in range(count):
            _multiply_add(self.total, self.partial_list[i], self.scale_list[i])


def run(
    config: Config,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    group_size: int,
) -> None:
    m, n = out.shape
    bounds = group_bounds(a.shape[1], group_size)
    scale_a = scale_a.T.contiguous()  # [groups, M]: one row of scales is then one dense vector
    addend = None if bias is None else bias.float()
    # the first block is the largest
    memory = take(sum(_sizes(min(m, config.rows), min(n, config.columns), config.groups)))
    blocks: dict[tuple[int, int], _Block] = {}  # at most four shapes: whole and tail blocks
    for top in range(0, m, config.rows):
        rows = slice(top, min(top + config.rows, m))
        for left in range(0, n, config.columns):
            columns = slice(left, min(left + config.columns, n))
            shape = (rows.stop - top, columns.stop - left)
            if shape not in blocks:
                blocks.clear()  # a tail replaces the whole blocks' buffers, never adds to them
                blocks[shape] = _Block(memory, *shape, config.groups, config.swap)
            block = blocks[shape]
            block.total.zero_()
            for first in range(0, len(bounds), config.groups):
                chunk = slice(first, min(first + config.groups, len(bounds)))
                for index, (start, stop) in enumerate(bounds[chunk]):
                    weight = b[first + index, : stop - start] if b.dim() == 3 else b[start:stop]
                    block.multiply(index, a[rows, start:stop], weight[:, columns])
                block.add_groups(scale_a[chunk, rows], scale_b[chunk, columns])
            total = block.total.T if config.swap else block.total
            if addend is not None:
                total += addend[columns]
            out[rows, columns] = total
    keep(memory)
