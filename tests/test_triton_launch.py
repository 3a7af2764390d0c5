"""Triton launches past its front door, with stand-ins for what only a GPU has."""

from __future__ import annotations

import types

import pytest
import torch

pytest.importorskip("triton")
from triton.backends.nvidia import driver

from farro import triton_launch
from farro.triton_launch import Launcher, leading_stride, specialization


class Recorder:
    """Stands in for a compiled kernel: `run` as Triton 3.6 has it, or as later releases do."""

    def __init__(self, raw, later, scratch=0):
        self.run = types.SimpleNamespace(
            launch=raw,
            launch_cooperative_grid=False,
            launch_pdl=False,
            global_scratch_size=scratch,
            profile_scratch_size=0,
        )
        if later:
            self.run.arg_annotations, self.run.kernel_signature = ["annotations"], b"signature"
        self.function, self.packed_metadata = "function", (4, 1, 1024)


def test_the_c_function_is_found_behind_descriptors():
    signature = {0: "tensordesc<i8[64, 128]>", 1: "*fp32"}
    wrapped = driver.wrap_handle_tensordesc(len, signature, [{}])
    assert wrapped is not len
    assert triton_launch._builtin(wrapped) is len
    assert triton_launch._builtin(len) is len
    assert triton_launch._builtin(lambda: None) is None


@pytest.mark.parametrize("later", (False, True))
def test_arguments_of_the_c_function(later, monkeypatch):
    seen = []
    monkeypatch.setattr(triton_launch, "_builtin", lambda launch: lambda *args: seen.append(args))
    fire = triton_launch._direct(Recorder(len, later), (7, 1, 1))
    fire(1234, [10, 20, True])
    head = (7, 1, 1, 1234, "function", False, False)
    hooks = (None, None, None)
    if later:
        about = (["annotations"], b"signature", (10, 20, True))
        assert seen == [(*head, (4, 1, 1024), *hooks, None, None, *about)]
    else:
        assert seen == [(*head, None, None, (4, 1, 1024), *hooks, 10, 20, True)]


def test_an_unknown_launcher_leaves_the_front_door():
    assert triton_launch._direct(Recorder(lambda: None, True), (1, 1, 1)) is None
    assert triton_launch._direct(Recorder(len, True, scratch=8), (1, 1, 1)) is None
    assert triton_launch._direct(object(), (1, 1, 1)) is None
    sanitized = Recorder(len, True)
    sanitized.run.gsan_enabled = True
    assert triton_launch._direct(sanitized, (1, 1, 1)) is None


def test_addresses_and_encoded_descriptors(monkeypatch):
    """The fast path passes addresses as numbers, and encodes a descriptor once for each."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(triton_launch, "current_stream", lambda device: 99)
    made, fired = [], []
    descriptors = (None, lambda tensor: tensor, None)
    launcher = Launcher(object(), "key", 0, (1, 1, 1), (5, 6), {}, descriptors)
    launcher._fire = lambda stream, args: fired.append((stream, list(args)))

    def encode(address, tensor):
        made.append(address)
        launcher._encoded[address] = ["map", 3, 4]
        return launcher._encoded[address]

    monkeypatch.setattr(launcher, "_encode", encode)
    x, y = torch.zeros(4), torch.zeros(4)
    for _ in range(3):
        launcher(x, y, None)
    assert fired == [(99, [x.data_ptr(), "map", 3, 4, None, 5, 6])] * 3
    assert made == [(1, y.data_ptr())]
    launcher(x, x, None)
    assert made == [(1, y.data_ptr()), (1, x.data_ptr())]


def test_numbers_in_place_of_tensors_are_those_of_the_call(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(triton_launch, "current_stream", lambda device: 99)
    fired = []
    launcher = Launcher(object(), "key", 0, (1, 1, 1), (5,), {}, (None, None))
    launcher._fire = lambda stream, args: fired.append(list(args))
    x = torch.zeros(4)
    for number in (0.5, -2.0):
        launcher(x, number)
    assert fired == [[x.data_ptr(), 0.5, 5], [x.data_ptr(), -2.0, 5]]
    codes = torch.zeros(4).to(torch.float8_e4m3fn)
    made = triton_launch.arguments((codes, 0.5, None), (None, None, None), True)
    assert made[0].dtype is torch.uint8 and made[1:] == [0.5, None]
    assert triton_launch.arguments((codes,), (None,), False)[0] is codes


def test_a_cold_kernel_under_capture_names_the_way_out(monkeypatch):
    class NoDevice:
        def __init__(self, index):
            pass

        __enter__ = __exit__ = lambda *args: None

    monkeypatch.setattr(torch.cuda, "device", NoDevice)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    kernel = types.SimpleNamespace(__name__="some_kernel")
    launcher = Launcher(kernel, object(), 0, (1, 1, 1), (), {}, (None,))
    with pytest.raises(RuntimeError, match=r"some_kernel: not compiled yet.*farro\.warmup"):
        launcher(torch.zeros(1))


def test_what_triton_specializes_on():
    assert specialization(1) == (True, False, False)
    assert specialization(4096) == (False, True, False)
    assert specialization(2**31) == (False, True, True)


def test_leading_strides():
    assert leading_stride(torch.zeros(3, 32, dtype=torch.int8)) == 32
    assert leading_stride(torch.zeros(9, 40, dtype=torch.int8)[::9]) == 48
    assert leading_stride(torch.zeros(1, 5)) == 8
