"""Threads that launch: a context where there is none, one load of each kernel. Needs no GPU."""

from __future__ import annotations

import functools
import threading
import time
import types

import pytest
import torch

pytest.importorskip("cuda.core", reason="needs cuda-core: pip install 'farro[cuda]'")
from cuda.bindings import driver

from farro.cuda import jit, launch, tensor_map
from farro.dispatch import insert

INVALID_CONTEXT = driver.CUresult.CUDA_ERROR_INVALID_CONTEXT
SUCCESS = driver.CUresult.CUDA_SUCCESS


@pytest.fixture
def bound(monkeypatch):
    """The driver of a thread without a context; gives the contexts that were made current."""
    contexts = []

    def retain(device):
        return SUCCESS, driver.CUcontext(7000 + int(device))

    def set_current(context):
        contexts.append(int(context))
        return (SUCCESS,)

    current = lambda: (SUCCESS, driver.CUcontext(contexts[-1] if contexts else 0))  # noqa: E731
    monkeypatch.setattr(driver, "cuCtxGetCurrent", current)
    monkeypatch.setattr(driver, "cuDevicePrimaryCtxRetain", retain)
    monkeypatch.setattr(driver, "cuCtxSetCurrent", set_current)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(launch, "current_stream", lambda device: 0)
    return contexts


def test_a_thread_without_a_context_is_given_its_devices(bound, monkeypatch):
    launched = []

    def refuse_without(config, function, parameters, extra):
        launched.append(bool(bound))
        return (SUCCESS if bound else INVALID_CONTEXT,)

    monkeypatch.setattr(driver, "cuLaunchKernelEx", refuse_without)
    ready = launch.Launch(3, driver.CUfunction(1), (1, 1, 1), 32, 0, 1, ())
    ready.on_current_stream()
    ready.on_current_stream()
    assert launched == [False, True, True] and bound == [7003]


def test_a_context_that_is_current_stays(bound):
    bound.append(42)
    launch.make_current(3)
    assert bound == [42]


def test_descriptors_in_a_thread_without_a_context(bound, monkeypatch):
    monkeypatch.setattr(
        *(driver, "cuTensorMapEncodeTiled"),
        lambda *what: (SUCCESS if bound else INVALID_CONTEXT, "descriptor"),
    )
    assert tensor_map.encode.__wrapped__(4096, 3, 64, 64, 64, 128) == "descriptor"
    assert bound == [7003]


def test_threads_load_a_kernel_once(bound, monkeypatch):
    """cuda.core unloads the one of two that nobody keeps, and launches would hold its handle."""
    loads = []

    @functools.cache
    def load(source, name, arch):
        loads.append(name)
        time.sleep(0.05)
        return types.SimpleNamespace(handle=len(loads))

    monkeypatch.setattr(jit, "load", load)
    monkeypatch.setattr(launch, "_allowed", {})
    monkeypatch.setattr(driver, "cuKernelSetAttribute", lambda *what: (SUCCESS,))
    found = []

    def look():
        found.append(int(launch.kernel_function.__wrapped__("source", "name", "sm_90a", 3, 1)))

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loads == ["name"] and found == [1] * 4


def test_shared_memory_that_a_kernel_was_allowed_stays(bound, monkeypatch):
    """Launches of one kernel may need different amounts, and each prepared one stays good."""
    handles = {"few": 11, "many": 12}
    limits = {}

    def set_attribute(attribute, size, kernel, device):
        assert attribute.name.endswith("MAX_DYNAMIC_SHARED_SIZE_BYTES")
        if size > 200_000:
            return (driver.CUresult.CUDA_ERROR_INVALID_VALUE,)
        limits[int(kernel), int(device)] = size
        return (SUCCESS,)

    monkeypatch.setattr(
        jit, "load", lambda source, name, arch: types.SimpleNamespace(handle=handles[name])
    )
    monkeypatch.setattr(launch, "_allowed", {})
    monkeypatch.setattr(driver, "cuKernelSetAttribute", set_attribute)

    @functools.lru_cache
    def allowed(name, device, size):
        assert int(launch.kernel_function.__wrapped__("x.cu", name, "sm_90a", device, size))

    for name, device, size in (
        *(("few", 0, 500), ("few", 0, 400), ("few", 0, 500), ("few", 1, 300), ("many", 0, 0)),
        *(("few", 0, 600), ("few", 0, 450), ("few", 1, 100), ("many", 0, 100_000)),
    ):
        allowed(name, device, size)
        assert limits[handles[name], device] >= size
    assert limits == {(11, 0): 600, (11, 1): 300, (12, 0): 100_000}
    for _ in "ab":  # a refusal is not taken for a grant the second time
        with pytest.raises(RuntimeError, match="many: 232448 bytes"):
            allowed("many", 0, 232_448)
    assert limits[12, 0] == 100_000


def test_a_full_dict_that_another_thread_changes_takes_the_entry_all_the_same():
    class Changing(dict):
        def __iter__(self):
            yield from ()
            raise RuntimeError("dictionary changed size during iteration")

    plans = Changing({i: i for i in range(4)})
    insert(plans, "new", "value", 4)
    assert plans["new"] == "value"
