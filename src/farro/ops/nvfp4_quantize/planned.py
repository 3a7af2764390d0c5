"""scatter_quant_act_planned and scatter_quant_act_ragged: rows that a plan sends."""

from __future__ import annotations

from typing import Any

import torch

from ...checks import check_dtype, check_required, check_size, check_tensors
from ...functional import Functional
from .checks import (
    INT32,
    check_contiguous,
    check_counts,
    check_dim,
    check_gscale,
    check_plan,
    check_rows,
    check_weights,
)
from .dense import Quantized, quantized
from .scatter import OPERATOR

_PLANNED, _RAGGED = OPERATOR.functions[1:]


# --- scatter_quant_act_planned -------------------------------------------------------------------


def _check_planned_types(
    a1: Any,
    src_tok: Any,
    src_route: Any,
    topk_weights: Any,
    gscale: Any,
    expert_num_tokens: Any,
    cap: Any,
) -> None:
    check_required(_PLANNED, a1=a1, src_tok=src_tok, src_route=src_route)
    check_tensors(_PLANNED, topk_weights=topk_weights)
    check_required(_PLANNED, gscale=gscale, expert_num_tokens=expert_num_tokens)
    check_size(_PLANNED, "cap", cap)


def _check_planned(
    a1: torch.Tensor,
    src_tok: torch.Tensor,
    src_route: torch.Tensor,
    topk_weights: torch.Tensor | None,
    gscale: torch.Tensor,
    expert_num_tokens: torch.Tensor,
    cap: int,
) -> None:
    check_rows(_PLANNED, "a1", a1, "[T, K]")
    check_counts(_PLANNED, expert_num_tokens, None)
    rows = expert_num_tokens.shape[0] * cap
    check_plan(_PLANNED, "src_tok", src_tok, INT32, rows)
    check_plan(_PLANNED, "src_route", src_route, INT32, rows)
    check_weights(_PLANNED, topk_weights, a1.shape[0])
    check_gscale(_PLANNED, gscale, expert_num_tokens.shape[0])
    check_contiguous(
        _PLANNED,
        a1=a1,
        src_tok=src_tok,
        src_route=src_route,
        topk_weights=topk_weights,
        gscale=gscale,
        expert_num_tokens=expert_num_tokens,
    )


_planned = Functional(
    _PLANNED,
    OPERATOR,
    "nvfp4_scatter_quant_act_planned(Tensor a1, Tensor src_tok, Tensor src_route, "
    "Tensor? topk_weights, Tensor gscale, Tensor expert_num_tokens, SymInt cap) -> "
    "(Tensor, Tensor)",
    check_types=_check_planned_types,
    check=_check_planned,
    outputs=lambda a1, *given: quantized(a1, given[-2].shape[0], given[-1], a1.shape[1]),
    problem=lambda a1, tok, route, weights, gscale, counts, cap: (
        {
            "a1": a1,
            "src_tok": tok,
            "src_route": route,
            "topk_weights": weights,
            "gscale": gscale,
            "expert_num_tokens": counts,
        },
        {"by": "plan", "cap": cap},
    ),
    launch=lambda run, *given: run(*given[:6], "plan", *given[6:]),
)


@_planned.explained
def scatter_quant_act_planned(
    a1: torch.Tensor,
    src_tok: torch.Tensor,
    src_route: torch.Tensor,
    topk_weights: torch.Tensor | None,
    gscale: torch.Tensor,
    expert_num_tokens: torch.Tensor,
    cap: int,
    *,
    backend: str = "auto",
) -> Quantized:
    """Gather each expert's rows by the plan of dispatch_plan and quantize them, in one launch.

    Row e * cap + r, r below the expert's count, is quant_act of a1[src_tok[e * cap + r]], or of
    bf16(a1[...] * topk_weights.flatten()[src_route[e * cap + r]]). Equal to scatter_quant_act byte
    for byte on used rows.

    Args:
        a1: bf16 [T, K], contiguous, K a multiple of 32.
        src_tok, src_route: int32 [E*cap], as dispatch_plan gives them. A row whose token is outside
            [0, T), or with weights its route outside theirs, counts as unused.
        topk_weights: fp32 [T, topk] to apply on the input, or None.
        gscale: fp32 [E] or [1].
        expert_num_tokens: int32 [E], clamped to [0, cap].
        cap: rows of each expert.
        backend: "auto", "reference", "cpu", "triton" or "cuda".

    Returns:
        (b_act uint8 [E, cap, K/2], sfb uint8 [E, cap, K/32]), contiguous. In unused rows codes are
        unspecified and scales 0x38.

    Raises what quant_act raises.
    """
    given = (a1, src_tok, src_route, topk_weights, gscale, expert_num_tokens, cap)
    result: Quantized = _planned(*given, backend=backend)
    return result


# --- scatter_quant_act_ragged --------------------------------------------------------------------


def _check_ragged_types(
    a1: Any, src_tok: Any, src_route: Any, topk_weights: Any, gscale: Any, expert_offsets: Any
) -> None:
    check_required(_RAGGED, a1=a1, src_tok=src_tok, src_route=src_route)
    check_tensors(_RAGGED, topk_weights=topk_weights)
    check_required(_RAGGED, gscale=gscale, expert_offsets=expert_offsets)


def _check_ragged(
    a1: torch.Tensor,
    src_tok: torch.Tensor,
    src_route: torch.Tensor,
    topk_weights: torch.Tensor | None,
    gscale: torch.Tensor,
    expert_offsets: torch.Tensor,
) -> None:
    check_rows(_RAGGED, "a1", a1, "[T, K]")
    check_plan(_RAGGED, "src_tok", src_tok, INT32, None)
    check_plan(_RAGGED, "src_route", src_route, INT32, src_tok.shape[0])
    check_weights(_RAGGED, topk_weights, a1.shape[0])
    hint = ", as dispatch_plan_ragged gives it"
    check_dtype(_RAGGED, "expert_offsets", expert_offsets, INT32, hint)
    check_dim(_RAGGED, "expert_offsets", expert_offsets, "[E+1]")
    if expert_offsets.shape[0] < 2:
        shape = list(expert_offsets.shape)
        raise ValueError(f"{_RAGGED}: expert_offsets has shape {shape}; needed [E+1], E at least 1")
    check_gscale(_RAGGED, gscale, expert_offsets.shape[0] - 1)
    check_contiguous(
        _RAGGED,
        a1=a1,
        src_tok=src_tok,
        src_route=src_route,
        topk_weights=topk_weights,
        gscale=gscale,
        expert_offsets=expert_offsets,
    )


_ragged = Functional(
    _RAGGED,
    OPERATOR,
    "nvfp4_scatter_quant_act_ragged(Tensor a1, Tensor src_tok, Tensor src_route, "
    "Tensor? topk_weights, Tensor gscale, Tensor expert_offsets) -> (Tensor, Tensor)",
    check_types=_check_ragged_types,
    check=_check_ragged,
    outputs=lambda a1, src_tok, *_: quantized(a1, src_tok.shape[0], a1.shape[1]),
    problem=lambda a1, tok, route, weights, gscale, offsets: (
        {
            "a1": a1,
            "src_tok": tok,
            "src_route": route,
            "topk_weights": weights,
            "gscale": gscale,
            "expert_offsets": offsets,
        },
        {"by": "ragged", "cap": tok.shape[0]},
    ),
    launch=lambda run, *given: run(*given[:6], "ragged", given[1].shape[0], *given[6:]),
)


@_ragged.explained
def scatter_quant_act_ragged(
    a1: torch.Tensor,
    src_tok: torch.Tensor,
    src_route: torch.Tensor,
    topk_weights: torch.Tensor | None,
    gscale: torch.Tensor,
    expert_offsets: torch.Tensor,
    *,
    backend: str = "auto",
) -> Quantized:
    """Gather rows sorted by expert by the plan of dispatch_plan_ragged and quantize them.

    Row i, below expert_offsets[E], is quant_act of a1[src_tok[i]], or of
    bf16(a1[src_tok[i]] * topk_weights.flatten()[src_route[i]]), with the gscale of the expert e
    where expert_offsets[e] <= i < expert_offsets[e+1]. One launch.

    Args:
        a1: bf16 [T, K], contiguous, K a multiple of 32.
        src_tok, src_route: int32 [T*topk], as dispatch_plan_ragged gives them; the number of their
            entries is that of the result's rows. A row whose token is outside [0, T), or with
            weights its route outside theirs, counts as unused.
        topk_weights: fp32 [T, topk] to apply on the input, or None.
        gscale: fp32 [E] or [1].
        expert_offsets: int32 [E+1], ascending.
        backend: "auto", "reference", "cpu", "triton" or "cuda".

    Returns:
        (b_act uint8 [T*topk, K/2], sfb uint8 [T*topk, K/32]), contiguous. In unused rows codes are
        unspecified and scales 0x38.

    Raises what quant_act raises.
    """
    given = (a1, src_tok, src_route, topk_weights, gscale, expert_offsets)
    result: Quantized = _ragged(*given, backend=backend)
    return result
