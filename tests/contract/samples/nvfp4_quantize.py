"""Quantizers of the NVFP4 family, with full experts: codes of unused rows are unspecified.

Rows are experts where results have one of their own for each, and tokens otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from farro import nvfp4

from .sample import Argument, Sample

_BF16, _FP32 = (torch.bfloat16,), (torch.float32,)
_INT32, _INT64, _UINT8 = (torch.int32,), (torch.int64,), (torch.uint8,)
_AS_IT_IS = ("contiguous", "offset")
_32 = "needed a multiple of 32"
_EXPERTS = 2


def _up(size: int) -> int:
    """Sizes are multiples of 32; the tests ask for any."""
    return -(-size // 32) * 32


def _argument(dtypes: tuple[torch.dtype, ...], **more: Any) -> Argument:
    return Argument(dtypes, layouts=_AS_IT_IS, **more)


def _values(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Of many magnitudes, with rows of zeros and tiny ones."""
    x = torch.randn(shape, generator=generator) * 4
    magnitude = torch.tensor([1.0, 1.0, 1e-3, 1e-37, 0.0])
    return (x * magnitude[torch.randint(5, (*shape[:-1], 1), generator=generator)]).bfloat16()


def _factors(generator: torch.Generator, size: int) -> torch.Tensor:
    return torch.exp2(torch.rand(size, generator=generator) * 8 - 2)


def _act(
    generator: torch.Generator, m: int = 3, rows: int = 5, k: int = 64, exact: bool = True
) -> dict[str, Any]:
    return {
        "x": _values(generator, m, rows, _up(k)),
        "gscale": _factors(generator, m),
        "expert_num_tokens": torch.full((m,), rows, dtype=torch.int32),
        "features": 4096,
    }


def _gated(generator: torch.Generator, k: int = 64, how: Any = (), **options: Any) -> Any:
    given = _act(generator, k=2 * _up(k), **options)
    return {"x2": given.pop("x"), **given, **dict(how)}


def _rows(generator: torch.Generator, m: int = 17, k: int = 96, exact: bool = True) -> Any:
    return {"x": _values(generator, m, _up(k)), "gscale": _factors(generator, 1)}


def _plan(
    generator: torch.Generator,
    m: int = 7,
    k: int = 96,
    weights: bool = True,
    factors: int = _EXPERTS,
    exact: bool = True,
) -> dict[str, Any]:
    """Each of two experts has a row for each of m tokens, in any order."""
    rows = _EXPERTS * m
    return {
        "a1": _values(generator, m, _up(k)),
        "src_tok": torch.randint(max(m, 1), (rows,), generator=generator, dtype=torch.int32),
        "src_route": torch.randint(max(2 * m, 1), (rows,), generator=generator, dtype=torch.int32),
        "topk_weights": torch.rand(m, 2, generator=generator) if weights else None,
        "gscale": _factors(generator, factors),
        "expert_num_tokens": torch.full((_EXPERTS,), m, dtype=torch.int32),
        "cap": m,
    }


def _routes(generator: torch.Generator, **options: Any) -> dict[str, Any]:
    given = _plan(generator, **options)
    rows = given.pop("src_route").shape[0]
    weights = given["topk_weights"]
    return {
        "a1": given["a1"],
        "flat_tok": given["src_tok"].long(),
        "dest_global": torch.randperm(rows, generator=generator),
        "topk_weights": None if weights is None else weights.flatten(),
        **{name: given[name] for name in ("gscale", "expert_num_tokens", "cap")},
    }


def _ragged(generator: torch.Generator, m: int = 7, **options: Any) -> dict[str, Any]:
    given = _plan(generator, m=m, **options)
    for name in ("expert_num_tokens", "cap"):
        given.pop(name)
    return {**given, "expert_offsets": torch.tensor([0, m // 2, 2 * m], dtype=torch.int32)}


def _copy(generator: torch.Generator, m: int = 7, k: int = 96, exact: bool = True) -> Any:
    plan = _plan(generator, m=m, k=32)
    return {
        "q": torch.randint(256, (m, _up(k) // 2), generator=generator, dtype=torch.uint8),
        "q_sf": torch.randint(128, (m, _up(k) // 32), generator=generator, dtype=torch.uint8),
        **{name: plan[name] for name in ("src_tok", "expert_num_tokens", "cap")},
    }


def _dequantize(
    generator: torch.Generator, m: int = 3, rows: int = 5, k: int = 64, exact: bool = True
) -> dict[str, Any]:
    def some(size: int, below: int) -> torch.Tensor:
        return torch.randint(below, (m, rows, size), generator=generator, dtype=torch.uint8)

    k = _up(k)  # no scale is NaN, for opcheck says that NaN is not NaN
    return {"b_act": some(k // 2, 256), "sfb": some(k // 32, 127), "gscale": _factors(generator, 1)}


def _quantized(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    *leading, k = shape
    codes = torch.empty(*leading, k // 2, dtype=torch.uint8)
    return codes, torch.empty(*leading, k // 32, dtype=torch.uint8)


def _shows(results: tuple[torch.Tensor, ...]) -> bool:
    return bool((results[1] == 0x7F).any())


def _warm(tokens: int) -> Callable[[dict[str, Any]], tuple[int, int, int]]:
    """Of the first tensor, whose dimension `tokens` counts them."""

    def shape(inputs: dict[str, Any]) -> tuple[int, int, int]:
        name, x = next(iter(inputs.items()))
        k = {"x2": x.shape[-1] // 2, "q": 2 * x.shape[-1], "b_act": 2 * x.shape[-1]}
        return x.shape[tokens], 1, k.get(name, x.shape[-1])

    return shape


def _sample(
    operator: str,
    function: Callable[..., Any],
    make: Callable[..., dict[str, Any]],
    arguments: dict[str, Argument],
    variants: dict[str, dict[str, Any]],
    empty_result: Callable[[dict[str, Any]], tuple[torch.Tensor, ...]],
    wrong: dict[str, Any],
    **more: Any,
) -> Sample:
    settings = {
        "empties": {"none": {"m": 0}, "no columns": {"k": 0}, "nothing": {"m": 0, "k": 0}},
        "records_grad": False,
        "warm_shape": _warm(0),
        **more,
    }
    return Sample(
        name=function.__name__,
        operator=operator,
        function=function,
        make=make,
        arguments=arguments,
        variants=variants,
        empty_result=empty_result,
        sizes=("k",),
        wrong=wrong,
        required=lambda backend, problem: backend in ("reference", "cpu", "triton"),
        shows_non_finite=_shows,
        **settings,
    )


_FEW_ROWS = {"no rows": {"rows": 0}, "no experts": {"m": 0}, "no columns": {"k": 0}}
_GSCALES = {
    "gscale [2]": ({"gscale": torch.ones(2)}, ValueError, ("gscale", "[2]", "[3] or [1]")),
    "rows skipped": (
        {"gscale": torch.ones(6)[::2]},
        ValueError,
        ("gscale", "strides", "contiguous"),
    ),
}
_BY_EXPERT = {
    "gscale": _argument(_FP32, rows=0),
    "expert_num_tokens": _argument(_INT32, rows=0),
}
_X2 = {"x2": torch.zeros(3, 5, 96, dtype=torch.bfloat16)}

QUANT_ACT = _sample(
    "nvfp4_quantize",
    nvfp4.quant_act,
    _act,
    {"x": _argument(_BF16, rows=0, any_shape=True), **_BY_EXPERT},
    {"two blocks": {}, "five blocks": {"k": 160, "rows": 3}},
    lambda inputs: _quantized(*inputs["x"].shape),
    {
        **_GSCALES,
        "K 48": ({"x": torch.zeros(3, 5, 48).bfloat16()}, ValueError, ("[3, 5, 48]", _32)),
        "2-D": ({"x": torch.zeros(3, 32).bfloat16()}, ValueError, ("[3, 32]", "[E, max_n, K]")),
    },
    empties=_FEW_ROWS,
    warm_shape=_warm(1),
)
GATED = _sample(
    "nvfp4_quantize",
    nvfp4.silu_mul_quant_act,
    _gated,
    {"x2": _argument(_BF16, rows=0, any_shape=True), **_BY_EXPERT},
    {
        "silu": {},
        "silu, interleaved": {"how": (("interleaved", True),), "k": 160},
        "situ": {"how": (("activation", "situ"), ("beta", 1.5))},
    },
    lambda inputs: _quantized(*inputs["x2"].shape[:2], inputs["x2"].shape[2] // 2),
    {
        **_GSCALES,
        "2N 96": (_X2, ValueError, ("[3, 5, 96]", "2N is 96", "multiple of 64")),
        "interleaved int": ({"interleaved": 1}, TypeError, ("interleaved", "bool", "int")),
        "activation gelu": ({"activation": "gelu"}, ValueError, ("activation", "'silu' or 'situ'")),
        "activation None": ({"activation": None}, TypeError, ("activation", "str", "NoneType")),
        "beta 0": ({"beta": 0.0}, ValueError, ("beta", "0.0", "positive")),
        "beta 1e-60": ({"beta": 1e-60}, ValueError, ("beta", "1e-60", "FP32")),
        "beta nan": ({"beta": float("nan")}, ValueError, ("beta", "nan")),
        "beta str": ({"beta": "1"}, TypeError, ("beta", "str")),
        "linear_beta inf": (
            {"linear_beta": float("inf")},
            ValueError,
            ("linear_beta", "inf", "finite"),
        ),
    },
    empties=_FEW_ROWS,
    warm_shape=_warm(1),
    graphs=4,  # with dynamic=True a float among the arguments has torch begin the first one anew
)
QUANT_ROWS = _sample(
    "nvfp4_quantize",
    nvfp4.quant_rows,
    _rows,
    {"x": _argument(_BF16, rows=0, any_shape=True), "gscale": _argument(_FP32, any_shape=True)},
    {"three blocks": {}, "one block": {"k": 32, "m": 1}},
    lambda inputs: _quantized(*inputs["x"].shape),
    {
        "gscale [17]": ({"gscale": torch.ones(17)}, ValueError, ("gscale", "[17]", "[] or [1]")),
        "3-D": ({"x": torch.zeros(1, 2, 32).bfloat16()}, ValueError, ("[1, 2, 32]", "[T, K]")),
    },
)
_COUNTED = {"gscale": _argument(_FP32), "expert_num_tokens": _argument(_INT32)}
_WEIGHTS = _argument(_FP32, required=False, any_shape=True)
_VARIANTS = {
    "weights, factors": {},
    "no weights, one factor": {"weights": False, "factors": 1, "k": 160},
}
_CAPS = {
    "cap float": ({"cap": 7.0}, TypeError, ("cap", "int", "float")),
    "cap -1": ({"cap": -1}, ValueError, ("cap", "-1")),
}


def _cap_result(inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return _quantized(_EXPERTS, inputs["cap"], inputs["a1"].shape[1])


ROUTES = _sample(
    "nvfp4_scatter",
    nvfp4.scatter_quant_act,
    _routes,
    {
        "a1": _argument(_BF16, any_shape=True),
        "flat_tok": _argument(_INT64),
        "dest_global": _argument(_INT64),
        "topk_weights": _argument(_FP32, required=False),
        **_COUNTED,
    },
    _VARIANTS,
    _cap_result,
    _CAPS,
)
PLANNED = _sample(
    "nvfp4_scatter",
    nvfp4.scatter_quant_act_planned,
    _plan,
    {
        "a1": _argument(_BF16, any_shape=True),
        "src_tok": _argument(_INT32),
        "src_route": _argument(_INT32),
        "topk_weights": _WEIGHTS,
        **_COUNTED,
    },
    _VARIANTS,
    _cap_result,
    {
        **_CAPS,
        "another cap": ({"cap": 8}, ValueError, ("src_tok", "[14]", "[16]")),
        "weights of other tokens": (
            {"topk_weights": torch.ones(8, 2)},
            ValueError,
            ("topk_weights", "[8, 2]", "T = 7"),
        ),
    },
)
RAGGED = _sample(
    "nvfp4_scatter",
    nvfp4.scatter_quant_act_ragged,
    _ragged,
    {
        "a1": _argument(_BF16, any_shape=True),
        "src_tok": _argument(_INT32),
        "src_route": _argument(_INT32),
        "topk_weights": _WEIGHTS,
        "gscale": _argument(_FP32),
        "expert_offsets": _argument(_INT32),
    },
    _VARIANTS,
    lambda inputs: _quantized(inputs["src_tok"].shape[0], inputs["a1"].shape[1]),
    {
        "no experts": (
            {"expert_offsets": torch.zeros(1, dtype=torch.int32)},
            ValueError,
            ("expert_offsets", "[1]", "[E+1]"),
        ),
    },
)
COPY = _sample(
    "nvfp4_scatter_fp4",
    nvfp4.scatter_fp4_planned,
    _copy,
    {
        "q": _argument(_UINT8),
        "q_sf": _argument(_UINT8),
        "src_tok": _argument(_INT32),
        "expert_num_tokens": _argument(_INT32),
    },
    {"three blocks": {}, "one block": {"k": 32}},
    lambda inputs: _quantized(_EXPERTS, inputs["cap"], 2 * inputs["q"].shape[1]),
    {
        **_CAPS,
        "scales of 16": (
            {"q_sf": torch.zeros(7, 6, dtype=torch.uint8)},
            ValueError,
            ("q_sf", "[7, 6]", "[7, 3]", "[T, K/32]"),
        ),
    },
)
DEQUANTIZE = _sample(
    "nvfp4_dequantize",
    nvfp4.dequantize_act,
    _dequantize,
    {
        "b_act": _argument(_UINT8, rows=0),
        "sfb": _argument(_UINT8, rows=0),
        "gscale": _argument(_FP32, required=False, any_shape=True),
    },
    {"two blocks": {}, "five blocks": {"k": 160, "rows": 3}},
    lambda inputs: (torch.empty(*inputs["b_act"].shape[:2], 2 * inputs["b_act"].shape[2]),),
    {"gscale [2]": ({"gscale": torch.ones(2)}, ValueError, ("gscale", "[2]", "[3], one for"))},
    empties=_FEW_ROWS,
    records_grad=True,
    warm_shape=_warm(1),
)

SAMPLES = (QUANT_ACT, GATED, QUANT_ROWS, ROUTES, PLANNED, RAGGED, COPY, DEQUANTIZE)
