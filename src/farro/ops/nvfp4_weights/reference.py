"""Weights in plain torch on any device, some experts at a time: they are made once, at load time.

Values are checked here, so this synchronizes with a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...formats import nvfp4, paired_sparsity
from ...formats.nvfp4 import BLOCK
from ...formats.paired_sparsity import GROUP, ILLEGAL, PATTERNS
from ...formats.shape import split
from .checks import first_place

_ELEMENTS = 1 << 22  # dense weights at a time: intermediate results take up to 40 bytes for each


def run(config: None, function: str, *arguments: Any) -> None:
    """Fill the results, which come after the function's own arguments."""
    functions: dict[str, Callable[..., None]] = {
        "prune_paired_4of8": prune,
        "quantize_weight": quantize,
        "requantize_group16": requantize,
        "dequantize_weight": dequantize,
        "compress": compress,
        "decompress": decompress,
    }
    functions[function](*arguments)


def _some(count: int, elements: int) -> Iterator[slice]:
    """Slices of `count` experts of so many dense elements each."""
    step = max(1, _ELEMENTS // max(elements, 1))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def prune(w: torch.Tensor, out: torch.Tensor) -> None:
    if w.dim() == 1:
        out.copy_(paired_sparsity.prune(w))
        return
    for part in _some(w.shape[0], w[:1].numel()):
        out[part] = paired_sparsity.prune(w[part])


def quantize(
    w: torch.Tensor,
    global_scale: torch.Tensor | None,
    factor: float | None,
    packed: torch.Tensor,
    scales: torch.Tensor,
    alpha: torch.Tensor,
) -> None:
    name = "quantize_weight"
    given = _given_factors(name, w, global_scale, factor)
    for part in _some(w.shape[0], w[:1].numel()):
        own = w[part]
        finite = split(own.float(), -1, -1, BLOCK).isfinite().all(-1)
        wrong = first_place(~finite, part.start, BLOCK)
        if wrong is not None:
            raise ValueError(
                f"{name}: w holds NaN or Inf (in FP32) in {wrong.count} groups of 32; the first is "
                f"{wrong.place}: needed finite weights"
            )
        g = nvfp4.automatic_global(own) if given is None else given[part]
        packed[part], scales[part] = nvfp4.quantize_blocks(own, g[:, None, None])
        alpha[part] = g.reciprocal()


def _given_factors(
    name: str, w: torch.Tensor, global_scale: torch.Tensor | None, factor: float | None
) -> torch.Tensor | None:
    """FP32 [E], or None for those that spread each expert over UE4M3."""
    if global_scale is not None:
        g = global_scale
    elif factor is not None:
        # torch.full refuses what FP32 cannot hold
        g = torch.full((w.shape[0],), factor, dtype=torch.float64, device=w.device).float()
    else:
        return None
    _check_factors(name, "global_scale", g)
    return g


def _check_factors(name: str, argument: str, factors: torch.Tensor) -> None:
    wrong = (~((factors > 0) & factors.isfinite())).nonzero()
    if wrong.numel():
        expert = int(wrong[0])
        raise ValueError(
            f"{name}: {argument} of expert {expert} is {float(factors[expert])} in FP32; needed a "
            "positive finite number"
        )


def dequantize(
    packed: torch.Tensor, scales: torch.Tensor, alpha: torch.Tensor | None, out: torch.Tensor
) -> None:
    for part in _some(packed.shape[0], out[:1].numel()):
        values = nvfp4.dequantize_blocks(packed[part], scales[part])
        out[part] = values if alpha is None else values * alpha[part, None, None]


def requantize(
    packed: torch.Tensor,
    scales: torch.Tensor,
    alpha: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    factor: float | None,
    prune: bool,
    new_packed: torch.Tensor,
    new_scales: torch.Tensor,
    new_alpha: torch.Tensor,
    loss: torch.Tensor,
) -> None:
    name = "requantize_group16"
    given = _given_factors(name, packed, global_scale, factor)
    if alpha is not None:
        _check_factors(name, "alpha", alpha)
    for part in _some(packed.shape[0], 2 * packed[:1].numel()):
        _check_scale_bytes(name, scales[part], part.start, 16, 0x7E)
        values = split(nvfp4.decode_e2m1(nvfp4.unpack_codes(packed[part])), -1, -1, 16)
        w = (values * nvfp4.decode_ue4m3(scales[part]).unsqueeze(-1)).flatten(-2)
        w = w if alpha is None else w * alpha[part, None, None]
        kept = paired_sparsity.prune(w) if prune else w
        g = nvfp4.automatic_global(kept) if given is None else given[part]
        codes, own = nvfp4.quantize_blocks(kept, g[:, None, None])
        new_packed[part], new_scales[part], new_alpha[part] = codes, own, g.reciprocal()
        restored = nvfp4.dequantize_blocks(codes, own) * new_alpha[part, None, None]
        size = w.double().square().sum((1, 2))
        error = (restored.double() - w.double()).square().sum((1, 2))
        loss[part] = torch.where(size == 0, 0.0, (error / size).sqrt()).float()


def _check_scale_bytes(
    name: str, scales: torch.Tensor, first_expert: int, block: int, largest: int = 0x7F
) -> None:
    """UE4M3 has no sign; NaN is the scale of a block that was not finite."""
    wrong = first_place(scales > largest, first_expert, block)
    if wrong is not None:
        what = "UE4M3, which has no sign" if largest == 0x7F else "UE4M3 without NaN"
        raise ValueError(
            f"{name}: w_blockscale holds {wrong.count} bytes above {largest:#x}; the first, "
            f"{int(scales[wrong.index]):#x}, is at {wrong.place}: needed {what}"
        )


def compress(
    packed: torch.Tensor,
    scales: torch.Tensor,
    k: int,
    a_comp: torch.Tensor,
    e_meta: torch.Tensor,
    sfa: torch.Tensor,
) -> None:
    name = "compress"
    for part in _some(packed.shape[0], 2 * packed[:1].numel()):
        _check_scale_bytes(name, scales[part], part.start, BLOCK)
        own = nvfp4.positive_zeros(packed[part])
        nibbles = paired_sparsity.patterns_of(own)
        wrong = first_place(nibbles == ILLEGAL, part.start, GROUP)
        if wrong is not None:
            raise ValueError(
                f"{name}: more than two of four pairs are not zero in {wrong.count} groups of 8; "
                f"the first is {wrong.place}: prune the weight with "
                "farro.nvfp4.prune_paired_4of8 before quantize_weight"
            )
        made = paired_sparsity.compress(own, nibbles, scales[part])
        for out, values in zip((a_comp, e_meta, sfa), made):
            out[part] = values


def decompress(
    a_comp: torch.Tensor,
    e_meta: torch.Tensor,
    sfa: torch.Tensor,
    k: int,
    packed: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    legal = torch.tensor(PATTERNS, dtype=torch.uint8, device=a_comp.device)
    for part in _some(packed.shape[0], 2 * packed[:1].numel()):
        nibbles = paired_sparsity.unpack_metadata(e_meta[part])
        wrong = first_place(~torch.isin(nibbles, legal), part.start, GROUP)
        if wrong is not None:
            raise ValueError(
                f"decompress: e_meta holds {wrong.count} nibbles that are no pattern; the first, "
                f"{int(nibbles[wrong.index]):#x}, is of {wrong.place}: needed what compress gave, "
                "in this layout version"
            )
        packed[part], scales[part] = paired_sparsity.decompress(a_comp[part], nibbles, sfa[part])
