"""fp8_linear: FP8 E4M3 linear layers with one scale, and their fused epilogues, to BF16."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ...arch import Arch, arch_of
from ...checks import check_size
from ...dispatch import select
from ...problem import Problem
from .calls import Call, described, linear, problem_of
from .checks import BIAS_DTYPES, check_variant_type
from .kernels import KERNELS, OPERATOR, PINNING

__all__ = [
    "KERNELS",
    "OPERATOR",
    "fp8_linear_bf16",
    "fp8_linear_bias_bf16",
    "fp8_linear_bias_gelu_bf16",
    "fp8_linear_bias_residual_bf16",
    "fp8_linear_residual_bf16",
    "select_fp8_linear_tile",
    "warm",
]


@described("none")
def fp8_linear_bf16(
    input: torch.Tensor,
    weight: torch.Tensor,
    alpha: float | torch.Tensor = 1.0,
    out: torch.Tensor | None = None,
    variant: int = 0,
    *,
    fast_accum: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """A linear layer of FP8 codes:

        out[m,n] = bf16(alpha * sum over k of input[m,k] * weight[n,k])

    The sum is accumulated in FP32, the epilogue computed in FP32 and rounded once. FP8 tensor cores
    keep about 14 significant bits while they accumulate; by default partial sums are promoted to
    FP32 at least every 512 of K. Against the float64 result of the same codes the relative
    Frobenius error is at most 4e-3, with `fast_accum` 1.5e-2 (docs/numerics.md).

    Args:
        input: float8_e4m3fn [M,K], row-major preferred; any positive strides are read in place.
        weight: float8_e4m3fn [N,K], as torch.nn.Linear keeps it; likewise.
        alpha: a number (rounded to FP32), or an fp32 tensor of one element ([] or [1]) on the same
            device, read when the kernel runs; normally input_scale * weight_scale.
        out: bf16 [M,N], any positive strides; written completely and returned. It must not share
            memory with an input.
        variant: 0 lets the dispatcher choose a tile; another value pins one, for diagnosis. The
            tiles of this device count from 1; a wrong one raises and names them.
        fast_accum: leave partial sums in the tensor core's accumulator over all of K.
        backend: "auto", "reference", "cpu", "triton" or "cuda"; an explicit one never falls back.

    Returns:
        bf16 [M,N]. M, N and K may be 0; a sum over nothing is zero.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: shapes that do not fit, a zero stride, mixed devices, an out that overlaps an
            input, a variant that does not exist here.
        UnsupportedError: the asked back end cannot run this here (see farro.explain).
        Nothing is written before all checks pass. No backward.
    """
    return linear("none", input, weight, alpha, None, None, out, variant, fast_accum, backend)


@described("residual")
def fp8_linear_residual_bf16(
    input: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    alpha: float | torch.Tensor = 1.0,
    variant: int = 0,
    *,
    fast_accum: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """A linear layer of FP8 codes and what it adds to, as a new tensor:

        out[m,n] = bf16(residual[m,n] + alpha * sum over k of input[m,k] * weight[n,k])

    Args:
        residual: bf16 [M,N], or [N] or [1,N] for every row; any positive strides; not written.

    The other arguments, the result and the errors are those of fp8_linear_bf16.
    """
    return linear(
        "residual", input, weight, alpha, None, residual, None, variant, fast_accum, backend
    )


@described("bias")
def fp8_linear_bias_bf16(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    alpha: float | torch.Tensor = 1.0,
    out: torch.Tensor | None = None,
    *,
    fast_accum: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """A linear layer of FP8 codes with a bias:

        out[m,n] = bf16(alpha * sum over k of input[m,k] * weight[n,k] + bias[n])

    Args:
        bias: bf16 or fp32 [N], added in FP32.

    The other arguments, the result and the errors are those of fp8_linear_bf16.
    """
    return linear("bias", input, weight, alpha, bias, None, out, 0, fast_accum, backend)


@described("bias_residual")
def fp8_linear_bias_residual_bf16(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor,
    alpha: float | torch.Tensor = 1.0,
    *,
    fast_accum: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """A linear layer of FP8 codes with a bias, added to the residual in place:

        residual[m,n] = bf16((alpha * sum over k of input[m,k] * weight[n,k] + bias[n])
                             + residual[m,n])

    Args:
        bias: bf16 or fp32 [N], added in FP32 before the residual.
        residual: bf16 [M,N], any positive strides; read, written completely and returned. It must
            not share memory with another argument.

    The other arguments and the errors are those of fp8_linear_bf16.
    """
    return linear(
        "bias_residual", input, weight, alpha, bias, residual, None, 0, fast_accum, backend
    )


@described("bias_gelu")
def fp8_linear_bias_gelu_bf16(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    alpha: float | torch.Tensor = 1.0,
    out: torch.Tensor | None = None,
    *,
    fast_accum: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """A linear layer of FP8 codes with a bias and GELU in its tanh form:

        v = alpha * sum over k of input[m,k] * weight[n,k] + bias[n]
        out[m,n] = bf16(0.5 * v * (1 + tanh(sqrt(2/pi) * (v + 0.044715 * v^3))))

    GELU is computed in FP32 (as torch.nn.functional.gelu(v, approximate="tanh")). Source: Hendrycks
    and Gimpel, "Gaussian Error Linear Units (GELUs)", arXiv 1606.08415.

    Args:
        bias: bf16 or fp32 [N], added in FP32.

    The other arguments, the result and the errors are those of fp8_linear_bf16.
    """
    return linear("bias_gelu", input, weight, alpha, bias, None, out, 0, fast_accum, backend)


def select_fp8_linear_tile(m: int, n: int, k: int, variant: int = 0) -> str:
    """The name of the tile that fp8_linear_bf16 would run for these sizes on this device.

    Pure: nothing runs, nothing is allocated. This device is torch's current GPU, or the CPU where
    there is none; operands count as contiguous. A name begins with its back end.

    Args:
        m, n, k: sizes of the problem, 0 or more.
        variant: as in fp8_linear_bf16.

    Raises:
        TypeError: an argument that is not an int.
        ValueError: a negative size, or a variant that does not exist here.
    """
    name = "select_fp8_linear_tile"
    for label, size in (("m", m), ("n", n), ("k", k)):
        check_size(name, label, size)
    check_variant_type(name, variant)
    problem = _plain_problem(m, n, k, variant, _current_arch())
    PINNING.check(name, problem, "auto")
    choice = select(OPERATOR, problem)
    return str(getattr(choice.config, "name", choice.kernel.backend))


def _current_arch() -> Arch:
    if torch.cuda.is_available():
        return arch_of(torch.device("cuda", torch.cuda.current_device()))
    return arch_of(torch.device("cpu"))


def _plain_problem(m: int, n: int, k: int, variant: int, arch: Arch) -> Problem:
    """fp8_linear_bf16 of contiguous operands, described without any."""
    input, weight = (
        torch.empty(size, k, dtype=torch.float8_e4m3fn, device="meta") for size in (m, n)
    )
    return problem_of(Call("none", input, weight, 1.0, variant=variant), arch)


def warm(device: torch.device, shape: tuple[int, ...]) -> list[Callable[[], Any]]:
    """Calls that compile what (M, N, K) needs: each function, kind of alpha and sum, bias dtype."""
    m, n, k = shape
    codes = functools.partial(torch.zeros, dtype=torch.float8_e4m3fn, device=device)

    def call(function: Callable[..., Any], tensor: bool, fast: bool, extra: dict[str, Any]) -> Any:
        alpha = torch.ones((), device=device) if tensor else 1.0
        made = {
            name: torch.zeros(*size, dtype=d, device=device) for name, (size, d) in extra.items()
        }
        return function(codes(m, k), codes(n, k), alpha=alpha, fast_accum=fast, **made)

    residual = {"residual": ((m, n), torch.bfloat16)}
    row = {"residual": ((n,), torch.bfloat16)}
    biases = [{"bias": ((n,), dtype)} for dtype in BIAS_DTYPES]
    kinds: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (fp8_linear_bf16, {}),
        (fp8_linear_residual_bf16, residual),
        (fp8_linear_residual_bf16, row),
        *((fp8_linear_bias_bf16, bias) for bias in biases),
        *((fp8_linear_bias_gelu_bf16, bias) for bias in biases),
        *((fp8_linear_bias_residual_bf16, {**bias, **residual}) for bias in biases),
    ]
    return [
        functools.partial(call, function, tensor, fast, extra)
        for function, extra in kinds
        for tensor in (False, True)
        for fast in (False, True)
    ]
