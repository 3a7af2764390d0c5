"""NVFP4Linear: a linear layer with a dense NVFP4 weight, emulated."""

from __future__ import annotations

from typing import Any

import torch

from ..formats.nvfp4 import NO_ROW, automatic_global, dequantize_blocks, quantize_blocks
from .compressed_weight import ExactFloats
from .inference_only import inference_only
from .quantized_linear import QuantizedLinear

GROUP_SIZES = (16, 32)
_NAME = "NVFP4Linear"


class NVFP4Linear(QuantizedLinear, ExactFloats):
    """y = x W^T + bias with e2m1 codes and one UE4M3 scale for 16 or 32 along K (W4A4), emulated.

    farro has no kernel of dense NVFP4 products. This module stores the format and restores its
    values on every call, weight and input alike, to multiply them in FP32: it tells what the format
    costs in accuracy, beside SparseNVFP4Linear, and is slower than the layer that it is made from.

    Args:
        in_features: K, a multiple of group_size.
        out_features: N.
        bias: whether there is a bias, added in FP32 to the BF16 product.
        group_size: 16, as dense NVFP4 checkpoints have it, or 32, as farro's sparse weights.
        backend: "auto" or "reference": torch's own operators on every device.
        device, dtype: where the module is made, and the dtype of the bias alone.

    Input and output: x [..., K] in bfloat16, float16 or float32, any leading dimensions, empty ones
    too -> [..., N] in x's dtype.

    State dict, the same on every device:
        weight        uint8 [N, K/2], two codes a byte, lower K in the low nibble
        weight_scale  uint8 [N, K/group_size], UE4M3
        alpha         fp32 [1]: w is about code * scale * alpha
        input_gscale  fp32 [1]; magnitudes up to 2688 / input_gscale are kept
        bias          [N], absent without bias
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor
    alpha: torch.Tensor
    input_gscale: torch.Tensor
    _exact = ("alpha", "input_gscale")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        group_size: int = 16,
        *,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, backend)
        if group_size not in GROUP_SIZES:
            raise ValueError(f"{_NAME}: group_size is {group_size!r}; needed 16 or 32")
        if backend not in ("auto", "reference"):
            raise ValueError(f"{_NAME}: backend is {backend!r}; it is emulated: needed 'auto'")
        reason = self.why_not(out_features, in_features, group_size)
        if reason:
            raise ValueError(f"{_NAME}: {reason}")
        self.group_size = group_size
        for name, size, value in (
            ("weight", in_features // 2, 0),
            ("weight_scale", in_features // group_size, NO_ROW),
        ):
            shape = (out_features, size)
            self.register_buffer(name, torch.full(shape, value, dtype=torch.uint8, device=device))
        for name in self._exact:
            self.register_buffer(name, torch.ones(1, dtype=torch.float32, device=device))
        self.register_buffer(
            "bias", torch.zeros(out_features, device=device, dtype=dtype) if bias else None
        )

    @staticmethod
    def why_not(n: int, k: int, group_size: int) -> str | None:
        """Why a weight [N, K] cannot be stored so, or None."""
        return f"K = {k} is no multiple of {group_size}" if k % group_size else None

    @classmethod
    def from_weight(
        cls,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        group_size: int = 16,
        *,
        input_gscale: float = 1.0,
        backend: str = "auto",
    ) -> NVFP4Linear:
        """Quantize a floating-point weight [N, K] and copy a bias [N].

        The global factor is 448 * 6 / max|W|, as `farro.nvfp4.quantize_weight` takes it.

        Raises:
            TypeError: weight or bias is not a floating-point tensor.
            ValueError: shapes that do not fit, another group_size, NaN or Inf in the weight.
        """
        weight = cls._matrix(weight)
        n, k = weight.shape
        options: dict[str, Any] = {"backend": backend, "device": weight.device}
        module = cls(k, n, bias is not None, group_size, **options)
        factor = automatic_global(weight[None])
        module.alpha = 1 / factor
        cls._check_scale(module.alpha, "NVFP4")
        module.weight, module.weight_scale = quantize_blocks(weight, factor, group_size)
        module.input_gscale.fill_(input_gscale)
        module._take_bias(weight, bias)
        return module

    @classmethod
    def from_linear(
        cls, linear: torch.nn.Linear, group_size: int = 16, **options: Any
    ) -> NVFP4Linear:
        """Of a torch.nn.Linear, on its device, with options of from_weight; it is left as it is.

        Raises TypeError for anything else, and what `from_weight` raises.
        """
        cls._check_linear(linear)
        module = cls.from_weight(linear.weight, linear.bias, group_size, **options)
        return module.train(linear.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, weight = self._rows(x.detach()), dequantize_blocks(*self._stored)
        # exact operands; alpha once, on the sum, as a kernel would
        y = (self._restored(rows) @ weight.T) * (self.alpha / self.input_gscale)
        y = y.bfloat16()
        if self.bias is not None:
            y = y.float() + self.bias.float()
        y = y.to(x.dtype).view(*x.shape[:-1], self.out_features)
        return inference_only(_NAME, x, y)

    @property
    def _stored(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.weight, self.weight_scale, self.group_size

    def _restored(self, rows: torch.Tensor) -> torch.Tensor:
        """Codes of the input times their block scales, fp32 [M, K]."""
        pair = quantize_blocks(rows.bfloat16(), self.input_gscale, self.group_size)
        return dequantize_blocks(*pair, self.group_size)

    @property
    def form(self) -> str:
        return f"group_size {self.group_size}"

    def dequantized_weight(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (dequantize_blocks(*self._stored) * self.alpha).to(dtype)

    def dequantized_input(self, x: torch.Tensor) -> torch.Tensor:
        return self._restored(x) / self.input_gscale

    def tie_weight_(self, other: NVFP4Linear) -> int:
        freed = self.weight.nbytes + self.weight_scale.nbytes + self.alpha.nbytes
        self.weight, self.weight_scale, self.alpha = other.weight, other.weight_scale, other.alpha
        return freed

    def extra_repr(self) -> str:
        return self._described(f", group_size={self.group_size}")
