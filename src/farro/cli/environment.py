"""What a bug report needs to know of a machine: versions, devices, probes, back ends."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..arch import Arch, arch_named, arch_of, interpreting
from ..catalogue import OPERATORS
from ..checks import BACKENDS
from ..dispatch import not_installed
from ..ops.int8_gemm.cpu import addcmul_is_fused, int8_product_is_exact


def _version(*distributions: str) -> str | None:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def versions() -> dict[str, str | None]:
    return {
        "farro": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "triton": _version("triton", "pytorch-triton", "triton-windows"),
        "cuda_core": _version("cuda-core"),
    }


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def cpu() -> dict[str, Any]:
    """The CPU as torch uses it, and what farro's probes found: both run a small product once."""
    return {
        "model": _cpu_model(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "int8_product_exact": int8_product_is_exact(),
        "addcmul_fused": addcmul_is_fused(),
    }


def gpus() -> list[dict[str, Any]]:
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        arch = arch_of(torch.device("cuda", index))
        found.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                "capability": list(arch.capability or ()),
                "arch": arch.name,
                "features": sorted(arch.features),
                "memory_bytes": properties.total_memory,
            }
        )
    return found


def devices() -> list[torch.device]:
    """The CPU and every GPU that torch sees."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in range(count))]


def device_named(name: str) -> torch.device:
    """The CPU or one GPU that is here, as --device names it."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device is {name!r}; needed cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device is {name!r}; needed cpu, cuda or cuda:N")
    if device.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise ValueError(f"--device is {name!r}; torch sees {count} GPUs here")
    return torch.device(
        "cuda", torch.cuda.current_device() if device.index is None else device.index
    )


def _why_not(backend: str, archs: list[Arch]) -> str | None:
    """Why no kernel of `backend` works on any of `archs`, or None where one does."""
    missing = not_installed(backend)
    if missing is not None:
        return missing
    kernels = [k for operator in OPERATORS for k in operator.kernels if k.backend == backend]
    if not kernels:
        return "no kernel of this back end exists yet"
    lacking = [arch.lacks(kernel.needs) for kernel in kernels for arch in archs]
    if None in lacking:
        return None
    here = ", ".join(dict.fromkeys(arch.name for arch in archs))
    reasons = " or ".join(dict.fromkeys(reason for reason in lacking if reason is not None))
    return f"needs {reasons}; here: {here}"


def backends() -> dict[str, dict[str, Any]]:
    """Back end -> whether any of its kernels works on this machine, and why not."""
    archs = [arch_of(device) for device in devices()]
    found = {}
    for backend in BACKENDS[1:]:
        reason = _why_not(backend, archs)
        kernels = [
            kernel.name
            for operator in OPERATORS
            for kernel in operator.kernels
            if kernel.backend == backend and None in [arch.lacks(kernel.needs) for arch in archs]
        ]
        found[backend] = {
            "works": reason is None,
            "reason": reason,
            "kernels": kernels if reason is None else [],
        }
    return found


def environment() -> dict[str, Any]:
    return {
        "versions": versions(),
        "cpu": cpu(),
        "gpus": gpus(),
        "triton_interpreter": interpreting(),
    }


def current_arch() -> Arch:
    """The current GPU's architecture, or the CPU's where there is none."""
    if torch.cuda.is_available():
        return arch_of(torch.device("cuda"))
    return arch_named("cpu")


def describe(found: dict[str, Any]) -> list[str]:
    """`environment()` in lines of text."""
    known, chip = found["versions"], found["cpu"]
    product = (
        "exact" if chip["int8_product_exact"] else "NOT exact (an FP32 product takes its place)"
    )
    fma = "fused" if chip["addcmul_fused"] else "NOT fused (float64 takes its place)"
    lines = [
        f"farro {known['farro']}, torch {known['torch']}, triton {known['triton'] or 'none'}, "
        f"cuda-core {known['cuda_core'] or 'none'}, python {known['python']}, {known['platform']}",
        f"cpu: {chip['model']}, {chip['capability']}, {chip['threads']} threads; "
        f"INT8 product {product}, addcmul {fma}",
    ]
    for gpu in found["gpus"]:
        memory = gpu["memory_bytes"] / 2**30
        lines.append(
            f"{gpu['device']}: {gpu['name']}, {gpu['arch']}, {memory:.0f} GiB; "
            f"{', '.join(gpu['features'])}"
        )
    if not found["gpus"]:
        built = "" if known["torch_cuda"] else " (this torch was built without CUDA)"
        lines.append(f"gpu: none that torch sees{built}")
    if found["triton_interpreter"]:
        lines.append("TRITON_INTERPRET is set: Triton's kernels run in its interpreter on the CPU")
    return lines
