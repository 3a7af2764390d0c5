"""farro explain: which kernel would run a problem, and why the others would not."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Annotated, Any

import typer

from . import explain_nvfp4

_DTYPES = ("bfloat16", "float16", "float32", "float64")


def _int8_gemm(m: int, n: int | None, k: int, dtype: Any, group_size: int, **keywords: Any) -> Any:
    import torch

    from .. import explain, int8_gemm

    if n is None:
        raise ValueError("int8_gemm needs --n, the columns of the result")
    groups = -(-k // max(group_size, 1))
    a = torch.empty(m, k, dtype=torch.int8, device="meta")
    weight = torch.empty(n, k, dtype=torch.int8, device="meta")
    scale_a = torch.empty(m, groups, dtype=torch.float32, device="meta")
    scale_b = torch.empty(groups, n, dtype=torch.float32, device="meta")
    return explain(
        int8_gemm,
        *(a, weight.T, scale_a, scale_b),
        group_size=group_size,
        output_dtype=dtype,
        **keywords,
    )


def _quantize(m: int, n: int | None, k: int, dtype: Any, group_size: int, **keywords: Any) -> Any:
    import torch

    from .. import explain, quantize_int8_groups

    if n is not None:
        raise ValueError("quantize_int8_groups takes rows [M,K]: leave out --n")
    x = torch.empty(m, k, dtype=dtype, device="meta")
    return explain(quantize_int8_groups, x, group_size, **keywords)


def _fp8_quantize(
    kind: str, m: int, n: int | None, k: int, dtype: Any, group_size: int, **keywords: Any
) -> Any:
    import torch

    from .. import explain
    from ..ops.fp8_quantize import FUNCTIONS

    if n is not None:
        raise ValueError(f"quantize_fp8_{kind} takes x [M,K]: leave out --n")
    x = torch.empty(m, k, dtype=dtype, device="meta")
    return explain(FUNCTIONS[kind], x, **keywords)


def _fp8_blockwise(
    m: int, n: int | None, k: int, dtype: Any, group_size: int, **keywords: Any
) -> Any:
    import torch

    from .. import explain, fp8_blockwise_linear_bf16

    if dtype is not torch.bfloat16:
        raise ValueError("fp8_blockwise_linear_bf16 gives bfloat16: leave out --dtype")
    operands = _fp8_operands("fp8_blockwise_linear_bf16", m, n, k, 1)
    return explain(fp8_blockwise_linear_bf16, *operands, **keywords)


def _fp8_swiglu(m: int, n: int | None, k: int, dtype: Any, group_size: int, **keywords: Any) -> Any:
    from .. import explain, fp8_blockwise_swiglu_quantize_fp8

    operands = _fp8_operands("fp8_blockwise_swiglu_quantize_fp8", m, n, k, 2)
    return explain(fp8_blockwise_swiglu_quantize_fp8, *operands, **keywords)


def _fp8_operands(function: str, m: int, n: int | None, k: int, matrices: int) -> Any:
    """FP8 operands with block scales; `matrices` of N rows joined to one weight."""
    import torch

    from ..formats.fp8 import E4M3, blocks

    if n is None:
        raise ValueError(f"{function} needs --n, the columns of the result")
    input_scale = torch.empty(m, blocks(k), dtype=torch.float32, device="meta")
    weight_scale = torch.empty(matrices * blocks(n), blocks(k), dtype=torch.float32, device="meta")
    x = torch.empty(m, k, dtype=E4M3, device="meta")
    weight = torch.empty(matrices * n, k, dtype=E4M3, device="meta")
    return x, weight, input_scale, weight_scale


_FP8_KINDS = ("per_tensor", "per_row", "1x128", "128x128")


def _plan(m: int, n: int | None, k: int, dtype: Any, group_size: int, **keywords: Any) -> Any:
    import torch

    from .. import dispatch_plan, explain

    if n is None:
        raise ValueError("dispatch_plan needs --n, the experts; --m are tokens, --k routes of each")
    ids = torch.empty(m, k, dtype=torch.int64, device="meta")
    return explain(dispatch_plan, ids, 0, n, max(m, 1), **keywords)


def _finalize(m: int, n: int | None, k: int, dtype: Any, group_size: int, **keywords: Any) -> Any:
    import torch

    from .. import explain, moe_finalize

    if n is None:
        raise ValueError("moe_finalize needs --n, the routes of a token; --k are columns")
    fused = torch.empty(m * n, k, dtype=torch.bfloat16, device="meta")
    dest = torch.empty(m, n, dtype=torch.int32, device="meta")
    weights = torch.empty(m, n, dtype=torch.float32, device="meta")
    out = torch.empty(m, k, dtype=torch.bfloat16, device="meta")
    return explain(moe_finalize, out, fused, dest, weights, **keywords)


def _moe_ffn(m: int, n: int | None, k: int, dtype: Any, group_size: int, **keywords: Any) -> Any:
    from .. import explain, moe_ffn
    from ..formats.int8_group import check_group_size
    from ..ops.moe_ffn.warm import operands

    if n is None:
        raise ValueError(
            "moe_ffn needs --n, the intermediate features; --m are tokens of 8 routes each to 128 "
            "experts, --k their features"
        )
    import torch

    check_group_size("moe_ffn", group_size)
    given: dict[str, Any] = dict(operands("meta", (m, n, k), 128, group_size, 8, torch.int64))
    return explain(moe_ffn, **given, group_size=group_size, output_dtype=dtype, **keywords)


def _fp8_linear(name: str, m: int, n: int | None, k: int, *_: Any, **keywords: Any) -> Any:
    import torch

    from .. import explain, fp8

    if n is None:
        raise ValueError(f"{name} needs --n, the columns of the result")
    input, weight = (
        torch.empty(rows, k, dtype=torch.float8_e4m3fn, device="meta") for rows in (m, n)
    )
    if "bias" in name:
        keywords["bias"] = torch.empty(n, dtype=torch.bfloat16, device="meta")
    if "residual" in name:
        keywords["residual"] = torch.empty(m, n, dtype=torch.bfloat16, device="meta")
    return explain(getattr(fp8, name), input, weight, **keywords)


_FP8_LINEAR = tuple(
    f"fp8_linear_{form}bf16" for form in ("", "residual_", "bias_", "bias_residual_", "bias_gelu_")
)

# public function -> its Explanation for sizes; the operator's name serves as well
_OPERATORS: dict[str, Callable[..., Any]] = {
    "int8_gemm": _int8_gemm,
    "quantize_int8_groups": _quantize,
    "int8_quantize": _quantize,
    "fp8_quantize": functools.partial(_fp8_quantize, "1x128"),
    **{f"quantize_fp8_{kind}": functools.partial(_fp8_quantize, kind) for kind in _FP8_KINDS},
    "fp8_blockwise_linear_bf16": _fp8_blockwise,
    "fp8_blockwise_linear": _fp8_blockwise,
    "fp8_blockwise_swiglu_quantize_fp8": _fp8_swiglu,
    "fp8_swiglu_quantize": _fp8_swiglu,
    "dispatch_plan": _plan,
    "moe_route": _plan,
    "moe_finalize": _finalize,
    "moe_ffn": _moe_ffn,
    "fp8_linear": functools.partial(_fp8_linear, "fp8_linear_bf16"),
    **{name: functools.partial(_fp8_linear, name) for name in _FP8_LINEAR},
    **explain_nvfp4.OPERATORS,
}


_LARGEST = 1 << 30  # a matrix of two such sizes still has a size in bytes, as torch asks


def explain_command(
    operator: Annotated[str, typer.Argument(help="A public function, such as int8_gemm.")],
    m: Annotated[int, typer.Option(min=0, max=_LARGEST, help="Rows of the result, or of x.")],
    k: Annotated[
        int, typer.Option(min=0, max=_LARGEST, help="The dimension that is summed, or grouped.")
    ],
    n: Annotated[
        int | None, typer.Option(min=0, max=_LARGEST, help="Columns of the result.")
    ] = None,
    group_size: Annotated[int, typer.Option(help="32, 64, 128 or 256.")] = 256,
    dtype: Annotated[
        str, typer.Option(help="Of the result; of x for quantize_int8_groups.")
    ] = "bfloat16",
    arch: Annotated[
        str | None, typer.Option(help="cpu, sm_90, ...: pretend a device. Default: this machine's.")
    ] = None,
    backend: Annotated[str, typer.Option(help="auto, reference, cpu, triton or cuda.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Which kernel would run a problem, its configuration, and why the others would not.

    Nothing is computed. Operands are laid out as preferred: weights [N,K], contiguous scales.
    Exit code 1 where nothing would run.
    """
    import torch

    from .environment import current_arch

    if operator not in _OPERATORS:
        raise ValueError(f"no operator is named {operator!r}; known: {', '.join(_OPERATORS)}")
    if dtype not in _DTYPES:
        raise ValueError(f"--dtype is {dtype!r}; needed one of {', '.join(_DTYPES)}")
    explanation = _OPERATORS[operator](
        *(m, n, k, getattr(torch, dtype), group_size),
        arch=current_arch() if arch is None else arch,
        backend=backend,
    )
    typer.echo(json.dumps(explanation.as_dict(), indent=2) if as_json else str(explanation))
    if explanation.chosen is None:
        raise typer.Exit(1)
