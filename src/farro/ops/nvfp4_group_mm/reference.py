"""A grouped product by its formula: exact operands, sums in float64, one rounding to BF16.

An e2m1 code times a UE4M3 scale has 6 significant bits, so the products of codes are exact in
float64; alpha is applied to the float64 sum.
"""

from __future__ import annotations

import torch

from ...exact import bfloat16_once
from ...formats.nvfp4 import dequantize_blocks
from ...formats.paired_sparsity import decompress, unpack_metadata


def weight_of(
    a_comp: torch.Tensor, e_meta: torch.Tensor, sfa: torch.Tensor, expert: int
) -> torch.Tensor:
    """FP32 [M, K] of one expert: codes times block scales, exact."""
    one = slice(expert, expert + 1)
    packed, scales = decompress(a_comp[one], unpack_metadata(e_meta[one]), sfa[one])
    return dequantize_blocks(packed[0], scales[0])


def values_of(b_act: torch.Tensor, sfb: torch.Tensor | None) -> torch.Tensor:
    """FP32 [rows, K] of activations, exact."""
    return b_act.float() if sfb is None else dequantize_blocks(b_act, sfb)


def rows_of(counts: torch.Tensor, expert: int, rows: int, ragged: bool) -> torch.Tensor:
    """Which of `rows` rows belong to an expert: bool [rows], counts and offsets clamped to them."""
    first, last = (expert, expert + 1) if ragged else (expert, expert)
    at = torch.arange(rows, device=counts.device)
    start = counts[first] if ragged else torch.zeros_like(counts[0])
    return (at >= start) & (at < counts[last])


def run(
    config: None,
    out: torch.Tensor,
    a_comp: torch.Tensor,
    e_meta: torch.Tensor,
    sfa: torch.Tensor,
    b_act: torch.Tensor,
    sfb: torch.Tensor | None,
    alphas: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Ragged where out has two dimensions: then `counts` holds the E + 1 offsets."""
    ragged = out.dim() == 2
    for e in range(a_comp.shape[0]):
        place, codes = (out, b_act) if ragged else (out[e], b_act[e])
        scales = sfb if ragged or sfb is None else sfb[e]
        mine = rows_of(counts, e, place.shape[0], ragged)
        # a GPU cannot tell how many rows there are without waiting: all are computed, some kept
        chosen = mine.nonzero().squeeze(1) if mine.device.type == "cpu" else slice(None)
        weight = weight_of(a_comp, e_meta, sfa, e).double()
        x = values_of(codes[chosen], None if scales is None else scales[chosen]).double()
        result = bfloat16_once(alphas[e].double() * (x @ weight.T))
        place[chosen] = torch.where(mine[chosen].unsqueeze(1), result, place[chosen])
