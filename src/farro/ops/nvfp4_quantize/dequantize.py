"""dequantize_act: values of quantized activations."""

from __future__ import annotations

from typing import Any

import torch

from ...checks import check_dtype, check_required, check_shape, check_tensors
from ...dispatch import Kernel, Operator
from ...formats.nvfp4 import BLOCK
from ...functional import Functional
from . import triton_configs
from .checks import UINT8, check_blocks, check_contiguous

OPERATOR = Operator(
    "nvfp4_dequantize",
    (
        Kernel(
            "nvfp4_dequantize.cpu",
            "cpu",
            run="ops.nvfp4_quantize.cpu:dequantize",
            needs=frozenset({"cpu"}),
            must_run=lambda problem: True,
        ),
        Kernel(
            "nvfp4_dequantize.triton",
            "triton",
            run="ops.nvfp4_quantize.triton:dequantize",
            bind="ops.nvfp4_quantize.triton:bind_dequantize",
            needs=frozenset({"triton"}),
            why_not=triton_configs.why_not,
            config=triton_configs.config,
            must_run=triton_configs.must_run,
            configs=triton_configs.configs,
        ),
        Kernel(
            "nvfp4_dequantize.reference",
            "reference",
            run="ops.nvfp4_quantize.reference:dequantize",
            must_run=lambda problem: True,
        ),
    ),
    functions=("dequantize_act",),
    families=("nvfp4",),
    at_top=False,
)
_NAME = "dequantize_act"


def _check_types(b_act: Any, sfb: Any, gscale: Any) -> None:
    check_required(_NAME, b_act=b_act, sfb=sfb)
    check_tensors(_NAME, gscale=gscale)


def _check(b_act: torch.Tensor, sfb: torch.Tensor, gscale: torch.Tensor | None) -> None:
    check_dtype(_NAME, "b_act", b_act, UINT8)
    check_dtype(_NAME, "sfb", sfb, UINT8, ": pass sfb.view(torch.uint8) if it is E4M3")
    if b_act.dim() == 0:
        raise ValueError(f"{_NAME}: b_act has no dimensions; needed at least [K/2]")
    size = 2 * b_act.shape[-1]
    check_blocks(_NAME, "b_act", b_act, "K", size)
    check_shape(_NAME, "sfb", sfb, (*b_act.shape[:-1], size // BLOCK), "[..., K/32]")
    if gscale is not None:
        check_dtype(_NAME, "gscale", gscale, (torch.float32,), ": pass gscale.float()")
        by_expert = b_act.dim() > 1 and tuple(gscale.shape) == (b_act.shape[0],)
        if tuple(gscale.shape) not in ((), (1,)) and not by_expert:
            raise ValueError(
                f"{_NAME}: gscale has shape {list(gscale.shape)}; needed [] or [1], or "
                f"[{b_act.shape[0]}], one for each of b_act's first dimension"
            )
    check_contiguous(_NAME, b_act=b_act, sfb=sfb, gscale=gscale)


_dequantize = Functional(
    _NAME,
    OPERATOR,
    "nvfp4_dequantize_act(Tensor b_act, Tensor sfb, Tensor? gscale) -> Tensor",
    check_types=_check_types,
    check=_check,
    outputs=lambda b_act, sfb, gscale: (
        torch.empty(
            (*b_act.shape[:-1], 2 * b_act.shape[-1]), dtype=torch.float32, device=b_act.device
        ),
    ),
    problem=lambda b_act, sfb, gscale: ({"b_act": b_act, "sfb": sfb, "gscale": gscale}, {}),
)


@_dequantize.explained
def dequantize_act(
    b_act: torch.Tensor,
    sfb: torch.Tensor,
    gscale: torch.Tensor | None = None,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """Restore values of quantized activations: code * s, exact in FP32, divided by gscale.

    Args:
        b_act: uint8 [..., K/2], as the quantizers give it, contiguous.
        sfb: uint8 [..., K/32], UE4M3; NaN (0x7f) gives NaN.
        gscale: fp32 [] or [1], or [E] for b_act [E, ..., K/2]; None for 1. The quotient is rounded
            once.
        backend: "auto", "reference", "cpu" or "triton".

    Returns:
        fp32 [..., K], contiguous. Rows that belong to no token hold whatever their codes say.

    Raises what quant_act raises.
    """
    result: torch.Tensor = _dequantize(b_act, sfb, gscale, backend=backend)
    return result
