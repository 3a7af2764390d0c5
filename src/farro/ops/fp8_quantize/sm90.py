"""quantize_fp8_per_tensor on SM90a: launches of sm90.cu's two kernels."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ...cuda.fp8.gemm import Prepared
from ...cuda.launch import Launch, Launches, kernel_function, prefer_shared
from ...problem import Problem

_THREADS = 512
_MOST_HELD = 7 << 15  # bytes of x in a multiprocessor's shared memory
_TYPES = {torch.bfloat16: "BFloat16", torch.float16: "Float16", torch.float32: "float"}
_LEAST = 2 << 20  # bytes of x; what is faster for smaller ones was not measured


@dataclass(frozen=True)
class Config:
    """How much of x stays in shared memory between its two readings."""

    held: int = _MOST_HELD  # bytes, of a multiprocessor
    ctas: int = 2  # that look for the largest, of a multiprocessor

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def why_not(problem: Problem) -> str | None:
    """One scale for all of a contiguous tensor of whole 16-byte pieces."""
    x = problem.spec("x")
    if problem.param("kind") != "per_tensor":
        return "only one scale for a whole tensor has a native kernel"
    if x.dtype not in _TYPES:
        return f"x is {x.dtype}; needed bfloat16, float16 or float32"
    count, dense = 1, True
    for size, step in zip(reversed(x.shape), reversed(x.stride)):
        dense = dense and (size == 1 or step == count)
        count *= size
    if not dense or x.align < 16 or count * x.dtype.itemsize % 16:
        return "x must be contiguous, in whole pieces of 16 bytes at such an address"
    return None


def config(problem: Problem) -> Config:
    return Config()


def yields(problem: Problem) -> str | None:
    x = problem.spec("x")
    count = functools.reduce(int.__mul__, x.shape, 1)
    if count * x.dtype.itemsize < _LEAST:
        return "a tensor under 2 MiB is left to Triton, whose launches are cheaper"
    return None


class _Task(ctypes.Structure):
    """`struct Task` of sm90.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "partial", "codes", "scale")),
        ("bytes", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("held", "parts")),
    )


def held_bytes(config: Config, nbytes: int, multiprocessors: int) -> int:
    """Of each CTA: no more than its share of x, in pieces of 128 bytes."""
    return min(config.held, -(-nbytes // (multiprocessors * 128)) * 128)


def prepare(
    config: Config, x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, partial: torch.Tensor
) -> Launches:
    """Both launches for these addresses; x is not empty."""
    device = x.get_device()
    count = torch.cuda.get_device_properties(device).multi_processor_count
    parts, held = config.ctas * count, held_bytes(config, x.nbytes, count)
    addresses = (t.data_ptr() for t in (x, partial, q, scale))
    task = _Task(*addresses, x.nbytes, held, parts)
    source, of_type = "ops/fp8_quantize/sm90.cu", _TYPES[x.dtype]
    first = kernel_function(source, f"fp8_largest<{of_type}>", "sm_90a", device, 0)
    prefer_shared(first, device)  # else the multiprocessor has none for the second until it is idle
    second = kernel_function(source, f"fp8_quantize<{of_type}>", "sm_90a", device, held)
    grids = ((parts, 1, 1), (count, 1, 1))
    return Launches(
        Launch(device, first, grids[0], _THREADS, 0, 1, (task,)),
        Launch(device, second, grids[1], _THREADS, held, 1, (task,), overlaps=True),
    )


class _Bound:
    """run() for calls alike in all but addresses."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.prepared = Prepared()

    def __call__(self, x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, kind: str) -> None:
        if q.numel() == 0:
            return
        count = torch.cuda.get_device_properties(x.device).multi_processor_count
        partial = torch.empty(self.config.ctas * count, dtype=torch.int32, device=x.device)
        tensors = (x, q, scale, partial)
        self.prepared.run(x.device, tensors, lambda: prepare(self.config, *tensors))


def bind(config: Config) -> Callable[..., None]:
    """run() with its configuration, for calls alike in all but their tensors' addresses."""
    return _Bound(config)


def run(config: Config, x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, kind: str) -> None:
    """Write codes and the scale, launched on the current stream of x's device."""
    bind(config)(x, q, scale, kind)
