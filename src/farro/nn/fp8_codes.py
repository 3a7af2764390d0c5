"""What FP8 layers keep: E4M3 codes and FP32 scales that no cast of a model rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..formats.fp8 import E4M3
from ..ops.fp8_linear.checks import BIAS_DTYPES
from ..ops.fp8_quantize import dequantize_fp8
from .quantized_linear import DTYPES, QuantizedLinear

_SCALES = ("weight_scale", "input_scale")
_MADE = ("weight", *_SCALES)  # what casts leave alone


class FP8Codes(QuantizedLinear):
    """Buffers `weight` (E4M3 [N, K]), `weight_scale` and, where there is one, `input_scale`.

    They are the state dict. Scales are read in FP16 and BF16 too, and kept in FP32.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor
    input_scale: torch.Tensor | None

    def _make_buffers(
        self,
        scales: dict[str, tuple[int, ...] | None],
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Codes of zeros, scales of ones of these shapes, a bias of zeros."""
        n, k = self.out_features, self.in_features
        self.register_buffer(
            "weight", torch.zeros(n, k, device=device, dtype=torch.uint8).view(E4M3)
        )
        for name, shape in scales.items():
            made = None if shape is None else torch.ones(shape, dtype=torch.float32, device=device)
            self.register_buffer(name, made)
        self.register_buffer("bias", torch.zeros(n, device=device, dtype=dtype) if bias else None)

    def dequantized_weight(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return dequantize_fp8(self.weight, self.weight_scale, dtype)

    def tie_weight_(self, other: FP8Codes) -> int:
        freed = self.weight.nbytes + self.weight_scale.nbytes
        self.weight, self.weight_scale = other.weight, other.weight_scale
        return freed

    def _bias(self) -> torch.Tensor | None:
        """The bias in a dtype that the products take."""
        bias = self.bias
        return bias if bias is None or bias.dtype in BIAS_DTYPES else bias.float()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        before = {name: getattr(self, name, None) for name in _MADE}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, tensor in before.items():
            # a cast of the model moves codes and scales, and must not round them
            if tensor is not None and getattr(self, name).dtype != tensor.dtype:
                setattr(self, name, tensor.to(getattr(self, name).device))
        return self

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        given = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
        assign = local_metadata.get("assign_to_params_buffers", False)
        errors = []
        for name in _MADE:
            key, buffer = prefix + name, getattr(self, name, None)
            if key not in given or buffer is None:
                continue
            error = self._why_not_load(name, buffer, given[key], assign)
            if error is not None:
                errors.append(f"{prefix}{error}")
            elif name in _SCALES:
                given[key] = given[key].to(torch.float32).reshape(buffer.shape)
        if errors:  # nothing is half loaded
            error_msgs.extend(errors)
            return
        super()._load_from_state_dict(
            given, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _why_not_load(
        self, name: str, buffer: torch.Tensor, value: torch.Tensor, assign: bool
    ) -> str | None:
        shape, dtypes = tuple(buffer.shape), DTYPES if name in _SCALES else (E4M3,)
        if tuple(value.shape) != shape and not (shape == () and tuple(value.shape) == (1,)):
            return f"{name} has shape {list(value.shape)}; needed {list(shape)}"
        if value.dtype not in dtypes:
            needed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            return f"{name} has dtype {str(value.dtype).removeprefix('torch.')}; needed {needed}"
        if not assign and buffer.is_meta and not value.is_meta:
            return f"{name} cannot be copied into a meta module; use load_state_dict(assign=True)"
        return None
