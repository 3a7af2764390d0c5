"""Checks of weights: those of types and shapes, and those of values, which name what is wrong.

Weights are prepared at load time, so a check of values may synchronize with a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...checks import FLOATS, check_devices, check_dtype, check_shape, check_strided
from ...formats.nvfp4 import BLOCK
from ...formats.paired_sparsity import GROUP

UINT8 = (torch.uint8,)
_ROWS = 32  # M is a multiple of it: half a row block of the compressed layout
_LIKELY_16 = (
    "this is one scale per 16 K, as dense NVFP4 checkpoints have: quantize the original weights "
    "with farro.nvfp4.quantize_weight, or farro.nvfp4.requantize_group16 does it from these"
)


def check_weight(name: str, w: torch.Tensor) -> None:
    """A dense weight [E, M, K]."""
    check_dtype(name, "w", w, FLOATS)
    if w.dim() != 3:
        way_out = ": pass w.unsqueeze(0) for one expert" if w.dim() == 2 else ""
        raise ValueError(f"{name}: w has shape {list(w.shape)}; needed [E, M, K]{way_out}")
    check_strided(name, w=w)
    _check_multiple(name, "w", w, "K", w.shape[2], BLOCK)


def check_pruned(name: str, w: torch.Tensor) -> None:
    """A weight [..., K] of any number of dimensions."""
    check_dtype(name, "w", w, FLOATS)
    if w.dim() == 0:
        raise ValueError(f"{name}: w has no dimensions; needed at least [K]")
    check_strided(name, w=w)
    _check_multiple(name, "w", w, "K", w.shape[-1], GROUP)


def _check_multiple(
    name: str, argument: str, tensor: torch.Tensor, what: str, size: int, of: int
) -> None:
    if size % of:
        raise ValueError(
            f"{name}: {argument} has shape {list(tensor.shape)}, so {what} is {size}; "
            f"needed a multiple of {of}"
        )


def check_packed(
    name: str, w_packed: torch.Tensor, w_blockscale: torch.Tensor, block: int = BLOCK
) -> None:
    """Packed codes [E, M, K/2] and their scales [E, M, K/block]."""
    check_dtype(name, "w_packed", w_packed, UINT8)
    hint = ": pass w_blockscale.view(torch.uint8) if it is E4M3"
    check_dtype(name, "w_blockscale", w_blockscale, UINT8, hint)
    if w_packed.dim() != 3:
        raise ValueError(
            f"{name}: w_packed has shape {list(w_packed.shape)}; needed [E, M, K/2], two codes a "
            "byte"
        )
    e, m, half = w_packed.shape
    _check_multiple(name, "w_packed", w_packed, "K", half * 2, BLOCK)
    shape, by_16 = (e, m, half * 2 // block), (e, m, half * 2 // 16)
    if block == BLOCK and tuple(w_blockscale.shape) == by_16 != shape:
        raise ValueError(
            f"{name}: w_blockscale has shape {list(by_16)}; needed {list(shape)}, that is "
            f"[E, M, K/32]: {_LIKELY_16}"
        )
    check_shape(name, "w_blockscale", w_blockscale, shape, f"[E, M, K/{block}]")


def check_alpha(name: str, alpha: torch.Tensor, experts: int, hint: str = "") -> None:
    check_dtype(name, "alpha", alpha, (torch.float32,), hint or ": pass alpha.float()")
    check_shape(name, "alpha", alpha, (experts,), "[E]")


def check_compressible(
    name: str, w_packed: torch.Tensor, w_blockscale: torch.Tensor, k: int
) -> None:
    check_packed(name, w_packed, w_blockscale)
    check_strided(name, w_packed=w_packed, w_blockscale=w_blockscale)
    check_devices(name, w_packed=w_packed, w_blockscale=w_blockscale)
    _check_k(name, k, "w_packed", w_packed, 2)
    _check_multiple(name, "w_packed", w_packed, "M", w_packed.shape[1], _ROWS)


def _check_k(name: str, k: int, argument: str, tensor: torch.Tensor, per_element: int) -> None:
    if k != tensor.shape[-1] * per_element:
        raise ValueError(
            f"{name}: k is {k}, but {argument} of shape {list(tensor.shape)} holds K = "
            f"{tensor.shape[-1] * per_element}"
        )


def check_compressed(
    name: str, a_comp: torch.Tensor, e_meta: torch.Tensor, sfa: torch.Tensor, k: int
) -> None:
    """What compress gives: [E, M, K/4], [E, M, K/16], [E, M, K/32], contiguous."""
    given = {"a_comp": a_comp, "e_meta": e_meta, "sfa": sfa}
    for argument, tensor in given.items():
        check_dtype(name, argument, tensor, UINT8)
    if a_comp.dim() != 3:
        shape = list(a_comp.shape)
        raise ValueError(f"{name}: a_comp has shape {shape}; needed [E, M, K/4], as compress gives")
    e, m, quarter = a_comp.shape
    _check_multiple(name, "a_comp", a_comp, "K", quarter * 4, BLOCK)
    _check_multiple(name, "a_comp", a_comp, "M", m, _ROWS)
    check_shape(name, "e_meta", e_meta, (e, m, quarter // 4), "[E, M, K/16]")
    check_shape(name, "sfa", sfa, (e, m, quarter // 8), "[E, M, K/32]")
    _check_k(name, k, "a_comp", a_comp, 4)
    check_strided(name, **given)
    check_devices(name, **given)
    for argument, tensor in given.items():
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name}: {argument} has strides {list(tensor.stride())}; needed a contiguous "
                "tensor, whose rows are not those of the weight: pass what compress gave"
            )


@dataclass(frozen=True)
class Wrong:
    """The first of `count` wrong groups: its index among those given, and its place in words."""

    index: tuple[int, int, int]
    place: str
    count: int


def first_place(wrong: torch.Tensor, part: tuple[slice, slice], size: int) -> Wrong | None:
    """The first True of [experts, rows, K/size], which are this part of a weight, or None."""
    count = int(wrong.sum())
    if not count:
        return None
    expert, row, group = (int(i) for i in wrong.nonzero()[0])
    where = (
        f"expert {part[0].start + expert}, row {part[1].start + row}, group {group} (k "
        f"{group * size} to {group * size + size - 1})"
    )
    return Wrong((expert, row, group), where, count)


def check_global_scale(name: str, value: Any) -> None:
    """ "auto", None, a positive number, or a tensor [E] of them."""
    if isinstance(value, str):
        if value != "auto":
            raise ValueError(f"{name}: global_scale is {value!r}; needed 'auto', a number or [E]")
        return
    if value is None or isinstance(value, torch.Tensor):
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(
            f"{name}: global_scale must be 'auto', None, a number or a tensor, got "
            f"{type(value).__name__}"
        )
    if not 0 < value < float("inf"):
        raise ValueError(f"{name}: global_scale is {value}; needed a positive finite number")
