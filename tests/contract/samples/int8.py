"""The INT8 family: int8_gemm and the quantizer of groups."""

from __future__ import annotations

from typing import Any

import torch

import farro
from farro.formats.int8_group import group_count
from farro.problem import Problem

from .sample import FLOATS, Argument, Sample, randint, signed_scales

# --- int8_gemm -----------------------------------------------------------------------------------


def _int8_gemm(
    generator: torch.Generator,
    m: int = 17,
    n: int = 33,
    k: int = 150,
    group_size: int = 64,
    dtype: torch.dtype = torch.float32,
    bias: torch.dtype | None = None,
    packed: bool = False,
    exact: bool = True,
) -> dict[str, Any]:
    weight = randint(generator, n, k)
    groups = group_count(k, group_size)
    inputs = {
        "a": randint(generator, m, k),
        "b": farro.int8.pack_groups(weight, group_size).transpose(1, 2) if packed else weight.T,
        "scale_a": signed_scales(generator, m, groups),
        "scale_b": signed_scales(generator, groups, n),
        "group_size": group_size,
        "output_dtype": dtype,
    }
    if bias is not None:
        inputs["bias"] = torch.randn(n, generator=generator).to(bias)
    return inputs


def _int8_gemm_required(backend: str, problem: Problem) -> bool:
    a, b = problem.spec("a"), problem.spec("b")
    if backend in ("reference", "cpu"):
        return True
    if len(b.shape) == 3:  # packed for a CPU
        return False
    if backend == "triton":
        return True
    # native: row-major a and column-major b, leading strides and addresses of whole 16 bytes
    rows = ((a.stride[1], a.stride[0], a.align), (b.stride[0], b.stride[1], b.align))
    return all(
        along == 1 and lead % 16 == 0 and lead >= a.shape[1] and align == 16
        for along, lead, align in rows
    )


def _int8_gemm_empty(inputs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    total = torch.zeros(inputs["a"].shape[0], inputs["b"].shape[-1])
    if inputs.get("bias") is not None:
        total = total + inputs["bias"].cpu().float()
    return (total.to(inputs["output_dtype"]),)


INT8_GEMM = Sample(
    name="int8_gemm",
    operator="int8_gemm",
    function=farro.int8_gemm,
    make=_int8_gemm,
    arguments={
        "a": Argument((torch.int8,), rows=0),
        "b": Argument((torch.int8,)),
        "scale_a": Argument((torch.float32,), rows=0),
        "scale_b": Argument((torch.float32,)),
        "bias": Argument(FLOATS, required=False),
    },
    variants={
        "g64": {"bias": torch.float32},
        "g32": {"group_size": 32, "k": 32, "n": 64},
        "g128 bf16": {"group_size": 128, "dtype": torch.bfloat16, "k": 384},
        "g256 fp16 bias": {
            "group_size": 256,
            "dtype": torch.float16,
            "bias": torch.bfloat16,
            "k": 300,
        },
        "packed": {"packed": True, "bias": torch.float16, "m": 3},
        "one": {"m": 1, "n": 1, "k": 1},
    },
    empties={
        "no rows": {"m": 0, "bias": torch.float32},
        "no columns": {"n": 0, "bias": torch.bfloat16},
        "no sum": {"k": 0},
        "no sum, bias": {"k": 0, "bias": torch.float16, "dtype": torch.bfloat16},
        "nothing": {"m": 0, "n": 0, "k": 0},
        "no rows, packed": {"m": 0, "packed": True},
        "no columns, packed": {"n": 0, "packed": True},
        "no sum, packed": {"k": 0, "packed": True, "bias": torch.float32},
    },
    empty_result=_int8_gemm_empty,
    sizes=("n", "k"),
    long={"group_size": 256},
    out=lambda inputs: (
        (inputs["a"].shape[0], inputs["b"].shape[-1]),
        inputs["output_dtype"],
    ),
    wrong={
        "group_size 48": ({"group_size": 48}, ValueError, ("group_size", "48", "64")),
        "group_size True": ({"group_size": True}, ValueError, ("group_size", "True")),
        "group_size 64.0": ({"group_size": 64.0}, ValueError, ("group_size", "64.0")),
        "group_size None": ({"group_size": None}, ValueError, ("group_size", "None")),
        "another group_size": ({"group_size": 32}, ValueError, ("scale_a", "[17, 3]", "[17, 5]")),
        "output_dtype str": ({"output_dtype": "bf16"}, TypeError, ("output_dtype", "str")),
        "output_dtype fp64": (
            {"output_dtype": torch.float64},
            TypeError,
            ("output_dtype", "float64", "bfloat16"),
        ),
        "b is the weight [N,K]": (
            {"b": torch.zeros(33, 150, dtype=torch.int8)},
            ValueError,
            ("[33, 150]", "b.T"),
        ),
        "b packed for another G": (
            {"b": torch.zeros(5, 32, 33, dtype=torch.int8)},
            ValueError,
            ("[5, 32, 33]", "[3, 64, 33]"),
        ),
    },
    required=_int8_gemm_required,
)


# --- int8_quantize -------------------------------------------------------------------------------


def _quantize(
    generator: torch.Generator,
    m: int = 17,
    k: int = 150,
    group_size: int = 64,
    dtype: torch.dtype = torch.float32,
    trailing: tuple[int, ...] = (),
    exact: bool = True,
) -> dict[str, Any]:
    """x [m, *trailing, k] of many magnitudes, with zero rows and tiny ones."""
    shape = (m, *trailing, k)
    x = torch.randn(shape, generator=generator) * 4
    magnitude = torch.tensor([1.0, 1.0, 1e-3, 1e-37, 0.0])
    x *= magnitude[torch.randint(5, (*shape[:-1], 1), generator=generator)]
    return {"x": x.to(dtype), "group_size": group_size}


def _quantize_empty(inputs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    shape = inputs["x"].shape
    scale = torch.empty(*shape[:-1], group_count(shape[-1], inputs["group_size"]))
    assert scale.numel() == 0
    return torch.empty(shape, dtype=torch.int8), scale


_GROUP_SIZES = {
    "group_size 48": ({"group_size": 48}, ValueError, ("group_size", "48", "64")),
    "group_size True": ({"group_size": True}, ValueError, ("group_size", "True")),
    "group_size 64.0": ({"group_size": 64.0}, ValueError, ("group_size", "64.0")),
}

QUANTIZE_INT8_GROUPS = Sample(
    name="quantize_int8_groups",
    operator="int8_quantize",
    function=farro.quantize_int8_groups,
    make=_quantize,
    arguments={"x": Argument((*FLOATS, torch.float64), rows=0, any_shape=True)},
    variants={
        "g64": {},
        "g32 bf16": {"group_size": 32, "dtype": torch.bfloat16, "k": 96},
        "g128 fp16, 3-D": {"group_size": 128, "dtype": torch.float16, "m": 3, "trailing": (5,)},
        "g256 fp64": {"group_size": 256, "dtype": torch.float64, "k": 300},
        "one": {"m": 1, "k": 1},
    },
    empties={
        "no rows": {"m": 0},
        "no columns": {"k": 0},
        "nothing": {"m": 0, "k": 0},
        "no rows, 3-D": {"m": 3, "trailing": (0,)},
    },
    empty_result=_quantize_empty,
    sizes=("k",),
    wrong={
        **_GROUP_SIZES,
        "no dimensions": ({"x": torch.tensor(1.0)}, ValueError, ("x", "dimension")),
    },
    required=lambda backend, problem: backend in ("reference", "cpu", "triton"),
)


def _dequantize(generator: torch.Generator, **options: Any) -> dict[str, Any]:
    dtype = options.pop("dtype", torch.float32)
    x = _quantize(generator, **options)["x"]
    group_size = options.get("group_size", 64)
    scale = signed_scales(generator, *x.shape[:-1], group_count(x.shape[-1], group_size))
    return {
        "q": randint(generator, *x.shape),
        "scale": scale,
        "group_size": group_size,
        "dtype": dtype,
    }


DEQUANTIZE_INT8_GROUPS = Sample(
    name="dequantize_int8_groups",
    operator="int8_quantize",
    function=farro.dequantize_int8_groups,
    make=_dequantize,
    arguments={
        "q": Argument((torch.int8,), rows=0, any_shape=True),
        "scale": Argument((torch.float32,), rows=0),
    },
    variants={
        "g64": {},
        "g256 bf16": {"group_size": 256, "dtype": torch.bfloat16, "k": 300},
        "g32, 3-D": {"group_size": 32, "trailing": (5,), "dtype": torch.float16},
    },
    empties=QUANTIZE_INT8_GROUPS.empties,
    empty_result=lambda inputs: (torch.empty(inputs["q"].shape, dtype=inputs["dtype"]),),
    sizes=("k",),
    wrong={
        **_GROUP_SIZES,
        "dtype str": ({"dtype": "float32"}, TypeError, ("dtype", "str")),
        "dtype int8": ({"dtype": torch.int8}, TypeError, ("dtype", "int8")),
        "no dimensions": (
            {"q": torch.tensor(1, dtype=torch.int8)},
            ValueError,
            ("q", "dimension"),
        ),
    },
    kernels=False,
)


SAMPLES = (INT8_GEMM, QUANTIZE_INT8_GROUPS, DEQUANTIZE_INT8_GROUPS)
