"""The checks of moe_ffn, on types, shapes, strides, dtypes and devices alone."""

from __future__ import annotations

from typing import Any

import torch

from ...checks import check_devices, check_dtype, check_required, check_shape, check_strided
from ...formats.int8_group import check_group_size, group_count
from ..int8_gemm.checks import OUTPUT_DTYPES
from ..moe_route.plan import MAX_EXPERTS, check_ids

NAME = "moe_ffn"
LAYOUTS = ("concatenated", "interleaved")
ARGUMENTS = (
    *("x_int8", "scale_x", "w_gate_up", "scale_gate_up", "w_down", "scale_down"),
    *("topk_ids", "topk_weights"),
)


def check_types(*given: Any) -> None:
    """Python types: what the torch operator's schema would turn into a message of its own."""
    *tensors, group_size, gate_up_layout, output_dtype = given
    check_required(NAME, **dict(zip(ARGUMENTS, tensors)))
    check_group_size(NAME, group_size)
    check_layout(NAME, gate_up_layout)
    if not isinstance(output_dtype, torch.dtype):
        kind = type(output_dtype).__name__
        raise TypeError(f"{NAME}: output_dtype must be a torch.dtype, got {kind}")
    if output_dtype not in OUTPUT_DTYPES:
        raise TypeError(
            f"{NAME}: output_dtype is {output_dtype}; needed bfloat16, float16, float32"
        )


def check_layout(function: str, gate_up_layout: Any) -> None:
    if not isinstance(gate_up_layout, str):
        kind = type(gate_up_layout).__name__
        raise TypeError(f"{function}: gate_up_layout must be a str, got {kind}")
    if gate_up_layout not in LAYOUTS:
        raise ValueError(
            f"{function}: gate_up_layout is {gate_up_layout!r}; needed {' or '.join(LAYOUTS)}"
        )


def check(
    x: torch.Tensor,
    scale_x: torch.Tensor,
    w_gate_up: torch.Tensor,
    scale_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    scale_down: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    group_size: int,
    gate_up_layout: str,
    output_dtype: torch.dtype,
) -> None:
    """Everything that one tensor alone, or two together, can have wrong."""
    given = (x, scale_x, w_gate_up, scale_gate_up, w_down, scale_down, topk_ids, topk_weights)
    tensors = dict(zip(ARGUMENTS, given))
    check_types(*given, group_size, gate_up_layout, output_dtype)
    for name in ("x_int8", "w_gate_up", "w_down"):
        hint = ": quantize_int8_groups makes int8 codes"
        check_dtype(NAME, name, tensors[name], (torch.int8,), hint)
    for name in ("scale_x", "scale_gate_up", "scale_down", "topk_weights"):
        check_dtype(NAME, name, tensors[name], (torch.float32,), f": pass {name}.float()")
    if x.dim() != 2:
        raise ValueError(
            f"{NAME}: x_int8 has shape {list(x.shape)}; needed [T,H]: flatten leading dimensions "
            "with x.reshape(-1, H)"
        )
    tokens, h = x.shape
    experts, i = _check_gate_up(w_gate_up, h)
    check_ids(NAME, topk_ids)
    topk = topk_ids.shape[1]
    of_h, of_i = group_count(h, group_size), group_count(i, group_size)
    turned = w_down.dim() == 3 and i != h and tuple(w_down.shape) == (experts, h, i)
    way_out = ": pass w_down.transpose(1, 2) of rows [E,H,I]" if turned else ""
    check_shape(NAME, "w_down", w_down, (experts, i, h), f"[E,I,H]{way_out}")
    check_shape(NAME, "scale_x", scale_x, (tokens, of_h), "[T, ceil(H/G)]")
    shape = (experts, of_h, 2 * i)
    check_shape(NAME, "scale_gate_up", scale_gate_up, shape, "[E, ceil(H/G), 2I]")
    check_shape(NAME, "scale_down", scale_down, (experts, of_i, h), "[E, ceil(I/G), H]")
    check_shape(NAME, "topk_ids", topk_ids, (tokens, topk), "[T, topk] with T of x_int8")
    check_shape(NAME, "topk_weights", topk_weights, (tokens, topk), "[T, topk] of topk_ids")
    check_strided(NAME, **tensors)
    check_devices(NAME, **tensors)


def _check_gate_up(w_gate_up: torch.Tensor, h: int) -> tuple[int, int]:
    """E and I."""
    shape = tuple(w_gate_up.shape)
    if len(shape) != 3 or shape[1] != h:
        turned = len(shape) == 3 and shape[2] == h
        raise ValueError(
            f"{NAME}: w_gate_up has shape {list(shape)}; needed [E,H,2I] with H = {h} of x_int8"
            + (": pass w_gate_up.transpose(1, 2) of rows [E,2I,H]" if turned else "")
        )
    if shape[2] % 2:
        raise ValueError(
            f"{NAME}: w_gate_up has shape {list(shape)}; needed [E,H,2I], an even number of "
            "columns: as many of gate as of up"
        )
    if shape[0] > MAX_EXPERTS:
        raise ValueError(f"{NAME}: w_gate_up has {shape[0]} experts; needed at most {MAX_EXPERTS}")
    return shape[0], shape[2] // 2
