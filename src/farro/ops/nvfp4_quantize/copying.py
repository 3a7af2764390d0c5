"""scatter_fp4_planned: rows that are quantized already and move to their experts."""

from __future__ import annotations

from typing import Any

import torch

from ...checks import check_dtype, check_required, check_shape, check_size
from ...dispatch import Kernel, Operator
from ...formats.nvfp4 import BLOCK
from ...functional import Functional
from . import sm90_configs, triton_configs
from .checks import (
    INT32,
    UINT8,
    check_blocks,
    check_contiguous,
    check_counts,
    check_dim,
    check_plan,
)
from .dense import Quantized, quantized

OPERATOR = Operator(
    "nvfp4_scatter_fp4",
    (
        Kernel(
            "nvfp4_scatter_fp4.cuda_sm90",
            "cuda",
            run="ops.nvfp4_quantize.sm90:copy",
            bind="ops.nvfp4_quantize.sm90:bind_copy",
            needs=frozenset({"wgmma"}),
            why_not=sm90_configs.why_not,
            config=sm90_configs.config,
            must_run=sm90_configs.must_run,
            configs=sm90_configs.configs,
        ),
        Kernel(
            "nvfp4_scatter_fp4.cpu",
            "cpu",
            run="ops.nvfp4_quantize.cpu:copy",
            needs=frozenset({"cpu"}),
            must_run=lambda problem: True,
        ),
        Kernel(
            "nvfp4_scatter_fp4.triton",
            "triton",
            run="ops.nvfp4_quantize.triton:copy",
            bind="ops.nvfp4_quantize.triton:bind_copy",
            needs=frozenset({"triton"}),
            why_not=triton_configs.why_not,
            config=triton_configs.config,
            must_run=triton_configs.must_run,
            configs=triton_configs.configs,
        ),
        Kernel(
            "nvfp4_scatter_fp4.reference",
            "reference",
            run="ops.nvfp4_quantize.reference:copy",
            must_run=lambda problem: True,
        ),
    ),
    functions=("scatter_fp4_planned",),
    families=("nvfp4",),
    at_top=False,
)
_NAME = "scatter_fp4_planned"


def _check_copy_types(q: Any, q_sf: Any, src_tok: Any, expert_num_tokens: Any, cap: Any) -> None:
    check_required(_NAME, q=q, q_sf=q_sf, src_tok=src_tok, expert_num_tokens=expert_num_tokens)
    check_size(_NAME, "cap", cap)


def _check_copy(
    q: torch.Tensor,
    q_sf: torch.Tensor,
    src_tok: torch.Tensor,
    expert_num_tokens: torch.Tensor,
    cap: int,
) -> None:
    check_dtype(_NAME, "q", q, UINT8, ", as quant_rows gives it")
    check_dtype(_NAME, "q_sf", q_sf, UINT8, ", as quant_rows gives it")
    check_dim(_NAME, "q", q, "[T, K/2]")
    tokens, half = q.shape
    check_blocks(_NAME, "q", q, "K", 2 * half)
    check_shape(_NAME, "q_sf", q_sf, (tokens, 2 * half // BLOCK), "[T, K/32]")
    check_counts(_NAME, expert_num_tokens, None)
    check_plan(_NAME, "src_tok", src_tok, INT32, expert_num_tokens.shape[0] * cap)
    check_contiguous(_NAME, q=q, q_sf=q_sf, src_tok=src_tok, expert_num_tokens=expert_num_tokens)


_copy = Functional(
    _NAME,
    OPERATOR,
    "nvfp4_scatter_fp4_planned(Tensor q, Tensor q_sf, Tensor src_tok, Tensor expert_num_tokens, "
    "SymInt cap) -> (Tensor, Tensor)",
    check_types=_check_copy_types,
    check=_check_copy,
    outputs=lambda q, q_sf, src_tok, counts, cap: quantized(
        q, counts.shape[0], cap, 2 * q.shape[1]
    ),
    problem=lambda q, q_sf, src_tok, counts, cap: (
        {"q": q, "q_sf": q_sf, "src_tok": src_tok, "expert_num_tokens": counts},
        {"cap": cap},
    ),
)


@_copy.explained
def scatter_fp4_planned(
    q: torch.Tensor,
    q_sf: torch.Tensor,
    src_tok: torch.Tensor,
    expert_num_tokens: torch.Tensor,
    cap: int,
    *,
    backend: str = "auto",
) -> Quantized:
    """Copy rows that quant_rows made to their experts by the plan of dispatch_plan.

    Row e * cap + r, r below the expert's count, is row src_tok[e * cap + r] of q and q_sf. With one
    gscale for all experts and no router weights, that is scatter_quant_act_planned, byte for byte.

    Args:
        q: uint8 [T, K/2], contiguous, K a multiple of 32.
        q_sf: uint8 [T, K/32], contiguous.
        src_tok: int32 [E*cap], as dispatch_plan gives it. A row whose token is outside [0, T)
            counts as unused.
        expert_num_tokens: int32 [E], clamped to [0, cap].
        cap: rows of each expert.
        backend: "auto", "reference", "cpu", "triton" or "cuda".

    Returns:
        (b_act uint8 [E, cap, K/2], sfb uint8 [E, cap, K/32]), contiguous. In unused rows codes are
        unspecified and scales 0x38.

    Raises what quant_act raises.
    """
    result: Quantized = _copy(q, q_sf, src_tok, expert_num_tokens, cap, backend=backend)
    return result
