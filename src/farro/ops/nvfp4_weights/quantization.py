"""Prune, quantize and requantize weights, and restore their values."""

from __future__ import annotations

from typing import Any

import torch

from ...arch import Arch
from ...checks import check_devices, check_required, check_shape, check_strided, check_tensors
from ...dispatch import Operator, explained_by
from ...formats.nvfp4 import BLOCK
from ...functional import Functional
from ...problem import Problem
from .checks import check_alpha, check_global_scale, check_packed, check_pruned, check_weight
from .operator import OPERATOR, launch, new_bytes, new_floats, problem

_PRUNE, _QUANTIZE, _REQUANTIZE, _DEQUANTIZE = OPERATOR.functions[:4]

GlobalScale = str | float | torch.Tensor | None

# --- prune_paired_4of8 ---------------------------------------------------------------------------

_prune = Functional(
    _PRUNE,
    OPERATOR,
    "nvfp4_prune_paired_4of8(Tensor w) -> Tensor",
    check_types=lambda w: check_required(_PRUNE, w=w),
    check=lambda w: check_pruned(_PRUNE, w),
    outputs=lambda w: (torch.empty(w.shape, dtype=w.dtype, device=w.device),),
    problem=problem(_PRUNE, "w"),
    launch=launch(_PRUNE),
)


@_prune.explained
def prune_paired_4of8(w: torch.Tensor, *, backend: str = "auto") -> torch.Tensor:
    """Keep two of the four adjacent pairs in each 8 consecutive K: those of larger L2 norm.

    w'[8g + 2p + i] = w[8g + 2p + i] where pair p is among the two of largest
    sqrt(w[8g+2p]^2 + w[8g+2p+1]^2), else 0; ties go to the lower p. NaN and Inf count as the
    largest, so that quantize_weight finds them.

    Args:
        w: [..., K], float16, bfloat16, float32 or float64, K a multiple of 8, positive strides.
        backend: "auto" or "reference": plain torch operators on every device.

    Returns:
        A contiguous tensor of w's shape and dtype.

    Raises:
        TypeError: w is not a floating-point tensor.
        ValueError: another K, a zero stride.
    """
    result: torch.Tensor = _prune(w, backend=backend)
    return result


# --- quantize_weight -----------------------------------------------------------------------------


def _given_global(name: str, value: Any) -> tuple[torch.Tensor | None, float | None]:
    """A tensor, or a number, or neither for "auto"."""
    check_global_scale(name, value)
    if isinstance(value, torch.Tensor):
        return value, None
    if isinstance(value, str):
        return None, None
    return None, 1.0 if value is None else float(value)


def _check_global(name: str, w: torch.Tensor, global_scale: torch.Tensor | None) -> None:
    if global_scale is not None:
        if global_scale.dtype != torch.float32:
            given = str(global_scale.dtype).removeprefix("torch.")
            raise TypeError(
                f"{name}: global_scale has dtype {given}; needed float32: pass global_scale.float()"
            )
        check_shape(name, "global_scale", global_scale, (w.shape[0],), "[E]")
        check_strided(name, global_scale=global_scale)


def _check_quantize(w: torch.Tensor, global_scale: torch.Tensor | None, factor: Any) -> None:
    check_weight(_QUANTIZE, w)
    _check_global(_QUANTIZE, w, global_scale)
    check_devices(_QUANTIZE, w=w, global_scale=global_scale)


def _quantized(w: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    e, m, k = w.shape
    return new_bytes(w, e, m, k // 2), new_bytes(w, e, m, k // BLOCK), new_floats(w, e)


_quantize = Functional(
    _QUANTIZE,
    OPERATOR,
    "nvfp4_quantize_weight(Tensor w, Tensor? global_scale, float? factor) -> "
    "(Tensor, Tensor, Tensor)",
    check_types=lambda w, *_: check_required(_QUANTIZE, w=w),
    check=_check_quantize,
    outputs=_quantized,
    problem=problem(_QUANTIZE, "w", "global_scale"),
    launch=launch(_QUANTIZE),
)


@explained_by(
    lambda w, global_scale="auto", *, backend="auto", arch=None: _quantize.describe(
        w, *_given_global(_QUANTIZE, global_scale), backend=backend, arch=arch
    )
)
def quantize_weight(
    w: torch.Tensor, global_scale: GlobalScale = "auto", *, backend: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize a weight to NVFP4 with one UE4M3 scale for 32 K and one global factor an expert.

    For each block of 32 along K, in FP32, with g of its expert:

        s = ue4m3(max|w| / 6 * g) clamped to [2^-9, 448], q = e2m1(w * (g / s)), alpha = 1 / g

    so that w is about q * s * alpha; the scale of a block of zeros is ue4m3(g). e2m1 rounds half
    to even and saturates, and stores -0 as +0. Gate and up rows in one weight share g.

    Args:
        w: [E, M, K], float16, bfloat16, float32 or float64, K a multiple of 32, positive strides.
            It need not be pruned; compress asks for that.
        global_scale: "auto", g = 448 * 6 / max|w| of the expert (at most 2^118; 1 for zeros), which
            keeps small weights out of UE4M3's subnormals; None for 1; a number; or fp32 [E].
        backend: "auto" or "reference": plain torch operators on every device.

    Returns:
        (w_packed uint8 [E, M, K/2], two codes a byte, lower K in the low nibble; w_blockscale uint8
        [E, M, K/32]; alpha fp32 [E]), contiguous.

    Raises:
        TypeError: wrong types.
        ValueError: wrong shapes, NaN or Inf in w (with expert, row and group), a global_scale that
            is not positive and finite.
    """
    given = _given_global(_QUANTIZE, global_scale)
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _quantize(w, *given, backend=backend)
    return result


# --- requantize_group16 --------------------------------------------------------------------------


def _check_requantize(
    w_packed: torch.Tensor,
    w_blockscale: torch.Tensor,
    alpha: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    factor: float | None,
    prune: bool,
) -> None:
    tensors = {"w_packed": w_packed, "w_blockscale": w_blockscale, "alpha": alpha}
    check_packed(_REQUANTIZE, w_packed, w_blockscale, 16)
    if alpha is not None:
        hint = ": a multiplier, as weight_scale_2 is; 1 / weight_global_scale of compressed-tensors"
        check_alpha(_REQUANTIZE, alpha, w_packed.shape[0], hint)
    _check_global(_REQUANTIZE, w_packed, global_scale)
    check_strided(_REQUANTIZE, **tensors)
    check_devices(_REQUANTIZE, **tensors, global_scale=global_scale)


def _check_requantize_types(
    w_packed: Any, w_blockscale: Any, alpha: Any, global_scale: Any, factor: Any, prune: Any
) -> None:
    check_required(_REQUANTIZE, w_packed=w_packed, w_blockscale=w_blockscale)
    check_tensors(_REQUANTIZE, alpha=alpha)
    if not isinstance(prune, bool):
        raise TypeError(f"{_REQUANTIZE}: prune must be a bool, got {type(prune).__name__}")


def _requantized(w_packed: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    e, m, half = w_packed.shape
    scales = new_bytes(w_packed, e, m, half * 2 // BLOCK)
    return new_bytes(w_packed, e, m, half), scales, new_floats(w_packed, e), new_floats(w_packed, e)


_requantize = Functional(
    _REQUANTIZE,
    OPERATOR,
    "nvfp4_requantize_group16(Tensor w_packed, Tensor w_blockscale, Tensor? alpha, "
    "Tensor? global_scale, float? factor, bool prune) -> (Tensor, Tensor, Tensor, Tensor)",
    check_types=_check_requantize_types,
    check=_check_requantize,
    outputs=_requantized,
    problem=problem(_REQUANTIZE, "w_packed", "w_blockscale", "alpha", "global_scale"),
    launch=launch(_REQUANTIZE),
)


def _describe_requantize(
    w_packed: Any,
    w_blockscale: Any,
    alpha: Any,
    global_scale: Any = "auto",
    prune: Any = True,
    *,
    backend: str = "auto",
    arch: Arch | None = None,
) -> tuple[Operator, Problem, str]:
    given = (w_packed, w_blockscale, alpha, *_given_global(_REQUANTIZE, global_scale), prune)
    return _requantize.describe(*given, backend=backend, arch=arch)


@explained_by(_describe_requantize)
def requantize_group16(
    w_packed: torch.Tensor,
    w_blockscale: torch.Tensor,
    alpha: torch.Tensor | None,
    global_scale: GlobalScale = "auto",
    prune: bool = True,
    *,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Turn a dense NVFP4 weight with one scale per 16 K into one that compress takes.

    w = q * s * alpha in FP32, then prune_paired_4of8 and quantize_weight. Where the original
    weight is at hand, quantize that: this rounds twice.

    Args:
        w_packed: uint8 [E, M, K/2], two e2m1 codes a byte, lower K in the low nibble.
        w_blockscale: uint8 [E, M, K/16], the bytes of E4M3 scales without a sign.
        alpha: fp32 [E], the multiplier of each expert (ModelOpt's weight_scale_2; one over
            compressed-tensors' weight_global_scale), or None for 1.
        global_scale: of the new weight, as quantize_weight takes it.
        prune: False keeps all pairs, for a weight that is paired 4:8 already.
        backend: "auto" or "reference": plain torch operators on every device.

    Returns:
        (w_packed, w_blockscale uint8 [E, M, K/32], alpha, loss fp32 [E]): loss is the relative
        error of each expert, |w' - w| / |w| in the Frobenius norm; 0 for an expert of zeros.

    Raises:
        TypeError: wrong types.
        ValueError: wrong shapes, scales that are negative or NaN (with expert, row and group).
    """
    given = _given_global(_REQUANTIZE, global_scale)
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] = _requantize(
        w_packed, w_blockscale, alpha, *given, prune, backend=backend
    )
    return result


# --- dequantize_weight ---------------------------------------------------------------------------


def _check_dequantize(
    w_packed: torch.Tensor, w_blockscale: torch.Tensor, alpha: torch.Tensor | None
) -> None:
    tensors = {"w_packed": w_packed, "w_blockscale": w_blockscale, "alpha": alpha}
    check_packed(_DEQUANTIZE, w_packed, w_blockscale)
    if alpha is not None:
        check_alpha(_DEQUANTIZE, alpha, w_packed.shape[0])
    check_strided(_DEQUANTIZE, **tensors)
    check_devices(_DEQUANTIZE, **tensors)


def _check_dequantize_types(w_packed: Any, w_blockscale: Any, alpha: Any) -> None:
    check_required(_DEQUANTIZE, w_packed=w_packed, w_blockscale=w_blockscale)
    check_tensors(_DEQUANTIZE, alpha=alpha)


_dequantize = Functional(
    _DEQUANTIZE,
    OPERATOR,
    "nvfp4_dequantize_weight(Tensor w_packed, Tensor w_blockscale, Tensor? alpha) -> Tensor",
    check_types=_check_dequantize_types,
    check=_check_dequantize,
    outputs=lambda w_packed, *_: (
        new_floats(w_packed, *w_packed.shape[:2], 2 * w_packed.shape[2]),
    ),
    problem=problem(_DEQUANTIZE, "w_packed", "w_blockscale", "alpha"),
    launch=launch(_DEQUANTIZE),
)


@_dequantize.explained
def dequantize_weight(
    w_packed: torch.Tensor,
    w_blockscale: torch.Tensor,
    alpha: torch.Tensor | None = None,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """Restore values of a quantized weight: q * s, exact in FP32, times alpha, rounded once.

    Args:
        w_packed: uint8 [E, M, K/2], as quantize_weight gives it.
        w_blockscale: uint8 [E, M, K/32], UE4M3; NaN (0x7f) gives NaN.
        alpha: fp32 [E], or None for 1.
        backend: "auto" or "reference": plain torch operators on every device.

    Returns:
        fp32 [E, M, K], contiguous.

    Raises:
        TypeError: wrong types.
        ValueError: wrong shapes, such as one scale per 16 K.
    """
    result: torch.Tensor = _dequantize(w_packed, w_blockscale, alpha, backend=backend)
    return result
