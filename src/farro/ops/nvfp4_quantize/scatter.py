"""The operator of rows that move to their experts, and scatter_quant_act: by routes."""

from __future__ import annotations

from typing import Any

import torch

from ...checks import check_dtype, check_required, check_shape, check_size, check_tensors
from ...dispatch import Kernel, Operator
from ...functional import Functional
from . import cpu, sm90_configs, triton_configs
from .checks import (
    INT64,
    check_contiguous,
    check_counts,
    check_gscale,
    check_plan,
    check_rows,
)
from .dense import Quantized, quantized

OPERATOR = Operator(
    "nvfp4_scatter",
    (
        Kernel(
            "nvfp4_scatter.cuda_sm90",
            "cuda",
            run="ops.nvfp4_quantize.sm90:scatter",
            bind="ops.nvfp4_quantize.sm90:bind_scatter",
            needs=frozenset({"wgmma"}),
            why_not=sm90_configs.why_not,
            config=sm90_configs.config,
            must_run=sm90_configs.must_run,
            configs=sm90_configs.configs,
        ),
        Kernel(
            "nvfp4_scatter.cpu",
            "cpu",
            run="ops.nvfp4_quantize.cpu:scatter",
            needs=frozenset({"cpu"}),
            config=cpu.config,
            must_run=lambda problem: True,
        ),
        Kernel(
            "nvfp4_scatter.triton",
            "triton",
            run="ops.nvfp4_quantize.triton:scatter",
            bind="ops.nvfp4_quantize.triton:bind_scatter",
            needs=frozenset({"triton"}),
            why_not=triton_configs.why_not,
            config=triton_configs.config,
            must_run=triton_configs.must_run,
            configs=triton_configs.configs,
        ),
        Kernel(
            "nvfp4_scatter.reference",
            "reference",
            run="ops.nvfp4_quantize.reference:scatter",
            must_run=lambda problem: True,
        ),
    ),
    functions=("scatter_quant_act", "scatter_quant_act_planned", "scatter_quant_act_ragged"),
    families=("nvfp4",),
    at_top=False,
)
_ROUTES = OPERATOR.functions[0]


def _check_routes_types(
    a1: Any,
    flat_tok: Any,
    dest_global: Any,
    topk_weights: Any,
    gscale: Any,
    expert_num_tokens: Any,
    cap: Any,
) -> None:
    check_required(_ROUTES, a1=a1, flat_tok=flat_tok, dest_global=dest_global)
    check_tensors(_ROUTES, topk_weights=topk_weights)
    check_required(_ROUTES, gscale=gscale, expert_num_tokens=expert_num_tokens)
    check_size(_ROUTES, "cap", cap)


def _check_routes(
    a1: torch.Tensor,
    flat_tok: torch.Tensor,
    dest_global: torch.Tensor,
    topk_weights: torch.Tensor | None,
    gscale: torch.Tensor,
    expert_num_tokens: torch.Tensor,
    cap: int,
) -> None:
    check_rows(_ROUTES, "a1", a1, "[T, K]")
    check_plan(_ROUTES, "flat_tok", flat_tok, INT64, None)
    check_plan(_ROUTES, "dest_global", dest_global, INT64, flat_tok.shape[0])
    if topk_weights is not None:
        hint = ": pass topk_weights.float()"
        check_dtype(_ROUTES, "topk_weights", topk_weights, (torch.float32,), hint)
        shape = (flat_tok.shape[0],)
        check_shape(_ROUTES, "topk_weights", topk_weights, shape, "one for each route")
    check_counts(_ROUTES, expert_num_tokens, None)
    check_gscale(_ROUTES, gscale, expert_num_tokens.shape[0])
    check_contiguous(
        _ROUTES,
        a1=a1,
        flat_tok=flat_tok,
        dest_global=dest_global,
        topk_weights=topk_weights,
        gscale=gscale,
        expert_num_tokens=expert_num_tokens,
    )


_routes = Functional(
    _ROUTES,
    OPERATOR,
    "nvfp4_scatter_quant_act(Tensor a1, Tensor flat_tok, Tensor dest_global, Tensor? topk_weights, "
    "Tensor gscale, Tensor expert_num_tokens, SymInt cap) -> (Tensor, Tensor)",
    check_types=_check_routes_types,
    check=_check_routes,
    outputs=lambda a1, *given: quantized(a1, given[-2].shape[0], given[-1], a1.shape[1]),
    problem=lambda a1, tok, dest, weights, gscale, counts, cap: (
        {
            "a1": a1,
            "flat_tok": tok,
            "dest_global": dest,
            "topk_weights": weights,
            "gscale": gscale,
            "expert_num_tokens": counts,
        },
        {"by": "routes", "cap": cap},
    ),
    launch=lambda run, *given: run(*given[:6], "routes", *given[6:]),
)


@_routes.explained
def scatter_quant_act(
    a1: torch.Tensor,
    flat_tok: torch.Tensor,
    dest_global: torch.Tensor,
    topk_weights: torch.Tensor | None,
    gscale: torch.Tensor,
    expert_num_tokens: torch.Tensor,
    cap: int,
    *,
    backend: str = "auto",
) -> Quantized:
    """Send routes to rows of their experts and quantize them, in one launch.

    Row dest_global[i] gets quant_act of a1[flat_tok[i]], or of bf16(a1[flat_tok[i]] *
    topk_weights[i]); dest_global[i] = e * cap + r is row r of expert e, and anything outside
    [0, E * cap) drops the route, as does r at or past the expert's count.

    Args:
        a1: bf16 [T, K], contiguous, K a multiple of 32.
        flat_tok: int64 [T*topk], the token of each route.
        dest_global: int64 [T*topk], the row of each route, or E * cap to drop it. No two routes
            have the same row, and every row below an expert's count has a route: what is in rows
            that have none or several is unspecified.
        topk_weights: fp32 [T*topk], router weights to apply on the input, or None.
        gscale: fp32 [E] or [1].
        expert_num_tokens: int32 [E], clamped to [0, cap].
        cap: rows of each expert.
        backend: "auto", "reference", "cpu", "triton" or "cuda".

    Returns:
        (b_act uint8 [E, cap, K/2], sfb uint8 [E, cap, K/32]), contiguous. In rows at or past the
        count (and of a token outside [0, T)) codes are unspecified and scales 0x38.

    Raises what quant_act raises.
    """
    given = (a1, flat_tok, dest_global, topk_weights, gscale, expert_num_tokens, cap)
    result: Quantized = _routes(*given, backend=backend)
    return result
