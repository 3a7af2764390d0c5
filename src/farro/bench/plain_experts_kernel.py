"""A plain Triton product of experts: rows gathered by their routes, one dot per group."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def plain_experts(
    x, scale_x, w, scale_w, source, owner, out, n, k, groups, GROUP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr
):  # fmt: skip
    """out [rows, n] = x [., k] of source [rows], times w [experts, n, k] of owner [rows / BM].

    scale_x [., groups], scale_w [experts, groups, n]; all contiguous, rows a multiple of BM.
    """
    expert = tl.load(owner + tl.program_id(0)).to(tl.int64)
    rows = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    depth = tl.arange(0, GROUP)
    in_n = columns < n
    token = tl.load(source + rows).to(tl.int64)
    xs = x + token[:, None] * k + depth[None, :]
    ys = w + (expert * n + columns.to(tl.int64))[None, :] * k + depth[:, None]
    of_columns = scale_w + expert * groups * n + columns
    total = tl.zeros((BM, BN), tl.float32)
    for g in range(groups):
        in_k = g * GROUP + depth < k
        part = tl.load(xs + g * GROUP, mask=in_k[None, :], other=0)
        weight = tl.load(ys + g * GROUP, mask=in_k[:, None] & in_n[None, :], other=0)
        sx = tl.load(scale_x + token * groups + g)
        sy = tl.load(of_columns + g * n, mask=in_n, other=0.0)
        partial = tl.dot(part, weight, out_dtype=tl.int32).to(tl.float32)
        total = tl.fma(partial, sx[:, None] * sy[None, :], total)
    where = out + rows[:, None] * n + columns[None, :]
    tl.store(where, total.to(out.dtype.element_ty), mask=in_n[None, :])
