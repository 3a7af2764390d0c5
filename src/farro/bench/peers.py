"""What a user would run instead of int8_gemm, each optional and each by its public interface.

fp8_peers.py has the peers of FP8 products.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .case import Missing, Options, Subject
from .timing import GpuTimer, median

# what --peers takes, beside none, default, tuned
NAMES = ("bf16", "int_mm", "scaled_mm", "scaled_grouped", "triton", "humming", "deepgemm")


@dataclass(frozen=True)
class Form:
    """What a table calls a format, and what Humming calls it for a weight and for its input."""

    label: str
    weight: dict[str, Any]
    input: dict[str, Any]


@dataclass(frozen=True)
class Operands:
    """The data that every peer gets: codes [M,K] and [N,K] with their scales."""

    a: torch.Tensor
    scale_a: torch.Tensor  # [M, ceil(K/G)]
    b: torch.Tensor
    scale_b: torch.Tensor  # [ceil(K/G), N]
    group_size: int
    options: Options

    @property
    def form(self) -> Form:
        codes = {"dtype": "int8", "group_size": self.group_size}
        return Form(f"INT8 G{self.group_size}", codes, codes)

    def x(self, dtype: torch.dtype) -> torch.Tensor:
        return exact(self.a, self.scale_a, self.group_size, dtype)

    def weight(self, dtype: torch.dtype) -> torch.Tensor:
        return exact(self.b, self.scale_b.T, self.group_size, dtype)


def exact(
    q: torch.Tensor, scale: torch.Tensor, group_size: int, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """q * scale [rows, K] in at least FP32, rounded to dtype; exact in float64."""
    wide = torch.promote_types(dtype, torch.float32)
    spread = scale.to(wide).repeat_interleave(group_size, dim=1)[:, : q.shape[1]]
    return (q.to(wide) * spread).to(dtype)


def product64(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [M,K] @ weight [N,K].T in float64."""
    return x.double() @ weight.double().T


def check_names(text: str) -> None:
    """ValueError for a name in --peers that no benchmark knows."""
    for name in text.split(","):
        if name not in (*NAMES, "none", "default", "tuned"):
            known = ", ".join(("none", "default", "tuned", *NAMES))
            raise ValueError(f"--peers: {name!r}; needed some of {known}")


def wanted(options: Options, name: str) -> bool:
    asked = options.peers.split(",")
    return name in asked or "default" in asked or "tuned" in asked


def dense(operands: Operands) -> Iterator[Subject | Missing]:
    """The peers of a dense product, in the order of the table."""
    options = operands.options
    if wanted(options, "bf16"):
        yield bf16(operands.x(torch.bfloat16), operands.weight(torch.bfloat16))
    if wanted(options, "int_mm"):
        yield _int_mm(operands)
    if options.device.type != "cuda":
        return
    if wanted(options, "triton"):
        yield _plain_triton(operands)
    if wanted(options, "humming"):
        from .humming import humming

        yield from humming(operands)


def _library(device: torch.device) -> str:
    return "cuBLAS" if device.type == "cuda" else "oneDNN"


def bf16(x: torch.Tensor, weight: torch.Tensor) -> Subject:
    """torch's matmul of BF16 values [M,K] and [N,K], with its own truth."""
    return Subject(
        f"{_library(x.device)} BF16",
        "peer",
        lambda: x @ weight.T,
        truth=functools.cache(lambda: product64(x, weight)),
    )


def _int_mm(operands: Operands) -> Subject | Missing:
    """The library's INT8 product, which applies no scales."""
    a, b = operands.a, operands.b
    name = f"{_library(a.device)} INT8, no scales"
    if a.device.type == "cuda" and a.shape[0] <= 16:
        return Missing(name, "torch._int_mm takes M > 16 only")
    return Subject(
        *(name, "peer", lambda: torch._int_mm(a, b.T)),
        truth=functools.cache(lambda: product64(a, b)),
        note="INT32 out, no scales",
    )


_TILES = ((16, 64, 4, 4), (16, 128, 4, 4), (64, 128, 4, 3), (128, 128, 8, 3), (128, 256, 8, 2))


def _plain_triton(operands: Operands) -> Subject | Missing:
    name = "plain Triton, one dot a group"
    if importlib.util.find_spec("triton") is None:
        return Missing(name, "triton is not installed")
    from .plain_kernel import plain_gemm

    a, b, group_size = operands.a, operands.b, operands.group_size
    (m, k), n = a.shape, b.shape[0]

    def call(tile: tuple[int, int, int, int]) -> torch.Tensor:
        block_m, block_n, warps, stages = tile
        out = torch.empty(m, n, dtype=operands.options.dtype, device=a.device)
        grid = (-(-m // block_m), -(-n // block_n))
        plain_gemm[grid](
            *(a, b, operands.scale_a, operands.scale_b, out, m, n, k, operands.scale_a.shape[1]),
            GROUP=group_size,
            BM=block_m,
            BN=block_n,
            num_warps=warps,
            num_stages=stages,
        )
        return out

    tiles = [t for t in _TILES if (t[0] <= 64 if m <= 64 else t[0] >= 64)]
    best, failed = fastest({tile: functools.partial(call, tile) for tile in tiles}, a.device)
    if best is None:
        return Missing(name, f"no tile runs: {failed}")
    return Subject(name, "peer", functools.partial(call, best), config=f"{best}, best of a few")


@functools.lru_cache(maxsize=1)
def _quick_timer(device: torch.device) -> GpuTimer:
    return GpuTimer(device)


def fastest(
    calls: dict[Any, Callable[[], Any]], device: torch.device
) -> tuple[Any | None, str | None]:
    """The key of the call that is fastest in a few cold runs, and the last failure's text."""
    clock = _quick_timer(device)
    best: tuple[float, Any] | None = None
    failed = None
    for name, call in calls.items():
        try:
            call()
            us = median(clock.few(call, 6)[1:])
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"[:160]
            continue
        if best is None or us < best[0]:
            best = us, name
    return (None if best is None else best[1]), failed
