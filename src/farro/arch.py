"""Compute capability -> Arch: the one place that knows architectures."""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass

import torch

_PORTABLE = frozenset({"gpu", "triton"})

# One row an architecture. A chip without a row gets _PORTABLE from SM80 on: features that NVIDIA
# ties to one architecture (the "a" targets) are never assumed of its successors.
_FEATURES: dict[tuple[int, int], frozenset[str]] = {
    (8, 0): _PORTABLE,
    (8, 6): _PORTABLE,
    (8, 7): _PORTABLE,
    (8, 9): _PORTABLE | {"fp8_mma"},
    (9, 0): _PORTABLE | {"fp8_mma", "tma", "wgmma"},
    (10, 0): _PORTABLE | {"fp8_mma", "tma"},
    (10, 3): _PORTABLE | {"fp8_mma", "tma"},
    (12, 0): _PORTABLE | {"fp8_mma", "tma"},
}

FEATURE_TEXT = {
    "cpu": "a CPU",
    "gpu": "an NVIDIA GPU",
    "triton": "a GPU of SM80 or newer",
    "fp8_mma": "FP8 tensor cores (SM89 or newer)",
    "tma": "the bulk tensor copy engine (SM90 or newer)",
    "wgmma": "Hopper's wgmma (SM90a)",
}


@dataclass(frozen=True)
class Arch:
    """What a kernel may rely on: `name` ("cpu", "sm_90"), its features, the device's table name."""

    name: str
    features: frozenset[str]
    capability: tuple[int, int] | None = None
    device: str = ""  # slug of the product name, for tuned tables; empty when pretended
    multiprocessors: int = 132  # an H200's where the device is pretended

    def lacks(self, needs: frozenset[str]) -> str | None:
        """The first feature of `needs` that is missing here, in words."""
        missing = sorted(needs - self.features)
        return FEATURE_TEXT.get(missing[0], missing[0]) if missing else None


def interpreting() -> bool:
    """Whether Triton runs its kernels in its CPU interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def _features(capability: tuple[int, int]) -> frozenset[str]:
    if capability in _FEATURES:
        return _FEATURES[capability]
    return _PORTABLE if capability >= (8, 0) else frozenset({"gpu"})


def arch_named(name: str) -> Arch:
    """Arch for "cpu" or "sm_XY" ("sm_90", "sm_121"), whether or not such a device is here."""
    if not isinstance(name, str):
        raise TypeError(f"arch: must be a str, such as 'sm_90', got {type(name).__name__}")
    if name == "cpu":
        features = {"cpu", "triton"} if interpreting() else {"cpu"}
        return Arch("cpu", frozenset(features))
    match = re.fullmatch(r"sm_(\d+)(\d)a?", name)
    if match is None:
        raise ValueError(f"arch: got {name!r}; needed 'cpu' or 'sm_XY', such as 'sm_90'")
    capability = (int(match[1]), int(match[2]))
    return Arch(f"sm_{match[1]}{match[2]}", _features(capability), capability)


@functools.lru_cache(maxsize=64)
def _cuda_arch(index: int) -> Arch:
    capability = torch.cuda.get_device_capability(index)
    if torch.version.hip is not None:  # AMD's numbers are not NVIDIA's: (9, 0) is no Hopper
        return Arch("hip", frozenset())
    product = re.sub(r"[^a-z0-9]+", "_", torch.cuda.get_device_name(index).lower()).strip("_")
    count = torch.cuda.get_device_properties(index).multi_processor_count
    name = f"sm_{capability[0]}{capability[1]}"
    return Arch(name, _features(capability), capability, product, count)


def arch_of(device: torch.device) -> Arch:
    """The architecture of a torch device; meta tensors count as the CPU's."""
    if device.type == "cuda":
        return _cuda_arch(torch.cuda.current_device() if device.index is None else device.index)
    if device.type in ("cpu", "meta"):
        return arch_named("cpu")
    return Arch(device.type, frozenset())
