"""A plain Triton kernel, one dot per group with pointer loads: what a user would write first."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def plain_gemm(
    a, b, scale_a, scale_b, out, m, n, k, groups, GROUP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr
):  # fmt: skip
    """a [m,k], b [n,k], scale_a [m,groups], scale_b [groups,n], out [m,n], all contiguous."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    depth = tl.arange(0, GROUP)
    in_m, in_n = rows < m, columns < n
    xs = a + rows.to(tl.int64)[:, None] * k + depth[None, :]
    ys = b + columns.to(tl.int64)[None, :] * k + depth[:, None]
    total = tl.zeros((BM, BN), tl.float32)
    for g in range(groups):
        in_k = g * GROUP + depth < k
        x = tl.load(xs + g * GROUP, mask=in_m[:, None] & in_k[None, :], other=0)
        y = tl.load(ys + g * GROUP, mask=in_k[:, None] & in_n[None, :], other=0)
        sx = tl.load(scale_a + rows * groups + g, mask=in_m, other=0.0)
        sy = tl.load(scale_b + g * n + columns, mask=in_n, other=0.0)
        partial = tl.dot(x, y, out_dtype=tl.int32).to(tl.float32)
        total = tl.fma(partial, sx[:, None] * sy[None, :], total)
    where = out + rows.to(tl.int64)[:, None] * n + columns[None, :]
    tl.store(where, total.to(out.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])
