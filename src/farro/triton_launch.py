"""Cheap launches of Triton kernels: compiled through Triton's front door once, then directly.

`JITFunction.run` inspects every argument at each call, 10 us and more of host time for a kernel of
thirty arguments, and encodes tensor descriptors anew. A `Launcher` serves calls that differ in
addresses alone: its first call goes through the front door and leaves the compiled kernel; later
ones call that kernel's own launcher, with addresses as numbers and descriptors encoded once for
each address. Anything unexpected there (a profiler's hooks, a Triton whose launcher looks
different) falls back to the front door.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .arch import interpreting
from .streams import current_stream
from .triton_cache import checked_cache

_COMPILED: dict[Hashable, Any] = {}  # by what Triton specializes on: Triton's CompiledKernel
_DESCRIPTORS = 256  # encoded ones that a launcher keeps


def specialization(value: int) -> tuple[bool, bool, bool]:
    """What Triton 3.6 to 3.9 specialize an integer argument on."""
    return value == 1, value % 16 == 0, value > 0x7FFFFFFF


@dataclass
class Launcher:
    """Launches of one kernel on one device whose arguments differ in their addresses alone.

    Tensor arguments come first, then `rest`: integers and constexprs, complete. `descriptors[i]`
    makes the tensor descriptor of the i-th tensor, or is None where a pointer is passed. In place
    of a tensor there may be a float, another one at each call.
    `key` tells kernels apart that Triton would compile differently.
    """

    kernel: Any
    key: Hashable
    device: int | None
    grid: tuple[int, int, int]
    rest: tuple[Any, ...]
    options: dict[str, Any]
    descriptors: tuple[Callable[[torch.Tensor], Any] | None, ...]
    fp8_as_bytes: bool = False  # below SM89 Triton refuses even a pointer to e4m3
    _fire: Callable[[int, Sequence[Any]], None] | None = field(default=None, repr=False)
    _encoded: dict[tuple[int, int], list[Any]] = field(default_factory=dict, repr=False)

    def __call__(self, *tensors: torch.Tensor | float | None) -> None:
        """Launch on the current stream of the device, whatever device is current."""
        if self._fire is None or _hooked():
            self._front_door(tensors)
            return
        if torch.cuda.current_device() != self.device:
            with torch.cuda.device(self.device):
                self(*tensors)
            return
        args: list[Any] = []
        for i, (tensor, descriptor) in enumerate(zip(tensors, self.descriptors)):
            if tensor is None or isinstance(tensor, float):
                args.append(tensor)
            elif descriptor is None:
                args.append(tensor.data_ptr())
            else:
                address = i, tensor.data_ptr()
                args.extend(self._encoded.get(address) or self._encode(address, tensor))
        args.extend(self.rest)
        self._fire(current_stream(self.device), args)

    def _front_door(self, tensors: Sequence[torch.Tensor | float | None]) -> None:
        if interpreting():
            self.kernel[self.grid](*self._args(tensors), **self.options)
            return
        with checked_cache(), torch.cuda.device(self.device):
            if self.key not in _COMPILED and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"{self.kernel.__name__}: not compiled yet, and a CUDA graph is being "
                    "captured; compile first, with farro.warmup or one call outside the capture"
                )
            compiled = self.kernel[self.grid](*self._args(tensors), **self.options)
            if hasattr(compiled, "result"):  # compiled in another thread
                compiled = compiled.result()
        _COMPILED[self.key] = compiled
        self._fire = _direct(compiled, self.grid)

    def _args(self, tensors: Sequence[torch.Tensor | float | None]) -> list[Any]:
        return [*arguments(tensors, self.descriptors, self.fp8_as_bytes), *self.rest]

    def _encode(self, address: tuple[int, int], tensor: torch.Tensor) -> list[Any]:
        """A descriptor as the launcher takes it; it depends on the address alone."""
        from triton.backends.nvidia.driver import make_tensordesc_arg

        make = self.descriptors[address[0]]
        assert make is not None
        which = sum(d is not None for d in self.descriptors[: address[0]])
        meta = _COMPILED[self.key].metadata.tensordesc_meta[which]
        # Triton 3.9 takes a third argument that it does not use
        extra = (None,) * (make_tensordesc_arg.__code__.co_argcount - 2)
        encoded: list[Any] = make_tensordesc_arg(make(tensor), meta, *extra)
        if len(self._encoded) >= _DESCRIPTORS:
            self._encoded.clear()
        self._encoded[address] = encoded
        return encoded


def arguments(
    tensors: Sequence[torch.Tensor | float | None],
    descriptors: Sequence[Callable[[torch.Tensor], Any] | None],
    fp8_as_bytes: bool,
) -> list[Any]:
    """What stands for tensors at Triton's front door: themselves, descriptors, or bytes."""
    made: list[Any] = []
    for tensor, descriptor in zip(tensors, descriptors):
        if not isinstance(tensor, torch.Tensor):
            made.append(tensor)
            continue
        if fp8_as_bytes and tensor.dtype is torch.float8_e4m3fn:
            tensor = tensor.view(torch.uint8)
        made.append(tensor if descriptor is None else descriptor(tensor))
    return made


def leading_stride(tensor: torch.Tensor) -> int:
    """The row stride for a descriptor; that of a single row is never used and may be anything."""
    unit = 16 // tensor.element_size()
    if tensor.shape[0] == 1:
        return -(-tensor.shape[1] // unit) * unit
    return tensor.stride(0)


@functools.lru_cache(maxsize=1)
def _runtime_knobs() -> Any:
    from triton import knobs

    return knobs.runtime


def _hooked() -> bool:
    """Whether a profiler listens to launches (Triton's proton): it needs the front door."""
    knobs = _runtime_knobs()
    for hook in (knobs.launch_enter_hook, knobs.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False


def _direct(
    compiled: Any, grid: tuple[int, int, int]
) -> Callable[[int, Sequence[Any]], None] | None:
    """A call of the compiled kernel's C launcher with encoded arguments, or None if unknown."""
    try:
        launcher, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
        flags = launcher.launch_cooperative_grid, launcher.launch_pdl
        raw = _builtin(launcher.launch)
        if raw is None or launcher.global_scratch_size or launcher.profile_scratch_size:
            return None
        if getattr(launcher, "gsan_enabled", False):  # Triton 3.9's sanitizer adds arguments
            return None
        if hasattr(launcher, "arg_annotations"):  # Triton 3.7 and later
            about = launcher.arg_annotations, launcher.kernel_signature
            tail = (metadata, None, None, None, None, None, *about)
            return lambda stream, args: raw(*grid, stream, function, *flags, *tail, tuple(args))
        head = (None, None, metadata, None, None, None)
        return lambda stream, args: raw(*grid, stream, function, *flags, *head, *args)
    except AttributeError:
        return None


def _builtin(launch: Any) -> Callable[..., None] | None:
    """The C function behind a launcher, which Triton wraps where it encodes descriptors."""
    if isinstance(launch, types.BuiltinFunctionType):
        return launch
    cells = getattr(launch, "__closure__", None) or ()
    for cell in cells:
        if isinstance(cell.cell_contents, types.BuiltinFunctionType):
            found: Callable[..., None] = cell.cell_contents
            return found
    return None


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
    with checked_cache():
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
