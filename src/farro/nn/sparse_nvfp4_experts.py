"""SparseNVFP4Experts: the experts of a mixture-of-experts layer in paired-4:8 sparse NVFP4."""

from __future__ import annotations

from typing import Any

import torch

from ..checks import check_backend, check_devices, check_dtype, check_required, check_size
from ..ops.moe_route import dispatch_plan, dispatch_plan_ragged, moe_finalize
from ..ops.nvfp4_group_mm import group_mm, group_mm_ragged, group_mm_swiglu_quant
from ..ops.nvfp4_quantize import (
    scatter_quant_act_planned,
    scatter_quant_act_ragged,
    silu_mul_quant_act,
)
from ..ops.nvfp4_quantize.activation import ACTIVATIONS
from .compressed_weight import CompressedWeight, ExactFloats
from .inference_only import inference_only
from .quantized_linear import DTYPES

_NAME = "SparseNVFP4Experts"


class SparseNVFP4Experts(ExactFloats):
    """Gated experts with NVFP4 weights, paired-4:8 sparse, and NVFP4 activations (W4A4).

        y[t] = sum over j of w[t,j] * down_e(act(gate_e(x[t]), up_e(x[t]))),  e = topk_ids[t,j]

    It takes what a router gives and computes the experts `first_expert` to `first_expert + E - 1`;
    routes to others add nothing, so that ranks of expert parallelism sum their results. Tokens are
    quantized once for each of their routes, what is between the products is rounded to BF16 and
    quantized, and the weighted sum is in FP32 in the order of j. Inference only.

    Args:
        num_experts: E, the experts here, 1 to 4096.
        hidden_size: H, a multiple of 32.
        intermediate_size: I, a multiple of 32.
        first_expert: the id of this rank's first expert.
        activation, beta, linear_beta: "silu" or "situ", as `farro.nvfp4.silu_mul_quant_act` has
            them.
        capacity: None: no route is dropped, and memory goes by routes. A number: rows of each
            expert in the padded layout, where routes beyond are dropped, and memory is
            E * capacity rows; what engines use that fix it for a batch.
        total_experts: how many the router chooses among, on all ranks; None for num_experts.
            How many rows an expert may expect, and so the tiles of the products, go by it.
        backend: what the products are asked for: "auto", "reference", "cpu", "triton", "cuda".
            The routing and the quantizers follow it where they have that back end.
        device: where the module is made.

    State dict, the same on every device, all tensors contiguous and their own (safetensors):
        gate_up.*, down.*   as CompressedWeight has them, of [E, 2I, H] and [E, H, I]
        input_gscale        fp32 [1]: of the first product's input, see docs/moe.md
        middle_gscale       fp32 [1]: of the second product's input

    Both gscales are 1 unless given: magnitudes up to 2688 are kept, and blocks of 32 whose largest
    magnitude is above 0.1 lose nothing to UE4M3's subnormals. A module made by __init__ is zero
    until it is loaded.
    """

    gate_up: CompressedWeight
    down: CompressedWeight
    input_gscale: torch.Tensor
    middle_gscale: torch.Tensor
    _gate_up_alphas: torch.Tensor
    _down_alphas: torch.Tensor
    _exact = ("input_gscale", "middle_gscale", "_gate_up_alphas", "_down_alphas")

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        first_expert: int = 0,
        activation: str = "silu",
        beta: float = 1.0,
        linear_beta: float = -1.0,
        capacity: int | None = None,
        total_experts: int | None = None,
        backend: str = "auto",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
            check_size(_NAME, name, size)
            if size % 32:
                raise ValueError(f"{_NAME}: {name} is {size}; needed a multiple of 32")
        check_size(_NAME, "first_expert", first_expert)
        check_backend(_NAME, backend)
        if capacity is not None:
            check_size(_NAME, "capacity", capacity)
        if total_experts is not None:
            check_size(_NAME, "total_experts", total_experts)
        if activation not in ACTIVATIONS:
            known = " or ".join(map(repr, ACTIVATIONS))
            raise ValueError(f"{_NAME}: activation is {activation!r}; needed {known}")
        self.num_experts, self.first_expert = num_experts, first_expert
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.activation, self.beta, self.linear_beta = activation, beta, linear_beta
        self.capacity, self.backend = capacity, backend
        self.total_experts = max(total_experts or 0, num_experts)
        self.gate_up = CompressedWeight(
            num_experts, 2 * intermediate_size, hidden_size, device=device
        )
        self.down = CompressedWeight(num_experts, hidden_size, intermediate_size, device=device)
        for name in ("input_gscale", "middle_gscale"):
            self.register_buffer(name, torch.ones(1, dtype=torch.float32, device=device))
        for name in ("_gate_up_alphas", "_down_alphas"):
            self.register_buffer(name, torch.empty_like(self.down.alpha), persistent=False)
        self.derive_alphas_()
        self.register_load_state_dict_post_hook(_derive)  # type: ignore[no-untyped-call]

    @classmethod
    def from_dense(
        cls,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        *,
        input_gscale: float = 1.0,
        middle_gscale: float = 1.0,
        first_expert: int = 0,
        activation: str = "silu",
        beta: float = 1.0,
        linear_beta: float = -1.0,
        capacity: int | None = None,
        total_experts: int | None = None,
        backend: str = "auto",
    ) -> SparseNVFP4Experts:
        """Prune, quantize and compress dense weights, an expert at a time, on their device.

        Args:
            gate_up: [E, 2I, H], rows [gate | up], any floating dtype; as transformers 5 holds it.
            down: [E, H, I].
            input_gscale, middle_gscale: 448 * 6 over the largest magnitude expected.
            The others as the class has them.

        Raises:
            TypeError: wrong types.
            ValueError: shapes that do not fit each other, H or I not a multiple of 32, NaN or Inf.
        """
        name = f"{_NAME}.from_dense"
        check_required(name, gate_up=gate_up, down=down)
        experts, hidden, inner = down.shape if down.dim() == 3 else (0, 0, 0)
        if down.dim() != 3 or tuple(gate_up.shape) != (experts, 2 * inner, hidden):
            raise ValueError(
                f"{name}: gate_up has shape {list(gate_up.shape)} and down {list(down.shape)}; "
                "needed [E, 2I, H] and [E, H, I]"
            )
        check_devices(name, gate_up=gate_up, down=down)
        for argument, value in (("input_gscale", input_gscale), ("middle_gscale", middle_gscale)):
            if not 0 < value < float("inf"):
                raise ValueError(f"{name}: {argument} is {value}; needed a positive number")
        module = cls(
            *(experts, hidden, inner),
            first_expert=first_expert,
            activation=activation,
            beta=beta,
            linear_beta=linear_beta,
            capacity=capacity,
            total_experts=total_experts,
            backend=backend,
            device=down.device,
        )
        for weight, dense in ((module.gate_up, gate_up), (module.down, down)):
            weight.fill_(dense)
        module.input_gscale.fill_(input_gscale)
        module.middle_gscale.fill_(middle_gscale)
        module.derive_alphas_()
        return module

    def forward(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor | None
    ) -> torch.Tensor:
        """Args:
            x: [T, H] in bfloat16; float16 and float32 are rounded to it.
            topk_ids: int32 or int64 [T, topk]; ids of other ranks or out of range add nothing.
            topk_weights: [T, topk] of any floating dtype, taken as FP32; None for 1.

        Returns:
            [T, H] in the dtype of x; zeros for a token without routes here.
        """
        check_required(_NAME, x=x, topk_ids=topk_ids)
        check_dtype(_NAME, "x", x, DTYPES)
        if x.dim() != 2 or x.shape[1] != self.hidden_size:
            raise ValueError(
                f"{_NAME}: x has shape {list(x.shape)}; needed [T, {self.hidden_size}]: pass "
                "x.flatten(0, -2)"
            )
        weights = None if topk_weights is None else topk_weights.detach().float().contiguous()
        rows = self._ragged if self.capacity is None else self._padded
        fused, dest = rows(x.detach().bfloat16().contiguous(), topk_ids.contiguous())
        out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
        y = moe_finalize(out, fused, dest, weights, backend=self.routing_backend)
        given = x if topk_weights is None or x.requires_grad else topk_weights
        return inference_only(_NAME, given, y.to(x.dtype))

    @property
    def routing_backend(self) -> str:
        """The back end of what has no native kernels."""
        return "auto" if self.backend == "cuda" else self.backend

    @property
    def _gating(self) -> dict[str, Any]:
        names = ("activation", "beta", "linear_beta")
        return {name: getattr(self, name) for name in names}

    def _ragged(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows [T*topk, H], the row of each route); a row for every route."""
        how, up, down = self.routing_backend, self.gate_up, self.down
        plan = dispatch_plan_ragged(ids, self.first_expert, self.num_experts, backend=how)
        offsets, dest, token, route = plan
        codes = scatter_quant_act_ragged(
            x, token, route, None, self.input_gscale, offsets, backend=how
        )
        shape = (token.shape[0], up.shape[1])
        both = torch.empty(shape, dtype=x.dtype, device=x.device)
        sizes = up.shape[1:]
        operands = (*up.parts, *codes, self._gate_up_alphas, offsets)
        how_many = self._expected(ids)
        group_mm_ragged(both, *operands, *sizes, expected_rows=how_many, backend=self.backend)
        # all experts share a gscale, so their rows may be quantized as one expert's
        middle = silu_mul_quant_act(
            *(both[None], self.middle_gscale, offsets[-1:], self.hidden_size),
            **self._gating,
            backend=how,
        )
        codes = middle[0][0], middle[1][0]
        fused = torch.empty(token.shape[0], self.hidden_size, dtype=x.dtype, device=x.device)
        operands = (*down.parts, *codes, self._down_alphas, offsets)
        sizes = down.shape[1:]
        group_mm_ragged(fused, *operands, *sizes, expected_rows=how_many, backend=self.backend)
        return fused, dest

    def _padded(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows [E, capacity, H], the row of each route)"""
        assert self.capacity is not None
        how, cap = self.routing_backend, self.capacity
        plan = dispatch_plan(ids, self.first_expert, self.num_experts, cap, backend=how)
        counts, dest, token, route = plan
        codes = scatter_quant_act_planned(
            x, token, route, None, self.input_gscale, counts, cap, backend=how
        )
        return self.products(*codes, counts, expected_rows=self._expected(ids)), dest

    def _expected(self, ids: torch.Tensor) -> int:
        """How many rows an expert has on average; 1 at least, for 0 says nothing."""
        return max(1, ids.shape[0] * ids.shape[1] // self.total_experts)

    def products(
        self,
        b_act: torch.Tensor,
        sfb: torch.Tensor,
        expert_num_tokens: torch.Tensor,
        *,
        expected_rows: int = 0,
    ) -> torch.Tensor:
        """Both products of rows in the padded layout, quantized with input_gscale.

        Args:
            b_act, sfb: uint8 [E, cap, H/2] and [E, cap, H/32], as scatter_fp4_planned gives them.
            expert_num_tokens: int32 [E].
            expected_rows: as farro.nvfp4.group_mm takes it.

        Returns:
            bf16 [E, cap, H], not weighted; unspecified past an expert's tokens.
        """
        up, down, counts = self.gate_up, self.down, expert_num_tokens
        codes = group_mm_swiglu_quant(
            *(*up.parts, b_act, sfb, self._gate_up_alphas, counts, self.middle_gscale),
            *up.shape[1:],
            **self._gating,
            expected_rows=expected_rows,
            backend=self.backend,
        )
        shape = (*b_act.shape[:2], self.hidden_size)
        fused = torch.empty(shape, dtype=torch.bfloat16, device=b_act.device)
        operands = (*down.parts, *codes, self._down_alphas, counts)
        sizes = down.shape[1:]
        group_mm(fused, *operands, *sizes, expected_rows=expected_rows, backend=self.backend)
        return fused

    def select(self, first: int, last: int) -> SparseNVFP4Experts:
        """A module of the experts [first, last) alone, with weights of its own.

        They are numbered as here: its first_expert is this module's plus `first`.
        """
        if not 0 <= first < last <= self.num_experts:
            raise ValueError(
                f"{_NAME}: experts {first} to {last} of {self.num_experts}; needed "
                f"0 <= first < last <= {self.num_experts}"
            )
        module = SparseNVFP4Experts(
            *(last - first, self.hidden_size, self.intermediate_size),
            first_expert=self.first_expert + first,
            **self._gating,
            capacity=self.capacity,
            total_experts=self.total_experts,
            backend=self.backend,
            device="meta",
        )
        for name in ("gate_up", "down"):
            own, part = getattr(self, name), getattr(module, name)
            for key, buffer in own.named_buffers():
                setattr(part, key, (buffer[first:last] if buffer.dim() else buffer).clone())
        for name in ("input_gscale", "middle_gscale"):
            setattr(module, name, getattr(self, name).clone())
        module.derive_alphas_()
        return module

    def derive_alphas_(self) -> None:
        """Work out what the products multiply by, in place; call it after changing a gscale."""
        for name, weight, gscale in (
            ("_gate_up_alphas", self.gate_up, self.input_gscale),
            ("_down_alphas", self.down, self.middle_gscale),
        ):
            if weight.alpha.is_meta != gscale.is_meta:  # half loaded
                continue
            alphas, own = weight.alpha / gscale, getattr(self, name)
            if own.is_meta or own.device != alphas.device:
                setattr(self, name, alphas)
            else:  # in place: a captured CUDA graph keeps reading the same memory
                own.copy_(alphas)

    def extra_repr(self) -> str:
        capacity = "" if self.capacity is None else f", capacity={self.capacity}"
        backend = "" if self.backend == "auto" else f", backend={self.backend!r}"
        return (
            f"num_experts={self.num_experts}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}, first_expert={self.first_expert}, "
            f"activation={self.activation!r}{capacity}{backend}"
        )


def _derive(module: SparseNVFP4Experts, keys: Any) -> None:
    module.derive_alphas_()
