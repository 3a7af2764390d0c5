"""The operator of weights: one kernel, plain torch, that serves all of its functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...dispatch import Kernel, Operator

KERNELS = (
    Kernel(
        "nvfp4_weights.reference",
        "reference",
        run="ops.nvfp4_weights.reference:run",
        must_run=lambda problem: True,
    ),
)
OPERATOR = Operator(
    "nvfp4_weights",
    KERNELS,
    functions=(
        *("prune_paired_4of8", "quantize_weight", "requantize_group16", "dequantize_weight"),
        *("compress", "decompress"),
    ),
    families=("nvfp4",),
    at_top=False,
)


def launch(name: str) -> Callable[..., None]:
    """Tells the kernel which function it is to be."""
    return lambda run, *arguments: run(name, *arguments)


def problem(name: str, *tensors: str) -> Callable[..., Any]:
    """The tensors that come first among the arguments, and the function."""
    return lambda *given: (dict(zip(tensors, given)), {"function": name})


def new_bytes(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.uint8, device=like.device)


def new_floats(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)
