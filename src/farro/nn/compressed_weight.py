"""A weight in paired-4:8 sparse NVFP4, as kernels read it and checkpoints store it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..checks import FLOATS, check_dtype, check_required, check_shape, check_size
from ..formats.paired_sparsity import LAYOUT_VERSION, PATTERNS
from ..ops.nvfp4_weights import (
    compress,
    decompress,
    dequantize_weight,
    prune_paired_4of8,
    quantize_weight,
)

_NO_GROUP = PATTERNS[0] | PATTERNS[0] << 4  # the metadata of two empty 8-groups
_ONE = 0x38  # UE4M3


class ExactFloats(torch.nn.Module):
    """A module whose FP32 buffers `_exact` are moved by a cast of the model, and not rounded."""

    _exact: tuple[str, ...] = ()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        before = {name: getattr(self, name) for name in self._exact}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, tensor in before.items():
            after = getattr(self, name)
            if after.dtype != tensor.dtype:
                setattr(self, name, tensor.to(after.device))
        return self


class CompressedWeight(ExactFloats):
    """Weights [E, M, K] of E experts, pruned to paired 4:8, in NVFP4, compressed.

    It holds 0.344 bytes a weight, and computes nothing by itself: `farro.nvfp4.group_mm` takes
    `parts` and an alpha. What the bytes are is drawn in docs/formats.md.

    Args:
        experts: E, 1 to 4096.
        rows: M, out-features, a multiple of 32.
        columns: K, in-features, a multiple of 32.
        device: where the module is made.

    State dict, the same on every device, each tensor contiguous and its own:
        codes           uint8 [E, M, K/4]
        metadata        uint8 [E, M, K/16]
        block_scale     uint8 [E, M, K/32]
        alpha           fp32 [E]
        layout_version  int32 []

    A state dict of another layout version, of other shapes or dtypes, or with metadata that is no
    pattern, is an error of load_state_dict. A fresh module is zero.
    """

    codes: torch.Tensor
    metadata: torch.Tensor
    block_scale: torch.Tensor
    alpha: torch.Tensor
    layout_version: torch.Tensor
    _exact = ("alpha",)

    def __init__(
        self, experts: int, rows: int, columns: int, *, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        check_size("CompressedWeight", "experts", experts)
        if not 1 <= experts <= 4096:
            raise ValueError(f"CompressedWeight: experts is {experts}; needed 1 to 4096")
        for name, size in (("rows", rows), ("columns", columns)):
            check_size("CompressedWeight", name, size)
            if size % 32:
                raise ValueError(f"CompressedWeight: {name} is {size}; needed a multiple of 32")
        for name, size, value in (
            ("codes", columns // 4, 0),
            ("metadata", columns // 16, _NO_GROUP),
            ("block_scale", columns // 32, _ONE),
        ):
            shape = (experts, rows, size)
            self.register_buffer(name, torch.full(shape, value, dtype=torch.uint8, device=device))
        self.register_buffer("alpha", torch.ones(experts, dtype=torch.float32, device=device))
        version = torch.full((), LAYOUT_VERSION, dtype=torch.int32, device=device)
        self.register_buffer("layout_version", version)

    @classmethod
    def from_dense(cls, weight: torch.Tensor) -> CompressedWeight:
        """Of a floating-point weight [E, M, K], on its device: see fill_."""
        check_required("CompressedWeight", weight=weight)
        if weight.dim() != 3:
            raise ValueError(
                f"CompressedWeight: weight has shape {list(weight.shape)}; needed [E, M, K]"
            )
        return cls(*weight.shape, device=weight.device).fill_(weight)

    def fill_(self, weight: torch.Tensor) -> CompressedWeight:
        """Prune, quantize and compress a floating-point weight [E, M, K].

        One expert at a time, so that what this needs beside the weight is small. Pruning keeps the
        two of four adjacent pairs that have the larger norm; a weight that is paired 4:8 already
        stays as it is.

        Raises:
            TypeError: weight is not a floating-point tensor.
            ValueError: another shape, NaN or Inf (with expert, row and group).
        """
        check_required("CompressedWeight", weight=weight)
        check_dtype("CompressedWeight", "weight", weight, FLOATS)
        check_shape("CompressedWeight", "weight", weight, self.shape, "[E, M, K]")
        for expert, dense in enumerate(weight.detach()):
            try:
                packed, scale, alpha = quantize_weight(prune_paired_4of8(dense.contiguous()[None]))
            except ValueError as error:
                raise ValueError(f"weight[{expert}], taken as expert 0: {error}") from error
            for own, part in zip(self.parts, compress(packed, scale, self.shape[2])):
                own[expert] = part[0]
            self.alpha[expert] = alpha[0]
        return self

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, M, K)"""
        experts, rows, steps = self.block_scale.shape
        return experts, rows, steps * 32

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What group_mm calls a_comp, e_meta and sfa."""
        return self.codes, self.metadata, self.block_scale

    def dequantized(self) -> torch.Tensor:
        """The values that the codes stand for, fp32 [E, M, K]."""
        packed, scale = decompress(*self.parts, self.shape[2])
        return dequantize_weight(packed, scale, self.alpha)

    def tie_(self, other: CompressedWeight) -> int:
        """Hold the tensors of `other`; returns the bytes that this frees."""
        freed = sum(buffer.nbytes for buffer in self.buffers())
        for name, buffer in other.named_buffers():
            setattr(self, name, buffer)
        return freed

    def extra_repr(self) -> str:
        return "experts={}, rows={}, columns={}".format(*self.shape)

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
        errors = self._why_not_load(
            {name: state_dict.get(prefix + name) for name, _ in self.named_buffers()}
        )
        if errors:
            error_msgs.extend(f"{prefix}{error}" for error in errors)
            return  # nothing is written
        super()._load_from_state_dict(
            *(state_dict, prefix, local_metadata, strict),
            *(missing_keys, unexpected_keys, error_msgs),
        )

    def _why_not_load(self, given: dict[str, torch.Tensor | None]) -> list[str]:
        """Why tensors of a state dict are not of this module; torch itself names missing ones."""
        errors = []
        version = given["layout_version"]
        if version is not None and not version.is_meta and int(version) != LAYOUT_VERSION:
            errors.append(
                f"layout_version is {int(version)}; this farro reads {LAYOUT_VERSION}: compress "
                "the weight again from its dense form"
            )
        for name, value in given.items():
            own: torch.Tensor = getattr(self, name)
            if value is None:
                continue
            if value.dtype != own.dtype:
                was, needed = (str(t.dtype).removeprefix("torch.") for t in (value, own))
                errors.append(f"{name} has dtype {was}; needed {needed}")
            elif value.shape != own.shape:
                errors.append(f"{name} has shape {list(value.shape)}; needed {list(own.shape)}")
        metadata = given["metadata"]
        if not errors and metadata is not None and not metadata.is_meta:
            wrong = int((~_legal(metadata)).sum())
            if wrong:
                errors.append(f"metadata has {wrong} bytes that are no pattern of paired 4:8")
        return errors


def _legal(metadata: torch.Tensor) -> torch.Tensor:
    """Whether both nibbles of a byte are patterns."""
    known = torch.zeros(16, dtype=torch.bool, device=metadata.device)
    known[torch.tensor(PATTERNS, device=metadata.device)] = True
    return known[(metadata & 15).int()] & known[(metadata >> 4).int()]
