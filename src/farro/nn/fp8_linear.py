"""FP8Linear: E4M3 weights with one scale, and activations with one scale or one for each row."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..formats.fp8 import BLOCK, E4M3, MAX, blocks, inverse_of
from ..ops.fp8_blockwise_linear import fp8_blockwise_linear_bf16
from ..ops.fp8_linear import fp8_linear_bf16, fp8_linear_bias_bf16
from ..ops.fp8_quantize import dequantize_fp8, quantize_fp8_per_row, quantize_fp8_per_tensor
from .fp8_codes import FP8Codes

SCALINGS = ("tensor", "row", "static")


class FP8Linear(FP8Codes):
    """y = x W^T + bias with E4M3 codes and one FP32 scale for the weight.

    `scaling` says how the input is quantized on every call:

        "tensor"   one scale for all of x, from its largest value (`farro.quantize_fp8_per_tensor`)
        "row"      one for each row (`farro.quantize_fp8_per_row`): a row's result does not depend
                   on the other rows' values, and an outlier costs its own row alone
        "static"   `input_scale`, one number that was measured beforehand; larger values are
                   clamped to 448 * input_scale

    The product is `farro.fp8_linear_bf16` (or its form with a bias), for "row"
    `farro.fp8_blockwise_linear_bf16`, which takes a scale for each row. Inference only.

    Args:
        in_features: K.
        out_features: N.
        bias: whether there is a bias.
        scaling: "tensor", "row" or "static".
        fast_accum: as in `farro.fp8_linear_bf16`; not for "row".
        backend: what the operators are asked for: "auto", "reference", "cpu", "triton", "cuda".
        device, dtype: where the module is made, and the dtype of the bias alone.

    Input and output: x [..., K] in bfloat16, float16 or float32, any leading dimensions, empty ones
    too -> [..., N] in x's dtype, rounded to BF16 before where that is another one.

    State dict, the same on every device:
        weight        float8_e4m3fn [N, K]
        weight_scale  fp32 []; [1], float16 and bfloat16 are read too, and kept as fp32 []
        input_scale   as weight_scale, with "static" alone
        bias          [N], absent without bias

    A fresh module is zero (codes 0, scales 1) until it is loaded or made by `from_linear`. A cast
    of the model (`half()`, `to(dtype)`) casts the bias and leaves codes and scales as they are.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        scaling: str = "tensor",
        *,
        fast_accum: bool = False,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, backend)
        _check_scaling(scaling, fast_accum)
        self.scaling = scaling
        self.fast_accum = fast_accum
        scales: dict[str, tuple[int, ...] | None] = {"weight_scale": ()}
        scales["input_scale"] = () if scaling == "static" else None
        self._make_buffers(scales, bias, device, dtype)

    @classmethod
    def from_weight(
        cls,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        scaling: str = "tensor",
        *,
        input_scale: float | torch.Tensor | None = None,
        fast_accum: bool = False,
        backend: str = "auto",
    ) -> FP8Linear:
        """Quantize a floating-point weight [N, K] (any strides) and copy a bias [N].

        Args:
            input_scale: a number, or a tensor of one element, that makes the scaling "static":
                max|x| / 448 over inputs that stand for those to come.

        Raises:
            TypeError: weight or bias is not a floating-point tensor.
            ValueError: shapes that do not fit, another scaling, "static" without input_scale, an
                input_scale that is not above zero, NaN or Inf in the weight.
        """
        _check_scaling(scaling, fast_accum)
        if input_scale is not None and scaling != "row":
            scaling = "static"
        if (scaling == "static") != (input_scale is not None):
            needed = "needs" if scaling == "static" else "takes no"
            raise ValueError(f"FP8Linear: scaling {scaling!r} {needed} input_scale")
        weight = cls._matrix(weight)
        n, k = weight.shape
        options: dict[str, Any] = {"fast_accum": fast_accum, "backend": backend}
        module = cls(k, n, bias is not None, scaling, **options, device="meta")
        module.weight, module.weight_scale = quantize_fp8_per_tensor(weight)
        cls._check_scale(module.weight_scale, "FP8")
        module._take_bias(weight, bias)
        if input_scale is not None:
            module.input_scale = _one_number(input_scale, weight.device)
        return module

    @classmethod
    def from_linear(
        cls,
        linear: torch.nn.Linear,
        scaling: str = "tensor",
        *,
        input_scale: float | torch.Tensor | None = None,
        fast_accum: bool = False,
        backend: str = "auto",
    ) -> FP8Linear:
        """Quantize the weight of a torch.nn.Linear, on its device; the linear is left as it is.

        Raises TypeError for anything else, and what `from_weight` raises.
        """
        cls._check_linear(linear)
        options: dict[str, Any] = {"fast_accum": fast_accum, "backend": backend}
        module = cls.from_weight(
            linear.weight, linear.bias, scaling, input_scale=input_scale, **options
        )
        return module.train(linear.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, scale = self._quantize(self._rows(x))
        y = self._row_product(q, scale) if self.scaling == "row" else self._product(q, scale)
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def _quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.scaling == "row":
            return quantize_fp8_per_row(x, backend=self.backend)
        if self.input_scale is None:
            return quantize_fp8_per_tensor(x, backend=self.backend)
        values = x.float() * inverse_of(self.input_scale)
        # the cast alone, which autograd follows as far as the product, whose backward refuses
        return values.clamp(-MAX, MAX).to(E4M3), self.input_scale

    def _product(self, q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        alpha = scale * self.weight_scale
        options: dict[str, Any] = {"fast_accum": self.fast_accum, "backend": self.backend}
        bias = self._bias()
        if bias is None:
            return fp8_linear_bf16(q, self.weight, alpha, **options)
        return fp8_linear_bias_bf16(q, self.weight, bias, alpha, **options)

    def _row_product(self, q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """A row's scale is that of all its blocks of 128, and the weight's of all of its."""
        across = blocks(self.in_features)
        of_weight = self.weight_scale.expand(blocks(self.out_features), across).contiguous()
        return fp8_blockwise_linear_bf16(
            *(q, self.weight, scale.expand(-1, across).contiguous(), of_weight),
            bias=self._bias(),
            backend=self.backend,
        )

    @property
    def form(self) -> str:
        return f"scaling {self.scaling!r}"

    def dequantized_input(self, x: torch.Tensor) -> torch.Tensor:
        return dequantize_fp8(*self._quantize(x))

    def extra_repr(self) -> str:
        fast = ", fast_accum=True" if self.fast_accum else ""
        return self._described(f", scaling={self.scaling!r}{fast}")


def _check_scaling(scaling: Any, fast_accum: Any) -> None:
    if scaling not in SCALINGS:
        needed = ", ".join(map(repr, SCALINGS))
        raise ValueError(f"FP8Linear: scaling is {scaling!r}; needed one of {needed}")
    if not isinstance(fast_accum, bool):
        raise TypeError(f"FP8Linear: fast_accum must be a bool, got {type(fast_accum).__name__}")
    if fast_accum and scaling == "row":
        raise ValueError(
            f"FP8Linear: fast_accum is not for scaling 'row', whose sums are promoted every {BLOCK}"
        )


def _one_number(scale: Any, device: torch.device) -> torch.Tensor:
    """input_scale as fp32 [] on the weight's device."""
    if isinstance(scale, bool) or not isinstance(scale, (int, float, torch.Tensor)):
        given = type(scale).__name__
        raise TypeError(f"FP8Linear: input_scale must be a number or a tensor of one, got {given}")
    if isinstance(scale, torch.Tensor) and scale.numel() != 1:
        shape = list(scale.shape)
        raise ValueError(f"FP8Linear: input_scale has shape {shape}; needed one element")
    number = torch.as_tensor(scale).detach().to(device, torch.float32, copy=True).reshape(())
    if not number.is_meta and not 0 < number.item() < math.inf:
        raise ValueError(f"FP8Linear: input_scale is {number.item()}; needed a number above zero")
    return number
