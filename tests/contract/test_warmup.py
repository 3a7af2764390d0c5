"""What warmup compiles through Triton is what calls look for: their keys are compared, no GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import farro
from farro.testing import MoeCase
from farro.testing.moe_ffn import operands

from .samples import SAMPLES

pytest.importorskip("triton")
from ..launch_keys import ARCHS, recorded_launches

archs = pytest.mark.parametrize("arch", ARCHS)


def cold(arch: str, name: str, shape: tuple[int, ...], call: Callable[[], object]) -> list[str]:
    """The kernels of a call that warmup has not compiled."""
    with recorded_launches(arch) as found:
        farro.warmup("cpu", [name], [shape])
        warm = set(found)
        found.clear()
        call()
        assert found, "the call launched nothing"
        return [kernel for key, kernel in found.items() if key not in warm]


COMPILED = [
    s for s in SAMPLES if s.kernels and any(k.backend == "triton" for k in s.catalogued.kernels)
]


@archs
@pytest.mark.parametrize("one", COMPILED, ids=lambda one: one.name)
def test_a_call_of_a_warm_shape_finds_its_kernels(arch, one, generator) -> None:
    """As the cold capture in test_devices.py does on a GPU."""
    narrow = {"n": 1} if "n" in one.sizes else {}
    inputs = one.first(generator, **narrow, m=5)
    k = inputs[next(iter(one.arguments))].shape[-1]
    shape = (5, inputs["b"].shape[-1] if "b" in inputs else 1, k)
    shape = one.warm_shape(inputs) if one.warm_shape else shape
    assert cold(arch, one.name, shape, lambda: one.function(**inputs)) == []


@archs
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
def test_moe_ffn_is_warm_whatever_the_experts(arch, case, generator) -> None:
    """Their number, the layout of gate and up, and strides that say nothing."""
    inputs = operands(generator, case)
    for name in ("w_gate_up", "w_down"):
        inputs[name] = inputs[name].transpose(1, 2).contiguous().transpose(1, 2)
    names = {"group_size": case.group_size, "gate_up_layout": case.layout}
    given = {**inputs, **names, "output_dtype": case.output}
    shape = case.tokens, case.i, case.h
    assert cold(arch, "moe_ffn", shape, lambda: farro.moe_ffn(**given)) == []
