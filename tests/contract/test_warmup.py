"""What warmup compiles through Triton is what calls look for, with no GPU: keys are compared.

A launch is recorded instead of made, so a kernel that a graph capture would find cold is found
here: one whose key (what Triton compiles differently) no launch of the warmup had.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator

import pytest
import torch

import farro
from farro.arch import arch_named
from farro.testing import MoeCase
from farro.testing.moe_ffn import operands

from .samples import SAMPLES

pytest.importorskip("triton")
from farro.triton_launch import Launcher

ARCHS = ("sm_80", "sm_120")  # where nothing but Triton's kernels run
Keys = Callable[[Callable[[], object]], dict[object, str]]


@pytest.fixture(params=ARCHS)
def keys(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> Iterator[Keys]:
    """The keys (with their kernels' names) that running a function would compile or look for."""
    found: dict[object, str] = {}

    def record(self: Launcher, *tensors: torch.Tensor) -> None:
        found[self.key] = self.kernel.__name__

    for module in [m for name, m in sys.modules.items() if name.startswith("farro.")]:
        if hasattr(module, "arch_of"):
            monkeypatch.setattr(module, "arch_of", lambda device: arch_named(request.param))
    device = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    monkeypatch.setattr(Launcher, "__call__", record)

    def run(function: Callable[[], object]) -> dict[object, str]:
        found.clear()
        function()
        return dict(found)

    yield run


def cold(keys: Keys, name: str, shape: tuple[int, ...], call: Callable[[], object]) -> list[str]:
    """The kernels of a call that warmup has not compiled."""
    warm = keys(lambda: farro.warmup("cpu", [name], [shape]))
    wanted = keys(call)
    assert wanted, "the call launched nothing"
    return [kernel for key, kernel in wanted.items() if key not in warm]


COMPILED = [
    s for s in SAMPLES if s.kernels and any(k.backend == "triton" for k in s.catalogued.kernels)
]


@pytest.mark.parametrize("one", COMPILED, ids=lambda one: one.name)
def test_a_call_of_a_warm_shape_finds_its_kernels(keys, one, generator) -> None:
    """As the cold capture in test_devices.py does on a GPU."""
    narrow = {"n": 1} if "n" in one.sizes else {}
    inputs = one.first(generator, **narrow, m=5)
    k = inputs[next(iter(one.arguments))].shape[-1]
    shape = (5, inputs["b"].shape[-1] if "b" in inputs else 1, k)
    shape = one.warm_shape(inputs) if one.warm_shape else shape
    assert cold(keys, one.name, shape, lambda: one.function(**inputs)) == []


@pytest.mark.parametrize(
    "case",
    [
        MoeCase("in model sizes", 16, 8, 128, 256, 128, 256, output=torch.bfloat16),
        MoeCase("one token, interleaved", 1, 2, 8, 64, 64, 64, "interleaved"),
        MoeCase("many experts", 16, 6, 200, 64, 32, 32, id_dtype=torch.int32),
        MoeCase("strides of no 16", 16, 2, 3, 40, 30, 64, "interleaved", output=torch.float16),
        MoeCase("one expert", 16, 1, 1, 64, 64, 64),
        MoeCase("features of one group", 5, 2, 8, 48, 1, 64),
    ],
    ids=str,
)
def test_moe_ffn_is_warm_whatever_the_experts(keys, case, generator) -> None:
    """Their number, the layout of gate and up, and strides that say nothing."""
    inputs = operands(generator, case)
    for name in ("w_gate_up", "w_down"):
        inputs[name] = inputs[name].transpose(1, 2).contiguous().transpose(1, 2)
    names = {"group_size": case.group_size, "gate_up_layout": case.layout}
    given = {**inputs, **names, "output_dtype": case.output}
    shape = case.tokens, case.i, case.h
    assert cold(keys, "moe_ffn", shape, lambda: farro.moe_ffn(**given)) == []
