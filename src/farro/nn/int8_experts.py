"""Int8Experts: the gated experts of a mixture, INT8 weights and activations in groups along K."""

from __future__ import annotations

from typing import Any

import torch

from ..checks import (
    FLOATS,
    check_backend,
    check_devices,
    check_dtype,
    check_required,
    check_size,
)
from ..formats.int8_group import check_group_size, group_count
from ..ops.int8_quantize import dequantize_int8_groups, quantize_int8_groups
from ..ops.moe_ffn import moe_ffn
from ..ops.moe_ffn.checks import check_layout
from .compressed_weight import ExactFloats
from .quantized_linear import DTYPES

_NAME = "Int8Experts"
_CODES = ("gate_up_proj", "down_proj")
_SCALES = ("gate_up_proj_scale", "down_proj_scale")


class Int8Experts(ExactFloats):
    """The experts of a layer on `farro.moe_ffn`: a router's output goes in, the weighted sum comes.

        y[t] = sum over j of w[t,j] * down_e(silu(gate_e(x[t])) * up_e(x[t])),  e = topk_ids[t,j]

    Rows of x are quantized in groups on every call, once for all their experts. Ids outside
    [0, E) add nothing. Parameters are laid out as transformers 5 lays out its experts, and forward
    takes what theirs takes, so it stands in for one. Inference only.

    Args:
        num_experts: E, at most 4096.
        hidden_size: H.
        intermediate_size: I. Neither need be a multiple of group_size.
        group_size: G, 32, 64, 128 or 256.
        gate_up_layout: rows of gate_up_proj are [gate | up], "concatenated", or [g0, u0, g1, ...],
            "interleaved".
        backend: what the operators are asked for: "auto", "reference", "cpu", "triton", "cuda".
            The quantizer, which has no native kernel, follows where it has that back end.
        device: where the module is made.

    State dict, the same on every device, all tensors contiguous and their own (safetensors):
        gate_up_proj        int8 [E, 2I, H]
        gate_up_proj_scale  fp32 [E, 2I, ceil(H/G)]; float16 and bfloat16 are read too
        down_proj           int8 [E, H, I]
        down_proj_scale     fp32 [E, H, ceil(I/G)]

    A fresh module is zero (codes 0, scales 1) until it is loaded or made by `from_dense`. A cast of
    the model leaves codes and scales as they are. Dense weights have the same names in
    transformers' checkpoints: loading them here is an error.
    """

    gate_up_proj: torch.Tensor
    gate_up_proj_scale: torch.Tensor
    down_proj: torch.Tensor
    down_proj_scale: torch.Tensor
    _exact = _SCALES

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        group_size: int = 256,
        *,
        gate_up_layout: str = "concatenated",
        backend: str = "auto",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        sizes = {
            "num_experts": num_experts,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
        }
        for name, size in sizes.items():
            check_size(_NAME, name, size)
        check_group_size(_NAME, group_size)
        check_layout(_NAME, gate_up_layout)
        check_backend(_NAME, backend)
        self.num_experts, self.hidden_size = num_experts, hidden_size
        self.intermediate_size, self.group_size = intermediate_size, group_size
        self.gate_up_layout, self.backend = gate_up_layout, backend
        for name, rows, columns in (
            ("gate_up_proj", 2 * intermediate_size, hidden_size),
            ("down_proj", hidden_size, intermediate_size),
        ):
            codes = torch.zeros(num_experts, rows, columns, dtype=torch.int8, device=device)
            shape = (num_experts, group_count(columns, group_size), rows)
            scale = torch.ones(shape, dtype=torch.float32, device=device)
            self.register_buffer(name, codes)
            # in memory as kernels read it, to the outside as checkpoints have it
            self.register_buffer(f"{name}_scale", scale.transpose(1, 2))
        self.register_load_state_dict_post_hook(_lay_out)  # type: ignore[no-untyped-call]

    @classmethod
    def from_dense(
        cls,
        gate_up_proj: torch.Tensor,
        down_proj: torch.Tensor,
        group_size: int = 256,
        *,
        gate_up_layout: str = "concatenated",
        backend: str = "auto",
    ) -> Int8Experts:
        """Quantize dense weights, on their device; they are left as they are.

        Args:
            gate_up_proj: [E, 2I, H], any floating dtype, any strides: as transformers 5 holds it.
            down_proj: [E, H, I].
            The others as the class has them.

        Raises:
            TypeError: a weight is no floating-point tensor.
            ValueError: shapes that do not fit each other, another group_size, NaN or Inf.
        """
        name = f"{_NAME}.from_dense"
        check_required(name, gate_up_proj=gate_up_proj, down_proj=down_proj)
        experts, hidden, inner = down_proj.shape if down_proj.dim() == 3 else (0, 0, 0)
        if down_proj.dim() != 3 or tuple(gate_up_proj.shape) != (experts, 2 * inner, hidden):
            raise ValueError(
                f"{name}: gate_up_proj has shape {list(gate_up_proj.shape)} and down_proj "
                f"{list(down_proj.shape)}; needed [E, 2I, H] and [E, H, I]"
            )
        check_dtype(name, "gate_up_proj", gate_up_proj, FLOATS)
        check_dtype(name, "down_proj", down_proj, FLOATS)
        check_devices(name, gate_up_proj=gate_up_proj, down_proj=down_proj)
        module = cls(
            *(experts, hidden, inner, group_size),
            gate_up_layout=gate_up_layout,
            backend=backend,
            device="meta",
        )
        for part, dense in (("gate_up_proj", gate_up_proj), ("down_proj", down_proj)):
            codes, scale = quantize_int8_groups(dense.detach(), group_size)
            if not scale.is_meta and not bool(torch.isfinite(scale).all()):
                raise ValueError(f"{name}: {part} holds NaN or Inf; INT8 has no code for them")
            setattr(module, part, codes)
            setattr(module, f"{part}_scale", scale)
        _lay_out(module, None)
        return module

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Args:
            hidden_states: [T, H] in bfloat16, float16 or float32.
            top_k_index: int32 or int64 [T, topk].
            top_k_weights: [T, topk] of any floating dtype, taken as FP32.

        Returns:
            [T, H] in the dtype of hidden_states; zeros for a token without routes.
        """
        check_required(_NAME, hidden_states=hidden_states, top_k_weights=top_k_weights)
        check_dtype(_NAME, "hidden_states", hidden_states, DTYPES)
        if hidden_states.dim() != 2 or hidden_states.shape[1] != self.hidden_size:
            raise ValueError(
                f"{_NAME}: hidden_states has shape {list(hidden_states.shape)}; needed "
                f"[T, {self.hidden_size}]: pass hidden_states.flatten(0, -2)"
            )
        if 0 in hidden_states.stride():  # an expanded input is legal for a layer
            hidden_states = hidden_states.contiguous()
        quantizer = "auto" if self.backend == "cuda" else self.backend
        codes, scale = quantize_int8_groups(hidden_states, self.group_size, backend=quantizer)
        return moe_ffn(
            *(codes, scale, *self.weights, top_k_index, top_k_weights.float()),
            group_size=self.group_size,
            gate_up_layout=self.gate_up_layout,
            output_dtype=hidden_states.dtype,
            backend=self.backend,
        )

    @property
    def weights(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """w_gate_up, scale_gate_up, w_down, scale_down of `farro.moe_ffn`: views."""
        return (
            self.gate_up_proj.transpose(1, 2),
            self.gate_up_proj_scale.transpose(1, 2),
            self.down_proj.transpose(1, 2),
            self.down_proj_scale.transpose(1, 2),
        )

    def select(self, first: int, last: int) -> Int8Experts:
        """A module of the experts [first, last) alone, with weights of its own."""
        if not 0 <= first <= last <= self.num_experts:
            raise ValueError(
                f"{_NAME}: experts {first} to {last} of {self.num_experts}; needed "
                f"0 <= first <= last <= {self.num_experts}"
            )
        module = Int8Experts(
            *(last - first, self.hidden_size, self.intermediate_size, self.group_size),
            gate_up_layout=self.gate_up_layout,
            backend=self.backend,
            device="meta",
        )
        for name in (*_CODES, *_SCALES):
            setattr(module, name, getattr(self, name)[first:last].clone())
        return module

    def dequantized(self, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        """The dense weights [E, 2I, H] and [E, H, I] that the codes and scales stand for."""
        up, down = (
            dequantize_int8_groups(getattr(self, c), getattr(self, s), self.group_size, dtype)
            for c, s in zip(_CODES, _SCALES)
        )
        return up, down

    def extra_repr(self) -> str:
        layout = ", interleaved" if self.gate_up_layout == "interleaved" else ""
        backend = "" if self.backend == "auto" else f", backend={self.backend!r}"
        return (
            f"num_experts={self.num_experts}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}, group_size={self.group_size}"
            f"{layout}{backend}"
        )

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in _SCALES:
            destination[prefix + name] = destination[prefix + name].contiguous()

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any
    ) -> None:
        errors = rest[-1]
        given = {name: state_dict.get(prefix + name) for name in (*_CODES, *_SCALES)}
        told = [self._why_not_load(name, v) for name, v in given.items() if v is not None]
        errors.extend(f"{prefix}{reason}" for reason in told if reason)
        if not any(told):  # else torch would copy what it can, and round BF16 weights to integers
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def _why_not_load(self, name: str, value: torch.Tensor) -> str | None:
        dtypes = (torch.int8,) if name in _CODES else DTYPES
        if value.dtype not in dtypes:
            needed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            hint = ": quantize dense weights with Int8Experts.from_dense" if name in _CODES else ""
            return (
                f"{name} has dtype {str(value.dtype).removeprefix('torch.')}; needed {needed}{hint}"
            )
        shape = getattr(self, name).shape
        if value.shape != shape:
            hint = "" if name in _CODES else f": was it made with group_size {self.group_size}?"
            return f"{name} has shape {list(value.shape)}; needed {list(shape)}{hint}"
        return None


def _lay_out(module: Int8Experts, keys: Any) -> None:
    """Scales FP32, features next to each other in memory."""
    for name in _SCALES:
        scale = getattr(module, name).float().transpose(1, 2)
        if not scale.is_contiguous() or getattr(module, name).dtype != scale.dtype:
            setattr(module, name, scale.contiguous().transpose(1, 2))
