"""INT8 codes with one FP32 scale per group of G along the last dimension.

scale = max(max|x| / 127, 1e-12), q = round-half-even(x / scale) clipped to +-127, all in FP32.
A group that holds NaN or Inf keeps that as its scale and gets codes 0. -128 is a legal code to
read, never written. The last group of a row is shorter where G does not divide K.
"""

from __future__ import annotations

from typing import Any

import torch

from ..checks import check_dtype, check_required, check_size

GROUP_SIZES = (32, 64, 128, 256)
SCALE_FLOOR = 1e-12
MAX_CODE = 127


def check_group_size(function: str, group_size: Any) -> None:
    """A true int among GROUP_SIZES; True and 256.0 are refused too."""
    if type(group_size) is not int or group_size not in GROUP_SIZES:
        raise ValueError(
            f"{function}: group_size is {group_size!r} ({type(group_size).__name__}); "
            f"needed an int among {', '.join(map(str, GROUP_SIZES))}"
        )


def group_count(k: int, group_size: int) -> int:
    """ceil(K / G)."""
    return -(-k // group_size)


def group_bounds(k: int, group_size: int) -> list[tuple[int, int]]:
    """[start, stop) along K of each group, in order."""
    return [(start, min(start + group_size, k)) for start in range(0, k, group_size)]


def quantize(x: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., K] -> codes int8 [..., K], scale fp32 [..., ceil(K/G)]: the formula by groups."""
    x = x.float()
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty(
        (*x.shape[:-1], group_count(x.shape[-1], group_size)), dtype=torch.float32, device=x.device
    )
    # a tensor on x's device: on a GPU torch divides by a number through its rounded reciprocal
    largest = torch.full((), MAX_CODE, dtype=torch.float32, device=x.device)
    for g, (start, stop) in enumerate(group_bounds(x.shape[-1], group_size)):
        values = x[..., start:stop]
        s = (values.abs().amax(-1, keepdim=True) / largest).clamp_min(SCALE_FLOOR)
        q = torch.round(values / s).clamp(-MAX_CODE, MAX_CODE)
        codes[..., start:stop] = torch.where(torch.isfinite(s), q, 0).to(torch.int8)
        scale[..., g] = s.squeeze(-1)
    return codes, scale


def dequantize(
    q: torch.Tensor, scale: torch.Tensor, group_size: int, dtype: torch.dtype
) -> torch.Tensor:
    """dtype(fp32(q) * scale): one product in FP32, one conversion; NaN or Inf scales give NaN."""
    k = q.shape[-1]
    spread = scale.repeat_interleave(group_size, dim=-1)[..., :k]
    return (q.float() * spread).to(dtype)


def pack_groups(codes: torch.Tensor, group_size: int) -> torch.Tensor:
    """codes int8 [N, K] -> [ceil(K/G), N, G] contiguous, the tail of K filled with zeros.

    The layout in which a CPU reads one group of a weight as one dense block.
    """
    check_group_size("pack_groups", group_size)
    check_required("pack_groups", codes=codes)
    check_dtype("pack_groups", "codes", codes, (torch.int8,))
    if codes.dim() != 2:
        raise ValueError(f"pack_groups: codes has shape {list(codes.shape)}; needed [N, K]")
    n, k = codes.shape
    packed = codes.new_zeros(group_count(k, group_size), n, group_size)
    for g, (start, stop) in enumerate(group_bounds(k, group_size)):
        packed[g, :, : stop - start] = codes[:, start:stop]
    return packed


def unpack_groups(packed: torch.Tensor, k: int) -> torch.Tensor:
    """The inverse of pack_groups: [ceil(K/G), N, G] -> [N, K] contiguous."""
    check_required("unpack_groups", packed=packed)
    check_size("unpack_groups", "k", k)
    shape = list(packed.shape)
    if packed.dim() != 3:
        raise ValueError(f"unpack_groups: packed has shape {shape}; needed [ceil(K/G), N, G]")
    groups, n, group_size = packed.shape
    if groups != group_count(k, max(group_size, 1)):
        raise ValueError(f"unpack_groups: k is {k}, which packed of shape {shape} does not hold")
    return packed.transpose(0, 1).reshape(n, groups * group_size)[:, :k].contiguous()
