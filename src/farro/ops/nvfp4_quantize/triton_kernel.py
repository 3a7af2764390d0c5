"""The Triton kernels of the NVFP4 quantizers: a tile of 32-blocks at a time, in registers.

Bits are those of formats/nvfp4.py: divisions are IEEE, maxima of bits drop no NaN, codes and scales
are rounded by integers, and nothing is fused that the formula does not fuse.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_gated import bf16_rounded, gated

NO_ROW = tl.constexpr(0x38)
INF_BITS = tl.constexpr(0x7F800000)
FILL = tl.constexpr(16)  # for each block of a tile: unused scales that a program writes at once


@triton.jit
def _scale_of(largest, gscale):
    """UE4M3 bytes of blocks, from the bits of max|x|; and gscale / scale, NaN as the scale is."""
    scale = tl.div_rn(largest.to(tl.float32, bitcast=True), 6.0) * gscale
    scale = tl.where(largest == 0, gscale, scale)
    factor_bits = gscale.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    finite = (largest < INF_BITS) & (factor_bits < INF_BITS)
    scale = tl.where(scale > 0.001953125, scale, 0.001953125)  # 2^-9
    scale = tl.where(scale < 448.0, scale, 448.0)
    bits = scale.to(tl.int32, bitcast=True)
    normal = bits >= 0x3C800000  # 2^-6: 3 bits of mantissa below, by half a unit and a tie's parity
    upper = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    step = scale + 16384.0  # whose last bit is worth 2^-9
    code = tl.where(normal, upper - 960, step.to(tl.int32, bitcast=True) & 15)
    value = tl.where(normal, (upper << 20).to(tl.float32, bitcast=True), step - 16384.0)
    ratio = tl.div_rn(gscale, value)
    return tl.where(finite, code, 0x7F), tl.where(finite, ratio, float("nan"))


@triton.jit
def _code_of(value):
    """e2m1 codes of FP32 values: nearest even, saturating, -0 and NaN as 0."""
    size = tl.minimum(tl.abs(value), 6.0)
    # 2^22 times the power of two below, 1 at least: the sum's last bit is worth the step there,
    # and its exponent tells how many codes lie below
    power = tl.maximum(size.to(tl.int32, bitcast=True), 0x3F800000) & 0x7F800000
    shifted = size + (power + 0x0B000000).to(tl.float32, bitcast=True)
    bits = shifted.to(tl.int32, bitcast=True)
    code = (bits & 7) + (bits >> 22) - 298
    sign = (value.to(tl.int32, bitcast=True) >> 28) & 8
    return tl.where(tl.abs(value) > 0.25, code | sign, 0)


@triton.jit
def _quantize(value, gscale, b_act, sfb, row, blocks, block, inside, BLOCKS: tl.constexpr):
    """Store one row's tile [BLOCKS, 32] of FP32 values: its codes, two a byte, and its scales."""
    largest = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    scale, ratio = _scale_of(largest, gscale)
    code = _code_of(value * ratio[:, None])
    low, high = tl.split(tl.reshape(code, [BLOCKS, 16, 2]))
    packed = (low | (high << 4)).to(tl.uint8)
    places = row * (blocks * 16) + block[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(b_act + places, packed, mask=inside[:, None])
    tl.store(sfb + row * blocks + block, scale.to(tl.uint8), mask=inside)


@triton.jit
def _load(x, row, blocks, block, inside):
    """One row's tile [BLOCKS, 32] of BF16 values, in FP32."""
    at = row * (blocks * 32) + block[:, None] * 32 + tl.arange(0, 32)[None, :]
    return tl.load(x + at, mask=inside[:, None], other=0.0).to(tl.float32)


@triton.jit
def _load_gated(
    x,
    row,
    blocks,
    block,
    inside,
    INTERLEAVED: tl.constexpr,
    SITU: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR: tl.constexpr,
):
    """The same of gate and up, combined."""
    lane = tl.arange(0, 32)[None, :]
    mask = inside[:, None]
    start = row * (blocks * 64)
    if INTERLEAVED:  # 8 gate columns, then 8 up columns
        at = start + block[:, None] * 64 + (lane // 8) * 16 + lane % 8
        other = at + 8
    else:
        at = start + block[:, None] * 32 + lane
        other = at + blocks * 32
    gate = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + other, mask=mask, other=0.0).to(tl.float32)
    return gated(gate, up, SITU, BETA, LINEAR)


@triton.jit
def _unused(sfb, row, blocks, block, inside, BLOCKS: tl.constexpr):
    nothing = tl.full([BLOCKS], NO_ROW, tl.uint8)
    tl.store(sfb + row * blocks + block, nothing, mask=inside)


@triton.jit
def _fill_rows(sfb, first, last, blocks, program, programs, BLOCKS: tl.constexpr):
    """Scales of rows [first, last), which belong to no token; rows are 64-bit."""
    SIZE: tl.constexpr = BLOCKS * FILL
    start = first * blocks
    length = (last - first) * blocks
    for chunk in range(program.to(tl.int64), tl.cdiv(length, SIZE), programs.to(tl.int64)):
        at = chunk * SIZE + tl.arange(0, SIZE)
        nothing = tl.full([SIZE], NO_ROW, tl.uint8)
        tl.store(sfb + start + at, nothing, mask=at < length)


_SIZES = ["tokens", "routes", "rows", "experts", "blocks"]


@triton.jit(do_not_specialize=_SIZES)
def quantize_regions(
    x,
    src_tok,
    src_route,
    weights,
    gscale,
    counts,
    b_act,
    sfb,
    tokens,
    routes,
    rows,
    experts,
    blocks,
    RAGGED: tl.constexpr,
    PER_EXPERT: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SITU: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Rows of one region, an expert or (RAGGED, or without counts) all there are: [rows] of them.

    The programs of a region share its used rows, and then the scales of the others. `src_tok` None:
    rows stay where they are.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    region = tl.program_id(1)
    first = region.to(tl.int64) * rows
    count = rows
    if RAGGED:
        count = tl.load(counts + experts)
    elif counts is not None:
        count = tl.load(counts + region)
    count = tl.minimum(tl.maximum(count, 0), rows)
    factor = tl.load(gscale)
    if PER_EXPERT and not RAGGED:
        factor = tl.load(gscale + region)

    tiles = tl.cdiv(blocks, BLOCKS)
    for item in range(program, count * tiles, programs):
        row = item // tiles
        block = item % tiles * BLOCKS + tl.arange(0, BLOCKS)
        inside = block < blocks
        place = first + row
        if src_tok is None:
            if GATED:
                value = _load_gated(
                    *(x, place, blocks, block, inside), INTERLEAVED, SITU, BETA, LINEAR
                )
            else:
                value = _load(x, place, blocks, block, inside)
            _quantize(value, factor, b_act, sfb, place, blocks, block, inside, BLOCKS)
        else:
            token = tl.load(src_tok + place)
            used = (token >= 0) & (token < tokens)
            route = 0
            if weights is not None:
                route = tl.load(src_route + place)
                used = used & (route >= 0) & (route < routes)
            if used:
                value = _load(x, token.to(tl.int64), blocks, block, inside)
                if weights is not None:
                    value = bf16_rounded(value * tl.load(weights + route))
                if PER_EXPERT and RAGGED:
                    factor = _ragged_factor(gscale, counts, experts, row)
                _quantize(value, factor, b_act, sfb, place, blocks, block, inside, BLOCKS)
            else:
                _unused(sfb, place, blocks, block, inside, BLOCKS)
    _fill_rows(sfb, first + count, first + rows, blocks, program, programs, BLOCKS)


@triton.jit
def _ragged_factor(gscale, offsets, experts, row):
    """That of the expert whose rows `row` is among: the first whose end lies past it."""
    low, high = 0, experts - 1
    while low < high:
        middle = (low + high) // 2
        past = tl.load(offsets + middle + 1) > row
        high = tl.where(past, middle, high)
        low = tl.where(past, low, middle + 1)
    return tl.load(gscale + low)


@triton.jit(do_not_specialize=_SIZES)
def quantize_routes(
    x,
    flat_tok,
    dest_global,
    weights,
    gscale,
    counts,
    b_act,
    sfb,
    tokens,
    routes,
    rows,
    experts,
    blocks,
    PER_EXPERT: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Routes to the rows they name; then, chunk by chunk, the scales of each expert's unused rows.

    Each expert has `rows` rows.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    tiles = tl.cdiv(blocks, BLOCKS)
    factor = tl.load(gscale)
    for item in range(program, routes * tiles, programs):
        route = item // tiles
        block = item % tiles * BLOCKS + tl.arange(0, BLOCKS)
        inside = block < blocks
        place = tl.load(dest_global + route)
        kept = (place >= 0) & (place < experts.to(tl.int64) * rows)
        expert = tl.where(kept, place // rows, 0).to(tl.int32)
        row = place - expert.to(tl.int64) * rows
        if kept & (row < tl.load(counts + expert)):
            token = tl.load(flat_tok + route)
            if (token >= 0) & (token < tokens):
                value = _load(x, token, blocks, block, inside)
                if weights is not None:
                    value = bf16_rounded(value * tl.load(weights + route))
                if PER_EXPERT:
                    factor = tl.load(gscale + expert)
                _quantize(value, factor, b_act, sfb, place, blocks, block, inside, BLOCKS)
            else:
                _unused(sfb, place, blocks, block, inside, BLOCKS)

    size = rows.to(tl.int64) * blocks
    SIZE: tl.constexpr = BLOCKS * FILL
    chunks = tl.cdiv(size, SIZE)
    # 64-bit, as the scales of all experts may be more than 2^31
    for item in range(program.to(tl.int64), experts * chunks, programs.to(tl.int64)):
        expert = item // chunks
        count = tl.minimum(tl.maximum(tl.load(counts + expert), 0), rows)
        at = (item % chunks) * SIZE + tl.arange(0, SIZE)
        nothing = tl.full([SIZE], NO_ROW, tl.uint8)
        unused = (at >= count.to(tl.int64) * blocks) & (at < size)
        tl.store(sfb + expert * size + at, nothing, mask=unused)


@triton.jit(do_not_specialize=_SIZES)
def copy_rows(
    q,
    q_sf,
    src_tok,
    counts,
    b_act,
    sfb,
    tokens,
    rows,
    blocks,
    BLOCKS: tl.constexpr,
):
    """Quantized tokens to the rows of one expert, and the scales of its unused rows."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    region = tl.program_id(1)
    first = region.to(tl.int64) * rows
    count = tl.minimum(tl.maximum(tl.load(counts + region), 0), rows)
    tiles = tl.cdiv(blocks, BLOCKS)
    for item in range(program, count * tiles, programs):
        place = first + item // tiles
        block = item % tiles * BLOCKS + tl.arange(0, BLOCKS)
        inside = block < blocks
        token = tl.load(src_tok + place).to(tl.int64)
        if (token >= 0) & (token < tokens):
            byte = block[:, None] * 16 + tl.arange(0, 16)[None, :]
            codes = tl.load(q + token * (blocks * 16) + byte, mask=inside[:, None])
            tl.store(b_act + place * (blocks * 16) + byte, codes, mask=inside[:, None])
            scales = tl.load(q_sf + token * blocks + block, mask=inside)
            tl.store(sfb + place * blocks + block, scales, mask=inside)
        else:
            _unused(sfb, place, blocks, block, inside, BLOCKS)
    _fill_rows(sfb, first + count, first + rows, blocks, program, programs, BLOCKS)


@triton.jit(do_not_specialize=_SIZES)
def dequantize_rows(
    b_act,
    sfb,
    gscale,
    out,
    rows,
    blocks,
    PER_REGION: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Values of the rows of one region, which share a gscale: code * scale, over gscale."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    region = tl.program_id(1)
    first = region.to(tl.int64) * rows
    tiles = tl.cdiv(blocks, BLOCKS)
    for item in range(program, rows * tiles, programs):
        place = first + item // tiles
        block = item % tiles * BLOCKS + tl.arange(0, BLOCKS)
        inside = block < blocks
        byte = block[:, None] * 16 + tl.arange(0, 16)[None, :]
        packed = tl.load(b_act + place * (blocks * 16) + byte, mask=inside[:, None], other=0)
        packed = packed.to(tl.int32)
        code = tl.reshape(tl.join(packed & 15, packed >> 4), [BLOCKS, 32])
        scale = tl.load(sfb + place * blocks + block, mask=inside, other=0).to(tl.int32)
        value = _code_value(code) * _scale_value(scale)[:, None]
        if gscale is not None:
            factor = tl.load(gscale + region) if PER_REGION else tl.load(gscale)
            value = tl.div_rn(value, factor)
        lane = tl.arange(0, 32)[None, :]
        at = place * (blocks * 32) + block[:, None] * 32 + lane
        tl.store(out + at, value, mask=inside[:, None])


@triton.jit
def _code_value(code):
    """FP32 of e2m1: exponent and mantissa of 2^(e-1) * 1.m, or m/2; and the sign."""
    magnitude = code & 7
    normal = ((magnitude << 22) + 0x3F000000).to(tl.float32, bitcast=True)
    value = tl.where(magnitude >= 2, normal, magnitude.to(tl.float32) * 0.5)
    return (value.to(tl.int32, bitcast=True) | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def _scale_value(scale):
    """FP32 of E4M3 bytes; NaN is 0x7f and 0xff."""
    magnitude = scale & 0x7F
    normal = ((magnitude + 960) << 20).to(tl.float32, bitcast=True)
    value = tl.where(magnitude >= 8, normal, magnitude.to(tl.float32) * 0.001953125)
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return (value.to(tl.int32, bitcast=True) | ((scale & 0x80) << 24)).to(tl.float32, bitcast=True)
