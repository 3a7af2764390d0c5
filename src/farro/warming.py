"""Compile ahead of the first call what calls would compile."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch

from .catalogue import warmers
from .checks import check_size


def warmup(
    device: torch.device | str | None = None,
    functions: Iterable[str] | None = None,
    shapes: Iterable[tuple[int, ...]] | None = None,
) -> int:
    """Run each function once on each shape, so that no later call (or graph capture) compiles.

    Args:
        device: where; the current GPU, or the CPU where there is none (nothing compiles there, but
            its probes run).
        functions: names of public functions, such as "int8_gemm"; all by default. A name warms the
            whole operator that it belongs to.
        shapes: (M, N, K) of products, whose (M, K) serve quantizers; a spread of sizes by default.

    Returns:
        How many calls ran. Progress goes to stderr when that is a terminal.

    Raises:
        ValueError: an unknown function or device, a shape that is not (M, N, K).
        TypeError: a size that is not an int.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(
            f"warmup: device is {device!r}; needed a torch.device or its name, such as 'cuda:0'"
        ) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"warmup: device is '{device}', and torch finds no GPU here: pass 'cpu'")
    known = warmers()
    if isinstance(functions, str):
        functions = (functions,)
    names = list(known) if functions is None else list(functions)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"warmup: unknown functions {unknown}; known: {', '.join(known)}")
    sizes = [(m, 4096, 4096) for m in (1, 16, 64, 256, 4096)] if shapes is None else list(shapes)
    for shape in sizes:
        if not isinstance(shape, (tuple, list, torch.Size)) or len(shape) != 3:
            raise ValueError(f"warmup: shapes holds {shape!r}; needed tuples (M, N, K)")
        for size in shape:
            check_size("warmup", f"a size in shapes, {tuple(shape)},", size)
    operators = list(dict.fromkeys(known[name] for name in names))
    calls = [call for warm in operators for shape in sizes for call in warm(device, shape)]
    for done, call in enumerate(calls, 1):
        call()
        if sys.stderr.isatty():
            end = "\n" if done == len(calls) else ""
            print(f"\rfarro.warmup: {done}/{len(calls)}", end=end, file=sys.stderr, flush=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return len(calls)
