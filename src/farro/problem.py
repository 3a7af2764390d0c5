"""Problem: a frozen, hashable description of one call, with no tensors in it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .arch import Arch, arch_of

MAX_ALIGN = 16  # no kernel asks for more


@dataclass(frozen=True)
class TensorSpec:
    """Shape, strides (elements), dtype and the alignment of the first element in bytes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    align: int = MAX_ALIGN

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        address = 0 if tensor.device.type == "meta" else tensor.data_ptr()
        align = min(address & -address, MAX_ALIGN) if address else MAX_ALIGN
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, align)


def kind_of(tensor: torch.Tensor | None) -> Any:
    """All of a tensor that a choice of kernel may depend on, cheaper to make than a TensorSpec."""
    if tensor is None:
        return None
    if tensor.layout != torch.strided:
        return tensor.layout  # no address: the checks refuse it
    address = tensor.data_ptr() & (MAX_ALIGN - 1)
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, address


@dataclass(frozen=True)
class Problem:
    """One call of one operator: `problem["a"]` is a TensorSpec, or None for an absent tensor."""

    operator: str
    arch: Arch
    tensors: tuple[tuple[str, TensorSpec | None], ...]
    params: tuple[tuple[str, Hashable], ...] = ()

    @classmethod
    def of(
        cls,
        operator: str,
        tensors: Mapping[str, torch.Tensor | None],
        params: Mapping[str, Hashable],
        arch: Arch | None = None,
    ) -> Problem:
        """Describe a call; `arch` pretends another device than that of the tensors."""
        present = [t for t in tensors.values() if t is not None]
        return cls(
            operator,
            arch if arch is not None else arch_of(present[0].device),
            tuple((n, None if t is None else TensorSpec.of(t)) for n, t in tensors.items()),
            tuple(params.items()),
        )

    def __getitem__(self, name: str) -> TensorSpec | None:
        for key, spec in self.tensors:
            if key == name:
                return spec
        raise KeyError(name)

    def spec(self, name: str) -> TensorSpec:
        """As `problem[name]`, for a tensor that is never absent."""
        spec = self[name]
        assert spec is not None, f"{self.operator}: {name} is absent"
        return spec

    def param(self, name: str) -> Hashable:
        for key, value in self.params:
            if key == name:
                return value
        raise KeyError(name)
