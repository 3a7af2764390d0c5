"""What of a token's row travels between ranks of ExpertParallel, and what is made of it there."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch

from .checks import check_required
from .nn import DTYPES, Int8Experts, SparseNVFP4Experts
from .ops.int8_quantize import quantize_int8_groups
from .ops.moe_ffn import moe_ffn
from .ops.moe_ffn.combine import weighted_sum
from .ops.moe_route import dispatch_plan, moe_finalize
from .ops.nvfp4_quantize import quant_rows, scatter_fp4_planned
from .ops.nvfp4_quantize.activation import ACTIVATIONS


class Rows(Protocol):
    """How rows for one kind of experts travel.

    `dtypes` are those of hidden states; `agreed` what all ranks' experts must have in common;
    `sizes` the bytes of each part of a row.
    """

    dtypes: ClassVar[tuple[torch.dtype, ...]]

    @property
    def agreed(self) -> dict[str, float]: ...

    @property
    def sizes(self) -> tuple[int, ...]: ...

    def check(self, name: str, weights: Any) -> None:
        """Of routing weights, which may be absent for some."""

    def quantized(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of [T, H] the parts, uint8 [T, size]."""

    def computed(self, parts: list[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        """BF16 [R, H], contiguous, of R rows of one route each, whose weight is 1.

        ids: int32 [R, 1], of this rank's experts from 0 on; rows of others may be anything.
        """

    def summed(
        self,
        rows: torch.Tensor,
        route_dest: torch.Tensor,
        weights: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """[T, H] of BF16 rows [R, H] and the row of each route, -1 for a dropped one."""


class Int8Rows:
    """INT8 codes and their FP32 scales."""

    dtypes: ClassVar[tuple[torch.dtype, ...]] = DTYPES

    def __init__(self, experts: Int8Experts) -> None:
        self.experts = experts

    @property
    def agreed(self) -> dict[str, float]:
        names = ("hidden_size", "intermediate_size", "group_size")
        return {name: getattr(self.experts, name) for name in names}

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.experts.hidden_size, 4 * self.experts.gate_up_proj_scale.shape[2]

    def check(self, name: str, weights: Any) -> None:
        check_required(name, top_k_weights=weights)

    def quantized(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        codes, scale = quantize_int8_groups(x, self.experts.group_size)
        return codes.view(torch.uint8), scale.view(torch.uint8)

    def computed(self, parts: list[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        experts, (codes, scale) = self.experts, parts
        return moe_ffn(
            codes.view(torch.int8),
            scale.view(torch.float32),
            *experts.weights,
            ids,
            torch.ones(ids.shape, dtype=torch.float32, device=ids.device),
            group_size=experts.group_size,
            gate_up_layout=experts.gate_up_layout,
            output_dtype=torch.bfloat16,
            backend=experts.backend,
        )

    def summed(
        self,
        rows: torch.Tensor,
        route_dest: torch.Tensor,
        weights: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        assert weights is not None
        return weighted_sum(rows, route_dest, weights, dtype)


class NVFP4Rows:
    """NVFP4 codes and their UE4M3 scales, of tokens quantized once whatever their routes."""

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16,)

    def __init__(self, experts: SparseNVFP4Experts) -> None:
        self.experts = experts

    @property
    def agreed(self) -> dict[str, float]:
        experts = self.experts
        return {
            "hidden_size": experts.hidden_size,
            "intermediate_size": experts.intermediate_size,
            "input_gscale": float(experts.input_gscale),
            "middle_gscale": float(experts.middle_gscale),
            "activation": ACTIVATIONS.index(experts.activation),
            "beta": experts.beta,
            "linear_beta": experts.linear_beta,
        }

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.experts.hidden_size // 2, self.experts.hidden_size // 32

    def check(self, name: str, weights: Any) -> None:
        """None means that they are applied already."""

    def quantized(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return quant_rows(x, self.experts.input_gscale, backend=self.experts.routing_backend)

    def computed(self, parts: list[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        experts, how = self.experts, self.experts.routing_backend
        codes, scale = (part.contiguous() for part in parts)
        ours = (ids[:, 0] >= 0) & (ids[:, 0] < experts.num_experts)
        expert = torch.where(ours, ids[:, 0], experts.num_experts)
        numbers = torch.bincount(expert, minlength=experts.num_experts + 1)[:-1]
        cap = rounded(int(numbers.max()))  # the host waits; no route is dropped
        counts, dest, token, _ = dispatch_plan(ids, 0, experts.num_experts, cap, backend=how)
        act, scales = scatter_fp4_planned(codes, scale, token, counts, cap, backend=how)
        fused = experts.products(act, scales, counts).flatten(0, 1)
        return fused[dest[:, 0].clamp_min(0)]

    def summed(
        self,
        rows: torch.Tensor,
        route_dest: torch.Tensor,
        weights: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        shape = route_dest.shape[0], rows.shape[1]
        out = torch.empty(shape, dtype=dtype, device=rows.device)
        weights = None if weights is None else weights.contiguous()
        how = self.experts.routing_backend
        return moe_finalize(out, rows, route_dest, weights, backend=how)


def rounded(rows: int) -> int:
    """Up by an eighth at most, so that few numbers of rows make a kernel's choice anew."""
    step = 1 << max(0, (rows - 1).bit_length() - 4)
    return -(-rows // step) * step
