"""Triton kernels of int8_gemm: out[x rows, y columns] = sum over groups of scales * (x @ y).

The kernels know x [m, k] and y [k, n] only; the host decides whether x is the activations or, for
few tokens, the weights (`swap` in triton.py). The product scale_x * scale_y commutes, so the bits
of the result do not depend on it. Each group's INT32 sum starts from zero and is exact, then one
fused multiply-add in FP32 adds it to the total: the order of groups is the only order there is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...triton_tiles import banded_tile


@triton.jit
def _finish(
    total,
    bias,
    out,
    rows,
    columns,
    m,
    n,
    stride_bias,
    stride_om,
    stride_on,
    BIAS_AXIS: tl.constexpr,
):
    """Add the bias, convert once, store. BIAS_AXIS: 0 rows of out, 1 columns, -1 no bias."""
    in_m = rows < m
    in_n = columns < n
    if BIAS_AXIS == 0:
        total += tl.load(bias + rows.to(tl.int64) * stride_bias, mask=in_m).to(tl.float32)[:, None]
    if BIAS_AXIS == 1:
        addend = tl.load(bias + columns.to(tl.int64) * stride_bias, mask=in_n)
        total += addend.to(tl.float32)[None, :]
    pointers = out + rows.to(tl.int64)[:, None] * stride_om
    pointers += columns.to(tl.int64)[None, :] * stride_on
    value = total.to(out.dtype.element_ty)
    tl.store(pointers, value, mask=in_m[:, None] & in_n[None, :])


def _gemm_pointers(
    x,
    y,
    scale_x,
    scale_y,
    bias,
    out,
    m,
    n,
    k,
    stride_xm,
    stride_xk,
    stride_yk,
    stride_yn,
    stride_sxm,
    stride_sxg,
    stride_syg,
    stride_syn,
    stride_bias,
    stride_om,
    stride_on,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,
    GROUP_M: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
    BIAS_AXIS: tl.constexpr,
):
    """Any strides: tiles come by pointers, UNROLL groups an iteration, BLOCK_K <= GROUP at a time.

    EVEN_K promises that k is a multiple of an iteration's UNROLL * GROUP.
    """
    tile_m, tile_n = banded_tile(m, n, BLOCK_M, BLOCK_N, GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    in_m = rows < m
    in_n = columns < n
    rows64 = rows.to(tl.int64)
    columns64 = columns.to(tl.int64)
    depth64 = depth.to(tl.int64)
    xs = x + rows64[:, None] * stride_xm + depth64[None, :] * stride_xk
    ys = y + depth64[:, None] * stride_yk + columns64[None, :] * stride_yn
    scale_xs = scale_x + rows64 * stride_sxm
    scale_ys = scale_y + columns64 * stride_syn
    step_x = BLOCK_K * tl.cast(stride_xk, tl.int64)
    step_y = BLOCK_K * tl.cast(stride_yk, tl.int64)

    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    groups = tl.cdiv(k, GROUP)
    # A stage count on the loop makes the compiler prefetch the scales with the tiles
    for first in tl.range(0, groups, UNROLL, num_stages=STAGES):
        for u in tl.static_range(UNROLL):
            partial = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
            for j in tl.static_range(GROUP // BLOCK_K):
                if EVEN_K:
                    tile_x = tl.load(xs, mask=in_m[:, None], other=0)
                    tile_y = tl.load(ys, mask=in_n[None, :], other=0)
                else:
                    left = k - (first + u) * GROUP - j * BLOCK_K
                    in_k = depth < left
                    tile_x = tl.load(xs, mask=in_m[:, None] & in_k[None, :], other=0)
                    tile_y = tl.load(ys, mask=in_k[:, None] & in_n[None, :], other=0)
                partial = tl.dot(tile_x, tile_y, acc=partial, out_dtype=tl.int32)
                xs += step_x
                ys += step_y
            if UNROLL == 1 or EVEN_K:
                sx = tl.load(scale_xs, mask=in_m, other=0.0)
                sy = tl.load(scale_ys, mask=in_n, other=0.0)
            else:
                # Zero scales past the last group: a total is never -0, so +0 does not change it
                more = tl.full((1,), first + u, tl.int32) < groups
                sx = tl.load(scale_xs, mask=in_m & more, other=0.0)
                sy = tl.load(scale_ys, mask=in_n & more, other=0.0)
            scale_xs += stride_sxg
            scale_ys += stride_syg
            total = tl.fma(partial.to(tl.float32), sx[:, None] * sy[None, :], total)
    _finish(total, bias, out, rows, columns, m, n, stride_bias, stride_om, stride_on, BIAS_AXIS)


def _gemm_descriptors(
    x,
    y,
    scale_x,
    scale_y,
    bias,
    out,
    m,
    n,
    k,
    stride_sxm,
    stride_sxg,
    stride_syg,
    stride_syn,
    stride_bias,
    stride_om,
    stride_on,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,
    GROUP_M: tl.constexpr,
    STAGES: tl.constexpr,
    SPECIALIZE: tl.constexpr,
    BIAS_AXIS: tl.constexpr,
):
    """x and y are tensor descriptors over [m, k] and [n, k]: the copy engine fills tails with 0.

    SPECIALIZE: one warp loads for two groups of warps that multiply (needs 4 warps).
    """
    tile_m, tile_n = banded_tile(m, n, BLOCK_M, BLOCK_N, GROUP_M)
    # min() keeps these apart from `rows` for the compiler: Triton 3.6 moves the second half of a
    # specialized tile by offsetting the descriptor's coordinate, and a shared one moves twice
    top = min(tile_m * BLOCK_M, m)
    left = min(tile_n * BLOCK_N, n)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    in_m = rows < m
    in_n = columns < n
    scale_xs = scale_x + rows.to(tl.int64) * stride_sxm
    scale_ys = scale_y + columns.to(tl.int64) * stride_syn

    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    groups = tl.cdiv(k, GROUP)
    for first in tl.range(0, groups, UNROLL, num_stages=STAGES, warp_specialize=SPECIALIZE):
        for u in tl.static_range(UNROLL):
            g = first + u
            g64 = tl.cast(g, tl.int64)
            if UNROLL == 1:
                sx = tl.load(scale_xs + g64 * stride_sxg, mask=in_m, other=0.0)
                sy = tl.load(scale_ys + g64 * stride_syg, mask=in_n, other=0.0)
            else:
                more = tl.full((1,), g, tl.int32) < groups
                sx = tl.load(scale_xs + g64 * stride_sxg, mask=in_m & more, other=0.0)
                sy = tl.load(scale_ys + g64 * stride_syg, mask=in_n & more, other=0.0)
            partial = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
            for j in tl.static_range(GROUP // BLOCK_K):
                tile_x = x.load([top, g * GROUP + j * BLOCK_K])
                tile_y = y.load([left, g * GROUP + j * BLOCK_K])
                partial = tl.dot(tile_x, tile_y.T, acc=partial, out_dtype=tl.int32)
            total = tl.fma(partial.to(tl.float32), sx[:, None] * sy[None, :], total)
    _finish(total, bias, out, rows, columns, m, n, stride_bias, stride_om, stride_on, BIAS_AXIS)


# The number of tokens is never specialized on: one compiled kernel serves every batch size. It is
# m, or n where the operands are swapped.
gemm_pointers = triton.jit(do_not_specialize=["m"])(_gemm_pointers)
gemm_pointers_swapped = triton.jit(do_not_specialize=["n"])(_gemm_pointers)
gemm_descriptors = triton.jit(do_not_specialize=["m"])(_gemm_descriptors)
gemm_descriptors_swapped = triton.jit(do_not_specialize=["n"])(_gemm_descriptors)
