"""compress and decompress: paired-4:8 weights in the layout of kernels."""

from __future__ import annotations

from typing import Any

import torch

from ...checks import check_required, check_size
from ...formats.nvfp4 import BLOCK
from ...functional import Functional
from .checks import check_compressed, check_compressible
from .operator import OPERATOR, launch, new_bytes, problem

_COMPRESS, _DECOMPRESS = OPERATOR.functions[4:]


def _check_compress_types(w_packed: Any, w_blockscale: Any, k: Any) -> None:
    check_required(_COMPRESS, w_packed=w_packed, w_blockscale=w_blockscale)
    check_size(_COMPRESS, "k", k)


def _compressed(w_packed: torch.Tensor, w_blockscale: Any, k: int) -> tuple[torch.Tensor, ...]:
    e, m = w_packed.shape[:2]
    return tuple(new_bytes(w_packed, e, m, k // per_byte) for per_byte in (4, 16, 32))


_compress = Functional(
    _COMPRESS,
    OPERATOR,
    "nvfp4_compress(Tensor w_packed, Tensor w_blockscale, SymInt k) -> (Tensor, Tensor, Tensor)",
    check_types=_check_compress_types,
    check=lambda w_packed, w_blockscale, k: check_compressible(
        _COMPRESS, w_packed, w_blockscale, k
    ),
    outputs=_compressed,
    problem=problem(_COMPRESS, "w_packed", "w_blockscale"),
    launch=launch(_COMPRESS),
)


@_compress.explained
def compress(
    w_packed: torch.Tensor, w_blockscale: torch.Tensor, k: int, *, backend: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Store a paired-4:8 weight in 0.344 bytes per dense element, in the order kernels read it.

    Of each 8 consecutive K two of the four pairs are stored, with a nibble that tells which. -0
    counts as zero; a group with fewer non-zero pairs stores zeros explicitly. The layout (version
    `farro.nvfp4.LAYOUT_VERSION`, drawn in docs/formats.md) is the same on every device and pads
    nothing.

    Args:
        w_packed: uint8 [E, M, K/2], as quantize_weight gives it from a pruned weight; M a multiple
            of 32.
        w_blockscale: uint8 [E, M, K/32], UE4M3.
        k: K, a multiple of 32.
        backend: "auto" or "reference": plain torch operators on every device.

    Returns:
        (a_comp uint8 [E, M, K/4], e_meta uint8 [E, M, K/16], sfa uint8 [E, M, K/32]), contiguous.
        Their rows are not rows of the weight; but [:, :64i] is the weight's first 64i rows.

    Raises:
        TypeError: wrong types.
        ValueError: wrong shapes, one scale per 16 K, more than two non-zero pairs in a group or a
            scale byte with a sign (both with expert, row and group).
    """
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _compress(
        w_packed, w_blockscale, k, backend=backend
    )
    return result


def _check_decompress_types(a_comp: Any, e_meta: Any, sfa: Any, k: Any) -> None:
    check_required(_DECOMPRESS, a_comp=a_comp, e_meta=e_meta, sfa=sfa)
    check_size(_DECOMPRESS, "k", k)


_decompress = Functional(
    _DECOMPRESS,
    OPERATOR,
    "nvfp4_decompress(Tensor a_comp, Tensor e_meta, Tensor sfa, SymInt k) -> (Tensor, Tensor)",
    check_types=_check_decompress_types,
    check=lambda *given: check_compressed(_DECOMPRESS, *given),
    outputs=lambda a_comp, e_meta, sfa, k: (
        new_bytes(a_comp, *a_comp.shape[:2], k // 2),
        new_bytes(a_comp, *a_comp.shape[:2], k // BLOCK),
    ),
    problem=problem(_DECOMPRESS, "a_comp", "e_meta", "sfa"),
    launch=launch(_DECOMPRESS),
)


@_decompress.explained
def decompress(
    a_comp: torch.Tensor,
    e_meta: torch.Tensor,
    sfa: torch.Tensor,
    k: int,
    *,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact inverse of compress, with -0 as +0.

    Args:
        a_comp, e_meta, sfa: uint8 [E, M, K/4], [E, M, K/16] and [E, M, K/32], as compress gave
            them, contiguous.
        k: K of the weight.
        backend: "auto" or "reference": plain torch operators on every device.

    Returns:
        (w_packed uint8 [E, M, K/2], w_blockscale uint8 [E, M, K/32]), contiguous.

    Raises:
        TypeError: wrong types.
        ValueError: wrong shapes, or metadata that is no pattern (with expert, row and group).
    """
    result: tuple[torch.Tensor, torch.Tensor] = _decompress(a_comp, e_meta, sfa, k, backend=backend)
    return result
