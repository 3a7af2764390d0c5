"""Triton kernels of fp8_linear: out[x rows, y columns] = epilogue(x @ y).

The kernels know x [m, k] and y [k, n] only; the host decides whether x is the activations or, for
few tokens, the weights (`swap` in triton_configs.py). FP8 tensor cores keep 14 bits or so while
they accumulate: with PROMOTE the sum of STEPS products is added in FP32 to the total, and the next
begins at zero. Below SM89 there are none (DECODE): codes come as bytes and become FP16, exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...formats.fp8_triton import decode
from ...triton_tiles import banded_tile

# as in epilogue.py
_SLOPE = tl.constexpr(1.5957691216057308)  # 2 * sqrt(2 / pi)
_CUBE = tl.constexpr(0.044715)


@triton.jit
def _finish(
    total,
    alpha,
    bias,
    residual,
    out,
    rows,
    columns,
    m,
    n,
    stride_bias,
    stride_rm,
    stride_rn,
    stride_om,
    stride_on,
    ALPHA_TENSOR: tl.constexpr,
    BIAS_AXIS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GELU: tl.constexpr,
):
    """(alpha * total + bias) + residual, or GELU, in FP32; then one conversion and the store.

    BIAS_AXIS: 0 rows of out, 1 columns, -1 no bias. `residual` may be `out` itself: an element is
    read before it is written, by the same program.
    """
    in_m = rows < m
    in_n = columns < n
    inside = in_m[:, None] & in_n[None, :]
    rows64 = rows.to(tl.int64)
    columns64 = columns.to(tl.int64)
    if ALPHA_TENSOR:
        total *= tl.load(alpha)
    else:
        total *= alpha
    if BIAS_AXIS == 0:
        total += tl.load(bias + rows64 * stride_bias, mask=in_m).to(tl.float32)[:, None]
    if BIAS_AXIS == 1:
        total += tl.load(bias + columns64 * stride_bias, mask=in_n).to(tl.float32)[None, :]
    if RESIDUAL:
        places = residual + rows64[:, None] * stride_rm + columns64[None, :] * stride_rn
        total += tl.load(places, mask=inside).to(tl.float32)
    if GELU:
        doubled = _SLOPE * (total + _CUBE * (total * total * total))
        total *= 1.0 / (1.0 + tl.exp(-doubled))
    pointers = out + rows64[:, None] * stride_om + columns64[None, :] * stride_on
    tl.store(pointers, total.to(out.dtype.element_ty), mask=inside)


def _gemm_pointers(
    x,
    y,
    alpha,
    bias,
    residual,
    out,
    m,
    n,
    k,
    stride_xm,
    stride_xk,
    stride_yk,
    stride_yn,
    stride_bias,
    stride_rm,
    stride_rn,
    stride_om,
    stride_on,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    PROMOTE: tl.constexpr,
    GROUP_M: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
    DECODE: tl.constexpr,
    ALPHA_TENSOR: tl.constexpr,
    BIAS_AXIS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GELU: tl.constexpr,
):
    """Any strides: tiles come by pointers. EVEN_K promises that k is a multiple of a loop step."""
    tile_m, tile_n = banded_tile(m, n, BLOCK_M, BLOCK_N, GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    in_m = rows < m
    in_n = columns < n
    depth64 = depth.to(tl.int64)
    xs = x + rows.to(tl.int64)[:, None] * stride_xm + depth64[None, :] * stride_xk
    ys = y + depth64[:, None] * stride_yk + columns.to(tl.int64)[None, :] * stride_yn
    step_x = BLOCK_K * tl.cast(stride_xk, tl.int64)
    step_y = BLOCK_K * tl.cast(stride_yk, tl.int64)

    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in tl.range(0, k, STEPS * BLOCK_K, num_stages=STAGES):
        partial = tl.zeros((BLOCK_M, BLOCK_N), tl.float32) if PROMOTE else total
        for j in tl.static_range(STEPS):
            if EVEN_K:
                tile_x = tl.load(xs, mask=in_m[:, None], other=0.0)
                tile_y = tl.load(ys, mask=in_n[None, :], other=0.0)
            else:
                in_k = depth < k - first - j * BLOCK_K
                tile_x = tl.load(xs, mask=in_m[:, None] & in_k[None, :], other=0.0)
                tile_y = tl.load(ys, mask=in_k[:, None] & in_n[None, :], other=0.0)
            if DECODE:
                partial = tl.dot(decode(tile_x), decode(tile_y), acc=partial)
            else:
                partial = tl.dot(tile_x, tile_y, acc=partial)
            xs += step_x
            ys += step_y
        total = total + partial if PROMOTE else partial
    # fmt: off
    _finish(total, alpha, bias, residual, out, rows, columns, m, n, stride_bias, stride_rm,
            stride_rn, stride_om, stride_on, ALPHA_TENSOR, BIAS_AXIS, RESIDUAL, GELU)
    # fmt: on


def _gemm_descriptors(
    x,
    y,
    alpha,
    bias,
    residual,
    out,
    m,
    n,
    k,
    stride_bias,
    stride_rm,
    stride_rn,
    stride_om,
    stride_on,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    PROMOTE: tl.constexpr,
    GROUP_M: tl.constexpr,
    STAGES: tl.constexpr,
    ALPHA_TENSOR: tl.constexpr,
    BIAS_AXIS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GELU: tl.constexpr,
):
    """x and y are tensor descriptors over [m, k] and [n, k]: the copy engine fills tails with 0."""
    tile_m, tile_n = banded_tile(m, n, BLOCK_M, BLOCK_N, GROUP_M)
    top = tile_m * BLOCK_M
    left = tile_n * BLOCK_N
    rows = top + tl.arange(0, BLOCK_M)
    columns = left + tl.arange(0, BLOCK_N)

    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in tl.range(0, k, STEPS * BLOCK_K, num_stages=STAGES):
        partial = tl.zeros((BLOCK_M, BLOCK_N), tl.float32) if PROMOTE else total
        for j in tl.static_range(STEPS):
            tile_x = x.load([top, first + j * BLOCK_K])
            tile_y = y.load([left, first + j * BLOCK_K])
            partial = tl.dot(tile_x, tile_y.T, acc=partial)
        total = total + partial if PROMOTE else partial
    # fmt: off
    _finish(total, alpha, bias, residual, out, rows, columns, m, n, stride_bias, stride_rm,
            stride_rn, stride_om, stride_on, ALPHA_TENSOR, BIAS_AXIS, RESIDUAL, GELU)
    # fmt: on


# The number of tokens is never specialized on: one compiled kernel serves every batch size. It is
# m, or n where the operands are swapped.
gemm_pointers = triton.jit(do_not_specialize=["m"])(_gemm_pointers)
gemm_pointers_swapped = triton.jit(do_not_specialize=["n"])(_gemm_pointers)
gemm_descriptors = triton.jit(do_not_specialize=["m"])(_gemm_descriptors)
gemm_descriptors_swapped = triton.jit(do_not_specialize=["n"])(_gemm_descriptors)
