"""The NVFP4 family for farro explain: what its sizes mean there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def _given(name: str, n: int | None, meaning: str) -> int:
    if n is None:
        raise ValueError(f"{name} needs --n, {meaning}")
    return n


def _meta(*shape: int, dtype: str) -> Any:
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def _weight(name: str, m: int, n: int | None, k: int, *_: Any, **keywords: Any) -> Any:
    """One expert of N rows."""
    from .. import explain, nvfp4

    rows = _given(name, n, "the rows of one expert's weight [N,K]; --m is not used")
    w = _meta(1, rows, k, dtype="bfloat16")
    packed, scales = (_meta(1, rows, k // of, dtype="uint8") for of in (2, 32))
    arguments: dict[str, tuple[Any, ...]] = {
        "requantize_group16": (packed, _meta(1, rows, k // 16, dtype="uint8"), None),
        "dequantize_weight": (packed, scales),
        "compress": (packed, scales, k),
        "decompress": (*(_meta(1, rows, k // of, dtype="uint8") for of in (4, 16, 32)), k),
    }
    return explain(getattr(nvfp4, name), *arguments.get(name, (w,)), **keywords)


def _rows(name: str, m: int, n: int | None, k: int, *_: Any, **keywords: Any) -> Any:
    """M rows of each of N experts, K columns of the result."""
    from .. import explain, nvfp4

    gscale = _meta(1, dtype="float32")
    if name == "quant_rows":
        if n is not None:
            raise ValueError("quant_rows takes x [M,K]: leave out --n")
        return explain(nvfp4.quant_rows, _meta(m, k, dtype="bfloat16"), gscale, **keywords)
    experts = _given(name, n, "the experts; --m are rows of each")
    if name == "dequantize_act":
        codes, scales = (_meta(experts, m, k // of, dtype="uint8") for of in (2, 32))
        return explain(nvfp4.dequantize_act, codes, scales, **keywords)
    width = 2 * k if name == "silu_mul_quant_act" else k
    x, counts = _meta(experts, m, width, dtype="bfloat16"), _meta(experts, dtype="int32")
    return explain(getattr(nvfp4, name), x, gscale, counts, 0, **keywords)


def _scatter(name: str, m: int, n: int | None, k: int, *_: Any, **keywords: Any) -> Any:
    """M tokens of N routes each, to 128 experts with room for all."""
    from .. import explain, nvfp4

    topk = _given(name, n, "the routes of a token; --m are tokens")
    a1, gscale = _meta(m, k, dtype="bfloat16"), _meta(1, dtype="float32")
    rows, counts = _meta(128 * m, dtype="int32"), _meta(128, dtype="int32")
    routes = _meta(m * topk, dtype="int32")
    arguments: dict[str, tuple[Any, ...]] = {
        "scatter_quant_act": (a1, routes.long(), routes.long(), None, gscale, counts, m),
        "scatter_quant_act_planned": (a1, rows, rows, None, gscale, counts, m),
        "scatter_quant_act_ragged": (a1, routes, routes, None, gscale, _meta(129, dtype="int32")),
        "scatter_fp4_planned": (
            *(_meta(m, k // of, dtype="uint8") for of in (2, 32)),
            *(rows, counts, m),
        ),
    }
    return explain(getattr(nvfp4, name), *arguments[name], **keywords)


def _products(name: str, m: int, n: int | None, k: int, *_: Any, **keywords: Any) -> Any:
    """M rows of each of 8 experts, N features."""
    from .. import explain, nvfp4

    features = _given(name, n, "the features; --m are rows of each of 8 experts")
    rows = (8 * m,) if name == "group_mm_ragged" else (8, m)
    weight = (_meta(8, features, k // of, dtype="uint8") for of in (4, 16, 32))
    x = (_meta(*rows, k // of, dtype="uint8") for of in (2, 32))
    counts = _meta(9 if len(rows) == 1 else 8, dtype="int32")
    operands = (*weight, *x, _meta(8, dtype="float32"), counts)
    if name == "group_mm_swiglu_quant":
        given = (*operands, _meta(1, dtype="float32"), features, k)
        return explain(nvfp4.group_mm_swiglu_quant, *given, **keywords)
    out = _meta(*rows, features, dtype="bfloat16")
    return explain(getattr(nvfp4, name), out, *operands, features, k, **keywords)


_WEIGHTS = ("prune_paired_4of8", "quantize_weight", "requantize_group16", "dequantize_weight")
_SCATTERS = ("scatter_quant_act", "scatter_quant_act_planned", "scatter_quant_act_ragged")

_PRODUCTS = ("group_mm", "group_mm_ragged", "group_mm_swiglu_quant")

# public function -> its Explanation for sizes; the operator's name serves as well
OPERATORS: dict[str, Callable[..., Any]] = {
    **{n: functools.partial(_weight, n) for n in (*_WEIGHTS, "compress", "decompress")},
    "nvfp4_weights": functools.partial(_weight, "compress"),
    **{n: functools.partial(_rows, n) for n in ("quant_act", "silu_mul_quant_act", "quant_rows")},
    "nvfp4_quantize": functools.partial(_rows, "quant_act"),
    **{n: functools.partial(_scatter, n) for n in (*_SCATTERS, "scatter_fp4_planned")},
    "nvfp4_scatter": functools.partial(_scatter, "scatter_quant_act_planned"),
    "nvfp4_scatter_fp4": functools.partial(_scatter, "scatter_fp4_planned"),
    "dequantize_act": functools.partial(_rows, "dequantize_act"),
    "nvfp4_dequantize": functools.partial(_rows, "dequantize_act"),
    **{n: functools.partial(_products, n) for n in _PRODUCTS},
    "nvfp4_group_mm": functools.partial(_products, "group_mm"),
    "nvfp4_group_mm_swiglu_quant": functools.partial(_products, "group_mm_swiglu_quant"),
}
