"""Checks shared by operators; every message says what was given, what is needed, the way out.

They read only types, shapes, strides, dtypes and devices, so they run on fake tensors too and never
synchronize with a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

BACKENDS = ("auto", "reference", "cpu", "triton", "cuda")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_backend(function: str, backend: Any) -> None:
    if not isinstance(backend, str):
        raise TypeError(f"{function}: backend must be a str, got {type(backend).__name__}")
    if backend not in BACKENDS:
        raise ValueError(f"{function}: backend is {backend!r}; needed one of {', '.join(BACKENDS)}")


def check_size(function: str, name: str, size: Any) -> None:
    """A number of elements: an int (a symbolic one too), 0 or more."""
    if isinstance(size, bool) or not isinstance(size, (int, torch.SymInt)):
        raise TypeError(f"{function}: {name} must be an int, got {type(size).__name__}")
    if size < 0:
        raise ValueError(f"{function}: {name} is {size}; needed 0 or more")


def check_tensors(function: str, **tensors: Any) -> None:
    """Each argument is a tensor (None is an absent one and passes)."""
    for name, tensor in tensors.items():
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{function}: {name} must be a tensor, got {type(tensor).__name__}")


def check_required(function: str, **tensors: Any) -> None:
    """Each argument is a tensor, and none is missing."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{function}: {name} must be a tensor, got {type(tensor).__name__}")


def check_dtype(
    function: str, name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype], hint: str = ""
) -> None:
    if tensor.dtype not in dtypes:
        needed = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        given = str(tensor.dtype).removeprefix("torch.")
        raise TypeError(f"{function}: {name} has dtype {given}; needed {needed}{hint}")


def check_shape(
    function: str, name: str, tensor: torch.Tensor, shape: Sequence[Any], meaning: str
) -> None:
    """`meaning` names the dimensions, such as "[M, ceil(K/G)]"."""
    if tensor.dim() != len(shape) or any(a != b for a, b in zip(tensor.shape, shape)):
        needed = list(shape)
        raise ValueError(
            f"{function}: {name} has shape {list(tensor.shape)}; needed {needed}, that is {meaning}"
        )


def check_strided(function: str, **tensors: torch.Tensor | None) -> None:
    """Dense (strided) layout, and no zero stride along a dimension longer than 1."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.layout != torch.strided:
            raise ValueError(
                f"{function}: {name} has layout {tensor.layout}; needed a strided tensor: "
                f"pass {name}.to_dense()"
            )
        if tensor.numel() == 0:
            continue
        for size, stride in zip(tensor.shape, tensor.stride()):
            if stride == 0 and size > 1:
                raise ValueError(
                    f"{function}: {name} has strides {list(tensor.stride())} for shape "
                    f"{list(tensor.shape)}; a zero stride (expand) is refused: "
                    f"pass {name}.contiguous()"
                )


def check_output_layout(function: str, name: str, tensor: torch.Tensor) -> None:
    """No two indices of an output may share memory."""
    if tensor.numel() == 0:
        return
    reach = 1  # one past the last address that the smaller strides reach
    for stride, size in sorted((st, sz) for sz, st in zip(tensor.shape, tensor.stride()) if sz > 1):
        if stride < reach:
            raise ValueError(
                f"{function}: {name} has strides {list(tensor.stride())} for shape "
                f"{list(tensor.shape)}, so its elements overlap; needed one address an element"
            )
        reach += stride * (size - 1)


def check_no_overlap(
    function: str, name: str, out: torch.Tensor, **inputs: torch.Tensor | None
) -> None:
    """No input lies in the memory of `out`, which is written while they are still read.

    As torch's own out= does, it judges dense tensors alone. For calls, not for plans: it reads
    addresses, and fake tensors have none.
    """
    start = out.data_ptr()
    stop = start + out.nbytes
    for other, tensor in inputs.items():
        if tensor is None:
            continue
        first = tensor.data_ptr()
        meet = first < stop and start < first + tensor.nbytes
        if meet and _is_dense(out) and _is_dense(tensor):
            raise ValueError(
                f"{function}: {name} shares memory with {other}, which would be overwritten while "
                f"it is read; needed memory of its own: pass {other}.clone()"
            )


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() or tensor.transpose(0, -1).is_contiguous()


def check_devices(function: str, **tensors: torch.Tensor | None) -> None:
    """All tensors are on one device."""
    first: tuple[str, torch.device] | None = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if first is None:
            first = (name, tensor.device)
        elif tensor.device != first[1]:
            raise ValueError(
                f"{function}: {name} is on {tensor.device} and {first[0]} on {first[1]}; "
                "all tensors must be on one device"
            )
