"""Compile ahead of the first call what calls would compile."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .ops import int8_gemm, int8_quantize

# public function name -> calls that compile what the function needs on a device
_WARMERS: dict[str, Callable[[torch.device, tuple[int, ...]], Iterable[Callable[[], Any]]]] = {
    "int8_gemm": int8_gemm.warm,
    "quantize_int8_groups": int8_quantize.warm,
}


def warmup(
    device: torch.device | str | None = None,
    functions: Iterable[str] | None = None,
    shapes: Iterable[tuple[int, ...]] | None = None,
) -> int:
    """Run each function once on each shape, so that no later call (or graph capture) compiles.

    Args:
        device: where; the current GPU, or the CPU where there is none (nothing compiles there, but
            its probes run).
        functions: names of public functions, such as "int8_gemm"; all by default.
        shapes: (M, N, K) of products, whose (M, K) serve quantizers; a spread of sizes by default.

    Returns:
        How many calls ran. Progress goes to stderr when that is a terminal.

    Raises:
        ValueError: an unknown function.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    names = list(_WARMERS) if functions is None else list(functions)
    unknown = [name for name in names if name not in _WARMERS]
    if unknown:
        raise ValueError(f"warmup: unknown functions {unknown}; known: {', '.join(_WARMERS)}")
    sizes = [(m, 4096, 4096) for m in (1, 16, 64, 256, 4096)] if shapes is None else list(shapes)
    calls = [call for name in names for shape in sizes for call in _WARMERS[name](device, shape)]
    for done, call in enumerate(calls, 1):
        call()
        if sys.stderr.isatty():
            end = "\n" if done == len(calls) else ""
            print(f"\rfarro.warmup: {done}/{len(calls)}", end=end, file=sys.stderr, flush=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return len(calls)
