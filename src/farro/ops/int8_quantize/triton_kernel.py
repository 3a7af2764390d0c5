"""The Triton kernel of int8_quantize: whole groups in registers, one pass over x."""

from __future__ import annotations

import triton
import triton.language as tl

FLOOR = tl.constexpr(1e-12)
# Adding 1.5 * 2^23 leaves round-half-even(v) in the low bits of the sum, for |v| < 2^22
ROUND = tl.constexpr(12582912.0)


@triton.jit
def magnitude(value):
    """The bits of |value| order as integers do, NaN above Inf: no float maximum keeps a NaN."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(largest):
    """The scale of groups whose largest magnitude (its bits) is given, and which are finite."""
    s = tl.div_rn(largest.to(tl.float32, bitcast=True), 127.0)
    return tl.where(s < FLOOR, FLOOR, s), largest < 0x7F800000


@triton.jit
def codes_of(value, s, finite, WIDE: tl.constexpr):
    """round-half-even(value / s) as int8, 0 where not finite. WIDE: values of more than 16 bits.

    s and finite broadcast to the FP32 values.
    """
    # value / s, correctly rounded: a reciprocal and two of Markstein's corrections (IBM Journal of
    # Research and Development 34, 1990). One is enough for all 16-bit values (tests prove it)
    r = tl.div_rn(tl.full(s.shape, 1.0, tl.float32), s)
    ratio = value * r
    ratio = tl.fma(tl.fma(ratio, -s, value), r, ratio)
    if WIDE:
        ratio = tl.fma(tl.fma(ratio, -s, value), r, ratio)
    # |ratio| rounds to 127 at most, so nothing needs clipping
    code = (ratio + ROUND).to(tl.int32, bitcast=True)
    return tl.where(finite, code, 0).to(tl.int8)


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
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    DIMS: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """x [m rows, k] -> q [m, k] and scale [m, ceil(k / GROUP)], both contiguous.

    A program takes ROWS rows and GROUPS groups. EVEN_K promises whole groups, GROUPS at a time.
    """
    groups = tl.cdiv(k, GROUP)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    depth = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    in_m = rows < m
    inside = in_m[:, None, None]
    if not EVEN_K:
        inside = inside & (depth < k)[None, :, :]
    row_offsets = _row_offsets(rows, size1, size2, stride0, stride1, stride2, DIMS)
    offsets = row_offsets[:, None, None] + (depth.to(tl.int64) * stride_k)[None, :, :]
    value = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)

    s, finite = scale_of(tl.max(magnitude(value), axis=2))
    wide: tl.constexpr = x.dtype.element_ty.primitive_bitwidth > 16
    code = codes_of(value, s[:, :, None], finite[:, :, None], wide)

    places = rows.to(tl.int64)[:, None, None] * k + depth[None, :, :]
    tl.store(q + places, code, mask=inside)
    places = rows.to(tl.int64)[:, None] * groups + group[None, :]
    in_group = in_m[:, None] & (group < groups)[None, :]
    tl.store(scale + places, s, mask=in_group)
