"""quant_act, silu_mul_quant_act and quant_rows: rows that stay where they are."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...checks import check_required
from ...dispatch import Kernel, Operator
from ...formats.nvfp4 import BLOCK
from ...functional import Functional
from . import cpu, sm90_configs, triton_configs
from .activation import ACTIVATIONS, LARGEST, SMALLEST, Gated, fp32
from .checks import (
    check_bool,
    check_contiguous,
    check_counts,
    check_gscale,
    check_number,
    check_rows,
)

KERNELS = (
    Kernel(
        "nvfp4_quantize.cuda_sm90",
        "cuda",
        run="ops.nvfp4_quantize.sm90:quantize",
        bind="ops.nvfp4_quantize.sm90:bind_quantize",
        needs=frozenset({"wgmma"}),
        why_not=sm90_configs.why_not,
        config=sm90_configs.config,
        must_run=sm90_configs.must_run,
        configs=sm90_configs.configs,
    ),
    Kernel(
        "nvfp4_quantize.cpu",
        "cpu",
        run="ops.nvfp4_quantize.cpu:quantize",
        needs=frozenset({"cpu"}),
        config=cpu.config,
        must_run=lambda problem: True,
    ),
    Kernel(
        "nvfp4_quantize.triton",
        "triton",
        run="ops.nvfp4_quantize.triton:quantize",
        bind="ops.nvfp4_quantize.triton:bind_quantize",
        needs=frozenset({"triton"}),
        why_not=triton_configs.why_not,
        config=triton_configs.config,
        must_run=triton_configs.must_run,
        configs=triton_configs.configs,
    ),
    Kernel(
        "nvfp4_quantize.reference",
        "reference",
        run="ops.nvfp4_quantize.reference:quantize",
        must_run=lambda problem: True,
    ),
)
OPERATOR = Operator(
    "nvfp4_quantize",
    KERNELS,
    functions=("quant_act", "silu_mul_quant_act", "quant_rows"),
    families=("nvfp4",),
    at_top=False,
)
_ACT, _GATED, _ROWS = OPERATOR.functions

Quantized = tuple[torch.Tensor, torch.Tensor]


def quantized(x: torch.Tensor, *shape: int) -> Quantized:
    """Places for the codes and scales of values of this shape."""
    *leading, size = shape
    codes = torch.empty((*leading, size // 2), dtype=torch.uint8, device=x.device)
    return codes, torch.empty((*leading, size // BLOCK), dtype=torch.uint8, device=x.device)


# --- quant_act -----------------------------------------------------------------------------------


def _check_act(x: torch.Tensor, gscale: torch.Tensor, expert_num_tokens: torch.Tensor) -> None:
    check_rows(_ACT, "x", x, "[E, max_n, K]")
    check_gscale(_ACT, gscale, x.shape[0])
    check_counts(_ACT, expert_num_tokens, x.shape[0])
    check_contiguous(_ACT, x=x, gscale=gscale, expert_num_tokens=expert_num_tokens)


_act = Functional(
    _ACT,
    OPERATOR,
    "nvfp4_quant_act(Tensor x, Tensor gscale, Tensor expert_num_tokens) -> (Tensor, Tensor)",
    check_types=lambda x, gscale, expert_num_tokens: check_required(
        _ACT, x=x, gscale=gscale, expert_num_tokens=expert_num_tokens
    ),
    check=_check_act,
    outputs=lambda x, *_: quantized(x, *x.shape),
    problem=lambda x, gscale, counts: (
        {"x": x, "gscale": gscale, "expert_num_tokens": counts},
        {"activation": None},
    ),
    launch=lambda run, x, gscale, counts, *made: run(x, gscale, counts, None, *made),
)


@_act.explained
def quant_act(
    x: torch.Tensor,
    gscale: torch.Tensor,
    expert_num_tokens: torch.Tensor,
    features: int,
    *,
    backend: str = "auto",
) -> Quantized:
    """Quantize the rows of each expert to NVFP4 with one UE4M3 scale for 32 K.

    For each block of 32 along K of a used row, in FP32 with IEEE rounding:

        s = ue4m3(max|x| / 6 * gscale) clamped to [2^-9, 448], code = e2m1(x * (gscale / s))

    so that x is about code * s / gscale; the scale of a block of zeros is ue4m3(gscale). A block
    that holds NaN or Inf, or whose gscale is one, has the scale 0x7f (NaN) and codes 0.

    Args:
        x: bf16 [E, max_n, K], contiguous, K a multiple of 32. Rows at or past an expert's count
            are never read.
        gscale: fp32 [E] or [1].
        expert_num_tokens: int32 [E], on x's device, clamped to [0, max_n].
        features: out-features of the product that will read the result. A hint: never checked, and
            it changes no byte.
        backend: "auto", "reference", "cpu", "triton" or "cuda".

    Returns:
        (b_act uint8 [E, max_n, K/2], two codes a byte, lower K in the low nibble; sfb uint8
        [E, max_n, K/32]), contiguous. In rows at or past the count, codes are unspecified and
        scales 0x38.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: shapes that do not fit, not contiguous, mixed devices.
        UnsupportedError: the asked back end cannot run here.
    """
    result: Quantized = _act(x, gscale, expert_num_tokens, backend=backend)
    return result


# --- silu_mul_quant_act --------------------------------------------------------------------------


def _check_gated_types(
    x2: Any,
    gscale: Any,
    expert_num_tokens: Any,
    interleaved: Any,
    activation: Any,
    beta: Any,
    linear_beta: Any,
) -> None:
    check_required(_GATED, x2=x2, gscale=gscale, expert_num_tokens=expert_num_tokens)
    check_activation(_GATED, interleaved, activation, beta, linear_beta)


def check_activation(
    name: str, interleaved: Any, activation: Any, beta: Any, linear_beta: Any
) -> None:
    check_bool(name, "interleaved", interleaved)
    if not isinstance(activation, str):
        raise TypeError(f"{name}: activation must be a str, got {type(activation).__name__}")
    if activation not in ACTIVATIONS:
        needed = " or ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"{name}: activation is {activation!r}; needed {needed}")
    check_number(name, "beta", beta)
    check_number(name, "linear_beta", linear_beta)
    # compared rather than converted: torch.compile traces this
    if not SMALLEST <= beta <= LARGEST:
        raise ValueError(f"{name}: beta is {beta}; needed a positive finite number (in FP32)")
    if linear_beta > LARGEST or 0 < linear_beta < SMALLEST:
        raise ValueError(f"{name}: linear_beta is {linear_beta}; needed a finite number (in FP32)")


def _check_gated(
    x2: torch.Tensor,
    gscale: torch.Tensor,
    expert_num_tokens: torch.Tensor,
    interleaved: bool,
    activation: str,
    beta: float,
    linear_beta: float,
) -> None:
    check_activation(_GATED, interleaved, activation, beta, linear_beta)
    check_rows(_GATED, "x2", x2, "[E, max_n, 2N]", halves=2)
    check_gscale(_GATED, gscale, x2.shape[0])
    check_counts(_GATED, expert_num_tokens, x2.shape[0])
    check_contiguous(_GATED, x2=x2, gscale=gscale, expert_num_tokens=expert_num_tokens)


@functools.lru_cache(maxsize=256)
def gating(interleaved: bool, activation: str, beta: float, linear_beta: float) -> Gated:
    """Numbers that change nothing are dropped, so that they compile nothing anew."""
    if activation == "silu":
        return Gated(interleaved, activation, 1.0, -1.0)
    linear = fp32(linear_beta)
    return Gated(interleaved, activation, fp32(beta), linear if linear > 0 else -1.0)


_gated = Functional(
    _GATED,
    OPERATOR,
    "nvfp4_silu_mul_quant_act(Tensor x2, Tensor gscale, Tensor expert_num_tokens, "
    "bool interleaved, str activation, float beta, float linear_beta) -> (Tensor, Tensor)",
    check_types=_check_gated_types,
    check=_check_gated,
    outputs=lambda x2, *_: quantized(x2, *x2.shape[:-1], x2.shape[-1] // 2),
    problem=lambda x2, gscale, counts, *how: (
        {"x2": x2, "gscale": gscale, "expert_num_tokens": counts},
        {"activation": gating(*how)},
    ),
    launch=lambda run, x2, gscale, counts, interleaved, activation, beta, linear, *made: run(
        x2, gscale, counts, gating(interleaved, activation, beta, linear), *made
    ),
)


@_gated.explained
def silu_mul_quant_act(
    x2: torch.Tensor,
    gscale: torch.Tensor,
    expert_num_tokens: torch.Tensor,
    features: int,
    interleaved: bool = False,
    activation: str = "silu",
    beta: float = 1.0,
    linear_beta: float = -1.0,
    *,
    backend: str = "auto",
) -> Quantized:
    """A gated activation of [gate | up], then quant_act, in one launch.

    "silu": y = bf16(bf16(silu(gate)) * up), the chain of BF16 operations, with
    silu(g) = g / (1 + exp(-g)) correctly rounded to FP32 before it is rounded to BF16. "situ":
    y = bf16(beta * tanh(gate/beta) * sigmoid(gate) * u), rounded once, with
    u = linear_beta * tanh(up/linear_beta) where linear_beta > 0, else up. The bytes are those of
    quant_act of y.

    Args:
        x2: bf16 [E, max_n, 2N], contiguous, N a multiple of 32: gate in the first N columns, up in
            the last. Rows at or past an expert's count are never read.
        gscale, expert_num_tokens, features: as of quant_act.
        interleaved: columns are in the order of `farro.nvfp4.interleave_gate_up_rows(N)`.
        activation: "silu" or "situ".
        beta, linear_beta: of "situ", rounded to FP32; beta is positive.
        backend: "auto", "reference", "cpu", "triton" or "cuda".

    Returns:
        (b_act uint8 [E, max_n, N/2], sfb uint8 [E, max_n, N/32]), as quant_act gives them.

    Raises what quant_act raises, and ValueError for another activation or beta.
    """
    given = (x2, gscale, expert_num_tokens, interleaved, activation, beta, linear_beta)
    result: Quantized = _gated(*given, backend=backend)
    return result


# --- quant_rows ----------------------------------------------------------------------------------


def _check_quant_rows(x: torch.Tensor, gscale: torch.Tensor) -> None:
    check_rows(_ROWS, "x", x, "[T, K]")
    check_gscale(_ROWS, gscale, None)
    check_contiguous(_ROWS, x=x, gscale=gscale)


_rows = Functional(
    _ROWS,
    OPERATOR,
    "nvfp4_quant_rows(Tensor x, Tensor gscale) -> (Tensor, Tensor)",
    check_types=lambda x, gscale: check_required(_ROWS, x=x, gscale=gscale),
    check=_check_quant_rows,
    outputs=lambda x, gscale: quantized(x, *x.shape),
    problem=lambda x, gscale: (
        {"x": x, "gscale": gscale, "expert_num_tokens": None},
        {"activation": None},
    ),
    launch=lambda run, x, gscale, codes, scales: run(
        x[None], gscale.view(1), None, None, codes[None], scales[None]
    ),
)


@_rows.explained
def quant_rows(x: torch.Tensor, gscale: torch.Tensor, *, backend: str = "auto") -> Quantized:
    """Quantize tokens to NVFP4 with one UE4M3 scale for 32 K, as quant_act does its used rows.

    With scatter_fp4_planned it quantizes each token once, whatever the number of its experts.

    Args:
        x: bf16 [T, K], contiguous, K a multiple of 32.
        gscale: fp32 [] or [1].
        backend: "auto", "reference", "cpu", "triton" or "cuda".

    Returns:
        (q uint8 [T, K/2], sf uint8 [T, K/32]), contiguous and completely written.

    Raises what quant_act raises.
    """
    result: Quantized = _rows(x, gscale, backend=backend)
    return result
