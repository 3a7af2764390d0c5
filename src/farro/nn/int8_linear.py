"""Int8Linear: INT8 weights with scales grouped along K, and activations quantized on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..formats.int8_group import check_group_size, group_count, pack_groups, unpack_groups
from ..ops.int8_gemm import int8_gemm
from ..ops.int8_quantize import dequantize_int8_groups, quantize_int8_groups
from .quantized_linear import DTYPES, QuantizedLinear

_PACKED_BACKENDS = ("auto", "cpu", "reference")  # those that read the group-packed weight
_MAX_PADDING = 1 / 16  # of the codes: a narrow layer would pay more memory than packing gains time


class Int8Linear(QuantizedLinear):
    """y = x W^T + bias with INT8 codes and one FP32 scale per group of G along K (W8A8).

    The weight is quantized once; activations are quantized in groups on every call
    (`farro.quantize_int8_groups`) and multiplied by `farro.int8_gemm`. Inference only.

    Args:
        in_features: K. It need not be a multiple of group_size.
        out_features: N.
        bias: whether there is a bias.
        group_size: G, 32, 64, 128 or 256.
        backend: what `farro.int8_gemm` is asked for: "auto", "reference", "cpu", "triton", "cuda".
        device, dtype: where the module is made, and the dtype of the bias alone.

    Input and output: x [..., K] in bfloat16, float16 or float32, any leading dimensions, empty ones
    too -> [..., N] in x's dtype.

    State dict, the same on every device:
        weight        int8 [N, K]
        weight_scale  fp32 [N, ceil(K/G)]; float16 and bfloat16 are read too, and kept as fp32
        bias          [N], absent without bias

    A fresh module is zero (codes 0, scales 1) until it is loaded or made by `from_linear`. On a
    CPU the codes are kept group-packed [ceil(K/G), N, G], which its kernel reads fastest (unless
    the padding of a K tail would add more than 1/16), and elsewhere as [N, K]: one copy, repacked
    by `to`, `load_state_dict` and unpickling. A cast of the model (`half()`, `to(dtype)`) casts the
    bias and leaves codes and scales as they are.
    """

    _codes: torch.Tensor
    _scale: torch.Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        group_size: int = 256,
        *,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, backend)
        check_group_size("Int8Linear", group_size)
        self.group_size = group_size
        groups = group_count(in_features, group_size)
        codes = torch.zeros(out_features, in_features, dtype=torch.int8, device=device)
        scale = torch.ones(groups, out_features, dtype=torch.float32, device=device)
        # not persistent: the state dict holds them under their public names and shapes
        self.register_buffer("_codes", codes, persistent=False)
        self.register_buffer("_scale", scale, persistent=False)
        self.register_buffer(
            "bias", torch.zeros(out_features, device=device, dtype=dtype) if bias else None
        )
        self._lay_out()

    @classmethod
    def from_weight(
        cls,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        group_size: int = 256,
        *,
        backend: str = "auto",
    ) -> Int8Linear:
        """Quantize a floating-point weight [N, K] (any strides) and copy a bias [N].

        Raises:
            TypeError: weight or bias is not a floating-point tensor.
            ValueError: shapes that do not fit, another group_size, NaN or Inf in the weight.
        """
        weight = cls._matrix(weight)
        n, k = weight.shape
        module = cls(k, n, bias is not None, group_size, backend=backend, device="meta")
        codes, scale = quantize_int8_groups(weight, group_size)
        cls._check_scale(scale, "INT8")
        module._take_bias(weight, bias)
        module._codes, module._scale = codes, scale.T.contiguous()
        module._lay_out()
        return module

    @classmethod
    def from_linear(
        cls, linear: torch.nn.Linear, group_size: int = 256, *, backend: str = "auto"
    ) -> Int8Linear:
        """Quantize the weight of a torch.nn.Linear, on its device; the linear is left as it is.

        Raises TypeError for anything else, and what `from_weight` raises.
        """
        cls._check_linear(linear)
        module = cls.from_weight(linear.weight, linear.bias, group_size, backend=backend)
        return module.train(linear.training)

    @property
    def weight(self) -> torch.Tensor:
        """The codes, int8 [N, K]: the buffer itself, or a copy where it is kept group-packed."""
        return unpack_groups(self._codes, self.in_features) if self._packed else self._codes

    @property
    def weight_scale(self) -> torch.Tensor:
        """The scales, fp32 [N, ceil(K/G)], a view."""
        return self._scale.T

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, scale = quantize_int8_groups(self._rows(x), self.group_size, backend=self.backend)
        y = int8_gemm(
            q,
            self._codes.transpose(-1, -2),
            scale,
            self._scale,
            group_size=self.group_size,
            output_dtype=x.dtype,
            bias=self.bias,
            backend=self.backend,
        )
        return y.view(*x.shape[:-1], self.out_features)

    @property
    def form(self) -> str:
        return f"group_size {self.group_size}"

    def dequantized_weight(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return dequantize_int8_groups(self.weight, self.weight_scale, self.group_size, dtype)

    def dequantized_input(self, x: torch.Tensor) -> torch.Tensor:
        q, scale = quantize_int8_groups(x, self.group_size)
        return dequantize_int8_groups(q, scale, self.group_size)

    def tie_weight_(self, other: Int8Linear) -> int:
        freed = self._codes.nbytes + self._scale.nbytes
        self._codes, self._scale = other._codes, other._scale
        return freed

    def extra_repr(self) -> str:
        return self._described(f", group_size={self.group_size}")

    # How the codes are kept: everything that moves or replaces them ends in _lay_out.

    @property
    def _packed(self) -> bool:
        return self._codes.dim() == 3

    def _lay_out(self) -> None:
        """Pack the codes for the device they are on, or unpack them; one copy is left."""
        k, padding = self.in_features, -self.in_features % self.group_size
        reads_packed = self._codes.device.type == "cpu" and self.backend in _PACKED_BACKENDS
        pack = reads_packed and padding <= k * _MAX_PADDING
        if pack and not self._packed:
            self._codes = pack_groups(self._codes, self.group_size)
        elif self._packed and not pack:
            self._codes = unpack_groups(self._codes, self.in_features)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        codes, scale = self._codes, self._scale
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # a cast of the model moves codes and scales, and must not round them
        if self._codes.dtype != torch.int8:
            self._codes = codes.to(self._codes.device)
        if self._scale.dtype != torch.float32:
            self._scale = scale.to(self._scale.device)
        self._lay_out()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._lay_out()  # torch.load may have mapped the pickle to another device

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight
        destination[prefix + "weight_scale"] = self.weight_scale.contiguous()
        super()._save_to_state_dict(destination, prefix, keep_vars)

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
        ours = {prefix + name: name for name in ("weight", "weight_scale")}
        others = {
            key: value
            for key, value in state_dict.items()
            if key.startswith(prefix) and key not in ours
        }
        super()._load_from_state_dict(
            others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        given = {name: state_dict[key] for key, name in ours.items() if key in state_dict}
        if strict:
            missing_keys.extend(key for key in ours if key not in state_dict)
        assign = local_metadata.get("assign_to_params_buffers", False)
        errors = [self._why_not_load(name, value, assign) for name, value in given.items()]
        error_msgs.extend(f"{prefix}{error}" for error in errors if error)
        if not any(errors):
            with torch.no_grad():
                for name, value in given.items():
                    self._load(name, value.detach(), assign)
            self._lay_out()

    def _why_not_load(self, name: str, value: torch.Tensor, assign: bool) -> str | None:
        groups = group_count(self.in_features, self.group_size)
        shape, dtypes = {
            "weight": ((self.out_features, self.in_features), (torch.int8,)),
            "weight_scale": ((self.out_features, groups), DTYPES),
        }[name]
        if tuple(value.shape) != shape:
            hint = "" if name == "weight" else f": was it made with group_size {self.group_size}?"
            return f"{name} has shape {list(value.shape)}; needed {list(shape)}{hint}"
        if value.dtype not in dtypes:
            needed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            return f"{name} has dtype {str(value.dtype).removeprefix('torch.')}; needed {needed}"
        if not assign and self._codes.is_meta and not value.is_meta:
            return f"{name} cannot be copied into a meta module; use load_state_dict(assign=True)"
        return None

    def _load(self, name: str, value: torch.Tensor, assign: bool) -> None:
        if name == "weight_scale":
            value = value.to(torch.float32).T.contiguous()
        elif not assign and self._packed:
            value = pack_groups(value, self.group_size)
        buffer = "_codes" if name == "weight" else "_scale"
        if assign:
            setattr(self, buffer, value)
        else:  # in place, as torch does: a captured CUDA graph keeps reading the same memory
            getattr(self, buffer).copy_(value)
