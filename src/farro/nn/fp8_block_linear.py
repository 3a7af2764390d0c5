"""FP8BlockLinear: E4M3 weights in blocks of 128 x 128, activations in groups of 128 along K."""

from __future__ import annotations

import torch

from ..formats.fp8 import blocks
from ..ops.fp8_blockwise_linear import fp8_blockwise_linear_bf16
from ..ops.fp8_quantize import dequantize_fp8, quantize_fp8_1x128, quantize_fp8_128x128
from .fp8_codes import FP8Codes


class FP8BlockLinear(FP8Codes):
    """y = x W^T + bias with E4M3 codes and one FP32 scale for each 128 x 128 of the weight.

    Activations get one scale for each 128 along K on every call (`farro.quantize_fp8_1x128`) and
    are multiplied by `farro.fp8_blockwise_linear_bf16`. Inference only.

    Args:
        in_features: K; in_features and out_features need not be multiples of 128.
        out_features: N.
        bias: whether there is a bias.
        backend: what the operators are asked for: "auto", "reference", "cpu", "triton", "cuda".
        device, dtype: where the module is made, and the dtype of the bias alone.

    Input and output: x [..., K] in bfloat16, float16 or float32, any leading dimensions, empty ones
    too -> [..., N] in x's dtype, rounded to BF16 before where that is another one.

    State dict, the same on every device:
        weight        float8_e4m3fn [N, K]
        weight_scale  fp32 [ceil(N/128), ceil(K/128)], the factor that restores values (called
                      `weight_scale_inv` in DeepSeek's checkpoints); float16 and bfloat16 are read
                      too, and kept as fp32
        bias          [N], absent without bias

    A fresh module is zero (codes 0, scales 1) until it is loaded or made by `from_linear`. A cast
    of the model (`half()`, `to(dtype)`) casts the bias and leaves codes and scales as they are.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, backend)
        shape = (blocks(out_features), blocks(in_features))
        self._make_buffers({"weight_scale": shape}, bias, device, dtype)

    @classmethod
    def from_weight(
        cls, weight: torch.Tensor, bias: torch.Tensor | None = None, *, backend: str = "auto"
    ) -> FP8BlockLinear:
        """Quantize a floating-point weight [N, K] (any strides) and copy a bias [N].

        Raises:
            TypeError: weight or bias is not a floating-point tensor.
            ValueError: shapes that do not fit, NaN or Inf in the weight.
        """
        weight = cls._matrix(weight)
        n, k = weight.shape
        module = cls(k, n, bias is not None, backend=backend, device="meta")
        module.weight, module.weight_scale = quantize_fp8_128x128(weight)
        cls._check_scale(module.weight_scale, "FP8")
        module._take_bias(weight, bias)
        return module

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear, *, backend: str = "auto") -> FP8BlockLinear:
        """Quantize the weight of a torch.nn.Linear, on its device; the linear is left as it is.

        Raises TypeError for anything else, and what `from_weight` raises.
        """
        cls._check_linear(linear)
        module = cls.from_weight(linear.weight, linear.bias, backend=backend)
        return module.train(linear.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, scale = quantize_fp8_1x128(self._rows(x), backend=self.backend)
        y = fp8_blockwise_linear_bf16(
            *(q, self.weight, scale, self.weight_scale), bias=self._bias(), backend=self.backend
        )
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)

    @property
    def form(self) -> str:
        return "blocks of 128"

    def dequantized_input(self, x: torch.Tensor) -> torch.Tensor:
        return dequantize_fp8(*quantize_fp8_1x128(x))

    def extra_repr(self) -> str:
        return self._described("")
