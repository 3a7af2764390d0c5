"""The FP8 family's quantizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import farro
from farro.formats.fp8 import E4M3, SCALE_FLOOR, scale_shape

from .sample import FLOATS, Argument, Sample, signed_scales


def _quantize(
    generator: torch.Generator,
    m: int = 17,
    k: int = 150,
    dtype: torch.dtype = torch.float32,
    trailing: tuple[int, ...] = (),
    exact: bool = True,
) -> dict[str, Any]:
    """x [m, *trailing, k] of many magnitudes, with zero rows and tiny ones."""
    shape = (m, *trailing, k)
    x = torch.randn(shape, generator=generator) * 4
    magnitude = torch.tensor([1.0, 1.0, 1e-3, 1e-37, 0.0])
    x *= magnitude[torch.randint(5, (*shape[:-1], 1), generator=generator)]
    return {"x": x.to(dtype)}


def _empty(kind: str) -> Callable[[dict[str, Any]], tuple[torch.Tensor, ...]]:
    def result(inputs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        shape = inputs["x"].shape
        scale = torch.full(scale_shape(shape, kind), SCALE_FLOOR)
        return torch.empty(shape, dtype=E4M3), scale

    return result


def _sample(kind: str) -> Sample:
    name = f"quantize_fp8_{kind}"
    leading = kind != "128x128"
    independent = kind in ("per_row", "1x128")
    variants: dict[str, dict[str, Any]] = {
        "fp32": {},
        "bf16, 3-D" if leading else "bf16": {
            "dtype": torch.bfloat16,
            "m": 3 if leading else 130,
            "k": 256,
            "trailing": (5,) if leading else (),
        },
        "fp64": {"dtype": torch.float64, "k": 300, "m": 5},
        "one": {"m": 1, "k": 1, "dtype": torch.float16},
    }
    empties: dict[str, dict[str, Any]] = {
        "no rows": {"m": 0},
        "no columns": {"k": 0},
        "nothing": {"m": 0, "k": 0},
    }
    if leading:
        empties["no rows, 3-D"] = {"m": 3, "trailing": (0,)}
    wrong = {"no dimensions": ({"x": torch.tensor(1.0)}, ValueError, ("x", "needed"))}
    if not leading:
        three = {"x": torch.ones(2, 3, 4)}
        wrong["3-D"] = (three, ValueError, ("[2, 3, 4]", "[M, K]", "flatten"))
    return Sample(
        name=name,
        operator="fp8_quantize",
        function=getattr(farro, name),
        make=_quantize,
        arguments={
            "x": Argument((*FLOATS, torch.float64), rows=0 if independent else None, any_shape=True)
        },
        variants=variants,
        empties=empties,
        empty_result=_empty(kind),
        sizes=("k",),
        wrong=wrong,
        required=lambda backend, problem: backend in ("reference", "cpu", "triton"),
        # torch compiles anew where a size becomes 1, and here one row of blocks does it too
        graphs=3 if leading else 4,
    )


def _dequantize(
    generator: torch.Generator,
    kind: str = "1x128",
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> dict[str, Any]:
    q = _quantize(generator, **options)["x"].clamp(-448, 448).to(E4M3)
    return {"q": q, "scale": signed_scales(generator, *scale_shape(q.shape, kind)), "dtype": dtype}


DEQUANTIZE = Sample(
    name="dequantize_fp8",
    operator="fp8_quantize",
    function=farro.dequantize_fp8,
    make=_dequantize,
    arguments={
        "q": Argument((E4M3,), rows=0, any_shape=True),
        "scale": Argument((torch.float32,), rows=0),
    },
    variants={
        "1x128": {},
        "128x128 bf16": {"kind": "128x128", "m": 300, "dtype": torch.bfloat16},
        "per row, 3-D": {"kind": "per_row", "trailing": (5,), "dtype": torch.float16},
        "per tensor": {"kind": "per_tensor", "dtype": torch.float64},
    },
    empties={
        "no rows": {"m": 0},
        "no columns": {"k": 0},
        "no columns, rows": {"k": 0, "kind": "per_row"},
        "nothing": {"m": 0, "k": 0, "kind": "128x128"},
        "no rows, 3-D": {"m": 3, "trailing": (0,)},
    },
    empty_result=lambda inputs: (torch.empty(inputs["q"].shape, dtype=inputs["dtype"]),),
    sizes=("k",),
    wrong={
        "dtype str": ({"dtype": "float32"}, TypeError, ("dtype", "str")),
        "dtype fp8": ({"dtype": E4M3}, TypeError, ("dtype", "float8_e4m3fn")),
        "no dimensions": ({"q": torch.zeros((), dtype=E4M3)}, ValueError, ("q", "dimension")),
        "a scale of groups of 64": (
            {"scale": torch.ones(17, 3)},
            ValueError,
            ("[17, 3]", "[17, 2] (1x128)", "[1, 2] (128x128)", "[] (per_tensor)"),
        ),
    },
    kernels=False,
)

SAMPLES = (*map(_sample, ("per_tensor", "per_row", "1x128", "128x128")), DEQUANTIZE)
