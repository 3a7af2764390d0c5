"""The five functions of fp8_linear, which share their operands."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

import farro
from farro import dispatch
from farro.problem import Problem
from farro.testing import difference

from .sample import Argument, Sample

_E4M3, _BF16 = torch.float8_e4m3fn, torch.bfloat16


def _codes(generator: torch.Generator, rows: int, k: int, exact: bool) -> torch.Tensor:
    if exact:  # every sum is an integer that 14 bits hold
        return torch.randint(-2, 3, (rows, k), generator=generator).float().to(_E4M3)
    return torch.randn(rows, k, generator=generator).to(_E4M3)


def _make(
    generator: torch.Generator,
    m: int = 17,
    n: int = 33,
    k: int = 150,
    alpha: float | None = None,
    fast_accum: bool = False,
    bias: torch.dtype | None = None,
    residual: str | None = None,
    exact: bool = True,
) -> dict[str, Any]:
    """`alpha` None is a tensor; `residual` is the shape "MN", "N" or "1N".

    First variants have a tensor: told that all is dynamic, torch.compile traces a number twice.
    """
    inputs: dict[str, Any] = {
        "input": _codes(generator, m, k, exact),
        "weight": _codes(generator, n, k, exact),
        "alpha": torch.tensor([0.5]) if alpha is None else alpha,
        "fast_accum": fast_accum,
    }
    if bias is not None:
        inputs["bias"] = (torch.randn(n, generator=generator) * 4).to(_BF16).to(bias)
    if residual is not None:
        shape = {"MN": (m, n), "N": (n,), "1N": (1, n)}[residual]
        inputs["residual"] = (torch.randn(shape, generator=generator) * 4).to(_BF16)
    return inputs


def _in_place(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The function that adds to its residual, on a copy of the residual with the same strides."""

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> torch.Tensor:
        residual = keywords.get("residual")
        if isinstance(residual, torch.Tensor) and not _refused(residual):
            if forward_ad._current_level >= 0:  # a write in place would keep the tangent
                residual = forward_ad.unpack_dual(residual).primal
            copy = torch.empty_strided(
                residual.shape, residual.stride(), dtype=residual.dtype, device=residual.device
            )
            keywords["residual"] = copy.copy_(residual)
        return function(*args, **keywords)

    describe = dispatch._DESCRIBERS[function]
    return dispatch.explained_by(lambda *args, **keywords: describe(*args, **keywords))(call)


def _refused(residual: torch.Tensor) -> bool:
    """Layouts that the function has to see as they are."""
    return residual.layout != torch.strided or 0 in residual.stride()


def _required(backend: str, problem: Problem) -> bool:
    if problem.param("variant") != 0:
        return False
    if backend != "cuda":
        return True
    # native: row-major operands, leading strides and addresses of whole 16 bytes
    operands = [problem.spec(name) for name in ("input", "weight")]
    (m, k), (n, _) = (spec.shape for spec in operands)
    return (
        0 not in (m, n, k)
        and k % 16 == n % 16 == 0
        and all(s.stride[1] == 1 and s.stride[0] == k and s.align == 16 for s in operands)
        and problem.spec("out").stride == (n, 1)
        and problem.spec("out").align == 16
    )


def _empty_result(inputs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    total = torch.zeros(inputs["input"].shape[0], inputs["weight"].shape[0])
    for name in ("bias", "residual"):
        if name in inputs:
            total = total + inputs[name].cpu().float()
    return (total.to(_BF16),)


def _within_a_step(actual: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """Of BF16: GELU in FP32 differs in its last bits from one exponential function to another."""
    a, b = actual.cpu(), expected.cpu()
    close = (a.float() - b.float()).abs() <= b.float().abs() * 2**-7 + 1e-30
    found = difference(torch.where(close, b, a), b)
    assert found is None, f"{what}: {found}"


_ARGUMENTS = {
    "input": Argument((_E4M3,), rows=0, any_shape=True),
    "weight": Argument((_E4M3,), any_shape=True),
}
_BIAS = {"bias": Argument((_BF16, torch.float32))}
_OUT: Callable[..., Any] = lambda inputs: (  # noqa: E731
    (inputs["input"].shape[0], inputs["weight"].shape[0]),
    _BF16,
)
_WRONG: dict[str, tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = {
    "alpha str": ({"alpha": "1"}, TypeError, ("alpha", "str", "float32")),
    "alpha None": ({"alpha": None}, TypeError, ("alpha", "NoneType")),
    "alpha True": ({"alpha": True}, TypeError, ("alpha", "bool")),
    "alpha past fp32": ({"alpha": 1e39}, ValueError, ("alpha", "1e+39", "float32")),
    "alpha fp64": (
        {"alpha": torch.ones(1, dtype=torch.float64)},
        TypeError,
        ("alpha", "float64", "float32"),
    ),
    "alpha of two": ({"alpha": torch.ones(2)}, ValueError, ("alpha", "[2]", "one element")),
    "alpha [1,1]": ({"alpha": torch.ones(1, 1)}, ValueError, ("alpha", "[1, 1]", "[1]")),
    "alpha elsewhere": (
        {"alpha": torch.ones(1, device="meta")},
        ValueError,
        ("alpha", "meta", "one device"),
    ),
    "fast_accum int": ({"fast_accum": 1}, TypeError, ("fast_accum", "int", "bool")),
    "input 3-D": (
        {"input": torch.zeros(1, 17, 150).to(_E4M3)},
        ValueError,
        ("input has shape [1, 17, 150]", "[M,K]", "reshape(-1, K)"),
    ),
    "input 1-D": ({"input": torch.zeros(150).to(_E4M3)}, ValueError, ("input", "[150]", "[M,K]")),
    "input [M,K+1]": (
        {"input": torch.zeros(17, 151).to(_E4M3)},
        ValueError,
        ("weight has shape [33, 150]", "K = 151 of input"),
    ),
    "weight 1-D": ({"weight": torch.zeros(150).to(_E4M3)}, ValueError, ("weight", "[150]")),
    "weight 3-D": (
        {"weight": torch.zeros(1, 33, 150).to(_E4M3)},
        ValueError,
        ("weight has shape [1, 33, 150]", "[N,K]"),
    ),
    "weight [K,N]": (
        {"weight": torch.zeros(150, 33).to(_E4M3)},
        ValueError,
        ("weight", "[150, 33]", "K = 150", "weight.T"),
    ),
}
_VARIANT: dict[str, tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = {
    "variant 99": ({"variant": 99}, ValueError, ("variant is 99", "Legal on cpu", "0 (the disp")),
    "variant -1": ({"variant": -1}, ValueError, ("variant is -1", "Legal on cpu")),
    "variant float": ({"variant": 1.0}, TypeError, ("variant", "float", "int")),
    "variant True": ({"variant": True}, TypeError, ("variant", "bool", "int")),
}
_RESIDUAL: dict[str, tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = {
    "residual [M,N+1]": (
        {"residual": torch.zeros(17, 34, dtype=_BF16)},
        ValueError,
        ("residual", "[17, 34]", "[17, 33]", "[1,N]"),
    ),
    "residual [2,N]": (
        {"residual": torch.zeros(2, 33, dtype=_BF16)},
        ValueError,
        ("residual", "[2, 33]", "[17, 33]"),
    ),
    "residual [1]": (
        {"residual": torch.zeros(1, dtype=_BF16)},
        ValueError,
        ("residual", "[1]", "[17, 33]"),
    ),
}
_EMPTIES = {
    "no rows": {"m": 0},
    "no columns": {"n": 0},
    "no sum": {"k": 0},
    "nothing": {"m": 0, "n": 0, "k": 0},
}


def _sample(function: Callable[..., Any], variants: dict[str, Any], **options: Any) -> Sample:
    own = next(iter(variants.values()))
    always = {name: own[name] for name in ("bias", "residual") if name in own}
    return Sample(
        name=function.__name__,
        operator="fp8_linear",
        function=function,
        make=_make,
        variants=variants,
        empties={
            name: {**always, **sizes}
            for name, sizes in _EMPTIES.items()
            if name != "no sum" or function is not farro.fp8_linear_bias_gelu_bf16
        },
        empty_result=_empty_result,
        sizes=("n", "k"),
        required=_required,
        warm_shape=lambda inputs: (
            inputs["input"].shape[0],
            inputs["weight"].shape[0],
            inputs["input"].shape[1],
        ),
        **options,
    )


_F32 = torch.float32
SAMPLES = (
    _sample(
        farro.fp8_linear_bf16,
        {
            "alpha in a tensor": {},
            "fast, alpha a number": {"alpha": 0.25, "fast_accum": True, "n": 48, "k": 96},
            "long": {"m": 3, "n": 16, "k": 1040},
            "one": {"m": 1, "n": 1, "k": 1},
        },
        arguments=_ARGUMENTS,
        out=_OUT,
        wrong={**_WRONG, **_VARIANT},
    ),
    _sample(
        farro.fp8_linear_residual_bf16,
        {
            "residual": {"residual": "MN"},
            "a number": {"residual": "MN", "n": 48, "alpha": 2.0, "k": 96},
        },
        arguments={**_ARGUMENTS, "residual": Argument((_BF16,), rows=0, any_shape=True)},
        wrong={**_WRONG, **_VARIANT, **_RESIDUAL},
    ),
    _sample(
        farro.fp8_linear_residual_bf16,
        {
            "one row for all": {"residual": "N"},
            "2-D": {"residual": "1N", "n": 48, "k": 96, "alpha": 2.0},
        },
        arguments={**_ARGUMENTS, "residual": Argument((_BF16,), any_shape=True)},
        wrong={**_WRONG, **_VARIANT},
    ),
    _sample(
        farro.fp8_linear_bias_bf16,
        {"bf16": {"bias": _BF16}, "fp32": {"bias": _F32, "n": 48, "k": 96, "alpha": 0.125}},
        arguments={**_ARGUMENTS, **_BIAS},
        out=_OUT,
        wrong=_WRONG,
    ),
    _sample(
        _in_place(farro.fp8_linear_bias_residual_bf16),
        {
            "bias bf16": {"bias": _BF16, "residual": "MN"},
            "bias fp32": {"bias": _F32, "residual": "MN", "n": 48, "k": 96, "alpha": 1},
        },
        arguments={
            "input": Argument((_E4M3,), rows=0),
            "weight": Argument((_E4M3,)),
            **_BIAS,
            "residual": Argument(
                (_BF16,), rows=0, layouts=tuple(n for n in Argument(()).layouts if n != "windows")
            ),
        },
        wrong=_WRONG,
    ),
    _sample(
        farro.fp8_linear_bias_gelu_bf16,
        {"bf16": {"bias": _BF16}, "fp32": {"bias": _F32, "n": 48, "k": 96, "alpha": 0.125}},
        arguments={**_ARGUMENTS, **_BIAS},
        out=_OUT,
        wrong=_WRONG,
        compare=_within_a_step,
    ),
)
