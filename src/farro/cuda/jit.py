"""Compile a .cu file of the package to a CUBIN for one architecture, and keep it on disk.

The cache is FARRO_CACHE_DIR, else ~/.cache/farro. A key holds the source with the text of every
header it includes, the kernel's name expression, the options, the compiler's version and the
architecture, so that no stale binary can match. One process compiles a key while others wait for
it (a lock file a key); files appear by atomic rename; a truncated or foreign file is compiled
again; where the directory cannot be written the result lives in memory.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parent.parent
INCLUDE = Path(__file__).resolve().parent / "include"
_MAGIC = b"farro-cubin-2\n"
# All that decides the code but paths; part of the key. Without no_source_include NVRTC would look
# for headers in the directory that the program happens to run in, before our own.
_OPTIONS = {"std": "c++20", "device_as_default_execution_space": True, "no_source_include": True}


def cache_directory() -> Path:
    given = os.environ.get("FARRO_CACHE_DIR")
    if given:
        return Path(given)
    try:
        return Path.home() / ".cache" / "farro"
    except RuntimeError:  # no HOME and a user without a name, as in containers: nothing is kept
        return Path(os.devnull) / "farro"


def source_text(source: str) -> str:
    """The file and every header it includes, each once, in the order of inclusion."""
    seen: dict[Path, str] = {}

    def visit(path: Path) -> None:
        if path in seen:
            return
        seen[path] = text = path.read_text()
        for name in re.findall(r'^\s*#include\s+"([^"]+)"', text, re.MULTILINE):
            beside = path.parent / name
            visit(beside if beside.exists() else INCLUDE / name)

    visit(_PACKAGE / source)
    return "\n".join(f"// {path.name}\n{text}" for path, text in seen.items())


def compiler_version() -> tuple[int, int]:
    from cuda.bindings import nvrtc

    error, major, minor = nvrtc.nvrtcVersion()
    if int(error) != 0:
        raise RuntimeError(f"NVRTC does not answer: {error}")
    return int(major), int(minor)


def driver_version() -> tuple[int, int] | None:
    """The CUDA version that the driver knows, or None where there is no driver."""
    from cuda.bindings import driver

    try:
        error, version = driver.cuDriverGetVersion()
    except Exception:  # no libcuda here
        return None
    return None if int(error) != 0 else (version // 1000, version % 1000 // 10)


def cache_key(source: str, name: str, arch: str) -> str:
    parts = (source_text(source), name, arch, repr(_OPTIONS), str(compiler_version()))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]


def program(source: str, arch: str, **more: Any) -> Any:
    """The cuda.core Program of a source; `more` are further ProgramOptions, for a closer look."""
    from cuda.core import Program, ProgramOptions

    path = _PACKAGE / source
    include = [str(path.parent), str(INCLUDE)]  # as source_text looks for them
    options = ProgramOptions(arch=arch, include_path=include, name=path.name, **_OPTIONS, **more)
    return Program(path.read_text(), "c++", options)


def _compile(source: str, name: str, arch: str) -> tuple[bytes, str]:
    """CUBIN and the kernel's mangled name."""
    try:
        code = program(source, arch).compile("cubin", name_expressions=(name,))
    except Exception as error:
        raise RuntimeError(f"compiling {name} of {source} for {arch} failed: {error}") from error
    lowered = code.symbol_mapping[name]
    return bytes(code.code), lowered.decode() if isinstance(lowered, bytes) else str(lowered)


def _pack(key: str, cubin: bytes, lowered: str) -> bytes:
    head = {"key": key, "name": lowered, "sha256": hashlib.sha256(cubin).hexdigest()}
    return _MAGIC + json.dumps(head).encode() + b"\n" + cubin


def _unpack(key: str, data: bytes) -> tuple[bytes, str] | None:
    """None where the file is truncated, damaged, another key's or not ours."""
    if not data.startswith(_MAGIC):
        return None
    head, _, cubin = data[len(_MAGIC) :].partition(b"\n")
    try:
        about = json.loads(head)
        whole = about["key"] == key and about["sha256"] == hashlib.sha256(cubin).hexdigest()
        return (cubin, str(about["name"])) if whole else None
    except (ValueError, KeyError, TypeError):
        return None


def _read(path: Path) -> tuple[bytes, str] | None:
    try:
        return _unpack(path.stem, path.read_bytes())
    except OSError:
        return None


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Hold a lock file, where files can be locked; yields whether the directory is writable."""
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(path, "a"))
            writable = True
        except OSError:
            writable = False
        if writable:
            with contextlib.suppress(ImportError, OSError):  # some NFS: compiled twice at worst
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX)
        yield writable


def cubin_path(source: str, name: str, arch: str) -> Path:
    """Where the CUBIN of a kernel is kept."""
    return cache_directory() / "cubin" / f"{cache_key(source, name, arch)}.cubin"


def cubin(source: str, name: str, arch: str) -> tuple[bytes, str]:
    """CUBIN and mangled name of kernel `name` of `source` (relative to the package) for `arch`."""
    kept = cubin_path(source, name, arch)
    found = _read(kept)
    if found is not None:
        return found
    with locked(kept.with_suffix(".lock")) as writable:
        found = _read(kept)  # another process may have compiled it while this one waited
        if found is not None:
            return found
        compiled = _compile(source, name, arch)
        if writable:
            part = kept.with_suffix(f".{os.getpid()}.part")
            try:
                part.write_bytes(_pack(kept.stem, *compiled))
                part.replace(kept)
            except OSError:  # a full or read-only disk: the result is still good in memory
                with contextlib.suppress(OSError):
                    part.unlink()
        return compiled


@functools.cache  # prepared launches keep handles: kernels are never unloaded
def load(source: str, name: str, arch: str) -> Any:
    """The cuda.core Kernel, compiled and loaded once a process."""
    import torch

    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{name} of {source} is not compiled yet and a CUDA graph is being captured; "
            "call farro.warmup(), or the function once, before capture"
        )
    from cuda.core import ObjectCode

    binary, lowered = cubin(source, name, arch)
    code = ObjectCode.from_cubin(binary, symbol_mapping={name: lowered.encode()})
    return code.get_kernel(name)
