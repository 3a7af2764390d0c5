"""The SM90 kernel of int8_gemm in Gluon, Triton's language for explicit layouts and roles.

Persistent: each program walks over output tiles. One warp fills a ring of shared-memory stages
through the copy engine; CONSUMERS groups of four warps each take WAVES slices of 64 rows of the
tile, one after the other through one INT32 accumulator, so that the tensor cores work for one group
of warps while another adds its partial sums to its FP32 totals. The column scales of wide tiles
travel through the ring, those of narrow ones through registers, one group ahead. The arithmetic and
its order are those of triton_kernel.py.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...triton_launch import leading_stride

# Triton 3.6's names for them, and those of later releases
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def _tile(tile, tiles_m, tiles_n, GROUP_M: gl.constexpr):
    """Tile coordinates; GROUP_M row tiles share their columns while these are in L2."""
    per_band = GROUP_M * tiles_n
    first = (tile // per_band) * GROUP_M
    height = min(tiles_m - first, GROUP_M)
    within = tile % per_band
    return first + within % height, within // height


# fmt: off
@gluon.jit
def _produce(x, y, scale_y, ring_x, ring_y, ring_s, full, empty, tiles_m, tiles_n, groups,
             PER_GROUP: gl.constexpr, SLICES: gl.constexpr, BLOCK_N: gl.constexpr,
             BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
             RING_SCALES: gl.constexpr):
    # fmt: on
    STAGE_BYTES: gl.constexpr = (SLICES * 64 + BLOCK_N) * BLOCK_K
    count = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = _tile(tile, tiles_m, tiles_n, GROUP_M)
        top = tile_m * (SLICES * 64)
        left = tile_n * BLOCK_N
        for g in range(groups):
            for j in gl.static_range(PER_GROUP):
                stage = count % STAGES
                mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
                ready = full.index(stage)
                depth = (g * PER_GROUP + j) * BLOCK_K
                if RING_SCALES and j == 0:
                    mbarrier.expect(ready, STAGE_BYTES + BLOCK_N * 4)
                    _copy(scale_y, [g, left], ready, ring_s.index(stage))
                else:
                    mbarrier.expect(ready, STAGE_BYTES)
                _copy(y, [left, depth], ready, ring_y.index(stage))
                for s in gl.static_range(SLICES):
                    place = ring_x.index(stage * SLICES + s)
                    _copy(x, [top + s * 64, depth], ready, place)
                count += 1


# fmt: off
@gluon.jit
def _multiply(ring_x, ring_y, zero, count, slice_of_x, SLICES: gl.constexpr,
              PER_GROUP: gl.constexpr, STAGES: gl.constexpr, full, WAIT: gl.constexpr):
    # fmt: on
    """The exact INT32 sum of one group, from zero."""
    partial = zero
    for j in gl.static_range(PER_GROUP):
        stage = (count + j) % STAGES
        if WAIT:
            mbarrier.wait(full.index(stage), ((count + j) // STAGES) & 1)
        left_side = ring_x.index(stage * SLICES + slice_of_x)
        right_side = ring_y.index(stage).permute((1, 0))
        partial = warpgroup_mma(left_side, right_side, partial, use_acc=j > 0, is_async=True)
    return warpgroup_mma_wait(0, deps=(partial,))


# fmt: off
@gluon.jit
def _store(total, bias, out, top, left, m, n, stride_bias, stride_om, stride_on,
           BIAS_AXIS: gl.constexpr, BLOCK_N: gl.constexpr, TOTAL: gl.constexpr,
           STORED: gl.constexpr):
    # fmt: on
    """Add the bias, convert once, store. BIAS_AXIS: 0 rows of out, 1 columns, -1 no bias."""
    if BIAS_AXIS == 0:
        r = top + gl.arange(0, 64, layout=gl.SliceLayout(1, TOTAL))
        addend = gl.load(bias + r.to(gl.int64) * stride_bias, mask=r < m, other=0)
        total += addend.to(gl.float32).expand_dims(1)
    if BIAS_AXIS == 1:
        c = left + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, TOTAL))
        addend = gl.load(bias + c.to(gl.int64) * stride_bias, mask=c < n, other=0)
        total += addend.to(gl.float32).expand_dims(0)
    value = gl.convert_layout(total.to(out.dtype.element_ty), STORED)
    rows = top + gl.arange(0, 64, layout=gl.SliceLayout(1, STORED))
    columns = left + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, STORED))
    offsets = (rows.to(gl.int64) * stride_om).expand_dims(1)
    offsets = offsets + (columns.to(gl.int64) * stride_on).expand_dims(0)
    inside = (rows < m).expand_dims(1) & (columns < n).expand_dims(0)
    gl.store(out + offsets, value, mask=inside)


# fmt: off
@gluon.jit
def _consume(scale_x, scale_ys, bias, out, ring_x, ring_y, ring_s, full, empty, m, n,
             tiles_m, tiles_n, groups, stride_sxm, stride_sxg, stride_syg, stride_syn,
             stride_bias, stride_om, stride_on,
             WHO: gl.constexpr, WAVES: gl.constexpr, SLICES: gl.constexpr,
             PER_GROUP: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr,
             STAGES: gl.constexpr, RING_SCALES: gl.constexpr, BIAS_AXIS: gl.constexpr,
             TOTAL: gl.constexpr, STORED: gl.constexpr):
    # fmt: on
    zero = gl.zeros((64, BLOCK_N), gl.int32, layout=TOTAL)
    mine: gl.constexpr = WHO * WAVES  # this consumer's first slice of 64 rows
    count = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = _tile(tile, tiles_m, tiles_n, GROUP_M)
        top = tile_m * (SLICES * 64) + mine * 64
        left = tile_n * BLOCK_N
        rows = top + gl.arange(0, 64, layout=gl.SliceLayout(1, TOTAL))
        columns = left + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, TOTAL))
        sxs = scale_x + rows.to(gl.int64) * stride_sxm
        sys = scale_ys + columns.to(gl.int64) * stride_syn
        total0 = gl.zeros((64, BLOCK_N), gl.float32, layout=TOTAL)
        next0 = gl.load(sxs, mask=rows < m, other=0.0)
        if WAVES == 2:
            total1 = gl.zeros((64, BLOCK_N), gl.float32, layout=TOTAL)
            far = 64 * gl.cast(stride_sxm, gl.int64)
            next1 = gl.load(sxs + far, mask=rows + 64 < m, other=0.0)
        if not RING_SCALES:
            nexty = gl.load(sys, mask=columns < n, other=0.0)
        for g in range(groups):
            # Scales that do not come by the ring are loaded one group ahead
            sx0 = next0
            ahead = gl.cast(min(g + 1, groups - 1), gl.int64)
            next0 = gl.load(sxs + ahead * stride_sxg, mask=rows < m, other=0.0)
            if WAVES == 2:
                sx1 = next1
                next1 = gl.load(sxs + far + ahead * stride_sxg, mask=rows + 64 < m, other=0.0)
            if not RING_SCALES:
                sy = nexty.expand_dims(0)
                nexty = gl.load(sys + ahead * stride_syg, mask=columns < n, other=0.0)
            partial = _multiply(
                ring_x, ring_y, zero, count, mine, SLICES, PER_GROUP, STAGES, full, True
            )
            if RING_SCALES:
                sy = ring_s.index(count % STAGES).load(TOTAL)
            total0 = gl.fma(partial.to(gl.float32), sx0.expand_dims(1) * sy, total0)
            if WAVES == 2:
                partial = _multiply(
                    ring_x, ring_y, zero, count, mine + 1, SLICES, PER_GROUP, STAGES, full, False
                )
                if RING_SCALES:  # read again: kept in registers they would spill
                    sy = ring_s.index(count % STAGES).load(TOTAL)
                total1 = gl.fma(partial.to(gl.float32), sx1.expand_dims(1) * sy, total1)
            # One thread arrives for its group of warps: all four must have read the stage by then.
            # Reads of the scales may still be queued behind slow stores when the copy engine, which
            # does not queue there, refills the stage: the fence waits for them.
            if RING_SCALES:
                fence_async_shared()
            _barrier()
            for j in gl.static_range(PER_GROUP):
                mbarrier.arrive(empty.index((count + j) % STAGES), count=1)
            count += PER_GROUP
        # fmt: off
        _store(total0, bias, out, top, left, m, n, stride_bias, stride_om, stride_on,
               BIAS_AXIS, BLOCK_N, TOTAL, STORED)
        if WAVES == 2:
            _store(total1, bias, out, top + 64, left, m, n, stride_bias, stride_om, stride_on,
                   BIAS_AXIS, BLOCK_N, TOTAL, STORED)
        # fmt: on


# fmt: off
def _gemm_ring(x, y, scale_y, scale_x, scale_ys, bias, out, m, n, k, stride_sxm, stride_sxg,
               stride_syg, stride_syn, stride_bias, stride_om, stride_on,
               GROUP: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
               GROUP_M: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
               WAVES: gl.constexpr, RING_SCALES: gl.constexpr, BIAS_AXIS: gl.constexpr,
               TOTAL: gl.constexpr, STORED: gl.constexpr):
    # fmt: on
    """x and y are descriptors over [m, k] and [n, k], of blocks of 64 and BLOCK_N rows of BLOCK_K.

    The column scales are scale_y, a descriptor over [groups, n] (RING_SCALES), or the pointer
    scale_ys. BLOCK_K <= GROUP. Needs 4 warps: they are the first consumer.
    """
    SLICES: gl.constexpr = CONSUMERS * WAVES
    PER_GROUP: gl.constexpr = GROUP // BLOCK_K
    tiles_m = gl.cdiv(m, SLICES * 64)
    tiles_n = gl.cdiv(n, BLOCK_N)
    groups = gl.cdiv(k, GROUP)
    ring_x = gl.allocate_shared_memory(gl.int8, [STAGES * SLICES, 64, BLOCK_K], x.layout)
    ring_y = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_N, BLOCK_K], y.layout)
    if RING_SCALES:
        ring_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_N], scale_y.layout)
    else:
        ring_s = ring_y  # not used
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=CONSUMERS)
    fence_async_shared()
    # fmt: off
    if CONSUMERS == 1:
        gl.warp_specialize([
            (_consume, (scale_x, scale_ys, bias, out, ring_x, ring_y, ring_s, full, empty, m, n,
                        tiles_m, tiles_n, groups, stride_sxm, stride_sxg, stride_syg, stride_syn,
                        stride_bias, stride_om, stride_on, 0, WAVES, SLICES, PER_GROUP, BLOCK_N,
                        GROUP_M, STAGES, RING_SCALES, BIAS_AXIS, TOTAL, STORED)),
            (_produce, (x, y, scale_y, ring_x, ring_y, ring_s, full, empty, tiles_m, tiles_n,
                        groups, PER_GROUP, SLICES, BLOCK_N, BLOCK_K, GROUP_M, STAGES,
                        RING_SCALES)),
        ], [1], [24])
    elif CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (scale_x, scale_ys, bias, out, ring_x, ring_y, ring_s, full, empty, m, n,
                        tiles_m, tiles_n, groups, stride_sxm, stride_sxg, stride_syg, stride_syn,
                        stride_bias, stride_om, stride_on, 0, WAVES, SLICES, PER_GROUP, BLOCK_N,
                        GROUP_M, STAGES, RING_SCALES, BIAS_AXIS, TOTAL, STORED)),
            (_consume, (scale_x, scale_ys, bias, out, ring_x, ring_y, ring_s, full, empty, m, n,
                        tiles_m, tiles_n, groups, stride_sxm, stride_sxg, stride_syg, stride_syn,
                        stride_bias, stride_om, stride_on, 1, WAVES, SLICES, PER_GROUP, BLOCK_N,
                        GROUP_M, STAGES, RING_SCALES, BIAS_AXIS, TOTAL, STORED)),
            (_produce, (x, y, scale_y, ring_x, ring_y, ring_s, full, empty, tiles_m, tiles_n,
                        groups, PER_GROUP, SLICES, BLOCK_N, BLOCK_K, GROUP_M, STAGES,
                        RING_SCALES)),
        ], [4, 1], [240, 24])
    elif CONSUMERS == 3:
        gl.warp_specialize([
            (_consume, (scale_x, scale_ys, bias, out, ring_x, ring_y, ring_s, full, empty, m, n,
                        tiles_m, tiles_n, groups, stride_sxm, stride_sxg, stride_syg, stride_syn,
                        stride_bias, stride_om, stride_on, 0, WAVES, SLICES, PER_GROUP, BLOCK_N,
                        GROUP_M, STAGES, RING_SCALES, BIAS_AXIS, TOTAL, STORED)),
            (_consume, (scale_x, scale_ys, bias, out, ring_x, ring_y, ring_s, full, empty, m, n,
                        tiles_m, tiles_n, groups, stride_sxm, stride_sxg, stride_syg, stride_syn,
                        stride_bias, stride_om, stride_on, 1, WAVES, SLICES, PER_GROUP, BLOCK_N,
                        GROUP_M, STAGES, RING_SCALES, BIAS_AXIS, TOTAL, STORED)),
            (_consume, (scale_x, scale_ys, bias, out, ring_x, ring_y, ring_s, full, empty, m, n,
                        tiles_m, tiles_n, groups, stride_sxm, stride_sxg, stride_syg, stride_syn,
                        stride_bias, stride_om, stride_on, 2, WAVES, SLICES, PER_GROUP, BLOCK_N,
                        GROUP_M, STAGES, RING_SCALES, BIAS_AXIS, TOTAL, STORED)),
            (_produce, (x, y, scale_y, ring_x, ring_y, ring_s, full, empty, tiles_m, tiles_n,
                        groups, PER_GROUP, SLICES, BLOCK_N, BLOCK_K, GROUP_M, STAGES,
                        RING_SCALES)),
        ], [4, 4, 1], [160, 160, 24])
    # fmt: on


# One compiled kernel serves every number of tokens: m, or n where the operands are swapped
gemm_ring = gluon.jit(do_not_specialize=["m"])(_gemm_ring)
gemm_ring_swapped = gluon.jit(do_not_specialize=["n"])(_gemm_ring)


def describe(tensor: torch.Tensor, transpose: bool, rows: int, columns: int) -> Any:
    """A tensor descriptor of a matrix, in blocks of rows x columns swizzled as wgmma reads them."""
    matrix = tensor.T if transpose else tensor
    size = matrix.element_size()
    width = columns if size == 1 else 0
    layout = gl.NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=8 * size, rank=2)
    strides = [leading_stride(matrix), 1]
    return TensorDescriptor(matrix, list(matrix.shape), strides, [rows, columns], layout)


def total_layout(block_n: int) -> Any:
    """Where the four warps of a consumer hold their 64 x block_n totals: as wgmma leaves them."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_n, 32])


def stored_layout(block_n: int, size: int, by_column: bool) -> Any:
    """16 bytes a thread along the contiguous side of out."""
    vector = 16 // size
    if by_column:
        lanes = 64 // vector
        return gl.BlockedLayout([vector, 1], [lanes, 32 // lanes], [1, 4], [0, 1])
    lanes = min(32, block_n // vector)
    return gl.BlockedLayout([1, vector], [32 // lanes, lanes], [4, 1], [1, 0])
