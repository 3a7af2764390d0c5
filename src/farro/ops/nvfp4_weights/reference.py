"""Weights in plain torch on any device, some experts at a time: they are made once, at load time.

Values are checked here, so this synchronizes with a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...formats import nvfp4, paired_sparsity
from ...formats.nvfp4 import BLOCK
from ...formats.paired_sparsity import GROUP, ILLEGAL, PATTERNS, ROWS
from ...formats.shape import split
from .checks import first_place

# Dense weights at a time. Intermediate results take up to 40 bytes for each; on a CPU they should
# stay in cache, and be too small for the allocator to give back each time
_ELEMENTS = {"cpu": 1 << 16, "cuda": 1 << 24}
Part = tuple[slice, slice]


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


def _parts(like: torch.Tensor, columns: int, whole: bool = False) -> Iterator[Part]:
    """Slices of [E, M, columns] weights: experts, or row blocks of one where it is larger."""
    experts, rows = like.shape[:2]
    limit = _ELEMENTS.get(like.device.type, 1 << 20) // max(columns, 1)
    step = max(ROWS, limit // ROWS * ROWS)
    if whole or rows <= step:
        together = max(1, limit // max(rows, 1))
        for start in range(0, experts, together):
            yield slice(start, min(start + together, experts)), slice(0, rows)
        return
    for expert in range(experts):
        for start in range(0, rows, step):
            yield slice(expert, expert + 1), slice(start, min(start + step, rows))


def prune(w: torch.Tensor, out: torch.Tensor) -> None:
    if w.dim() != 3:
        w, out = w.reshape(1, -1, w.shape[-1]), out.view(1, -1, w.shape[-1])
    for part in _parts(w, w.shape[2]):
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
    g = _given_factors(name, w, global_scale, factor)
    if g is None:
        g = nvfp4.automatic_global(w)
    for part in _parts(w, w.shape[2]):
        own = w[part]
        finite = split(own.float(), -1, -1, BLOCK).isfinite().all(-1)
        wrong = first_place(~finite, part, BLOCK)
        if wrong is not None:
            raise ValueError(
                f"{name}: w holds NaN or Inf (in FP32) in {wrong.count} groups of 32; the first is "
                f"{wrong.place}: needed finite weights"
            )
        packed[part], scales[part] = nvfp4.quantize_blocks(own, g[part[0], None, None])
    alpha.copy_(g.reciprocal())


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
    for part in _parts(packed, out.shape[2]):
        values = nvfp4.dequantize_blocks(packed[part], scales[part])
        out[part] = values if alpha is None else values * alpha[part[0], None, None]


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
    for part in _parts(packed, 2 * packed.shape[2], whole=True):
        _check_scale_bytes(name, scales[part], part, 16, 0x7E)
        experts = part[0]
        values = split(nvfp4.decode_e2m1(nvfp4.unpack_codes(packed[part])), -1, -1, 16)
        w = (values * nvfp4.decode_ue4m3(scales[part]).unsqueeze(-1)).flatten(-2)
        w = w if alpha is None else w * alpha[experts, None, None]
        kept = paired_sparsity.prune(w) if prune else w
        g = nvfp4.automatic_global(kept) if given is None else given[experts]
        codes, own = nvfp4.quantize_blocks(kept, g[:, None, None])
        new_packed[part], new_scales[part], new_alpha[experts] = codes, own, g.reciprocal()
        restored = nvfp4.dequantize_blocks(codes, own) * new_alpha[experts, None, None]
        size = w.double().square().sum((1, 2))
        error = (restored.double() - w.double()).square().sum((1, 2))
        loss[experts] = torch.where(size == 0, 0.0, (error / size).sqrt()).float()


def _check_scale_bytes(
    name: str, scales: torch.Tensor, part: Part, block: int, largest: int = 0x7F
) -> None:
    """UE4M3 has no sign; NaN is the scale of a block that was not finite."""
    wrong = first_place(scales > largest, part, block)
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
    for part in _parts(packed, k):
        _check_scale_bytes(name, scales[part], part, BLOCK)
        own = nvfp4.positive_zeros(packed[part])
        nibbles = paired_sparsity.patterns_of(own)
        wrong = first_place(nibbles == ILLEGAL, part, GROUP)
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
    for part in _parts(packed, k):
        # the first 64i rows of the compressed tensors are those of the weight
        nibbles = paired_sparsity.unpack_metadata(e_meta[part])
        wrong = first_place(~torch.isin(nibbles, legal), part, GROUP)
        if wrong is not None:
            raise ValueError(
                f"decompress: e_meta holds {wrong.count} nibbles that are no pattern; the first, "
                f"{int(nibbles[wrong.index]):#x}, is of {wrong.place}: needed what compress gave, "
                "in this layout version"
            )
        packed[part], scales[part] = paired_sparsity.decompress(a_comp[part], nibbles, sfa[part])
