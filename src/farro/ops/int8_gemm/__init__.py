"""int8_gemm: INT8 x INT8 with FP32 scales grouped along K."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..._ops import define, is_plain, ops
from ...arch import Arch
from ...checks import check_no_overlap
from ...dispatch import Kernel, Operator, explained_by, remember, select
from ...formats.int8_group import GROUP_SIZES
from ...problem import Problem, kind_of
from . import cpu, sm90, triton
from .checks import NAME, OUTPUT_DTYPES, check, check_arguments, contiguous_scales

KERNELS = (
    Kernel(
        "int8_gemm.cuda_sm90",
        "cuda",
        run="ops.int8_gemm.sm90_launch:run",
        bind="ops.int8_gemm.sm90_launch:bind",
        needs=frozenset({"wgmma"}),
        why_not=sm90.why_not,
        config=sm90.config,
        must_run=sm90.must_run,
        configs=sm90.candidates,
        yields=sm90.yields,
    ),
    Kernel(
        "int8_gemm.cpu",
        "cpu",
        run="ops.int8_gemm.cpu:run",
        needs=frozenset({"cpu"}),
        config=cpu.config,
        must_run=lambda problem: True,
    ),
    Kernel(
        "int8_gemm.triton",
        "triton",
        run="ops.int8_gemm.triton:run",
        bind="ops.int8_gemm.triton:bind",
        needs=frozenset({"triton"}),
        why_not=triton.why_not,
        config=triton.config,
        must_run=triton.must_run,
        configs=triton.candidates,
    ),
    Kernel(
        "int8_gemm.reference",
        "reference",
        run="ops.int8_gemm.reference:run",
        must_run=lambda problem: True,
    ),
)
OPERATOR = Operator("int8_gemm", KERNELS, functions=("int8_gemm", "get_kernel_config"))


def _problem(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    group_size: int,
    output_dtype: torch.dtype,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    arch: Arch | None = None,
) -> Problem:
    if out is None:  # what the call will allocate
        out = torch.empty(a.shape[0], b.shape[-1], dtype=output_dtype, device="meta")
    tensors = {"a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b, "bias": bias, "out": out}
    return Problem.of("int8_gemm", tensors, {"group_size": group_size}, arch)


def _describe(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    group_size: int = 256,
    output_dtype: torch.dtype = torch.bfloat16,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str = "auto",
    arch: Arch | None = None,
) -> tuple[Operator, Problem, str]:
    check_arguments(a, b, scale_a, scale_b, group_size, output_dtype, bias, out, backend)
    check(a, b, scale_a, scale_b, group_size, output_dtype, bias, out)
    problem = _problem(a, b, scale_a, scale_b, group_size, output_dtype, bias, out, arch)
    return OPERATOR, problem, backend


_RUNNERS: dict[Any, Any] = {}
_TYPES = int, torch.dtype, str  # of group_size, output_dtype and backend


def _runner(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    group_size: int,
    output_dtype: torch.dtype,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    backend: str,
) -> Any:
    """The kernel and configuration for a call, checked and chosen once for each kind of call."""
    key = (
        *map(kind_of, (a, b, scale_a, scale_b, bias, out)),
        *(group_size, output_dtype, backend),
    )
    run = _RUNNERS.get(key)
    if run is None:
        check_arguments(a, b, scale_a, scale_b, group_size, output_dtype, bias, out, backend)
        check(a, b, scale_a, scale_b, group_size, output_dtype, bias, out)
        problem = _problem(a, b, scale_a, scale_b, group_size, output_dtype, bias, out)
        run = select(OPERATOR, problem, backend).run
        remember(_RUNNERS, key, run)
    return run


def _implementation(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    group_size: int,
    output_dtype: torch.dtype,
    bias: torch.Tensor | None,
    backend: str,
) -> torch.Tensor:
    run = _runner(a, b, scale_a, scale_b, group_size, output_dtype, bias, None, backend)
    out = torch.empty((a.shape[0], b.shape[-1]), dtype=output_dtype, device=a.device)
    if out.numel():
        run(a, b, scale_a, scale_b, bias, out, group_size)
    return out


def _out_implementation(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    group_size: int,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    backend: str,
) -> None:
    run = _runner(a, b, scale_a, scale_b, group_size, out.dtype, bias, out, backend)
    if out.numel():
        check_no_overlap(NAME, "out", out, a=a, b=b, scale_a=scale_a, scale_b=scale_b, bias=bias)
        run(a, b, scale_a, scale_b, bias, out, group_size)
        torch.autograd.graph.increment_version(out)  # kernels that write by address do not


def _fake(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    group_size: int,
    output_dtype: torch.dtype,
    bias: torch.Tensor | None,
    backend: str,
) -> torch.Tensor:
    check_arguments(a, b, scale_a, scale_b, group_size, output_dtype, bias, None, backend)
    check(a, b, scale_a, scale_b, group_size, output_dtype, bias, None)
    return torch.empty((a.shape[0], b.shape[-1]), dtype=output_dtype, device=a.device)


def _out_fake(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    group_size: int,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    backend: str,
) -> None:
    check_arguments(a, b, scale_a, scale_b, group_size, out.dtype, bias, out, backend)
    check(a, b, scale_a, scale_b, group_size, out.dtype, bias, out)


define(
    "int8_gemm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, int group_size, "
    "ScalarType output_dtype, Tensor? bias, str backend) -> Tensor",
    _implementation,
    _fake,
)
define(
    "int8_gemm_out(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, int group_size, "
    "Tensor? bias, Tensor(a!) out, str backend) -> ()",
    _out_implementation,
    _out_fake,
    grad=False,
)


@explained_by(_describe)
def int8_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    group_size: int = 256,
    output_dtype: torch.dtype = torch.bfloat16,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """INT8 x INT8 with FP32 scales grouped along K:

        C[m,n] = sum over g of scale_a[m,g] * scale_b[g,n] * float(sum over k in g of a[m,k]*b[k,n])

    The inner sum is exact INT32. Groups are taken in order with one fused multiply-add each,
    total = fma(float(partial), fp32(scale_a * scale_b), total) in FP32; then bias is added; then
    one conversion to the output dtype. Every back end keeps this order, so FP32 outputs agree bit
    for bit on all of them and a row never depends on the other rows.

    Args:
        a: int8 [M,K]; row-major preferred, any positive strides are read in place.
        b: int8 [K,N], a logical view: `weight.T` of a row-major weight [N,K] preferred. Or
            group-packed [ceil(K/G), G, N], `farro.int8.pack_groups(weight, G).transpose(1, 2)`,
            which a CPU reads fastest (back ends "cpu" and "reference").
        scale_a: fp32 [M, ceil(K/G)]; may be zero, negative or non-finite, as may scale_b.
        scale_b: fp32 [ceil(K/G), N].
        group_size: G, 32, 64, 128 or 256; K need not be a multiple.
        output_dtype: bfloat16, float16 or float32.
        bias: [N] in bfloat16, float16 or float32, added to the FP32 total.
        out: [M,N] of output_dtype, any positive strides; written completely and returned. It must
            not share memory with an input.
        backend: "auto", "reference", "cpu", "triton" or "cuda"; an explicit one never falls back.

    Returns:
        [M,N] in output_dtype. M, N and K may be 0; a sum over nothing is zero, or the bias.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: shapes that do not fit, a zero stride, mixed devices, another group_size, an
            out that overlaps an input.
        UnsupportedError: the asked back end cannot run this here (see farro.explain).
        Nothing is written before all checks pass. -128 is a legal code. No backward.
    """
    plain = is_plain(a, b, scale_a, scale_b, bias, out)
    # Tensors of these types with arguments of these: the first such call checks the values, in
    # _runner; 2.7 us a call. Types first, for True and 256.0 would find what 1 and 256 left
    types = type(group_size), type(output_dtype), type(backend)
    if not plain or out is not None or types != _TYPES:
        check_arguments(a, b, scale_a, scale_b, group_size, output_dtype, bias, out, backend)
    if out is None:
        call = _implementation if plain else ops.int8_gemm
        result: torch.Tensor = call(a, b, scale_a, scale_b, group_size, output_dtype, bias, backend)
        return result
    call_out = _out_implementation if plain else ops.int8_gemm_out
    call_out(a, b, scale_a, scale_b, group_size, bias, out, backend)
    return out


def get_kernel_config(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    group_size: int = 256,
    output_dtype: torch.dtype = torch.bfloat16,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    backend: str = "auto",
) -> dict[str, Any]:
    """The kernel and configuration that int8_gemm would use for these operands; runs nothing.

    Arguments are int8_gemm's; scales may be left out, and then count as contiguous. Meta tensors
    are accepted.

    Returns:
        A dict with the keys policy (how the kernel works), compute_capability ((9, 0), or None on
        a CPU), backend, kernel, tile ((rows, columns) or None), stages, warps (None where the
        kernel has none) and why (the kernels passed over, with their reasons).

    Raises what int8_gemm raises.
    """
    if scale_a is None or scale_b is None:
        contiguous = contiguous_scales(a, b, group_size)
        scale_a = contiguous[0] if scale_a is None else scale_a
        scale_b = contiguous[1] if scale_b is None else scale_b
    operator, problem, _ = _describe(
        *(a, b, scale_a, scale_b),
        group_size=group_size,
        output_dtype=output_dtype,
        backend=backend,
    )
    choice = select(operator, problem, backend)
    refused = "; ".join(f"{name}: {reason}" for name, reason in choice.refused)
    return {
        "policy": getattr(choice.config, "policy", choice.kernel.backend),
        "compute_capability": problem.arch.capability,
        "backend": choice.kernel.backend,
        "kernel": choice.kernel.name,
        "tile": getattr(choice.config, "tile", None),
        "stages": getattr(choice.config, "stages", None),
        "warps": getattr(choice.config, "warps", None),
        "why": f"passed over {refused}" if refused else "first in the order of preference",
    }


def warm(device: torch.device, shape: tuple[int, ...]) -> list[Callable[[], Any]]:
    """Calls that compile what (M, N, K) needs: each group size and output dtype, and its bias."""
    m, n, k = shape

    def call(group_size: int, dtype: torch.dtype, bias: bool) -> torch.Tensor:
        a = torch.zeros(m, k, dtype=torch.int8, device=device)
        weight = torch.zeros(n, k, dtype=torch.int8, device=device)
        scale_a, scale_b = contiguous_scales(a, weight.T, group_size)
        return int8_gemm(
            *(a, weight.T, scale_a, scale_b),
            group_size=group_size,
            output_dtype=dtype,
            bias=torch.zeros(n, dtype=dtype, device=device) if bias else None,
        )

    return [
        functools.partial(call, group_size, dtype, bias)
        for group_size in GROUP_SIZES
        for dtype in OUTPUT_DTYPES
        for bias in (False, True)
    ]
