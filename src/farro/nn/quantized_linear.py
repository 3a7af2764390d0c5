"""QuantizedLinear: what all quantized linear layers have, and what quantize_ and farro eval ask."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from ..checks import (
    FLOATS,
    check_backend,
    check_devices,
    check_dtype,
    check_required,
    check_shape,
    check_size,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Self = TypeVar("Self", bound="QuantizedLinear")


class QuantizedLinear(torch.nn.Module):
    """y = x W^T + bias on codes: the weight is quantized once, the input on every call.

    Inference only. Subclasses keep codes and scales, leave them as they are where a model is cast,
    and are made by `from_weight` and `from_linear`.
    """

    in_features: int
    out_features: int
    backend: str
    bias: torch.Tensor | None

    def __init__(self, in_features: int, out_features: int, backend: str) -> None:
        super().__init__()
        check_backend(self._name, backend)
        check_size(self._name, "in_features", in_features)
        check_size(self._name, "out_features", out_features)
        self.in_features = in_features
        self.out_features = out_features
        self.backend = backend

    @property
    def form(self) -> str:
        """What tells it from others of its class."""
        raise NotImplementedError

    def dequantized_weight(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight [N, K] that the codes and scales stand for."""
        raise NotImplementedError

    def dequantized_input(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] as the product sees it, quantized and restored, in fp32."""
        raise NotImplementedError

    def tie_weight_(self, other: Any) -> int:
        """Hold the same codes and scales as `other`; returns the bytes that this frees."""
        raise NotImplementedError

    @property
    def _name(self) -> str:
        return type(self).__name__

    @classmethod
    def _matrix(cls, weight: torch.Tensor) -> torch.Tensor:
        """A floating-point weight [N, K] of any strides, as quantizers read it."""
        name = cls.__name__
        check_required(name, weight=weight)
        if weight.dim() != 2:
            raise ValueError(f"{name}: weight has shape {list(weight.shape)}; needed [N, K]")
        check_dtype(name, "weight", weight, FLOATS)
        weight = weight.detach()
        # an expanded weight is legal for a linear layer
        return weight.contiguous() if 0 in weight.stride() else weight

    @classmethod
    def _check_scale(cls, scale: torch.Tensor, format: str) -> None:
        if not scale.is_meta and not bool(torch.isfinite(scale).all()):
            raise ValueError(
                f"{cls.__name__}: the weight holds NaN or Inf; {format} has no code for them"
            )

    def _take_bias(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        if bias is None:
            return
        check_required(self._name, bias=bias)
        check_dtype(self._name, "bias", bias, DTYPES)
        check_devices(self._name, weight=weight, bias=bias)
        check_shape(self._name, "bias", bias, (self.out_features,), "[N]")
        self.bias = bias.detach().clone()

    @classmethod
    def _check_linear(cls, linear: Any) -> None:
        if not isinstance(linear, torch.nn.Linear):
            name, given = cls.__name__, type(linear).__name__
            raise TypeError(
                f"{name}.from_linear: linear is a {given}; needed a torch.nn.Linear, or use "
                f"{name}.from_weight(weight [N, K], bias)"
            )

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K], checked, as [M, K]."""
        check_required(self._name, x=x)
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(
                f"{self._name}: x has shape {list(x.shape)}; needed [..., {self.in_features}]"
            )
        check_dtype(self._name, "x", x, DTYPES)
        rows = x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)
        # an expanded input is legal for a linear layer
        return rows.contiguous() if 0 in rows.stride() else rows

    def _described(self, form: str) -> str:
        backend = "" if self.backend == "auto" else f", backend={self.backend!r}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}{form}{backend}"
        )
