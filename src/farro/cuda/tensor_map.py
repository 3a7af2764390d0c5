"""TMA descriptors of 2-D row-major tensors, encoded once for each (address, shape, stride, box)."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .launch import NO_CONTEXT, make_current


@functools.lru_cache(maxsize=4096)
def encode(
    address: int, rows: int, columns: int, row_bytes: int, box_rows: int, box_columns: int
) -> Any:
    """A descriptor of one-byte elements in 128-byte swizzled boxes; outside reads as zero.

    `address` and `row_bytes` are multiples of 16. It depends on nothing but its arguments, so that
    reuse after the memory was freed and given out again is right.
    """
    return _encode(address, (columns, rows), (row_bytes,), (box_columns, box_rows))


@functools.lru_cache(maxsize=4096)
def encode_groups(
    address: int,
    rows: int,
    columns: int,
    row_bytes: int,
    box_groups: int,
    box_columns: int,
    group: int = 16,
) -> Any:
    """As encode, of boxes of groups of 16 or 32 rows in another order; rows are whole groups.

    Of group g, row (group / 4) q + 2 j + i lies at 8 j + 2 q + i, i being 0 or 1, q 0 to 3: wgmma
    gives lane q of a quad columns 8 j + 2 q + i of a tile, and these are then neighbours.
    """
    sizes = (columns, 2, 4, group // 8, rows // group)
    steps = tuple(row_bytes * step for step in (1, group // 4, 2, group))
    return _encode(address, sizes, steps, (box_columns, 2, 4, group // 8, box_groups))


@functools.lru_cache(maxsize=4096)
def encode_results(
    address: int,
    rows: int,
    columns: int,
    row_bytes: int,
    box_groups: int,
    box_rows: int,
    group: int,
) -> Any:
    """A descriptor of two-byte results as [groups][rows][group] in plain boxes of box_rows rows.

    `columns` are whole groups; `address`, `row_bytes` and a group's bytes are multiples of 16.
    """
    sizes, steps = (2 * group, rows, columns // group), (row_bytes, 2 * group)
    return _encode(address, sizes, steps, (2 * group, box_rows, box_groups), swizzled=False)


@functools.lru_cache(maxsize=4096)
def encode_experts(
    address: int, sizes: tuple[int, int, int], steps: tuple[int, int], box_rows: int
) -> Any:
    """As encode, of `sizes` experts x rows x bytes; `steps` in bytes from expert to expert and row
    to row; boxes of box_rows x 128 of one expert."""
    experts, rows, columns = sizes
    return _encode(address, (columns, rows, experts), steps[::-1], (128, box_rows, 1))


@functools.lru_cache(maxsize=4096)
def encode_pairs(
    address: int, sizes: tuple[int, int, int], steps: tuple[int, int, int], box_blocks: int
) -> Any:
    """As encode_experts, of rows that have a partner: 8 of them lie before their partners.

    `sizes` are experts x pairs (a multiple of 8) x bytes, `steps` in bytes from expert to expert,
    pair to pair and to a row's partner. A box is 2 * 8 * box_blocks rows of 128 bytes.
    """
    experts, pairs, columns = sizes
    of_expert, of_pair, partner = steps
    strides = (of_pair, partner, 8 * of_pair, of_expert)
    return _encode(
        address, (columns, 8, 2, pairs // 8, experts), strides, (128, 8, 2, box_blocks, 1)
    )


def _encode(
    address: int,
    sizes: tuple[int, ...],
    steps: tuple[int, ...],
    box: tuple[int, ...],
    swizzled: bool = True,
) -> Any:
    """`sizes` and `box` from the contiguous dimension on; `steps` in bytes, of all others."""
    from cuda.bindings import driver

    swizzle = "128B" if swizzled else "NONE"
    what = (
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        len(sizes),
        address,
        [driver.cuuint64_t(size) for size in sizes],
        [driver.cuuint64_t(step) for step in steps],
        [driver.cuuint32_t(size) for size in box],
        [driver.cuuint32_t(1)] * len(sizes),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    error, descriptor = driver.cuTensorMapEncodeTiled(*what)
    if int(error) == NO_CONTEXT:
        make_current(torch.cuda.current_device())
        error, descriptor = driver.cuTensorMapEncodeTiled(*what)
    if int(error) != 0:
        raise RuntimeError(
            f"cuTensorMapEncodeTiled: {error} for sizes {sizes}, steps {steps} bytes, box {box}, "
            f"at {address:#x}"
        )
    return descriptor
