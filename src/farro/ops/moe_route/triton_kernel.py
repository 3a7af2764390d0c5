"""The Triton kernels of routing: a plan without communication, and the sum over a token's rows."""

from __future__ import annotations

import triton
import triton.language as tl

LANES = tl.constexpr(128)  # routes of a tile's row: counts of one expert within fit 8 bits
FLUSH = tl.constexpr(128)  # tiles whose counts fit them too
ABREAST = tl.constexpr(8)  # routes of a token whose rows are read at a time


@triton.jit
def _from_base(
    topk_ids,
    at,
    stop,
    base,
    stride_t,
    stride_k,
    TOPK: tl.constexpr,
    FLAT: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The expert of each route, counted from `base`; negative from `stop` on, unless WHOLE."""
    if FLAT:
        offsets = at
    else:
        offsets = (at // TOPK).to(tl.int64) * stride_t + (at % TOPK).to(tl.int64) * stride_k
    if WHOLE:
        return tl.load(topk_ids + offsets) - base
    return tl.load(topk_ids + offsets, mask=at < stop, other=-1) - base


@triton.jit
def _is_among(e, count):
    """0 <= e < count, in one comparison."""
    if e.dtype == tl.int64:
        return e.to(tl.uint64, bitcast=True) < count
    else:
        return e.to(tl.uint32, bitcast=True) < count


@triton.jit
def _packed(e, mine):
    """One for each route to one of four experts, in the byte of its expert."""
    place = (e & 3).to(tl.int32) * 8
    return tl.where(mine, tl.full(place.shape, 1, tl.int32) << place, 0)


@triton.jit
def _count(
    topk_ids,
    start,
    stop,
    routes,
    base,
    own,
    before,
    experts,
    stride_t,
    stride_k,
    TOPK: tl.constexpr,
    FLAT: tl.constexpr,
    WHOLE: tl.constexpr,
    TILE: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Routes of tiles [start, stop) to four experts from `base` on; ragged: those before, and all.

    `before` experts of this rank come before `base`.
    """
    n0, n1, n2, n3 = 0, 0, 0, 0
    below, local = 0, 0
    for chunk in range(start, stop, FLUSH):
        packed = tl.zeros([TILE], tl.int32)
        lower = tl.zeros([TILE], tl.int32)
        every = tl.zeros([TILE], tl.int32)
        for tile in range(chunk, tl.minimum(chunk + FLUSH, stop)):
            at = tile * TILE + tl.arange(0, TILE)
            e = _from_base(topk_ids, at, routes, base, stride_t, stride_k, TOPK, FLAT, WHOLE)
            packed += _packed(e, _is_among(e, own))
            if RAGGED:
                local_e = e + before
                lower += _is_among(local_e, before).to(tl.int32)
                every += _is_among(local_e, experts).to(tl.int32)
        n0 += tl.sum(packed & 0xFF)
        n1 += tl.sum((packed >> 8) & 0xFF)
        n2 += tl.sum((packed >> 16) & 0xFF)
        n3 += tl.sum((packed >> 24) & 0xFF)
        if RAGGED:
            below += tl.sum(lower)
            local += tl.sum(every)
    return n0, n1, n2, n3, below, local


@triton.jit
def _fill(source1, source2, start, stop, step, BLOCK: tl.constexpr):
    """-1 in both, in blocks from `start` on, `step` apart."""
    for first in range(start, stop, step):
        at = first + tl.arange(0, BLOCK)
        minus = tl.full([BLOCK], -1, tl.int32)
        tl.store(source1 + at, minus, mask=at < stop)
        tl.store(source2 + at, minus, mask=at < stop)


@triton.jit
def _four(n0, n1, n2, n3):
    """Four scalars as a column."""
    i = tl.arange(0, 4)[:, None]
    return tl.where(i < 2, tl.where(i == 0, n0, n1), tl.where(i == 2, n2, n3))


@triton.jit
def _tile_ranks(e, mine, c0, c1, c2, c3):
    """Of routes to four experts, which of these, and the rank after c0.. earlier ones; new c0.. .

    e [ROWS, LANES] counts from the first of the four; what is not `mine` gets any rank.
    """
    packed = _packed(e, mine)
    slot = (e & 3).to(tl.int32)
    in_row = ((tl.cumsum(packed, 1) - packed) >> (slot * 8)) & 0xFF
    total = tl.sum(packed, 1)
    # the same four counts, 16 bits each, so that one scan goes through the rows
    wide = (total & 0xFF).to(tl.int64)
    wide += ((total >> 8) & 0xFF).to(tl.int64) << 16
    wide += ((total >> 16) & 0xFF).to(tl.int64) << 32
    wide += ((total >> 24) & 0xFF).to(tl.int64) << 48
    above = tl.cumsum(wide, 0) - wide
    r0 = (c0 + (above & 0xFFFF).to(tl.int32))[:, None]
    r1 = (c1 + ((above >> 16) & 0xFFFF).to(tl.int32))[:, None]
    r2 = (c2 + ((above >> 32) & 0xFFFF).to(tl.int32))[:, None]
    r3 = (c3 + ((above >> 48) & 0xFFFF).to(tl.int32))[:, None]
    low, high = tl.where(slot == 0, r0, r1), tl.where(slot == 2, r2, r3)
    rank = tl.where(slot < 2, low, high) + in_row
    sums = tl.sum(wide, 0)
    c0 += (sums & 0xFFFF).to(tl.int32)
    c1 += ((sums >> 16) & 0xFFFF).to(tl.int32)
    c2 += ((sums >> 32) & 0xFFFF).to(tl.int32)
    c3 += ((sums >> 48) & 0xFFFF).to(tl.int32)
    return slot, rank, c0, c1, c2, c3


_SIZES = ["routes", "stride_t", "stride_k", "first_expert", "experts", "cap", "slices", "length"]


@triton.jit(do_not_specialize=_SIZES)
def plan_rows(
    topk_ids,
    counts,
    route_dest,
    src_tok,
    src_route,
    routes,
    stride_t,
    stride_k,
    first_expert,
    experts,
    cap,
    slices,
    length,
    TOPK: tl.constexpr,
    FLAT: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    FILL: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """A plan in one launch: programs never wait for each other, they read what they need to know.

    A program ranks the routes of one slice, `length` tiles, to four experts. It counts those of
    all earlier slices, so its ranks are final. RAGGED: it counts the later slices too, and the
    experts before its own. The ids are few and in L2, and counting is cheap.
    """
    TILE: tl.constexpr = ROWS * LANES
    group, groups = tl.program_id(0), tl.num_programs(0)
    piece = slices - 1 - tl.program_id(1)  # the last slices have most to do, and start first
    tiles = tl.cdiv(routes, TILE)
    before = group * 4
    own = tl.minimum(experts - before, 4)
    base = first_expert + before
    begin = piece * length
    end = tl.minimum(begin + length, tiles)
    # fmt: off
    c0, c1, c2, c3, below, local = _count(
        topk_ids, 0, begin, routes, base, own, before, experts, stride_t, stride_k,
        TOPK, FLAT, True, TILE, RAGGED,
    )
    if RAGGED:
        d0, d1, d2, d3, below_too, local_too = _count(
            topk_ids, begin, tiles, routes, base, own, before, experts, stride_t, stride_k,
            TOPK, FLAT, WHOLE, TILE, RAGGED,
        )
        # fmt: on
        o0 = below + below_too
        o1 = o0 + c0 + d0
        o2 = o1 + c1 + d1
        o3 = o2 + c2 + d2
        local += local_too
        if piece == 0:
            tl.store(counts + before, o0)
            tl.store(counts + before + 1, o1)  # its own and the end of the last, so at least two
            tl.store(counts + before + 2, o2, mask=own >= 2)
            tl.store(counts + before + 3, o3, mask=own >= 3)
            tl.store(counts + before + 4, o3 + c3 + d3, mask=own == 4)
        c0 += o0
        c1 += o1
        c2 += o2
        c3 += o3
        first_row = before * 0
    else:
        first_row = before * cap
    start = _four(c0, c1, c2, c3)

    # rank every route of the slice, and note it in its row
    for tile in range(begin, end):
        at = tile * TILE + tl.arange(0, ROWS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
        e = _from_base(topk_ids, at, routes, base, stride_t, stride_k, TOPK, FLAT, WHOLE)
        mine = _is_among(e, own)
        slot, rank, c0, c1, c2, c3 = _tile_ranks(e, mine, c0, c1, c2, c3)
        if RAGGED:
            tl.store(src_route + rank, at, mask=mine)
        else:
            tl.store(src_route + first_row + slot * cap + rank, at, mask=mine & (rank < cap))
            minus = tl.full([ROWS, LANES], -1, tl.int32)
            tl.store(route_dest + at, minus, mask=mine & (rank >= cap))

    # the slice's rows, now that they are next to each other, tell what else there is to write
    tl.debug_barrier()
    stop = _four(c0, c1, c2, c3)
    if not RAGGED:
        stop = tl.minimum(stop, cap)
    longest = tl.max(stop - start)
    SPAN: tl.constexpr = FILL // 4
    for first in range(0, longest, SPAN):
        row = start + first + tl.arange(0, SPAN)[None, :]
        used = row < stop
        if not RAGGED:
            row += first_row + tl.arange(0, 4)[:, None] * cap
        route = tl.load(src_route + row, mask=used, other=0)
        tl.store(src_tok + row, route // TOPK, mask=used)
        tl.store(route_dest + route, row, mask=used)

    # routes to nobody here: an equal share of the slice for each program
    share = tl.cdiv(length * TILE, groups)
    lowest = begin * TILE + group * share
    highest = tl.minimum(lowest + share, tl.minimum((begin + length) * TILE, routes))
    for first in range(lowest, highest, FILL):
        at = first + tl.arange(0, FILL)
        e = _from_base(topk_ids, at, highest, first_expert, stride_t, stride_k, TOPK, FLAT, False)
        nobody = (at < highest) & (_is_among(e, experts) == 0)
        tl.store(route_dest + at, tl.full([FILL], -1, tl.int32), mask=nobody)

    # rows that nobody uses
    if RAGGED:
        program = group * slices + piece
        step = groups * slices * FILL
        _fill(src_tok, src_route, local + program * FILL, routes, step, FILL)
    elif piece == slices - 1:
        for i in tl.static_range(4):
            count = c0 if i == 0 else (c1 if i == 1 else (c2 if i == 2 else c3))
            if i < own:
                used_rows = tl.minimum(count, cap)
                tl.store(counts + before + i, used_rows)
                offset = first_row + i * cap
                _fill(src_tok + offset, src_route + offset, used_rows, cap, FILL, FILL)


@triton.jit(do_not_specialize=["rows", "cap"])
def sum_rows(
    out,
    fused,
    route_dest,
    topk_weights,
    k,
    rows,
    cap,
    stride_ot,
    stride_ok,
    stride_fe,
    stride_fc,
    stride_fk,
    stride_dt,
    stride_dj,
    stride_wt,
    stride_wj,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
    FLAT: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """out[t] = bf16(sum over j, in order, of bf16(fused[dest] * bf16(weight))), BLOCK columns.

    `rows` rows are `cap` to a block of stride_fe, or FLAT: stride_fc apart.
    """
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    along = column.to(tl.int64) * stride_fk
    total = tl.zeros([BLOCK], tl.float32)
    for first in tl.static_range(0, TOPK, ABREAST):
        # all loads of some routes before the first use of one: their latencies overlap
        dests = ()
        for j in tl.static_range(first, min(first + ABREAST, TOPK)):
            dests = dests + (tl.load(route_dest + t * stride_dt + j * stride_dj),)
        terms = ()
        for i in tl.static_range(len(dests)):
            dest = dests[i]
            if FLAT:
                row = dest.to(tl.int64) * stride_fc
            else:
                row = (dest // cap).to(tl.int64) * stride_fe + (dest % cap).to(tl.int64) * stride_fc
            width = tl.where((dest >= 0) & (dest < rows), k, 0)
            terms = terms + (tl.load(fused + row + along, mask=column < width, other=0.0),)
        for i in tl.static_range(len(dests)):
            term = terms[i]
            if WEIGHTED:
                place = topk_weights + t * stride_wt + (first + i) * stride_wj
                weight = tl.load(place).to(tl.bfloat16).to(tl.float32)
                term = (term.to(tl.float32) * weight).to(tl.bfloat16)
            kept = (dests[i] >= 0) & (dests[i] < rows)
            total = tl.where(kept, total + term.to(tl.float32), total)
    place = t * stride_ot + column.to(tl.int64) * stride_ok
    tl.store(out + place, total.to(tl.bfloat16), mask=column < k)
