"""quantize_fp8_per_tensor natively on SM90a: problems, launches, machine code, results."""

from __future__ import annotations

import ctypes
import dataclasses
import types

import pytest
import torch

import farro
from farro.arch import arch_named
from farro.cuda import jit
from farro.formats.fp8 import E4M3
from farro.ops.fp8_quantize import OPERATOR, sm90
from farro.ops.fp8_quantize.sm90 import Config
from farro.problem import Problem, TensorSpec

from .native_facts import compiles, fields_of, offsets_of, pretend, sizes_of
from .sm90_forced import compile_all, skip_without_it

SOURCE = jit._PACKAGE / "ops" / "fp8_quantize" / "sm90.cu"
NAMES = [
    ("ops/fp8_quantize/sm90.cu", f"{function}<{kind}>")
    for function in ("fp8_largest", "fp8_quantize")
    for kind in sm90._TYPES.values()
]


def problem_of(shape, dtype=torch.bfloat16, stride=None, align=16, kind="per_tensor"):
    if stride is None:
        stride = tuple(torch.empty(shape, device="meta").stride())
    spec = TensorSpec(shape, stride, dtype, align)
    return Problem("fp8_quantize", arch_named("sm_90"), (("x", spec),), (("kind", kind),))


def test_why_not():
    for good in (
        problem_of((8192, 4096)),
        problem_of((3, 5, 16), torch.float32),
        problem_of((1, 8), torch.float16, (99, 1)),
    ):
        assert sm90.why_not(good) is None
    for bad, reason in (
        (problem_of((8, 128), kind="per_row"), "only one scale"),
        (problem_of((8, 128), torch.float64), "float64"),
        (problem_of((8, 128), stride=(136, 1)), "contiguous"),
        (problem_of((8, 128), stride=(1, 8)), "contiguous"),
        (problem_of((8, 128), align=8), "16 bytes"),
        (problem_of((3, 5)), "16 bytes"),
    ):
        assert reason in sm90.why_not(bad)


def test_small_tensors_are_left_to_triton():
    assert sm90.yields(problem_of((255, 4096))) and not sm90.yields(problem_of((256, 4096)))
    assert OPERATOR.kernels[0].name == "fp8_quantize.cuda_sm90"


@pytest.mark.parametrize("rows", (1, 100, 8192))
def test_what_is_held_and_launched(rows, monkeypatch):
    maps = types.SimpleNamespace()  # there are none
    monkeypatch.setattr(sm90, "tensor_map", maps, raising=False)
    for name in ("encode", "encode_groups", "encode_results"):
        setattr(maps, name, None)
    pretend(monkeypatch, sm90)
    monkeypatch.setattr(sm90, "prefer_shared", lambda function, device: None)
    x, q = torch.zeros(rows, 4096, dtype=torch.bfloat16), torch.zeros(rows, 4096).to(E4M3)
    scale, partial = torch.zeros(()), torch.zeros(264, dtype=torch.int32)
    first, second = sm90.prepare(Config(), x, q, scale, partial)._launches
    held = sm90.held_bytes(Config(), x.nbytes, 132)
    assert held % 128 == 0 and held <= 7 << 15
    assert 132 * held >= x.nbytes or held == 7 << 15
    assert (first.grid, second.grid) == ((264, 1, 1), (132, 1, 1))
    assert (first.shared, second.shared) == (0, held) and second.overlaps and not first.overlaps
    (task,) = second.parameters
    assert (task.x, task.partial, task.codes) == tuple(t.data_ptr() for t in (x, partial, q))
    assert (task.bytes, task.held, task.parts) == (x.nbytes, held, 264)


def test_parameters_lie_as_the_kernels_read_them(tmp_path):
    assert fields_of("Task", SOURCE.read_text()) == sizes_of(sm90._Task)
    compiles(f'#include "{SOURCE}"\n{offsets_of("Task", sm90._Task)}', tmp_path)
    assert ctypes.sizeof(sm90._Task) == 48


def test_both_kernels_fit_beside_each_other():
    pytest.importorskip("cuda.core", reason="needs cuda-core: pip install 'farro[cuda]'")
    from ..cuda.sass import compiled

    for kind in sm90._TYPES.values():
        largest, quantize = (
            compiled(NAMES[0][0], f"{name}<{kind}>") for name in ("fp8_largest", "fp8_quantize")
        )
        assert largest.stack == quantize.stack == 0
        registers = 2 * largest.registers + -(-quantize.registers // 8) * 8
        assert registers * sm90._THREADS <= 65536, kind


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", sm90._TYPES, ids=str)
def test_codes_and_scale_are_tritons(dtype, generator):
    skip_without_it()
    compile_all(NAMES)
    for rows, columns, special in (
        *((1, 16, None), (3, 48, None), (1031, 4112, None), (6000, 8192, None)),
        *((8192, 4096, value) for value in (3e4, float("nan"), float("-inf"))),
    ):
        x = torch.randn(rows, columns, generator=generator).to("cuda", dtype)
        if special is not None:
            x[rows // 3, columns - 1] = special
        want = farro.quantize_fp8_per_tensor(x, backend="triton")
        for config in (Config(), Config(0), Config(1 << 15, 1)):
            for _ in range(3):
                q, scale = (
                    torch.zeros(x.shape, device="cuda").to(E4M3),
                    torch.zeros((), device="cuda"),
                )
                sm90.run(config, x, q, scale, "per_tensor")
                assert torch.equal(scale, want[1]) or (scale.isnan() and want[1].isnan())
                codes, others = q.view(torch.uint8), want[0].view(torch.uint8)
                if want[1].isfinite():
                    assert torch.equal(codes, others), f"{config} {rows}x{columns}"
                else:
                    assert (codes & 127 == 127).all()


def test_a_configuration_is_kept_as_a_dict():
    assert Config(**Config().as_dict()) == Config()
    assert dataclasses.is_dataclass(Config)
