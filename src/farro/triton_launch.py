"""Cheap launches of Triton kernels: compiled through Triton's front door once, then directly.

`JITFunction.run` inspects every argument at each call, 10 us and more of host time for a kernel of
thirty arguments. The first launch of a kind of call goes through it and leaves the compiled kernel;
later ones call that kernel's own launcher. Whoever launches says what a kind of call is, by a key
that covers all that Triton specializes on: dtypes, the 16-byte alignment of pointers, and of each
integer whether it is 1, a multiple of 16, or wider than 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from .arch import interpreting

_Entry = tuple[Callable[..., None], Any, Any]
_LAUNCHERS: dict[Hashable, _Entry] = {}


def specialization(value: int) -> tuple[bool, bool, bool]:
    """What Triton 3.6 to 3.9 specialize an integer argument on."""
    return value == 1, value % 16 == 0, value > 0x7FFFFFFF


def _hooked() -> bool:
    """Whether a profiler listens to launches (Triton's proton): it needs the front door."""
    from triton import knobs

    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)


def _compile_and_launch(
    kernel: Any, key: Hashable, grid: tuple[int, int, int], args: Sequence[Any], options: Any
) -> None:
    if not interpreting() and torch.cuda.is_current_stream_capturing() and key not in _LAUNCHERS:
        raise RuntimeError(
            f"{kernel.__name__}: not compiled yet, and a CUDA graph is being captured; compile "
            "first, with farro.warmup or one call outside the capture"
        )
    compiled = kernel[grid](*args, **options)
    if hasattr(compiled, "result"):  # compiled in another thread
        compiled = compiled.result()
    if compiled is not None and all(
        hasattr(compiled, name) for name in ("run", "function", "packed_metadata")
    ):
        _LAUNCHERS[key] = (compiled.run, compiled.function, compiled.packed_metadata)


def launch(
    kernel: Any,
    key: Hashable,
    device: torch.device,
    grid: tuple[int, int, int],
    args: Sequence[Any],
    options: dict[str, Any],
) -> None:
    """Launch `kernel[grid](*args, **options)` on the current stream of `device`.

    `args` are positional and complete, constexprs included; `key` must not be shared between calls
    that Triton would compile differently, nor between devices.
    """
    entry = _LAUNCHERS.get(key)
    if interpreting():
        kernel[grid](*args, **options)
        return
    index = device.index
    if index != torch.cuda.current_device():
        with torch.cuda.device(index):
            launch(kernel, key, torch.device("cuda", index), grid, args, options)
        return
    if entry is None or _hooked():
        _compile_and_launch(kernel, key, grid, args, options)
        return
    run, function, metadata = entry
    stream = torch.cuda.current_stream(index).cuda_stream
    run(*grid, stream, function, metadata, None, None, None, *args)


def compile_only(
    kernel: Any, args: Sequence[Any], options: dict[str, Any], capability: tuple[int, int]
) -> Any:
    """Compile what `launch` would, for a device that need not be here; fills Triton's disk cache.

    Tensors in `args` may be meta tensors; they count as 16-byte aligned. Returns Triton's
    CompiledKernel, whose `asm` holds the PTX and the machine code.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile, make_backend
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.runtime.jit import create_function_from_signature

    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    backend = make_backend(target)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    given = {"debug": False, **options}
    bound, specialized, given = binder(*args, **given)
    parsed, signature, constexprs, attrs = kernel._pack_args(
        backend, given, bound, specialized, given
    )
    form = GluonASTSource if kernel.is_gluon() else ASTSource
    source = form(kernel, signature, constexprs, attrs)
    return compile(source, target=target, options=parsed.__dict__)


def resources(compiled: Any) -> tuple[int, int]:
    """Registers a thread and bytes of stack (spills) of a kernel compiled for an NVIDIA GPU."""
    import re
    import subprocess
    import tempfile
    from pathlib import Path

    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        told = subprocess.run(
            [str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", told.stdout)
    if found is None:
        raise RuntimeError(f"cuobjdump told no resource usage: {told.stdout[-200:]}")
    return int(found[1]), int(found[2])
