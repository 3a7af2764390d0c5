"""The Triton kernel of grouped products: codes decoded in registers, dense tensor-core products.

The compressed weight is read as it lies in memory (formats/paired_sparsity.py): a 32-bit word has
the two kept bytes of one 8-group for rows r and r + 8. With its metadata it becomes the 8 codes of
the group in natural order, which is how activations lie in memory too.
"""

from __future__ import annotations

import triton
import triton.language as tl

DEPTH = tl.constexpr(128)  # of K in a step: a chunk of the compressed layout
# e2m1 codes are decoded as FP16 numbers 2^-14 times as large, of weights and activations alike
UNSCALE = tl.constexpr(16384.0)
MINUS = tl.constexpr(-(1 << 31))


@triton.jit
def _load_words(pointer, index, mask, WIDE: tl.constexpr):
    """32-bit words of bytes, little end first; WIDE promises 4-byte alignment."""
    if WIDE:
        return tl.load(pointer.to(tl.pointer_type(tl.int32)) + index, mask=mask, other=0)
    word = tl.load(pointer + index * 4, mask=mask, other=0).to(tl.int32)
    for byte in tl.static_range(1, 4):
        part = tl.load(pointer + index * 4 + byte, mask=mask, other=0).to(tl.int32)
        word |= part << (8 * byte)
    return word


@triton.jit
def _halves(words, ROWS: tl.constexpr, STEPS: tl.constexpr, GROUPS: tl.constexpr):
    """Words [ROWS/2, GROUPS, STEPS] of rows r and r + 8 -> their 16 bits [ROWS, STEPS * GROUPS]."""
    both = tl.join(words & 0xFFFF, (words >> 16) & 0xFFFF)
    both = tl.reshape(both, [ROWS // 16, 8, GROUPS, STEPS, 2])
    return tl.reshape(tl.permute(both, [0, 4, 1, 3, 2]), [ROWS, STEPS * GROUPS])


@triton.jit
def _scales(bytes):
    """UE4M3 bytes as FP16."""
    bits = ((bytes & 0x7F) << 7) | ((bytes & 0x80) << 8)
    scale = bits.to(tl.int16).to(tl.float16, bitcast=True) * 256.0
    return tl.where((bytes & 0x7F) == 0x7F, float("nan"), scale)


@triton.jit
def _values(words, scales, ROWS: tl.constexpr):
    """FP16 [ROWS, DEPTH] of 2^-14 * code * scale: words of 8 codes [ROWS, 16], UE4M3 [ROWS, 4]."""
    both = words[:, :, None] >> (tl.arange(0, 4)[None, None, :] * 8)
    # the two codes of a byte, each at its place in 16 bits
    both = (
        ((both & 0x07) << 9) | ((both & 0x08) << 12) | ((both & 0x70) << 21) | (both << 24 & MINUS)
    )
    low = both.to(tl.int16).to(tl.float16, bitcast=True)
    high = (both >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    values = tl.reshape(tl.join(low, high), [ROWS, 4, 32]) * _scales(scales)[:, :, None]
    return tl.reshape(values, [ROWS, DEPTH])


@triton.jit
def _tiles(block, chunk, m32, steps):
    """Rows in blocks of the compressed layout, and where their tiles begin, in 32-row steps."""
    halves = tl.minimum(m32 - block * 2, 2)  # the last block may have 32 rows
    return halves * 32, block.to(tl.int64) * (2 * steps) + halves * 4 * chunk


@triton.jit
def _weights(
    a_comp,
    e_meta,
    sfa,
    row0,
    chunk,
    m32,
    steps,
    ROWS: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """FP16 [ROWS, DEPTH] of one expert's weight, from row0 (a multiple of 64) and K chunk on.

    `steps` is K/32; WHOLE promises chunks of 4 steps.
    """
    in_chunk = 4
    if not WHOLE:
        in_chunk = tl.minimum(steps - chunk * 4, 4)
    step = tl.arange(0, 4)
    pair = tl.arange(0, ROWS // 2)
    warp, eighth = pair % 32 // 8, pair % 8
    rows, start = _tiles(row0 // 64 + pair // 32, chunk, m32, steps)
    inside = (warp * 16 < rows)[:, None] & (step < in_chunk)[None, :]

    group = tl.arange(0, 4)
    at = ((warp * 32 + eighth * 4)[:, None] + group[None, :]) * in_chunk
    at = (start * 64)[:, None, None] + at[:, :, None] + step[None, None, :]
    kept = _halves(_load_words(a_comp, at, inside[:, None, :], WIDE), ROWS, 4, 4)

    at = (start * 16)[:, None] + (warp * 8 + eighth)[:, None] * in_chunk + step[None, :]
    words = _load_words(e_meta, at, inside, WIDE)
    nibbles = _halves(words[:, None, :], ROWS, 4, 1)
    nibbles = (nibbles[:, :, None] >> (group[None, None, :] * 4)) & 15
    nibbles = tl.reshape(nibbles, [ROWS, 16])
    # the two kept bytes of a group at their places among its four
    codes = ((kept & 0xFF) << ((nibbles & 3) * 8)) | ((kept >> 8) << ((nibbles >> 2) * 8))

    row = tl.arange(0, ROWS)
    rows, start = _tiles(row0 // 64 + row // 64, chunk, m32, steps)
    at = (start * 32 + row % 64 * in_chunk)[:, None] + step[None, :]
    inside = (row % 64 < rows)[:, None] & (step < in_chunk)[None, :]
    scales = tl.load(sfa + at, mask=inside, other=0).to(tl.int32)
    return _values(codes, scales, ROWS)


@triton.jit
def _coded_tokens(
    b_act,
    sfb,
    rows,
    in_rows,
    chunk,
    steps,
    TOKENS: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """FP16 [TOKENS, DEPTH] of 2^-14 * code * scale; rows (int64) that are not in_rows are zero."""
    word = chunk * 16 + tl.arange(0, 16)
    step = chunk * 4 + tl.arange(0, 4)
    inside, in_step = in_rows[:, None], in_rows[:, None]
    if not WHOLE:
        inside = inside & (word < steps * 4)[None, :]
        in_step = in_step & (step < steps)[None, :]
    words = _load_words(b_act, (rows * (steps * 4))[:, None] + word[None, :], inside, WIDE)
    scales = tl.load(sfb + (rows * steps)[:, None] + step[None, :], mask=in_step, other=0)
    return _values(words, scales.to(tl.int32), TOKENS)


@triton.jit
def _count(counts, e, limit, RAGGED: tl.constexpr):
    """First row and number of rows of experts, clamped to the rows that there are."""
    if RAGGED:
        first = tl.minimum(tl.maximum(tl.load(counts + e), 0), limit)
        last = tl.minimum(tl.maximum(tl.load(counts + e + 1), 0), limit)
        return first, tl.maximum(last - first, 0)
    return e * 0, tl.minimum(tl.maximum(tl.load(counts + e), 0), limit)


@triton.jit(do_not_specialize=["experts", "limit", "m32", "steps"])
def products(
    out,
    a_comp,
    e_meta,
    sfa,
    b_act,
    sfb,
    alphas,
    counts,
    experts,
    limit,
    m32,
    steps,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    CODED: tl.constexpr,
    RAGGED: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDE: tl.constexpr,
    WIDE_TOKENS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Tiles of ROWS weight rows x TOKENS tokens, dealt out to the programs in order.

    `limit` is max_n, or the number of rows where RAGGED; EXPERTS is a power of two of at least
    `experts`. The tokens of one tile of weights follow one another, so that it stays in L2.
    """
    e = tl.arange(0, EXPERTS)
    there = e < experts
    m = m32 * 32
    _, number = _count(counts, tl.where(there, e, 0), limit, RAGGED)
    row_tiles = tl.cdiv(m, ROWS)
    ends = tl.cumsum(tl.where(there, tl.cdiv(number, TOKENS) * row_tiles, 0), 0)
    for tile in range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0)):
        expert = tl.sum((ends <= tile).to(tl.int32), 0)
        local = tile - tl.max(tl.where(ends <= tile, ends, 0), 0)
        first, number_here = _count(counts, expert, limit, RAGGED)
        token_tiles = tl.cdiv(number_here, TOKENS)
        row0 = local // token_tiles * ROWS
        token = local % token_tiles * TOKENS + tl.arange(0, TOKENS)
        in_tokens = token < number_here
        token = first.to(tl.int64) + token
        if not RAGGED:
            token += expert.to(tl.int64) * limit

        size = expert.to(tl.int64) * m32 * steps * 32
        total = tl.zeros([ROWS, TOKENS], tl.float32)
        for chunk in tl.range(0, tl.cdiv(steps, 4), num_stages=STAGES):
            # fmt: off
            weights = _weights(
                a_comp + size * 8, e_meta + size * 2, sfa + size, row0, chunk, m32, steps,
                ROWS, WHOLE, WIDE,
            )
            if CODED:
                tokens = _coded_tokens(
                    b_act, sfb, token, in_tokens, chunk, steps, TOKENS, WHOLE, WIDE_TOKENS
                )
                # fmt: on
            else:
                weights = (weights.to(tl.float32) * UNSCALE).to(tl.bfloat16)
                k = chunk * DEPTH + tl.arange(0, DEPTH)
                inside = in_tokens[:, None] & (k < steps * 32)[None, :]
                at = (token * (steps * 32))[:, None] + k[None, :]
                tokens = tl.load(b_act + at, mask=inside, other=0.0)
                if INTERPRETED:  # it would multiply the bits of BF16
                    weights, tokens = weights.to(tl.float32), tokens.to(tl.float32)
            total = tl.dot(weights, tl.trans(tokens), total)
        if CODED:
            total = total * (UNSCALE * UNSCALE)
        total = total * tl.load(alphas + expert)
        row = row0 + tl.arange(0, ROWS)
        at = (token * m)[None, :] + row[:, None]
        inside = in_tokens[None, :] & (row < m)[:, None]
        tl.store(out + at, total.to(tl.bfloat16), mask=inside)
