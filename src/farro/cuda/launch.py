"""Launch native kernels on torch's current stream, cheaply.

A prepared launch holds the parameters in memory as the driver wants them. Calls that repeat their
addresses (weights always do, activations mostly, since torch's allocator gives the same memory
again) reuse one whole, and then cost one driver call.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

import torch

from ..dispatch import insert
from ..streams import current_stream
from . import jit

NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_LOADING = threading.Lock()
_allowed: dict[tuple[int, int], int] = {}  # shared memory, of kernels (never unloaded) by device


def make_current(device: int) -> None:
    """Give a thread that has not used CUDA yet the context that torch's calls use.

    The runtime's calls do so by themselves, the driver's do not, and memory that torch's allocator
    had cached comes without either.
    """
    from cuda.bindings import driver

    error, context = driver.cuCtxGetCurrent()
    if int(error) == 0 and int(context) == 0:
        error, context = driver.cuDevicePrimaryCtxRetain(driver.CUdevice(device))
        if int(error) == 0:
            driver.cuCtxSetCurrent(context)


class Launch:
    """One kernel with its grid and parameters; immutable, so that threads may share it."""

    def __init__(
        self,
        device: int,
        function: Any,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        cluster: int,
        parameters: tuple[Any, ...],
        overlaps: bool = False,
    ) -> None:
        """`parameters` are ctypes objects or CUtensorMap, each passed by value.

        One that `overlaps` may begin before the kernel ahead of it in the stream has ended: when
        all CTAs of that one allowed it, and it waits by itself (ptx.cuh) for what it reads.
        """
        from cuda.bindings import driver

        self._device = device
        self._function = function
        self._alive = parameters
        addresses = [
            ctypes.addressof(p)
            if isinstance(p, (ctypes.Structure, ctypes._SimpleCData))
            else p.getPtr()
            for p in parameters
        ]
        self._table = (ctypes.c_void_p * len(addresses))(*addresses)
        self._table_address = ctypes.addressof(self._table)
        self._shape = (grid, threads, shared_bytes, cluster)
        self._overlaps = overlaps
        self._configs: dict[int, Any] = {}
        self._launch = driver.cuLaunchKernelEx

    def _config(self, stream: int) -> Any:
        from cuda.bindings import driver

        grid, threads, shared_bytes, cluster = self._shape
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared_bytes
        config.hStream = driver.CUstream(stream)
        attributes = []
        if cluster > 1:
            attributes.append(_cluster_attribute(cluster))
        if self._overlaps:
            attribute = driver.CUlaunchAttribute()
            kind = driver.CUlaunchAttributeID
            attribute.id = kind.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        if attributes:
            config.attrs = attributes
            config.numAttrs = len(attributes)
        return config

    def on_current_stream(self) -> None:
        """Launch on torch's current stream of the launch's device, whatever device is current."""
        if torch.cuda.current_device() != self._device:
            with torch.cuda.device(self._device):
                self.on_current_stream()
            return
        stream = current_stream(self._device)
        config = self._configs.get(stream)
        if config is None:
            config = self._config(stream)
            insert(self._configs, stream, config, limit=16)
        (error,) = self._launch(config, self._function, self._table_address, 0)
        if int(error) == NO_CONTEXT:
            make_current(self._device)
            (error,) = self._launch(config, self._function, self._table_address, 0)
        if int(error) != 0:
            raise RuntimeError(f"cuLaunchKernelEx: {error} for grid and threads {self._shape}")


class Launches:
    """Kernels one after the other, in the place of one."""

    def __init__(self, *launches: Launch) -> None:
        self._launches = launches

    def on_current_stream(self) -> None:
        for launch in self._launches:
            launch.on_current_stream()


@functools.lru_cache(maxsize=1024)
def kernel_function(source: str, name: str, arch: str, device: int, shared_bytes: int) -> Any:
    """The compiled kernel, allowed at least `shared_bytes` of dynamic shared memory on `device`."""
    from cuda.bindings import driver

    make_current(device)
    with _LOADING:  # a kernel loaded twice is unloaded once, under the launches that hold it
        loaded = jit.load(source, name, arch)
        handle = int(loaded.handle)
        _allow(driver, name, handle, device, shared_bytes)
    return driver.CUfunction(handle)


def _allow(driver: Any, name: str, handle: int, device: int, shared_bytes: int) -> None:
    """Raise a kernel's limit; never lower it, for launches prepared before need theirs."""
    if shared_bytes <= _allowed.get((handle, device), -1):
        return
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    kernel, place = driver.CUkernel(handle), driver.CUdevice(device)
    (error,) = driver.cuKernelSetAttribute(attribute, shared_bytes, kernel, place)
    if int(error) != 0:
        raise RuntimeError(f"{name}: {shared_bytes} bytes of shared memory refused: {error}")
    _allowed[handle, device] = shared_bytes


def prefer_shared(function: Any, device: int) -> None:
    """Have a kernel's multiprocessors give all they can to shared memory, used by it or not.

    The share changes only while a multiprocessor is idle, so that kernels side by side need one.
    """
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    kernel, place = driver.CUkernel(int(function)), driver.CUdevice(device)
    (error,) = driver.cuKernelSetAttribute(attribute, 100, kernel, place)
    if int(error) != 0:
        raise RuntimeError(f"a share of shared memory was refused: {error}")


@functools.lru_cache(maxsize=1024)
def resident_clusters(
    device: int, function: Any, threads: int, shared_bytes: int, cluster: int, ctas: int
) -> int:
    """Clusters of a kernel that run at a time, of at most `ctas` CTAs a multiprocessor."""
    from cuda.bindings import driver

    most = torch.cuda.get_device_properties(device).multi_processor_count * ctas // cluster
    if cluster == 1:
        return most
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = most * cluster, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_bytes
    config.attrs = [_cluster_attribute(cluster)]
    config.numAttrs = 1
    error, count = driver.cuOccupancyMaxActiveClusters(function, config)
    if int(error) != 0:
        raise RuntimeError(f"cuOccupancyMaxActiveClusters: {error} for clusters of {cluster}")
    return min(most, int(count))


def _cluster_attribute(cluster: int) -> Any:
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    attribute.value.clusterDim.x = cluster
    attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1
    return attribute
