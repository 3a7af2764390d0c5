"""The Triton kernels of moe_ffn: gate/up with its activation and quantizer, down, the weighted sum.

Rows are the routes sorted by expert (moe_route's ragged plan). Both products deal their tiles out
to the programs in order; the token tiles of one tile of weights follow one another, so that it
stays in L2. A tile of gate/up has whole groups of its columns, so it quantizes them in registers.
SWAP makes weights the rows of the tensor cores' operands, and leaves the narrow side to few tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..int8_quantize.triton_kernel import codes_of, magnitude, scale_of

LOG2E = tl.constexpr(1.4426950408889634)
LN2_HIGH = tl.constexpr(0.693359375)  # 10 bits: its products with small integers are exact
LN2_LOW = tl.constexpr(-2.1219444005469057e-4)
FLUSHED = tl.constexpr(-104.0)  # exp of less is 0 in FP32
ABREAST = tl.constexpr(8)  # routes of a token whose rows are read at a time


@triton.jit
def _bfloat16(x, INTERPRETED: tl.constexpr):
    """x rounded to BF16, as FP32; the interpreter would truncate."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        odd = (bits >> 16) & 1
        return ((bits + 0x7FFF + odd) & -65536).to(tl.float32, bitcast=True)
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _power_of_two(n):
    """2^n of int32 in -126..127."""
    return ((n + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _silu(x):
    """x / (1 + exp(-x)) within some units in the last place; -Inf gives NaN.

    exp is taken of -|x| alone, which does not overflow, and of a remainder of it: the error of a
    product x * log2(e) would grow with x. 2^n, which a GPU's exp2 gives as 0 below 2^-126, is two
    factors, and x comes before the second, so that a result that is a normal number has all bits.
    """
    t = -tl.abs(x)
    n = tl.floor(tl.maximum(t, FLUSHED) * LOG2E + 0.5)
    remainder = tl.fma(n, -LN2_LOW, tl.fma(n, -LN2_HIGH, t))
    half = n.to(tl.int32) >> 1
    part = tl.exp2(remainder * LOG2E) * _power_of_two(half)
    part = tl.where(t < FLUSHED, 0.0, part)
    rest = _power_of_two(n.to(tl.int32) - half)
    return tl.div_rn(tl.where(x < 0, x * part * rest, x), 1.0 + part * rest)


@triton.jit
def _ends(offsets, experts, column_tiles, EXPERTS: tl.constexpr, TOKENS: tl.constexpr):
    """The tile after each expert's last; EXPERTS is a power of two of at least `experts`."""
    e = tl.arange(0, EXPERTS)
    there = e < experts
    first = tl.load(offsets + e, mask=there, other=0)
    last = tl.load(offsets + e + 1, mask=there, other=0)
    return tl.cumsum(tl.cdiv(last - first, TOKENS) * column_tiles, 0)


@triton.jit
def _place(offsets, ends, tile, TOKENS: tl.constexpr):
    """Expert, column tile, the rows (int32) of a tile, and which of them are the expert's."""
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    local = tile - tl.max(tl.where(ends <= tile, ends, 0), 0)
    first = tl.load(offsets + expert)
    last = tl.load(offsets + expert + 1)
    token_tiles = tl.cdiv(last - first, TOKENS)
    rows = first + local % token_tiles * TOKENS + tl.arange(0, TOKENS)
    return expert.to(tl.int64), local // token_tiles, rows, rows < last


@triton.jit
def _product(
    x,
    scale_x,
    w,
    scale_w,
    in_rows,
    in_columns,
    k,
    stride_xk,
    stride_wk,
    stride_sxg,
    stride_swg,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """FP32 sums over groups of scales * (x @ w): [TOKENS, COLUMNS], turned around where SWAP.

    x, scale_x [TOKENS] and w, scale_w [COLUMNS] point to the beginnings of K. EVEN_K promises that
    k is a multiple of GROUP. Each group's INT32 sum is exact, and one fused multiply-add adds it.
    """
    axis: tl.constexpr = 0 if SWAP else 1  # of K in a tile of x; w is the other way around
    depth = tl.arange(0, BLOCK_K)
    depth64 = depth.to(tl.int64)
    xs = tl.expand_dims(x, axis) + tl.expand_dims(depth64 * stride_xk, 1 - axis)
    ws = tl.expand_dims(w, 1 - axis) + tl.expand_dims(depth64 * stride_wk, axis)
    in_x = tl.expand_dims(in_rows, axis)
    in_w = tl.expand_dims(in_columns, 1 - axis)
    shape_m: tl.constexpr = COLUMNS if SWAP else TOKENS
    shape_n: tl.constexpr = TOKENS if SWAP else COLUMNS
    total = tl.zeros((shape_m, shape_n), tl.float32)
    for g in tl.range(0, tl.cdiv(k, GROUP), num_stages=STAGES):
        partial = tl.zeros((shape_m, shape_n), tl.int32)
        for j in tl.static_range(GROUP // BLOCK_K):
            if EVEN_K:
                tile_x = tl.load(xs, mask=in_x, other=0)
                tile_w = tl.load(ws, mask=in_w, other=0)
            else:
                in_k = depth < k - g * GROUP - j * BLOCK_K
                tile_x = tl.load(xs, mask=in_x & tl.expand_dims(in_k, 1 - axis), other=0)
                tile_w = tl.load(ws, mask=in_w & tl.expand_dims(in_k, axis), other=0)
            if SWAP:
                partial = tl.dot(tile_w, tile_x, acc=partial, out_dtype=tl.int32)
            else:
                partial = tl.dot(tile_x, tile_w, acc=partial, out_dtype=tl.int32)
            xs += BLOCK_K * tl.cast(stride_xk, tl.int64)
            ws += BLOCK_K * tl.cast(stride_wk, tl.int64)
        sx = tl.load(scale_x, mask=in_rows, other=0.0)
        sw = tl.load(scale_w, mask=in_columns, other=0.0)
        scale = tl.expand_dims(sx, axis) * tl.expand_dims(sw, 1 - axis)
        total = tl.fma(partial.to(tl.float32), scale, total)
        scale_x += stride_sxg
        scale_w += stride_swg
    return total


@triton.jit
def _of_pair(n, SWAP: tl.constexpr):
    """Of column n of a product of gate and up: the intermediate feature, and 0 or 1 for up.

    One thread has two neighbouring columns of the tensor cores' results, or, of their rows, those
    that are 8 apart: so it has a feature's gate and up, and nothing is exchanged.
    """
    if SWAP:
        return n // 16 * 8 + n % 8, n // 8 % 2
    return n // 2, n % 2


@triton.jit
def _gate_and_up(total, TOKENS: tl.constexpr, FEATURES: tl.constexpr, SWAP: tl.constexpr):
    """The two parts [TOKENS, FEATURES] of a product in the order of `_of_pair`."""
    if SWAP:
        pairs = tl.reshape(total, [FEATURES // 8, 2, 8, TOKENS])
        pairs = tl.reshape(tl.permute(pairs, [0, 2, 3, 1]), [FEATURES, TOKENS, 2])
        gate, up = tl.split(pairs)
        return tl.trans(gate), tl.trans(up)
    return tl.split(tl.reshape(total, [TOKENS, FEATURES, 2]))


# scales are gathered one by one whatever their strides, so that both layouts share a kernel
@triton.jit(do_not_specialize=["experts", "step_sw", "up_sw"])
def gate_up(
    x,
    scale_x,
    w,
    scale_w,
    offsets,
    src_tok,
    codes,
    scale,
    experts,
    i,
    h,
    stride_xt,
    stride_xh,
    stride_sxt,
    stride_sxg,
    stride_we,
    stride_wh,
    step_w,
    up_w,
    stride_swe,
    stride_swg,
    step_sw,
    up_sw,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """codes [rows, i] and scale [rows, ceil(i / GROUP)] of silu(gate) * up, both contiguous.

    A row's token is src_tok[row], whose x is read in place. Feature f has its gate at f * step_w
    and its up `up_w` further on, which is all there is of a layout. A tile takes whole groups,
    FEATURES features (and twice as many columns of w) at a time.
    """
    PART: tl.constexpr = min(FEATURES, GROUP)  # of a group that one product has
    GROUPS: tl.constexpr = FEATURES // PART
    PIECES: tl.constexpr = GROUP // PART
    tile_i: tl.constexpr = FEATURES * PIECES
    ends = _ends(offsets, experts, tl.cdiv(i, tile_i), EXPERTS, TOKENS)
    feature, is_up = _of_pair(tl.arange(0, 2 * FEATURES), SWAP)
    of_tile = tl.arange(0, GROUPS)[:, None] * PART + tl.arange(0, PART)[None, :]
    for tile in range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0)):
        expert, column_tile, rows, in_rows = _place(offsets, ends, tile, TOKENS)
        token = tl.load(src_tok + rows, mask=in_rows, other=0).to(tl.int64)
        xs = x + token * stride_xt
        scale_xs = scale_x + token * stride_sxt
        hidden = ()
        largest = tl.zeros([TOKENS, GROUPS], tl.int32)
        for piece in tl.static_range(PIECES):
            f = column_tile * tile_i + piece * FEATURES + feature
            f64 = f.to(tl.int64)
            ws = w + expert * stride_we + f64 * step_w + is_up.to(tl.int64) * up_w
            scale_ws = scale_w + expert * stride_swe + f64 * step_sw
            scale_ws += is_up.to(tl.int64) * up_sw
            # fmt: off
            total = _product(
                xs, scale_xs, ws, scale_ws, in_rows, f < i, h,
                stride_xh, stride_wh, stride_sxg, stride_swg,
                GROUP, BLOCK_K, TOKENS, 2 * FEATURES, STAGES, SWAP, EVEN_K,
            )
            # fmt: on
            gate, up = _gate_and_up(total, TOKENS, FEATURES, SWAP)
            value = _silu(_bfloat16(gate, INTERPRETED)) * _bfloat16(up, INTERPRETED)
            value = tl.reshape(value, [TOKENS, GROUPS, PART])
            largest = tl.maximum(largest, tl.max(magnitude(value), axis=2))
            hidden = hidden + (value,)
        s, finite = scale_of(largest)
        rows64 = rows.to(tl.int64)
        for piece in tl.static_range(PIECES):
            code = codes_of(hidden[piece], s[:, :, None], finite[:, :, None], True)
            f = column_tile * tile_i + piece * FEATURES + of_tile
            places = rows64[:, None, None] * i + f[None, :, :]
            tl.store(codes + places, code, mask=in_rows[:, None, None] & (f < i)[None, :, :])
        groups = tl.cdiv(i, GROUP)
        group = column_tile * (tile_i // GROUP) + tl.arange(0, GROUPS)
        places = rows64[:, None] * groups + group[None, :]
        tl.store(scale + places, s, mask=in_rows[:, None] & (group < groups)[None, :])


@triton.jit(do_not_specialize=["experts"])
def down(
    codes,
    scale,
    w,
    scale_w,
    offsets,
    y,
    experts,
    h,
    i,
    stride_we,
    stride_wi,
    stride_wh,
    stride_swe,
    stride_swg,
    stride_swh,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """y [rows, h] = bf16(codes [rows, i] @ w[expert]); codes, scale and y are contiguous."""
    ends = _ends(offsets, experts, tl.cdiv(h, COLUMNS), EXPERTS, TOKENS)
    groups = tl.cdiv(i, GROUP)
    for tile in range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0)):
        expert, column_tile, rows, in_rows = _place(offsets, ends, tile, TOKENS)
        rows64 = rows.to(tl.int64)
        columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        columns64 = columns.to(tl.int64)
        in_columns = columns < h
        # fmt: off
        total = _product(
            codes + rows64 * i, scale + rows64 * groups,
            w + expert * stride_we + columns64 * stride_wh,
            scale_w + expert * stride_swe + columns64 * stride_swh,
            in_rows, in_columns, i, 1, stride_wi, 1, stride_swg,
            GROUP, BLOCK_K, TOKENS, COLUMNS, STAGES, SWAP, EVEN_K,
        )
        # fmt: on
        if SWAP:
            total = tl.trans(total)
        value = _bfloat16(total, INTERPRETED).to(tl.bfloat16)
        places = rows64[:, None] * h + columns[None, :]
        tl.store(y + places, value, mask=in_rows[:, None] & in_columns[None, :])


@triton.jit(do_not_specialize=["topk", "stride_wt", "stride_wj"])
def combine(
    y,
    route_dest,
    topk_weights,
    out,
    topk,
    h,
    stride_wt,
    stride_wj,
    BLOCK: tl.constexpr,
):
    """out[t] = sum over kept j, in order, of topk_weights[t,j] * y[route_dest[t,j]], in FP32.

    y, route_dest and out are contiguous; a route is kept where its row is not negative.
    """
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, topk, ABREAST):
        # all loads of some routes before the first use of one: their latencies overlap
        kept = ()
        terms = ()
        weights = ()
        for j in tl.static_range(ABREAST):
            slot = tl.cast(first + j, tl.int64)
            there = slot < topk
            row = tl.load(route_dest + t * topk + slot, mask=there, other=-1)
            kept = kept + (row >= 0,)
            at = topk_weights + t * stride_wt + slot * stride_wj
            weights = weights + (tl.load(at, mask=there, other=0.0),)
            place = y + tl.maximum(row, 0).to(tl.int64) * h + column
            width = tl.where(row >= 0, h, 0)
            terms = terms + (tl.load(place, mask=column < width, other=0.0),)
        for j in tl.static_range(ABREAST):
            term = weights[j] * terms[j].to(tl.float32)
            total = tl.where(kept[j], total + term, total)
    tl.store(out + t * h + column, total.to(out.dtype.element_ty), mask=column < h)
