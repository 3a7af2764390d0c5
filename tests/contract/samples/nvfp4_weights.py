"""Weights of the NVFP4 family. Experts are the rows: results have one of their own for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from farro import nvfp4
from farro.formats.paired_sparsity import PATTERNS
from farro.testing import LAYOUTS

from .sample import FLOATS, Argument, Sample

_ANY = (*FLOATS, torch.float64)
_BYTES = (torch.uint8,)
_AS_IT_IS = ("contiguous", "offset")
_NO_WINDOWS = tuple(name for name, layout in LAYOUTS.items() if not layout.windows)
_32 = "needed a multiple of 32"


def _up(size: int, multiple: int = 32) -> int:
    """Sizes of these formats are multiples; the tests ask for any."""
    return -(-size // multiple) * multiple


def _weight(
    generator: torch.Generator,
    m: int = 3,
    n: int = 32,
    k: int = 64,
    dtype: torch.dtype = torch.float32,
    exact: bool = True,
) -> dict[str, Any]:
    """w [m experts, n rows, k] of many magnitudes, with experts of zeros and tiny ones."""
    w = torch.randn(m, _up(n), _up(k), generator=generator) * 0.1
    magnitude = torch.tensor([1.0, 1.0, 1e-3, 1e-37, 0.0])
    return {"w": (w * magnitude[torch.randint(5, (m, 1, 1), generator=generator)]).to(dtype)}


def _quantize(generator: torch.Generator, scale: Any = "auto", **options: Any) -> dict[str, Any]:
    w = _weight(generator, **options)["w"]
    if scale == "tensor":
        scale = torch.rand(w.shape[0], generator=generator) + 0.5
    return {"w": w, "global_scale": scale}


def _codes(generator: torch.Generator, m: int, n: int, k: int, block: int = 32) -> dict[str, Any]:
    """Any codes of paired 4:8, and any finite scales."""
    k = _up(k)
    packed = torch.randint(256, (m, n, k // 8, 4), generator=generator, dtype=torch.uint8)
    nibbles = torch.tensor(PATTERNS)[torch.randint(6, (m, n, k // 8), generator=generator)]
    which = torch.stack((nibbles & 3, nibbles >> 2), -1)
    kept = torch.zeros(packed.shape, dtype=torch.uint8).scatter_(-1, which, 1)
    return {
        "w_packed": (packed * kept).flatten(-2),
        "w_blockscale": torch.randint(
            127, (m, n, k // block), generator=generator, dtype=torch.uint8
        ),
    }


def _alpha(generator: torch.Generator, m: int) -> torch.Tensor:
    return torch.rand(m, generator=generator) + 0.1


def _dequantize(
    generator: torch.Generator, m: int = 3, n: int = 5, k: int = 64, exact: bool = True
) -> dict[str, Any]:
    return {**_codes(generator, m, n, k), "alpha": _alpha(generator, m)}


def _requantize(
    generator: torch.Generator,
    m: int = 3,
    n: int = 5,
    k: int = 64,
    prune: bool = True,
    exact: bool = True,
) -> dict[str, Any]:
    codes = _codes(generator, m, n, k, 16)
    return {**codes, "alpha": _alpha(generator, m), "prune": prune}


def _compress(
    generator: torch.Generator, m: int = 3, n: int = 32, k: int = 160, exact: bool = True
) -> dict[str, Any]:
    return {**_codes(generator, m, _up(n), k), "k": _up(k)}


def _decompress(
    generator: torch.Generator, m: int = 3, n: int = 32, k: int = 160, exact: bool = True
) -> dict[str, Any]:
    """Any bytes, but for the nibbles of the metadata."""
    n, k = _up(n), _up(k)
    nibbles = torch.tensor(PATTERNS)[torch.randint(6, (m, n, k // 8), generator=generator)]
    nibbles = nibbles.to(torch.uint8)

    def some(size: int, below: int) -> torch.Tensor:
        return torch.randint(below, (m, n, size), generator=generator, dtype=torch.uint8)

    return {
        "a_comp": some(k // 4, 256),
        "e_meta": nibbles[..., ::2] | nibbles[..., 1::2] << 4,
        "sfa": some(k // 32, 127),
        "k": k,
    }


def _bytes(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.uint8)


def _quantized(shape: torch.Size, rate: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    e, m, k = shape[0], shape[1], shape[2] * rate
    return _bytes(e, m, k // 2), _bytes(e, m, k // 32)


def _compressed(inputs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    e, m = inputs["w_packed"].shape[:2]
    return tuple(_bytes(e, m, inputs["k"] // of) for of in (4, 16, 32))


_EMPTIES: dict[str, dict[str, Any]] = {
    "no experts": {"m": 0},
    "no rows": {"n": 0},
    "no columns": {"k": 0},
    "nothing": {"m": 0, "n": 0, "k": 0},
}


def _sample(
    function: Callable[..., Any],
    make: Callable[..., dict[str, Any]],
    arguments: dict[str, Argument],
    variants: dict[str, dict[str, Any]],
    empty_result: Callable[[dict[str, Any]], tuple[torch.Tensor, ...]],
    wrong: dict[str, Any],
    **more: Any,
) -> Sample:
    return Sample(
        name=function.__name__,
        operator="nvfp4_weights",
        function=function,
        make=make,
        arguments=arguments,
        variants=variants,
        empties=_EMPTIES,
        empty_result=empty_result,
        sizes=("k",),
        wrong=wrong,
        load_time=True,
        **more,
    )


_PACKED = {
    "w_packed": Argument(_BYTES, rows=0),
    "w_blockscale": Argument(_BYTES, rows=0),
}
_BY_16 = (
    {"w_blockscale": torch.zeros(3, 5, 4, dtype=torch.uint8)},
    ValueError,
    ("[3, 5, 4]", "[3, 5, 2]", "requantize_group16", "original weights"),
)

PRUNE = _sample(
    nvfp4.prune_paired_4of8,
    _weight,
    {"w": Argument(_ANY, rows=0, any_shape=True)},
    {"fp32": {}, "bf16": {"dtype": torch.bfloat16, "n": 7}, "fp64": {"dtype": torch.float64}},
    lambda inputs: (torch.empty(inputs["w"].shape),),
    {
        "K 12": ({"w": torch.zeros(2, 12)}, ValueError, ("[2, 12]", "multiple of 8")),
        "no dimensions": ({"w": torch.tensor(1.0)}, ValueError, ("w", "dimension")),
    },
)
QUANTIZE = _sample(
    nvfp4.quantize_weight,
    _quantize,
    {"w": Argument(_ANY, rows=0, any_shape=True)},
    {
        "auto": {},
        "bf16, a number": {"dtype": torch.bfloat16, "scale": 3.5, "n": 7},
        "fp64, none": {"dtype": torch.float64, "scale": None, "k": 128},
    },
    lambda inputs: (*_quantized(inputs["w"].shape), torch.ones(inputs["w"].shape[0])),
    {
        "2-D": ({"w": torch.zeros(5, 32)}, ValueError, ("[5, 32]", "[E, M, K]", "unsqueeze")),
        "K 48": ({"w": torch.zeros(1, 5, 48)}, ValueError, ("[1, 5, 48]", _32)),
        "global_scale str": ({"global_scale": "max"}, ValueError, ("global_scale", "'max'")),
        "global_scale list": ({"global_scale": [1.0]}, TypeError, ("global_scale", "list")),
        "global_scale bool": ({"global_scale": True}, TypeError, ("global_scale", "bool")),
        "global_scale zero": ({"global_scale": 0.0}, ValueError, ("global_scale", "positive")),
        "global_scale nan": (
            {"global_scale": float("nan")},
            ValueError,
            ("global_scale", "positive"),
        ),
        "global_scale fp64": (
            {"global_scale": torch.ones(3, dtype=torch.float64)},
            TypeError,
            ("global_scale", "float64", "float32"),
        ),
        "global_scale [2]": (
            {"global_scale": torch.ones(2)},
            ValueError,
            ("global_scale", "[2]", "[3]"),
        ),
        "global_scale elsewhere": (
            {"global_scale": torch.ones(3, device="meta")},
            ValueError,
            ("global_scale", "meta", "one device"),
        ),
    },
    refuses_non_finite=True,
)
REQUANTIZE = _sample(
    nvfp4.requantize_group16,
    _requantize,
    {**_PACKED, "alpha": Argument((torch.float32,), rows=0, required=False, fill=1)},
    {"pruned": {}, "not pruned": {"prune": False, "k": 96}},
    lambda inputs: (
        *_quantized(inputs["w_packed"].shape, 2),
        torch.ones(inputs["w_packed"].shape[0]),
        torch.zeros(inputs["w_packed"].shape[0]),
    ),
    {
        "scales of 32": (
            {"w_blockscale": torch.zeros(3, 5, 2, dtype=torch.uint8)},
            ValueError,
            ("[3, 5, 2]", "[3, 5, 4]", "[E, M, K/16]"),
        ),
        "prune int": ({"prune": 1}, TypeError, ("prune", "bool", "int")),
    },
    refuses_non_finite=True,
)
DEQUANTIZE = _sample(
    nvfp4.dequantize_weight,
    _dequantize,
    {**_PACKED, "alpha": Argument((torch.float32,), rows=0, required=False)},
    {"alpha": {}, "longer": {"k": 160, "n": 1}},
    lambda inputs: (torch.empty(*inputs["w_packed"].shape[:2], inputs["w_packed"].shape[2] * 2),),
    {"scales of 16": _BY_16},
)
COMPRESS = _sample(
    nvfp4.compress,
    _compress,
    {
        "w_packed": Argument(_BYTES, rows=0, layouts=_NO_WINDOWS),  # these would fit no pattern
        "w_blockscale": Argument(_BYTES, rows=0, layouts=_NO_WINDOWS),
    },
    {"short tiles": {}, "whole tiles": {"n": 96, "k": 128}},
    _compressed,
    {
        "scales of 16": (
            {"w_blockscale": torch.zeros(3, 32, 10, dtype=torch.uint8)},
            ValueError,
            ("[3, 32, 10]", "[3, 32, 5]", "requantize_group16"),
        ),
        "M 31": (
            {
                "w_packed": torch.zeros(3, 31, 80, dtype=torch.uint8),
                "w_blockscale": torch.zeros(3, 31, 5, dtype=torch.uint8),
            },
            ValueError,
            ("[3, 31, 80]", "M is 31", _32),
        ),
        "another k": ({"k": 320}, ValueError, ("k is 320", "[3, 32, 80]", "160")),
        "k float": ({"k": 160.0}, TypeError, ("k", "int", "float")),
    },
    records_grad=False,
)
DECOMPRESS = _sample(
    nvfp4.decompress,
    _decompress,
    {
        "a_comp": Argument(_BYTES, rows=0, layouts=_AS_IT_IS),
        "e_meta": Argument(_BYTES, rows=0, layouts=_AS_IT_IS, fill=0x44),
        "sfa": Argument(_BYTES, rows=0, layouts=_AS_IT_IS),
    },
    {"short tiles": {}, "whole tiles": {"n": 96, "k": 128}},
    lambda inputs: _quantized(inputs["a_comp"].shape, 4),
    {
        "another k": ({"k": 320}, ValueError, ("k is 320", "[3, 32, 40]", "160")),
        "k str": ({"k": "160"}, TypeError, ("k", "int", "str")),
        "rows skipped": (
            {"sfa": torch.zeros(3, 64, 5, dtype=torch.uint8)[:, ::2]},
            ValueError,
            ("sfa", "strides", "contiguous"),
        ),
    },
    records_grad=False,
)

SAMPLES = (PRUNE, QUANTIZE, REQUANTIZE, DEQUANTIZE, COMPRESS, DECOMPRESS)
