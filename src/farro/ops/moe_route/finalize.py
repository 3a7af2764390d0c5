"""moe_finalize: the weighted sum of each token's rows."""

from __future__ import annotations

from typing import Any

import torch

from ..._ops import define, is_plain, ops
from ...arch import Arch
from ...checks import (
    check_backend,
    check_devices,
    check_dtype,
    check_no_overlap,
    check_output_layout,
    check_required,
    check_shape,
    check_strided,
    check_tensors,
)
from ...dispatch import Kernel, Operator, explained_by, remember, select
from ...problem import Problem, kind_of
from . import triton_finalize

NAME = "moe_finalize"
KERNELS = (
    Kernel(
        "moe_finalize.cpu",
        "cpu",
        run="ops.moe_route.cpu:finalize",
        needs=frozenset({"cpu"}),
        must_run=lambda problem: True,
    ),
    Kernel(
        "moe_finalize.triton",
        "triton",
        run="ops.moe_route.triton_finalize:run",
        bind="ops.moe_route.triton_finalize:bind",
        needs=frozenset({"triton"}),
        why_not=triton_finalize.why_not,
        config=triton_finalize.config,
        must_run=triton_finalize.must_run,
        configs=triton_finalize.configs,
    ),
    Kernel(
        "moe_finalize.reference",
        "reference",
        run="ops.moe_route.reference:finalize",
        must_run=lambda problem: True,
    ),
)
OPERATOR = Operator(NAME, KERNELS, functions=(NAME,), families=("nvfp4", "moe"))


def _check_arguments(out: Any, fused: Any, route_dest: Any, topk_weights: Any, back: Any) -> None:
    check_required(NAME, out=out, fused=fused, route_dest=route_dest)
    check_tensors(NAME, topk_weights=topk_weights)
    check_backend(NAME, back)


def _check(
    out: torch.Tensor,
    fused: torch.Tensor,
    route_dest: torch.Tensor,
    topk_weights: torch.Tensor | None,
) -> None:
    check_dtype(NAME, "fused", fused, (torch.bfloat16,))
    check_dtype(NAME, "route_dest", route_dest, (torch.int32,), ", as dispatch_plan gives it")
    if topk_weights is not None:
        hint = ": pass topk_weights.float()"
        check_dtype(NAME, "topk_weights", topk_weights, (torch.float32,), hint)
    check_dtype(NAME, "out", out, (torch.bfloat16,))
    if fused.dim() not in (2, 3):
        raise ValueError(
            f"{NAME}: fused has shape {list(fused.shape)}; needed [E, cap, K], or [R, K] of a "
            "ragged plan"
        )
    if route_dest.dim() != 2:
        given = list(route_dest.shape)
        raise ValueError(f"{NAME}: route_dest has shape {given}; needed [T, topk]")
    if topk_weights is not None:
        shape = tuple(route_dest.shape)
        check_shape(NAME, "topk_weights", topk_weights, shape, "[T, topk] of route_dest")
    check_shape(NAME, "out", out, (route_dest.shape[0], fused.shape[-1]), "[T, K]")
    tensors = {"fused": fused, "route_dest": route_dest, "topk_weights": topk_weights, "out": out}
    check_strided(NAME, **tensors)
    check_output_layout(NAME, "out", out)
    check_devices(NAME, **tensors)


def _problem(
    out: torch.Tensor,
    fused: torch.Tensor,
    route_dest: torch.Tensor,
    topk_weights: torch.Tensor | None,
    arch: Arch | None = None,
) -> Problem:
    tensors = {"fused": fused, "route_dest": route_dest, "topk_weights": topk_weights, "out": out}
    return Problem.of(NAME, tensors, {}, arch)


def _describe(
    out: torch.Tensor,
    fused: torch.Tensor,
    route_dest: torch.Tensor,
    topk_weights: torch.Tensor | None,
    *,
    backend: str = "auto",
    arch: Arch | None = None,
) -> tuple[Operator, Problem, str]:
    _check_arguments(out, fused, route_dest, topk_weights, backend)
    _check(out, fused, route_dest, topk_weights)
    return OPERATOR, _problem(out, fused, route_dest, topk_weights, arch), backend


_RUNNERS: dict[Any, Any] = {}


def _implementation(
    out: torch.Tensor,
    fused: torch.Tensor,
    route_dest: torch.Tensor,
    topk_weights: torch.Tensor | None,
    backend: str,
) -> None:
    key = (*map(kind_of, (out, fused, route_dest, topk_weights)), backend)
    run = _RUNNERS.get(key)
    if run is None:
        check_backend(NAME, backend)
        _check(out, fused, route_dest, topk_weights)
        run = select(OPERATOR, _problem(out, fused, route_dest, topk_weights), backend).run
        remember(_RUNNERS, key, run)
    if out.numel():
        inputs = {"fused": fused, "route_dest": route_dest, "topk_weights": topk_weights}
        check_no_overlap(NAME, "out", out, **inputs)
        run(out, fused, route_dest, topk_weights)
        torch.autograd.graph.increment_version(out)  # kernels that write by address do not


def _fake(
    out: torch.Tensor,
    fused: torch.Tensor,
    route_dest: torch.Tensor,
    topk_weights: torch.Tensor | None,
    backend: str,
) -> None:
    check_backend(NAME, backend)
    _check(out, fused, route_dest, topk_weights)


define(
    "moe_finalize(Tensor(a!) out, Tensor fused, Tensor route_dest, Tensor? topk_weights, "
    "str backend) -> ()",
    _implementation,
    _fake,
    grad=False,
)


@explained_by(_describe)
def moe_finalize(
    out: torch.Tensor,
    fused: torch.Tensor,
    route_dest: torch.Tensor,
    topk_weights: torch.Tensor | None,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """Sum each token's rows of the experts' results, weighted by the router, in one launch:

        out[t] = bf16(sum over kept j of bf16(fused[route_dest[t,j]] * bf16(topk_weights[t,j])))

    The sum is FP32 from +0 in the order of j, with one rounding at the end; a route is kept where
    0 <= route_dest < number of rows. The same bits on every back end.

    Args:
        out: bf16 [T, K]; written completely, zeros where no route was kept, and returned. It must
            not share memory with an input.
        fused: bf16 [E, cap, K] of a padded plan, or [R, K] of a ragged one; rows that no route
            points to are never read.
        route_dest: int32 [T, topk], as dispatch_plan or dispatch_plan_ragged gives it.
        topk_weights: fp32 [T, topk], or None where the weights are already applied.
        backend: "auto", "reference", "cpu" or "triton".
        All with any positive strides. T, topk, K and the number of rows may be 0.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: shapes that do not fit, a zero stride, mixed devices, an out that overlaps an
            input or itself.
        UnsupportedError: the asked back end cannot run this here (see farro.explain).
        Nothing is written before all checks pass. No gradients are recorded.
    """
    _check_arguments(out, fused, route_dest, topk_weights, backend)
    call = _implementation if is_plain(out, fused, route_dest, topk_weights) else ops.moe_finalize
    call(out, fused, route_dest, topk_weights, backend)
    return out
