"""The Triton kernels of fp8_swiglu_quantize: gate and up of the same 128 columns in one program.

So a program holds whole groups of its rows, and quantizes them without leaving its registers. A
block of 128 columns has one weight scale for each of gate and up. SWAP turns the products around:
weights are the rows of the tensor cores' operands, and the narrow side is left to few tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...formats.fp8_triton import INF, decode, encode, inverse_of, magnitude, scale_of
from ...triton_tiles import banded_tile

BLOCK = tl.constexpr(128)


@triton.jit
def _multiply(of_x, of_w, partial, SWAP: tl.constexpr, DECODE: tl.constexpr):
    """partial + the product of a tile of x and one of w, in the order of the output."""
    if DECODE:
        of_x, of_w = decode(of_x), decode(of_w)
    return tl.dot(of_w, of_x, acc=partial) if SWAP else tl.dot(of_x, of_w, acc=partial)


@triton.jit
def _silu(x):
    """x / (1 + exp(-x)) by the root of exp(-|x|), which neither overflows nor vanishes.

    -Inf gives NaN.
    """
    root = tl.exp(-0.5 * tl.abs(x))
    return tl.div_rn(tl.where(x < 0, x * root * root, x), 1.0 + root * root)


@triton.jit
def _finish(
    gate,
    up,
    q,
    scale,
    tokens,
    tile_n,
    m,
    n,
    stride_qm,
    stride_qn,
    stride_sm,
    stride_sn,
    SWAP: tl.constexpr,
    CONVERT: tl.constexpr,
    BYTES: tl.constexpr,
):
    """v = bf16(bf16(silu(gate)) * up), its groups quantized; columns past n count as zeros.

    CONVERT: by the device's own conversion to E4M3. BYTES: q is a pointer to bytes.
    """
    columns = tile_n * BLOCK + tl.arange(0, BLOCK)
    axis: tl.constexpr = 0 if SWAP else 1  # of the columns
    v = _silu(gate).to(tl.bfloat16).to(tl.float32) * up
    in_n = tl.expand_dims(columns < n, 1 - axis)
    v = tl.where(in_n, v.to(tl.bfloat16).to(tl.float32), 0.0)
    largest = tl.max(magnitude(v), axis=axis)
    s = scale_of(largest)
    finite = largest < INF
    inverse = tl.expand_dims(inverse_of(s, finite), axis)
    code = encode(v * inverse, tl.expand_dims(finite, axis), CONVERT)
    if not BYTES:
        code = code.to(tl.float8e4nv, bitcast=True)
    in_m = tokens < m
    rows64 = tokens.to(tl.int64)
    places = tl.expand_dims(rows64 * stride_qm, axis)
    places += tl.expand_dims(columns.to(tl.int64) * stride_qn, 1 - axis)
    tl.store(q + places, code, mask=tl.expand_dims(in_m, axis) & in_n)
    tl.store(scale + rows64 * stride_sm + tl.cast(tile_n, tl.int64) * stride_sn, s, mask=in_m)


@triton.jit(do_not_specialize=["m"])
def swiglu_pointers(
    x,
    w,
    scale_x,
    scale_w,
    q,
    scale,
    m,
    n,
    k,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    stride_sxm,
    stride_sxb,
    stride_swn,
    stride_swb,
    stride_qm,
    stride_qn,
    stride_sm,
    stride_sn,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAP: tl.constexpr,
    CONVERT: tl.constexpr,
    DECODE: tl.constexpr,
):
    """Any strides: tiles come by pointers. DECODE: codes are bytes, multiplied as float16."""
    tile_m, tile_n = banded_tile(m, n, TOKENS, BLOCK, GROUP_M)
    tokens = tile_m * TOKENS + tl.arange(0, TOKENS)
    columns = tile_n * BLOCK + tl.arange(0, BLOCK)
    depth = tl.arange(0, BLOCK_K)
    axis: tl.constexpr = 0 if SWAP else 1  # of K in a tile of x; w is the other way around
    depth64 = depth.to(tl.int64)
    in_m = tl.expand_dims(tokens < m, axis)
    in_n = tl.expand_dims(columns < n, 1 - axis)
    xs = x + tl.expand_dims(tokens.to(tl.int64) * stride_xm, axis)
    xs += tl.expand_dims(depth64 * stride_xk, 1 - axis)
    gates = w + tl.expand_dims(columns.to(tl.int64) * stride_wn, 1 - axis)
    gates += tl.expand_dims(depth64 * stride_wk, axis)
    ups = gates + tl.cast(n, tl.int64) * stride_wn
    scale_xs = scale_x + tokens.to(tl.int64) * stride_sxm
    scale_gate = scale_w + tl.cast(tile_n, tl.int64) * stride_swn
    scale_up = scale_gate + tl.cdiv(n, BLOCK).to(tl.int64) * stride_swn

    shape_m: tl.constexpr = BLOCK if SWAP else TOKENS
    shape_n: tl.constexpr = TOKENS if SWAP else BLOCK
    gate = tl.zeros((shape_m, shape_n), tl.float32)
    up = tl.zeros((shape_m, shape_n), tl.float32)
    for b in tl.range(0, tl.cdiv(k, BLOCK), num_stages=STAGES):
        of_gate = tl.zeros((shape_m, shape_n), tl.float32)
        of_up = tl.zeros((shape_m, shape_n), tl.float32)
        for j in tl.static_range(BLOCK // BLOCK_K):
            if EVEN_K:
                tile_x = tl.load(xs, mask=in_m, other=0.0)
                tile_g = tl.load(gates, mask=in_n, other=0.0)
                tile_u = tl.load(ups, mask=in_n, other=0.0)
            else:
                in_k = depth < k - b * BLOCK - j * BLOCK_K
                tile_x = tl.load(xs, mask=in_m & tl.expand_dims(in_k, 1 - axis), other=0.0)
                in_w = in_n & tl.expand_dims(in_k, axis)
                tile_g = tl.load(gates, mask=in_w, other=0.0)
                tile_u = tl.load(ups, mask=in_w, other=0.0)
            of_gate = _multiply(tile_x, tile_g, of_gate, SWAP, DECODE)
            of_up = _multiply(tile_x, tile_u, of_up, SWAP, DECODE)
            xs += BLOCK_K * tl.cast(stride_xk, tl.int64)
            gates += BLOCK_K * tl.cast(stride_wk, tl.int64)
            ups += BLOCK_K * tl.cast(stride_wk, tl.int64)
        sx = tl.load(scale_xs, mask=tokens < m, other=0.0)
        by_gate = tl.expand_dims(sx * tl.load(scale_gate), axis)
        by_up = tl.expand_dims(sx * tl.load(scale_up), axis)
        gate = tl.fma(of_gate, by_gate, gate)
        up = tl.fma(of_up, by_up, up)
        scale_xs += stride_sxb
        scale_gate += stride_swb
        scale_up += stride_swb
    # fmt: off
    _finish(gate, up, q, scale, tokens, tile_n, m, n, stride_qm, stride_qn, stride_sm, stride_sn,
            SWAP, CONVERT, DECODE)
    # fmt: on


@triton.jit(do_not_specialize=["m"])
def swiglu_descriptors(
    x,
    w,
    scale_x,
    scale_w,
    q,
    scale,
    m,
    n,
    k,
    stride_sxm,
    stride_sxb,
    stride_swn,
    stride_swb,
    stride_qm,
    stride_qn,
    stride_sm,
    stride_sn,
    TOKENS: tl.constexpr,
    GROUP_M: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    CONVERT: tl.constexpr,
):
    """x and w are tensor descriptors over [m, k] and [2n, k], in blocks of 128 of K.

    Rows of the gate's last block may be those of up: their columns are past n and not used.
    """
    tile_m, tile_n = banded_tile(m, n, TOKENS, BLOCK, GROUP_M)
    tokens = tile_m * TOKENS + tl.arange(0, TOKENS)
    axis: tl.constexpr = 0 if SWAP else 1
    scale_xs = scale_x + tokens.to(tl.int64) * stride_sxm
    scale_gate = scale_w + tl.cast(tile_n, tl.int64) * stride_swn
    scale_up = scale_gate + tl.cdiv(n, BLOCK).to(tl.int64) * stride_swn
    shape_m: tl.constexpr = BLOCK if SWAP else TOKENS
    shape_n: tl.constexpr = TOKENS if SWAP else BLOCK
    gate = tl.zeros((shape_m, shape_n), tl.float32)
    up = tl.zeros((shape_m, shape_n), tl.float32)
    for b in tl.range(0, tl.cdiv(k, BLOCK), num_stages=STAGES):
        tile_x = x.load([tile_m * TOKENS, b * BLOCK])
        tile_g = w.load([tile_n * BLOCK, b * BLOCK])
        tile_u = w.load([n + tile_n * BLOCK, b * BLOCK])
        sx = tl.load(scale_xs, mask=tokens < m, other=0.0)
        by_gate = tl.expand_dims(sx * tl.load(scale_gate), axis)
        by_up = tl.expand_dims(sx * tl.load(scale_up), axis)
        zero = tl.zeros((shape_m, shape_n), tl.float32)
        if SWAP:
            gate = tl.fma(_multiply(tile_x.T, tile_g, zero, True, False), by_gate, gate)
            up = tl.fma(_multiply(tile_x.T, tile_u, zero, True, False), by_up, up)
        else:
            gate = tl.fma(_multiply(tile_x, tile_g.T, zero, False, False), by_gate, gate)
            up = tl.fma(_multiply(tile_x, tile_u.T, zero, False, False), by_up, up)
        scale_xs += stride_sxb
        scale_gate += stride_swb
        scale_up += stride_swb
    # fmt: off
    _finish(gate, up, q, scale, tokens, tile_n, m, n, stride_qm, stride_qn, stride_sm, stride_sn,
            SWAP, CONVERT, False)
    # fmt: on
