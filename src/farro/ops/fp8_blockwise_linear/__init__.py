"""fp8_blockwise_linear_bf16: FP8 x FP8 with one FP32 scale per 1x128 and 128x128 block."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..._ops import define, is_plain, ops
from ...arch import Arch
from ...checks import check_no_overlap
from ...dispatch import Kernel, Operator, explained_by, remember, select
from ...formats.fp8 import E4M3, blocks
from ...problem import Problem, kind_of
from . import cpu, sm90, triton
from .checks import BIAS_DTYPES, NAME, check, check_arguments

KERNELS = (
    Kernel(
        "fp8_blockwise_linear.cuda_sm90",
        "cuda",
        run="ops.fp8_blockwise_linear.sm90:run",
        bind="ops.fp8_blockwise_linear.sm90:bind",
        needs=frozenset({"wgmma"}),
        why_not=sm90.why_not,
        config=sm90.config,
        must_run=sm90.must_run,
        configs=sm90.candidates,
        yields=sm90.yields,
    ),
    Kernel(
        "fp8_blockwise_linear.cpu",
        "cpu",
        run="ops.fp8_blockwise_linear.cpu:run",
        needs=frozenset({"cpu"}),
        config=cpu.config,
        must_run=lambda problem: True,
    ),
    Kernel(
        "fp8_blockwise_linear.triton",
        "triton",
        run="ops.fp8_blockwise_linear.triton:run",
        bind="ops.fp8_blockwise_linear.triton:bind",
        needs=frozenset({"triton"}),
        why_not=triton.why_not,
        config=triton.config,
        must_run=triton.must_run,
        configs=triton.candidates,
    ),
    Kernel(
        "fp8_blockwise_linear.reference",
        "reference",
        run="ops.fp8_blockwise_linear.reference:run",
        must_run=lambda problem: True,
    ),
)
OPERATOR = Operator("fp8_blockwise_linear", KERNELS, functions=(NAME,))


def _problem(
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    out: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str | None,
    arch: Arch | None = None,
) -> Problem:
    if out is None:  # what the call will allocate
        shape = (input.shape[0], weight.shape[0])
        out = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    tensors = {
        "input": input,
        "weight": weight,
        "input_scale": input_scale,
        "weight_scale": weight_scale,
        "bias": bias,
        "out": out,
    }
    return Problem.of("fp8_blockwise_linear", tensors, {"activation": activation}, arch)


def _describe(
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    backend: str = "auto",
    arch: Arch | None = None,
) -> tuple[Operator, Problem, str]:
    tensors = (input, weight, input_scale, weight_scale, out, bias)
    check_arguments(*tensors, activation, backend)
    check(*tensors)
    return OPERATOR, _problem(*tensors, activation, arch), backend


_RUNNERS: dict[Any, Any] = {}


def _runner(
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    out: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str | None,
    backend: str,
) -> Any:
    """The kernel and configuration for a call, checked and chosen once for each kind of call."""
    tensors = (input, weight, input_scale, weight_scale, out, bias)
    key = (*map(kind_of, tensors), activation, backend)
    run = _RUNNERS.get(key)
    if run is None:
        check_arguments(*tensors, activation, backend)
        check(*tensors)
        run = select(OPERATOR, _problem(*tensors, activation), backend).run
        remember(_RUNNERS, key, run)
    return run


def _output(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    shape = (input.shape[0], weight.shape[0])
    return torch.empty(shape, dtype=torch.bfloat16, device=input.device)


def _implementation(
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    backend: str,
) -> torch.Tensor:
    run = _runner(input, weight, input_scale, weight_scale, None, bias, activation, backend)
    out = _output(input, weight)
    if out.numel():
        run(input, weight, input_scale, weight_scale, bias, out, activation is not None)
    return out


def _out_implementation(
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    backend: str,
) -> None:
    run = _runner(input, weight, input_scale, weight_scale, out, bias, activation, backend)
    if out.numel():
        inputs = {
            "input": input,
            "weight": weight,
            "input_scale": input_scale,
            "weight_scale": weight_scale,
            "bias": bias,
        }
        check_no_overlap(NAME, "out", out, **inputs)
        run(input, weight, input_scale, weight_scale, bias, out, activation is not None)
        torch.autograd.graph.increment_version(out)  # kernels that write by address do not


def _fake(
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    backend: str,
) -> torch.Tensor:
    tensors = (input, weight, input_scale, weight_scale, None, bias)
    check_arguments(*tensors, activation, backend)
    check(*tensors)
    return _output(input, weight)


def _out_fake(
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    backend: str,
) -> None:
    tensors = (input, weight, input_scale, weight_scale, out, bias)
    check_arguments(*tensors, activation, backend)
    check(*tensors)


define(
    "fp8_blockwise_linear(Tensor input, Tensor weight, Tensor input_scale, Tensor weight_scale, "
    "Tensor? bias, str? activation, str backend) -> Tensor",
    _implementation,
    _fake,
)
define(
    "fp8_blockwise_linear_out(Tensor input, Tensor weight, Tensor input_scale, "
    "Tensor weight_scale, Tensor(a!) out, Tensor? bias, str? activation, str backend) -> ()",
    _out_implementation,
    _out_fake,
    grad=False,
)


@explained_by(_describe)
def fp8_blockwise_linear_bf16(
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """FP8 x FP8 with FP32 scales, one per 1x128 block of input and 128x128 block of weight:

        y[m,n] = bf16(act(bias[n] + sum over b of
                      input_scale[m,b] * weight_scale[n // 128, b]
                      * sum over k in block b of input[m,k] * weight[n,k]))

    Block b holds k in [128 b, 128 b + 128). Its products are summed by themselves, from zero, in
    FP32 (tensor cores of Hopper keep about 14 bits within a block). Blocks are taken in order,
    total = fma(partial, fp32(input_scale * weight_scale), total) in FP32; a back end may round the
    product of partial and scales too. Then bias and activation in FP32, and one conversion. The
    reference sums in float64. docs/numerics.md has the errors that were measured.

    Args:
        input: float8_e4m3fn [M,K]; row-major preferred, any positive strides are read in place.
        weight: float8_e4m3fn [N,K]; as input.
        input_scale: fp32 [M, ceil(K/128)], as `farro.quantize_fp8_1x128` gives it; row-major,
            column-major or any positive strides, read in place. May be zero, negative or
            non-finite, as may weight_scale.
        weight_scale: fp32 [ceil(N/128), ceil(K/128)], as `farro.quantize_fp8_128x128` gives it.
        out: bfloat16 [M,N], any positive strides; written completely and returned. It must not
            share memory with an input.
        bias: bfloat16 or fp32 [N], added to the FP32 total.
        activation: None, or "gelu_tanh": GELU in its tanh form.
        backend: "auto", "reference", "cpu", "triton" or "cuda"; an explicit one never falls back.

    Returns:
        bfloat16 [M,N]. M, N and K may be 0 and need not be multiples of 128; a sum over nothing is
        zero, or the bias. A NaN code or scale spoils its own row (of input) or column (of weight).

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: shapes that do not fit, a zero stride, mixed devices, another activation, an
            out that overlaps an input.
        UnsupportedError: the asked back end cannot run this here (see farro.explain).
        Nothing is written before all checks pass. No backward.

    Source of the format: the block scales of DeepSeek-V3 (arXiv 2412.19437, section 3.3).
    """
    check_arguments(input, weight, input_scale, weight_scale, out, bias, activation, backend)
    plain = is_plain(input, weight, input_scale, weight_scale, out, bias)
    operands = (input, weight, input_scale, weight_scale)
    if out is None:
        call = _implementation if plain else ops.fp8_blockwise_linear
        result: torch.Tensor = call(*operands, bias, activation, backend)
        return result
    call_out = _out_implementation if plain else ops.fp8_blockwise_linear_out
    call_out(*operands, out, bias, activation, backend)
    return out


def warm(device: torch.device, shape: tuple[int, ...]) -> list[Callable[[], Any]]:
    """Calls that compile what (M, N, K) needs: each bias and activation, both scale layouts."""
    m, n, k = shape

    def call(column_major: bool, bias: torch.dtype | None, activation: str | None) -> torch.Tensor:
        scales = (blocks(k), m) if column_major else (m, blocks(k))
        input_scale = torch.zeros(scales, device=device)
        return fp8_blockwise_linear_bf16(
            torch.zeros(m, k, dtype=E4M3, device=device),
            torch.zeros(n, k, dtype=E4M3, device=device),
            input_scale.T if column_major else input_scale,
            torch.zeros(blocks(n), blocks(k), device=device),
            bias=None if bias is None else torch.zeros(n, dtype=bias, device=device),
            activation=activation,
        )

    return [
        functools.partial(call, column_major, bias, activation)
        for column_major in (False, True)
        for bias in (None, *BIAS_DTYPES)
        for activation in (None, "gelu_tanh")
    ]
