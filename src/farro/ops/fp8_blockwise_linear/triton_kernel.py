"""Triton kernels of fp8_blockwise_linear: out[x rows, y columns] = sum over blocks of scaled x @ y.

The kernels know x [m, k] and y [k, n] only; the host decides whether x is the activations or, for
few tokens, the weights (`swap` in triton.py). A scale of x serves X_SHARE rows: 1 of activations,
128 of weights; likewise for y. Each block of 128 of K is summed from zero, then one fused
multiply-add in FP32 adds it to the total, in the order of the blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...formats.fp8_triton import decode
from ...triton_tiles import banded_tile

BLOCK = tl.constexpr(128)  # of K: what one scale covers


@triton.jit
def gelu_tanh(x):
    """x / 2 * (1 + tanh(u)) as x / (1 + exp(-2u)), which does not cancel where x is negative."""
    inner = 1.5957691216057308 * x + 0.0713548162726 * x * x * x
    return x / (1.0 + tl.exp(-inner))


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
    GELU: tl.constexpr,
):
    """Add the bias, apply GELU, convert once, store. BIAS_AXIS: 0 rows of out, 1 columns, or -1."""
    in_m = rows < m
    in_n = columns < n
    if BIAS_AXIS == 0:
        total += tl.load(bias + rows.to(tl.int64) * stride_bias, mask=in_m).to(tl.float32)[:, None]
    if BIAS_AXIS == 1:
        addend = tl.load(bias + columns.to(tl.int64) * stride_bias, mask=in_n)
        total += addend.to(tl.float32)[None, :]
    if GELU:
        total = gelu_tanh(total)
    pointers = out + rows.to(tl.int64)[:, None] * stride_om
    pointers += columns.to(tl.int64)[None, :] * stride_on
    tl.store(pointers, total.to(out.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


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
    stride_sxb,
    stride_syn,
    stride_syb,
    stride_bias,
    stride_om,
    stride_on,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,
    GROUP_M: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
    X_SHARE: tl.constexpr,
    Y_SHARE: tl.constexpr,
    BIAS_AXIS: tl.constexpr,
    GELU: tl.constexpr,
    DECODE: tl.constexpr,
):
    """Any strides: tiles come by pointers, UNROLL blocks an iteration, BLOCK_K <= 128 at a time.

    EVEN_K promises that k is a multiple of an iteration's UNROLL * 128. DECODE: x and y are bytes
    for a device without FP8 tensor cores, and are multiplied as float16, which holds every code.
    """
    tile_m, tile_n = banded_tile(m, n, BLOCK_M, BLOCK_N, GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    in_m = rows < m
    in_n = columns < n
    depth64 = depth.to(tl.int64)
    xs = x + rows.to(tl.int64)[:, None] * stride_xm + depth64[None, :] * stride_xk
    ys = y + depth64[:, None] * stride_yk + columns.to(tl.int64)[None, :] * stride_yn
    scale_xs = scale_x + (rows // X_SHARE).to(tl.int64) * stride_sxm
    scale_ys = scale_y + (columns // Y_SHARE).to(tl.int64) * stride_syn
    step_x = BLOCK_K * tl.cast(stride_xk, tl.int64)
    step_y = BLOCK_K * tl.cast(stride_yk, tl.int64)

    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    blocks = tl.cdiv(k, BLOCK)
    # A stage count on the loop makes the compiler prefetch the scales with the tiles
    for first in tl.range(0, blocks, UNROLL, num_stages=STAGES):
        for u in tl.static_range(UNROLL):
            partial = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for j in tl.static_range(BLOCK // BLOCK_K):
                if EVEN_K:
                    tile_x = tl.load(xs, mask=in_m[:, None], other=0.0)
                    tile_y = tl.load(ys, mask=in_n[None, :], other=0.0)
                else:
                    in_k = depth < k - (first + u) * BLOCK - j * BLOCK_K
                    tile_x = tl.load(xs, mask=in_m[:, None] & in_k[None, :], other=0.0)
                    tile_y = tl.load(ys, mask=in_k[:, None] & in_n[None, :], other=0.0)
                if DECODE:
                    partial = tl.dot(decode(tile_x), decode(tile_y), acc=partial)
                else:
                    partial = tl.dot(tile_x, tile_y, acc=partial)
                xs += step_x
                ys += step_y
            if UNROLL == 1 or EVEN_K:
                sx = tl.load(scale_xs, mask=in_m, other=0.0)
                sy = tl.load(scale_ys, mask=in_n, other=0.0)
            else:
                # Zero scales past the last block: a total is never -0, so +0 does not change it
                more = tl.full((1,), first + u, tl.int32) < blocks
                sx = tl.load(scale_xs, mask=in_m & more, other=0.0)
                sy = tl.load(scale_ys, mask=in_n & more, other=0.0)
            scale_xs += stride_sxb
            scale_ys += stride_syb
            total = tl.fma(partial, sx[:, None] * sy[None, :], total)
    # fmt: off
    _finish(total, bias, out, rows, columns, m, n, stride_bias, stride_om, stride_on,
            BIAS_AXIS, GELU)
    # fmt: on


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
    stride_sxb,
    stride_syn,
    stride_syb,
    stride_bias,
    stride_om,
    stride_on,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    STAGES: tl.constexpr,
    X_SHARE: tl.constexpr,
    Y_SHARE: tl.constexpr,
    BIAS_AXIS: tl.constexpr,
    GELU: tl.constexpr,
):
    """x and y are tensor descriptors over [m, k] and [n, k], in blocks of 128 of K.

    The copy engine fills what lies past their ends with zeros.
    """
    tile_m, tile_n = banded_tile(m, n, BLOCK_M, BLOCK_N, GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    in_m = rows < m
    in_n = columns < n
    scale_xs = scale_x + (rows // X_SHARE).to(tl.int64) * stride_sxm
    scale_ys = scale_y + (columns // Y_SHARE).to(tl.int64) * stride_syn
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for b in tl.range(0, tl.cdiv(k, BLOCK), num_stages=STAGES):
        sx = tl.load(scale_xs, mask=in_m, other=0.0)
        sy = tl.load(scale_ys, mask=in_n, other=0.0)
        scale_xs += stride_sxb
        scale_ys += stride_syb
        tile_x = x.load([tile_m * BLOCK_M, b * BLOCK])
        tile_y = y.load([tile_n * BLOCK_N, b * BLOCK])
        partial = tl.dot(tile_x, tile_y.T, out_dtype=tl.float32)
        total = tl.fma(partial, sx[:, None] * sy[None, :], total)
    # fmt: off
    _finish(total, bias, out, rows, columns, m, n, stride_bias, stride_om, stride_on,
            BIAS_AXIS, GELU)
    # fmt: on


# The number of tokens is never specialized on: one compiled kernel serves every batch size. It is
# m, or n where the operands are swapped.
gemm_pointers = triton.jit(do_not_specialize=["m"])(_gemm_pointers)
gemm_pointers_swapped = triton.jit(do_not_specialize=["n"])(_gemm_pointers)
gemm_descriptors = triton.jit(do_not_specialize=["m"])(_gemm_descriptors)
gemm_descriptors_swapped = triton.jit(do_not_specialize=["n"])(_gemm_descriptors)
