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
    from cuda.bindings import driver

    what = (
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        2,
        address,
        [driver.cuuint64_t(columns), driver.cuuint64_t(rows)],
        [driver.cuuint64_t(row_bytes)],
        [driver.cuuint32_t(box_columns), driver.cuuint32_t(box_rows)],
        [driver.cuuint32_t(1), driver.cuuint32_t(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    error, descriptor = driver.cuTensorMapEncodeTiled(*what)
    if int(error) == NO_CONTEXT:
        make_current(torch.cuda.current_device())
        error, descriptor = driver.cuTensorMapEncodeTiled(*what)
    if int(error) != 0:
        raise RuntimeError(
            f"cuTensorMapEncodeTiled: {error} for {rows} x {columns} bytes, rows {row_bytes} bytes "
            f"apart at {address:#x}, box {box_rows} x {box_columns}"
        )
    return descriptor
