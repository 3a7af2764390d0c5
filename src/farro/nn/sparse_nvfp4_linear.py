"""SparseNVFP4Linear: a linear layer with a paired-4:8 sparse NVFP4 weight."""

from __future__ import annotations

from typing import Any

import torch

from ..formats.nvfp4 import BLOCK
from ..ops.nvfp4_group_mm import group_mm
from ..ops.nvfp4_quantize import dequantize_act, quant_rows
from .compressed_weight import CompressedWeight, ExactFloats
from .inference_only import inference_only
from .quantized_linear import QuantizedLinear


class SparseNVFP4Linear(QuantizedLinear, ExactFloats):
    """y = x W^T + bias with half of W's pairs pruned, in NVFP4; one expert of farro.nvfp4.group_mm.

    The weight is pruned to paired 4:8, quantized and compressed once: 0.344 bytes a weight. The
    input is rounded to BF16 and quantized to NVFP4 on every call (W4A4), or stays BF16 (W4A16).
    Pruning a weight that was not trained for it can destroy a model: docs/nvfp4-accuracy.md has
    what was measured. Inference only.

    Args:
        in_features: K, a multiple of 32.
        out_features: N, a multiple of 32.
        bias: whether there is a bias, added in FP32 to the BF16 product.
        quantize_input: False for W4A16.
        backend: what the operators are asked for: "auto", "reference", "cpu", "triton", "cuda".
        device, dtype: where the module is made, and the dtype of the bias alone.

    Input and output: x [..., K] in bfloat16, float16 or float32, any leading dimensions, empty ones
    too -> [..., N] in x's dtype.

    State dict, the same on every device:
        sparse_weight.*  as CompressedWeight has them, of [1, N, K]
        input_gscale     fp32 [1]; magnitudes up to 2688 / input_gscale are kept
        bias             [N], absent without bias

    A fresh module is zero until it is loaded or made by `from_linear`.
    """

    sparse_weight: CompressedWeight
    input_gscale: torch.Tensor
    _exact = ("input_gscale",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        quantize_input: bool = True,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, backend)
        reason = self.why_not(out_features, in_features)
        if reason:
            raise ValueError(f"SparseNVFP4Linear: {reason}")
        self.quantize_input = quantize_input
        self.sparse_weight = CompressedWeight(1, out_features, in_features, device=device)
        one = torch.ones(1, dtype=torch.float32, device=device)
        self.register_buffer("input_gscale", one)
        self.register_buffer(
            "bias", torch.zeros(out_features, device=device, dtype=dtype) if bias else None
        )

    @staticmethod
    def why_not(n: int, k: int) -> str | None:
        """Why a weight [N, K] cannot be stored so, or None."""
        if n % BLOCK or k % BLOCK:
            return f"a weight [{n}, {k}] has no multiples of 32 for both sizes"
        return None

    @classmethod
    def from_weight(
        cls,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        input_gscale: float = 1.0,
        quantize_input: bool = True,
        backend: str = "auto",
    ) -> SparseNVFP4Linear:
        """Prune, quantize and compress a floating-point weight [N, K] and copy a bias [N].

        Raises:
            TypeError: weight or bias is not a floating-point tensor.
            ValueError: shapes that do not fit, sizes that are no multiples of 32, NaN or Inf in the
                weight.
        """
        weight = cls._matrix(weight)
        n, k = weight.shape
        module = cls(
            *(k, n, bias is not None),
            quantize_input=quantize_input,
            backend=backend,
            device=weight.device,
        )
        module.sparse_weight.fill_(weight[None])
        module.input_gscale.fill_(input_gscale)
        module._take_bias(weight, bias)
        return module

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear, **options: Any) -> SparseNVFP4Linear:
        """Of a torch.nn.Linear, on its device, with options of from_weight; it is left as it is.

        Raises TypeError for anything else, and what `from_weight` raises.
        """
        cls._check_linear(linear)
        return cls.from_weight(linear.weight, linear.bias, **options).train(linear.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self._rows(x.detach()).bfloat16().contiguous()
        count = torch.full((1,), rows.shape[0], dtype=torch.int32, device=x.device)
        weight, alpha = self.sparse_weight, self.sparse_weight.alpha
        codes: tuple[torch.Tensor, torch.Tensor | None] = (rows[None], None)
        if self.quantize_input:
            codes, alpha = self._codes(rows), alpha / self.input_gscale
        y = torch.empty(1, rows.shape[0], self.out_features, dtype=rows.dtype, device=x.device)
        operands = (*weight.parts, *codes, alpha, count)
        group_mm(y, *operands, *weight.shape[1:], backend=self.backend)
        if self.bias is not None:
            y = y.float() + self.bias.float()
        y = y.to(x.dtype).view(*x.shape[:-1], self.out_features)
        return inference_only("SparseNVFP4Linear", x, y)

    def _codes(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of [M, K] as those of one expert."""
        backend = "auto" if self.backend == "cuda" else self.backend
        codes, scales = quant_rows(rows, self.input_gscale, backend=backend)
        return codes[None], scales[None]

    @property
    def form(self) -> str:
        return "W4A4" if self.quantize_input else "W4A16"

    def dequantized_weight(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.sparse_weight.dequantized()[0].to(dtype)

    def dequantized_input(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2).bfloat16().contiguous()
        if self.quantize_input:
            return dequantize_act(*self._codes(rows), self.input_gscale)[0].view(x.shape)
        return rows.float().view(x.shape)

    def tie_weight_(self, other: SparseNVFP4Linear) -> int:
        return self.sparse_weight.tie_(other.sparse_weight)

    def extra_repr(self) -> str:
        return self._described("" if self.quantize_input else ", quantize_input=False")
