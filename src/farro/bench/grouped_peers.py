"""What a user would run instead of grouped NVFP4 products, each optional.

All get the dense weights that the codes stand for and BF16 activations, and quantize both as they
need before they are timed; the error beside each time is against the product of what they got.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .case import Missing, Subject

_HUMMING: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "FP8 block": (
        {"dtype": "float8e4m3", "group_size": 128, "group_size_n": 128},
        {"dtype": "float8e4m3", "group_size": 128},
    ),
    "NVFP4 W4A16": ({"dtype": "float4e2m1", "group_size": 16, "scale_dtype": "float8e4m3"}, None),
    "MXFP4 W4A8": (
        {"dtype": "float4e2m1", "group_size": 32, "scale_dtype": "float8e8m0"},
        {"dtype": "float8e4m3"},
    ),
}


@dataclass(frozen=True)
class Experts:
    """x bf16 [E, rows, K], every row a token, and weights bf16 [E, N, K]."""

    x: torch.Tensor
    weight: Callable[[], torch.Tensor]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        (e, rows, k), n = self.x.shape, self.weight().shape[1]
        return e, rows, n, k

    @functools.cached_property
    def truth(self) -> torch.Tensor:
        """float64 [E, rows, N]."""
        return torch.stack([x.double() @ w.double().T for x, w in zip(self.x, self.weight())])


def grouped(experts: Experts) -> Iterator[Subject | Missing]:
    """The peers of a grouped product with the same rows for each expert."""
    named: tuple[tuple[str, Callable[[Experts], Callable[[], Any]]], ...]
    named = (("torch bmm BF16", _bmm),)
    if experts.x.is_cuda:
        named = (
            *named,
            ("torch _grouped_mm BF16", _grouped_mm),
            ("torch _scaled_grouped_mm FP8 rows", _scaled_grouped_mm),
            ("DeepGEMM FP8 block, masked", _deep_gemm),
            *((f"Humming {kind}", functools.partial(_humming, kind)) for kind in _HUMMING),
        )
    e, rows, n, _ = experts.sizes

    def value(result: torch.Tensor) -> torch.Tensor:
        return result.reshape(e, -1, n)[:, :rows]

    for name, make in named:
        try:
            call = make(experts)
            call()
        except ModuleNotFoundError as error:
            yield Missing(name, f"{error.name} is not installed")
        except Exception as error:  # an older library, or a shape that it does not take
            yield Missing(name, f"{type(error).__name__}: {error}"[:200])
        else:
            yield Subject(name, "peer", call, value, truth=lambda: experts.truth)


def _bmm(experts: Experts) -> Callable[[], Any]:
    x, weight = experts.x, experts.weight().mT
    return lambda: torch.bmm(x, weight)


def _ends(e: int, rows: int, device: torch.device) -> torch.Tensor:
    return torch.arange(1, e + 1, device=device, dtype=torch.int32) * rows


def _grouped_mm(experts: Experts) -> Callable[[], Any]:
    e, rows, _, k = experts.sizes
    x, weight = experts.x.reshape(e * rows, k), experts.weight().mT
    ends = _ends(e, rows, x.device)
    return lambda: torch._grouped_mm(x, weight, offs=ends)


def _by_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 with one FP32 scale for each row of the last dimension."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp_min(1e-12) / 448
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale.squeeze(-1)


def _scaled_grouped_mm(experts: Experts) -> Callable[[], Any]:
    e, rows, _, k = experts.sizes
    padded = -(-rows // 16) * 16
    x = torch.zeros(e, padded, k, dtype=torch.bfloat16, device=experts.x.device)
    x[:, :rows] = experts.x
    (a, scale_a), (b, scale_b) = _by_rows(x.view(-1, k)), _by_rows(experts.weight())
    ends = _ends(e, padded, x.device)
    return lambda: torch._scaled_grouped_mm(
        *(a, b.mT, scale_a, scale_b), offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _deep_gemm(experts: Experts) -> Callable[[], Any]:
    import deep_gemm
    from deep_gemm.utils.math import per_block_cast_to_fp8, per_token_cast_to_fp8

    e, rows, n, k = experts.sizes
    cap = max(64, -(-rows // 64) * 64)
    x = torch.zeros(e, cap, k, dtype=torch.bfloat16, device=experts.x.device)
    x[:, :rows] = experts.x
    codes, scales = per_token_cast_to_fp8(x.view(-1, k), use_ue8m0=False)
    a = codes.view(e, cap, k), scales.view(e, cap, -1)
    pairs = [per_block_cast_to_fp8(w, use_ue8m0=False) for w in experts.weight()]
    b = tuple(torch.stack(parts) for parts in zip(*pairs))
    out = torch.empty(e, cap, n, dtype=torch.bfloat16, device=x.device)
    counts = torch.full((e,), rows, dtype=torch.int32, device=x.device)

    def call() -> torch.Tensor:
        deep_gemm.m_grouped_fp8_gemm_nt_masked(a, b, out, counts, rows, disable_ue8m0_cast=True)
        return out

    if not hasattr(deep_gemm, "m_grouped_fp8_gemm_nt_masked"):  # the name of sgl-deep-gemm
        deep_gemm.m_grouped_fp8_gemm_nt_masked = deep_gemm.fp8_m_grouped_gemm_nt_masked
    return call


def _humming(kind: str, experts: Experts) -> Callable[[], Any]:
    if importlib.util.find_spec("humming") is None:
        raise ModuleNotFoundError("humming", name="humming-kernels")
    from humming.forward import may_quant_input
    from humming.layer import HummingLayer

    e, rows, n, k = experts.sizes
    weight_config, input_config = _HUMMING[kind]
    layer = HummingLayer(
        shape_n=n,
        shape_k=k,
        num_experts=e,
        weight_config=dict(weight_config),
        input_config=dict(input_config) if input_config else None,
        torch_dtype=torch.bfloat16,
    ).cuda()
    layer.load_from_unquantized(experts.weight())
    layer.transform()
    x, scale = experts.x.reshape(e * rows, k), None
    if input_config:
        x, scale = may_quant_input(layer.humming_config, x)
    offsets = torch.arange(e + 1, device=x.device, dtype=torch.int64) * rows
    grouped = {"gemm_type": "grouped_contiguous"}
    return lambda: layer(x, input_scale=scale, expert_layout=offsets, compute_config=grouped)
