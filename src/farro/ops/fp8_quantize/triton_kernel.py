"""The Triton kernels of fp8_quantize: groups in registers, long rows and whole tensors in passes.

Codes are written as bytes, because Triton has no e4m3 type below SM89.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...formats.fp8_triton import INF, encode, inverse_of, magnitude, scale_of


@triton.jit
def _row_offsets(rows, size1, size2, stride0, stride1, stride2, DIMS: tl.constexpr):
    """Offsets of rows numbered through up to three leading dimensions [.., size1, size2]."""
    if DIMS == 1:
        return rows.to(tl.int64) * stride0
    if DIMS == 2:
        return (rows // size1).to(tl.int64) * stride0 + (rows % size1).to(tl.int64) * stride1
    upper = rows // size2
    offsets = (upper // size1).to(tl.int64) * stride0 + (upper % size1).to(tl.int64) * stride1
    return offsets + (rows % size2).to(tl.int64) * stride2


@triton.jit(do_not_specialize=["m", "size1", "size2"])
def quantize_groups(
    x,
    q,
    scale,
    m,
    k,
    size1,
    size2,
    stride0,
    stride1,
    stride2,
    stride_k,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    DIMS: tl.constexpr,
    EVEN_K: tl.constexpr,
    TALL: tl.constexpr,
    CONVERT: tl.constexpr,
):
    """x [m rows, k] -> q [m, k] and scale [m, ceil(k / WIDTH)], both contiguous.

    A program takes ROWS rows and GROUPS groups. EVEN_K promises whole groups, GROUPS at a time.
    TALL: one scale for all ROWS rows of a program, so scale is [ceil(m / ROWS), ceil(k / WIDTH)].
    """
    groups = tl.cdiv(k, WIDTH)
    columns = tl.cdiv(groups, GROUPS)
    tile = tl.program_id(0) // columns
    rows = tile * ROWS + tl.arange(0, ROWS)
    group = (tl.program_id(0) % columns) * GROUPS + tl.arange(0, GROUPS)
    depth = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = (rows < m)[:, None, None]
    if not EVEN_K:
        inside = inside & (depth < k)[None, :, :]
    row_offsets = _row_offsets(rows, size1, size2, stride0, stride1, stride2, DIMS)
    offsets = row_offsets[:, None, None] + (depth.to(tl.int64) * stride_k)[None, :, :]
    value = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)

    largest = tl.max(magnitude(value), axis=2)
    if TALL:
        largest = tl.max(largest, axis=0)[None, :]
    s = scale_of(largest)
    finite = largest < INF
    inverse = inverse_of(s, finite)
    code = encode(value * inverse[:, :, None], finite[:, :, None], CONVERT)

    places = rows.to(tl.int64)[:, None, None] * k + depth[None, :, :]
    tl.store(q + places, code, mask=inside)
    if TALL:
        places = (tile + tl.zeros([1], tl.int32)).to(tl.int64)[:, None] * groups + group[None, :]
        tl.store(scale + places, s, mask=(group < groups)[None, :])
    else:
        places = rows.to(tl.int64)[:, None] * groups + group[None, :]
        tl.store(scale + places, s, mask=(rows < m)[:, None] & (group < groups)[None, :])


@triton.jit(do_not_specialize=["m", "size1", "size2"])
def quantize_long_rows(
    x,
    q,
    scale,
    m,
    k,
    size1,
    size2,
    stride0,
    stride1,
    stride2,
    stride_k,
    WIDTH: tl.constexpr,
    DIMS: tl.constexpr,
    CONVERT: tl.constexpr,
):
    """x [m rows, k] -> q [m, k] and scale [m, 1]; a program reads one row twice."""
    row = tl.program_id(0)
    start = x + _row_offsets(row, size1, size2, stride0, stride1, stride2, DIMS)
    column = tl.arange(0, WIDTH)
    largest = tl.zeros([WIDTH], tl.int32)
    for first in range(0, k, WIDTH):
        depth = first + column
        value = tl.load(start + depth.to(tl.int64) * stride_k, mask=depth < k, other=0.0)
        largest = tl.maximum(largest, magnitude(value.to(tl.float32)))
    most = tl.max(largest, axis=0) + tl.zeros([1], tl.int32)
    s = scale_of(most)
    finite = most < INF
    inverse = inverse_of(s, finite)
    tl.store(scale + row.to(tl.int64) + tl.arange(0, 1), s)
    to = q + row.to(tl.int64) * k
    for first in range(0, k, WIDTH):
        depth = first + column
        value = tl.load(start + depth.to(tl.int64) * stride_k, mask=depth < k, other=0.0)
        code = encode(value.to(tl.float32) * inverse, finite, CONVERT)
        tl.store(to + depth, code, mask=depth < k)


@triton.jit
def _tile(number, columns, m, k, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows, columns and the mask of a tile of x [m, k], numbered along the rows first."""
    rows = (number // columns) * ROWS + tl.arange(0, ROWS)
    depth = (number % columns) * WIDTH + tl.arange(0, WIDTH)
    return rows, depth, (rows < m)[:, None] & (depth < k)[None, :]


@triton.jit(do_not_specialize=["m", "size1", "size2", "tiles"])
def largest_of_tensor(
    x,
    partial,
    m,
    k,
    size1,
    size2,
    stride0,
    stride1,
    stride2,
    stride_k,
    tiles,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """partial [PROGRAMS] <- bits of the largest |x| of each program's tiles; zeros without any."""
    columns = tl.cdiv(k, WIDTH)
    largest = tl.zeros([ROWS, WIDTH], tl.int32)
    for number in range(tl.program_id(0), tiles, PROGRAMS):
        rows, depth, inside = _tile(number, columns, m, k, ROWS, WIDTH)
        row_offsets = _row_offsets(rows, size1, size2, stride0, stride1, stride2, DIMS)
        offsets = row_offsets[:, None] + (depth.to(tl.int64) * stride_k)[None, :]
        value = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, magnitude(value))
    tl.store(partial + tl.program_id(0), tl.max(tl.max(largest, axis=1), axis=0))


@triton.jit(do_not_specialize=["m", "size1", "size2", "tiles"])
def quantize_tensor(
    x,
    partial,
    q,
    scale,
    m,
    k,
    size1,
    size2,
    stride0,
    stride1,
    stride2,
    stride_k,
    tiles,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    CONVERT: tl.constexpr,
):
    """x [m rows, k] -> q [m, k] and scale [], with the partial maxima of largest_of_tensor."""
    # the last tiles first: the pass before has left them in the L2 cache
    number = tiles - 1 - tl.program_id(0)
    rows, depth, inside = _tile(number, tl.cdiv(k, WIDTH), m, k, ROWS, WIDTH)
    row_offsets = _row_offsets(rows, size1, size2, stride0, stride1, stride2, DIMS)
    offsets = row_offsets[:, None] + (depth.to(tl.int64) * stride_k)[None, :]
    value = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    parts = tl.load(partial + tl.arange(0, PROGRAMS))
    largest = tl.max(parts, axis=0) + tl.zeros([1], tl.int32)
    s = scale_of(largest)
    finite = largest < INF
    code = encode(value * inverse_of(s, finite)[:, None], finite[:, None], CONVERT)
    tl.store(q + rows.to(tl.int64)[:, None] * k + depth[None, :], code, mask=inside)
    if number == 0:
        tl.store(scale + tl.arange(0, 1), s)
