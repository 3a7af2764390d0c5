"""The checks of the grouped products: types, shapes, layouts, devices; values are on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...checks import (
    check_backend,
    check_devices,
    check_dtype,
    check_required,
    check_shape,
    check_size,
    check_strided,
    check_tensors,
)
from ..nvfp4_weights.checks import UINT8, check_compressed
from .tactics import check_tactic

MAX_EXPERTS = 4096


def check_types(
    name: str,
    operands: Sequence[Any],
    features: Any,
    k: Any,
    tactic: Sequence[Any],
    backend: Any,
    **more: Any,
) -> None:
    """Python types, and sizes that are in no tensor; `more` are tensors of the caller's own.

    `operands` are a_comp, e_meta, sfa, b_act, sfb, alphas, and counts or offsets.
    """
    a_comp, e_meta, sfa, b_act, sfb, alphas, counts = operands
    check_required(name, **more, a_comp=a_comp, e_meta=e_meta, sfa=sfa, b_act=b_act)
    check_tensors(name, sfb=sfb)
    if sfb is None and b_act.dtype == torch.uint8:
        raise TypeError(
            f"{name}: sfb must be a tensor where b_act holds codes (uint8), got NoneType; None "
            "goes with activations in bfloat16"
        )
    check_required(name, alphas=alphas, **{count_name(name): counts})
    check_size(name, "features", features)
    check_size(name, "k", k)
    check_tactic(name, *tactic)
    check_backend(name, backend)


def count_name(name: str) -> str:
    return "expert_offsets" if name.endswith("_ragged") else "expert_num_tokens"


def check_operands(name: str, operands: Sequence[Any], features: int, k: int) -> None:
    """Everything but `out`; ragged activations have two dimensions."""
    a_comp, e_meta, sfa, b_act, sfb, alphas, counts = operands
    ragged = name.endswith("_ragged")
    check_compressed(name, a_comp, e_meta, sfa, k)
    e, m, _ = a_comp.shape
    if not 1 <= e <= MAX_EXPERTS:
        raise ValueError(f"{name}: a_comp has {e} experts; needed 1 to {MAX_EXPERTS}")
    if features != m:
        raise ValueError(
            f"{name}: features is {features}, but a_comp of shape {list(a_comp.shape)} has M = {m}"
        )
    _check_activations(name, b_act, sfb, None if ragged else e, k)
    check_dtype(name, "alphas", alphas, (torch.float32,), ": pass alphas.float()")
    check_shape(name, "alphas", alphas, (e,), "[E]")
    argument = count_name(name)
    hint = ", as dispatch_plan_ragged gives it" if ragged else ", as dispatch_plan gives it"
    check_dtype(name, argument, counts, (torch.int32,), hint)
    check_shape(name, argument, counts, (e + int(ragged),), "[E + 1]" if ragged else "[E]")
    check_place(
        name,
        **{"a_comp": a_comp, "e_meta": e_meta, "sfa": sfa, "b_act": b_act, "sfb": sfb},
        **{"alphas": alphas, argument: counts},
    )


def _check_activations(
    name: str, b_act: torch.Tensor, sfb: torch.Tensor | None, experts: int | None, k: int
) -> None:
    """Codes and scales, or BF16 values: rows of each expert, or one after the other."""
    rows = "[R, {}]" if experts is None else "[E, max_n, {}]"
    coded = sfb is not None
    last = "K/2" if coded else "K"
    if coded:
        way_out = ": quant_act makes codes, and bfloat16 goes with sfb=None"
        check_dtype(name, "b_act", b_act, UINT8, way_out)
    else:
        check_dtype(name, "b_act", b_act, (torch.bfloat16,), ", since sfb is None")
    if b_act.dim() != (2 if experts is None else 3):
        raise ValueError(f"{name}: b_act has shape {list(b_act.shape)}; needed {rows.format(last)}")
    leading = tuple(b_act.shape[:-1]) if experts is None else (experts, b_act.shape[1])
    size = k // 2 if coded else k
    check_shape(name, "b_act", b_act, (*leading, size), rows.format(last))
    if sfb is not None:
        check_dtype(name, "sfb", sfb, UINT8, ": pass sfb.view(torch.uint8) if it is E4M3")
        check_shape(name, "sfb", sfb, (*leading, k // 32), rows.format("K/32"))


def check_place(name: str, **tensors: torch.Tensor | None) -> None:
    """Contiguous, and on one device."""
    check_strided(name, **tensors)
    check_devices(name, **tensors)
    for argument, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(
                f"{name}: {argument} has strides {list(tensor.stride())} for shape "
                f"{list(tensor.shape)}; needed a contiguous tensor: pass {argument}.contiguous()"
            )


def check_out(name: str, out: torch.Tensor, b_act: torch.Tensor, features: int) -> None:
    check_dtype(name, "out", out, (torch.bfloat16,))
    shape = (*b_act.shape[:-1], features)
    check_shape(name, "out", out, shape, "[R, M]" if b_act.dim() == 2 else "[E, max_n, M]")
    check_place(name, b_act=b_act, out=out)
