"""FP8 products with 128-block scales: the linear layer, and the fused SwiGLU and quantizer."""

from __future__ import annotations

from typing import Any

import torch

import farro
from farro.formats.fp8 import E4M3, SCALE_FLOOR, blocks
from farro.problem import Problem

from .sample import Argument, Sample


def _codes(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """So small that sums of products are exact, in any order, on tensor cores of 14 bits too."""
    return (torch.randint(-4, 5, shape, generator=generator) / 2).to(E4M3)


def _scales(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Powers of two, of both signs and some zero: they leave sums exact."""
    powers = torch.exp2(torch.randint(-4, 1, shape, generator=generator).float())
    return (
        powers * torch.tensor([-1.0, 1.0, 1.0, 0.0])[torch.randint(4, shape, generator=generator)]
    )


def _near(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """At most one step of the dtype from the expected value, as exp and tanh of FP32 may move it.

    Zeros of both signs are equal here; tests/ops tells them apart where the result is exact.
    """
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, what
    got, needed = actual.detach().cpu(), expected.detach().cpu()
    if got.dtype == torch.float32:  # a scale: one step of the BF16 maximum
        assert torch.allclose(got, needed, rtol=2.0**-7, atol=0, equal_nan=True), what
        return
    if got.dtype == torch.bfloat16:  # GELU's far tail underflows to 0 in FP32, not in float64
        got, needed = (t.masked_fill(t.abs() < 1e-30, 0.0) for t in (got, needed))
    size = 1 << (8 * got.element_size() - 1)  # codes in the order of the values that they stand for
    bits = [
        t.contiguous().view(torch.int8 if size == 128 else torch.int16).int() for t in (got, needed)
    ]
    order = [torch.where(b < 0, -(b & (size - 1)), b) for b in bits]
    same = (order[0] - order[1]).abs() <= 1
    nans = [t.float().isnan() for t in (got, needed)]
    wrong = (nans[0] != nans[1]) | ~(same | nans[0])
    assert not wrong.any(), f"{what}: {int(wrong.sum())} of {wrong.numel()} differ"


# --- fp8_blockwise_linear_bf16 -------------------------------------------------------------------


def _linear(
    generator: torch.Generator,
    m: int = 17,
    n: int = 150,
    k: int = 300,
    bias: torch.dtype | None = None,
    activation: str | None = None,
    exact: bool = True,
) -> dict[str, Any]:
    inputs = {
        "input": _codes(generator, m, k),
        "weight": _codes(generator, n, k),
        "input_scale": _scales(generator, m, blocks(k)),
        "weight_scale": _scales(generator, blocks(n), blocks(k)),
    }
    if bias is not None:
        inputs["bias"] = (torch.randint(-64, 64, (n,), generator=generator) / 64).to(bias)
    if activation is not None:
        inputs["activation"] = activation
    return inputs


def _linear_required(backend: str, problem: Problem) -> bool:
    return backend in ("reference", "cpu", "triton")


def _linear_empty(inputs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    total = torch.zeros(inputs["input"].shape[0], inputs["weight"].shape[0])
    if inputs.get("bias") is not None:
        total = total + inputs["bias"].cpu().float()
    return (total.bfloat16(),)


LINEAR = Sample(
    name="fp8_blockwise_linear_bf16",
    operator="fp8_blockwise_linear",
    function=farro.fp8_blockwise_linear_bf16,
    make=_linear,
    arguments={
        "input": Argument((E4M3,), rows=0),
        "weight": Argument((E4M3,)),
        "input_scale": Argument((torch.float32,), rows=0),
        "weight_scale": Argument((torch.float32,)),
        "bias": Argument((torch.bfloat16, torch.float32), required=False),
    },
    variants={
        "bias": {"bias": torch.bfloat16},
        "whole blocks": {"n": 128, "k": 256},
        "gelu": {"bias": torch.float32, "activation": "gelu_tanh", "n": 192},
        "few": {"m": 3, "n": 70, "k": 96},
        "one": {"m": 1, "n": 1, "k": 1},
    },
    empties={
        "no rows": {"m": 0, "bias": torch.float32},
        "no columns": {"n": 0, "bias": torch.bfloat16},
        "no sum": {"k": 0},
        "no sum, bias": {"k": 0, "bias": torch.float32},
        "nothing": {"m": 0, "n": 0, "k": 0},
    },
    empty_result=_linear_empty,
    sizes=("n", "k"),
    out=lambda inputs: ((inputs["input"].shape[0], inputs["weight"].shape[0]), torch.bfloat16),
    wrong={
        "activation gelu": ({"activation": "gelu"}, ValueError, ("activation", "'gelu_tanh'")),
        "activation True": ({"activation": True}, TypeError, ("activation", "bool")),
        "weight [K,N]": (
            {"weight": torch.zeros(300, 150).to(E4M3)},
            ValueError,
            ("weight", "[300, 150]", "weight.T"),
        ),
        "one scale a row": (
            {"input_scale": torch.ones(17, 1)},
            ValueError,
            ("input_scale", "[17, 1]", "[17, 3]"),
        ),
    },
    required=_linear_required,
    compare=_near,
    warm_shape=lambda inputs: (*inputs["input"].shape[:1], *inputs["weight"].shape),
)


# --- fp8_blockwise_swiglu_quantize_fp8 -----------------------------------------------------------


def _swiglu(
    generator: torch.Generator, m: int = 17, n: int = 150, k: int = 300, exact: bool = True
) -> dict[str, Any]:
    return {
        "input": _codes(generator, m, k),
        "gate_up_weight": _codes(generator, 2 * n, k),
        "input_scale": _scales(generator, m, blocks(k)),
        "gate_up_weight_scale": _scales(generator, 2 * blocks(n), blocks(k)),
    }


def _swiglu_empty(inputs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    m, n = inputs["input"].shape[0], inputs["gate_up_weight"].shape[0] // 2
    return torch.zeros(m, n).to(E4M3), torch.full((m, blocks(n)), SCALE_FLOOR)


SWIGLU = Sample(
    name="fp8_blockwise_swiglu_quantize_fp8",
    operator="fp8_swiglu_quantize",
    function=farro.fp8_blockwise_swiglu_quantize_fp8,
    make=_swiglu,
    arguments={
        "input": Argument((E4M3,), rows=0),
        "gate_up_weight": Argument((E4M3,)),
        "input_scale": Argument((torch.float32,), rows=0),
        "gate_up_weight_scale": Argument((torch.float32,)),
    },
    variants={
        "tails": {},
        "whole blocks": {"n": 128, "k": 256},
        "few": {"m": 3, "n": 70, "k": 96},
        "one": {"m": 1, "n": 1, "k": 1},
    },
    empties={
        "no rows": {"m": 0},
        "no columns": {"n": 0},
        "no sum": {"k": 0},
        "nothing": {"m": 0, "n": 0, "k": 0},
    },
    empty_result=_swiglu_empty,
    sizes=("n", "k"),
    outputs=lambda inputs: {
        name: (tuple(made.shape), made.dtype)
        for name, made in zip(("output", "output_scale"), _swiglu_empty(inputs))
    },
    wrong={
        "an odd number of rows": (
            {"gate_up_weight": torch.zeros(301, 300).to(E4M3)},
            ValueError,
            ("gate_up_weight", "[301, 300]", "[2N,K]"),
        ),
        "scales as if quantized together": (
            {"gate_up_weight_scale": torch.ones(3, 3)},
            ValueError,
            ("gate_up_weight_scale", "[3, 3]", "[4, 3]", "apart"),
        ),
    },
    required=_linear_required,
    compare=_near,
    warm_shape=lambda inputs: (
        inputs["input"].shape[0],
        inputs["gate_up_weight"].shape[0] // 2,
        inputs["input"].shape[1],
    ),
)

SAMPLES = (LINEAR, SWIGLU)
