"""Checks of the activations' quantizers; they never look at values, which are on the device."""

from __future__ import annotations

from typing import Any

import torch

from ...checks import check_devices, check_dtype, check_shape, check_strided
from ...formats.nvfp4 import BLOCK
from ...problem import Problem, TensorSpec

BF16 = (torch.bfloat16,)
INT32, INT64 = (torch.int32,), (torch.int64,)
UINT8 = (torch.uint8,)


def source(problem: Problem) -> TensorSpec:
    """What is quantized (or copied, or restored): the first tensor of each of these functions."""
    spec = problem.tensors[0][1]
    assert spec is not None
    return spec


def check_contiguous(name: str, **tensors: torch.Tensor | None) -> None:
    """On one device and contiguous, as all of these functions ask."""
    check_strided(name, **tensors)
    check_devices(name, **tensors)
    for argument, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(
                f"{name}: {argument} has strides {list(tensor.stride())} for shape "
                f"{list(tensor.shape)}; needed a contiguous tensor: pass {argument}.contiguous()"
            )


def check_blocks(name: str, argument: str, tensor: torch.Tensor, what: str, size: int) -> None:
    if size % BLOCK:
        raise ValueError(
            f"{name}: {argument} has shape {list(tensor.shape)}, so {what} is {size}; needed a "
            f"multiple of {BLOCK}"
        )


def check_rows(name: str, argument: str, x: torch.Tensor, shape: str, halves: int = 1) -> None:
    """Activations in BF16 whose last dimension is `halves` times a multiple of 32."""
    check_dtype(name, argument, x, BF16, f": pass {argument}.bfloat16()")
    check_dim(name, argument, x, shape)
    size = x.shape[-1]
    if halves == 2:
        if size % (2 * BLOCK):
            raise ValueError(
                f"{name}: {argument} has shape {list(x.shape)}, so 2N is {size}; needed a multiple "
                f"of {2 * BLOCK}"
            )
    else:
        check_blocks(name, argument, x, "K", size)


def check_dim(name: str, argument: str, tensor: torch.Tensor, shape: str) -> None:
    """As many dimensions as `shape`, such as "[T, K]", names."""
    if tensor.dim() != shape.count(",") + 1:
        raise ValueError(f"{name}: {argument} has shape {list(tensor.shape)}; needed {shape}")


def check_gscale(name: str, gscale: torch.Tensor, experts: int | None) -> None:
    """fp32 [E] or [1]; of rows without experts [] or [1]."""
    check_dtype(name, "gscale", gscale, (torch.float32,), ": pass gscale.float()")
    shape = tuple(gscale.shape)
    if shape == (1,) or (shape == () if experts is None else shape == (experts,)):
        return
    needed = "[] or [1]" if experts is None else f"[{experts}] or [1], that is [E] or [1]"
    raise ValueError(f"{name}: gscale has shape {list(shape)}; needed {needed}")


def check_counts(name: str, expert_num_tokens: torch.Tensor, experts: int | None) -> None:
    check_dtype(name, "expert_num_tokens", expert_num_tokens, INT32, ": pass it as .int()")
    check_dim(name, "expert_num_tokens", expert_num_tokens, "[E]")
    if experts is not None:
        check_shape(name, "expert_num_tokens", expert_num_tokens, (experts,), "[E]")


def check_plan(
    name: str, argument: str, plan: torch.Tensor, dtype: tuple[torch.dtype, ...], length: int | None
) -> None:
    """One entry for each row or route."""
    check_dtype(name, argument, plan, dtype, ", as dispatch_plan gives it" * (dtype == INT32))
    check_dim(name, argument, plan, "[R]")
    if length is not None and plan.shape[0] != length:
        raise ValueError(f"{name}: {argument} has shape {list(plan.shape)}; needed [{length}]")


def check_weights(name: str, topk_weights: torch.Tensor | None, tokens: int) -> None:
    """fp32 [T, topk], or the same flattened; which route is whose is the plan's business."""
    if topk_weights is None:
        return
    hint = ": pass topk_weights.float()"
    check_dtype(name, "topk_weights", topk_weights, (torch.float32,), hint)
    shape = tuple(topk_weights.shape)
    flat = len(shape) == 1 and (shape[0] % tokens == 0 if tokens else shape[0] == 0)
    if not flat and not (len(shape) == 2 and shape[0] == tokens):
        raise ValueError(
            f"{name}: topk_weights has shape {list(shape)}; needed [T, topk] with T = {tokens}, "
            "or the same flattened"
        )


def check_bool(name: str, argument: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: {argument} must be a bool, got {type(value).__name__}")


def check_number(name: str, argument: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: {argument} must be a number, got {type(value).__name__}")
    if value != value:  # torch.compile traces this, and not math.isnan
        raise ValueError(f"{name}: {argument} is nan; needed a number")
