"""fp8_blockwise_swiglu_quantize_fp8: gate and up projection, SwiGLU and quantizer as one."""

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
from .checks import NAME, check, check_arguments

KERNELS = (
    Kernel(
        "fp8_swiglu_quantize.cuda_sm90",
        "cuda",
        run="ops.fp8_swiglu_quantize.sm90:run",
        bind="ops.fp8_swiglu_quantize.sm90:bind",
        needs=frozenset({"wgmma"}),
        why_not=sm90.why_not,
        config=sm90.config,
        must_run=sm90.must_run,
        configs=sm90.candidates,
    ),
    Kernel(
        "fp8_swiglu_quantize.cpu",
        "cpu",
        run="ops.fp8_swiglu_quantize.cpu:run",
        needs=frozenset({"cpu"}),
        config=cpu.config,
        must_run=lambda problem: True,
    ),
    Kernel(
        "fp8_swiglu_quantize.triton",
        "triton",
        run="ops.fp8_swiglu_quantize.triton:run",
        bind="ops.fp8_swiglu_quantize.triton:bind",
        needs=frozenset({"triton"}),
        why_not=triton.why_not,
        config=triton.config,
        must_run=triton.must_run,
        configs=triton.candidates,
    ),
    Kernel(
        "fp8_swiglu_quantize.reference",
        "reference",
        run="ops.fp8_swiglu_quantize.reference:run",
        must_run=lambda problem: True,
    ),
)
OPERATOR = Operator("fp8_swiglu_quantize", KERNELS, functions=(NAME,))


def _problem(
    input: torch.Tensor,
    gate_up_weight: torch.Tensor,
    input_scale: torch.Tensor,
    gate_up_weight_scale: torch.Tensor,
    output: torch.Tensor | None,
    output_scale: torch.Tensor | None,
    arch: Arch | None = None,
) -> Problem:
    made = _outputs(input, gate_up_weight, torch.device("meta"))  # what the call will allocate
    tensors = {
        "input": input,
        "gate_up_weight": gate_up_weight,
        "input_scale": input_scale,
        "gate_up_weight_scale": gate_up_weight_scale,
        "output": made[0] if output is None else output,
        "output_scale": made[1] if output_scale is None else output_scale,
    }
    return Problem.of("fp8_swiglu_quantize", tensors, {}, arch)


def _describe(
    input: torch.Tensor,
    gate_up_weight: torch.Tensor,
    input_scale: torch.Tensor,
    gate_up_weight_scale: torch.Tensor,
    *,
    output: torch.Tensor | None = None,
    output_scale: torch.Tensor | None = None,
    backend: str = "auto",
    arch: Arch | None = None,
) -> tuple[Operator, Problem, str]:
    tensors = (input, gate_up_weight, input_scale, gate_up_weight_scale, output, output_scale)
    check_arguments(*tensors, backend)
    check(*tensors)
    return OPERATOR, _problem(*tensors, arch), backend


_RUNNERS: dict[Any, Any] = {}


def _runner(
    input: torch.Tensor,
    gate_up_weight: torch.Tensor,
    input_scale: torch.Tensor,
    gate_up_weight_scale: torch.Tensor,
    output: torch.Tensor | None,
    output_scale: torch.Tensor | None,
    backend: str,
) -> Any:
    """The kernel and configuration for a call, checked and chosen once for each kind of call."""
    tensors = (input, gate_up_weight, input_scale, gate_up_weight_scale, output, output_scale)
    key = (*map(kind_of, tensors), backend)
    run = _RUNNERS.get(key)
    if run is None:
        check_arguments(*tensors, backend)
        check(*tensors)
        run = select(OPERATOR, _problem(*tensors), backend).run
        remember(_RUNNERS, key, run)
    return run


def _outputs(
    input: torch.Tensor, gate_up_weight: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    m, n = input.shape[0], gate_up_weight.shape[0] // 2
    scale = torch.empty((m, blocks(n)), dtype=torch.float32, device=device)
    return torch.empty((m, n), dtype=E4M3, device=device), scale


def _implementation(
    input: torch.Tensor,
    gate_up_weight: torch.Tensor,
    input_scale: torch.Tensor,
    gate_up_weight_scale: torch.Tensor,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    operands = (input, gate_up_weight, input_scale, gate_up_weight_scale)
    run = _runner(*operands, None, None, backend)
    output, output_scale = _outputs(input, gate_up_weight, input.device)
    if output.numel():
        run(*operands, output, output_scale)
    return output, output_scale


def _out_implementation(
    input: torch.Tensor,
    gate_up_weight: torch.Tensor,
    input_scale: torch.Tensor,
    gate_up_weight_scale: torch.Tensor,
    output: torch.Tensor,
    output_scale: torch.Tensor,
    backend: str,
) -> None:
    operands = (input, gate_up_weight, input_scale, gate_up_weight_scale)
    run = _runner(*operands, output, output_scale, backend)
    if output.numel():
        names = ("input", "gate_up_weight", "input_scale", "gate_up_weight_scale")
        inputs = dict(zip(names, operands))
        check_no_overlap(NAME, "output", output, **inputs, output_scale=output_scale)
        check_no_overlap(NAME, "output_scale", output_scale, **inputs)
        run(*operands, output, output_scale)
        for written in (output, output_scale):  # kernels that write by address do not
            torch.autograd.graph.increment_version(written)


def _fake(
    input: torch.Tensor,
    gate_up_weight: torch.Tensor,
    input_scale: torch.Tensor,
    gate_up_weight_scale: torch.Tensor,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = (input, gate_up_weight, input_scale, gate_up_weight_scale, None, None)
    check_arguments(*tensors, backend)
    check(*tensors)
    return _outputs(input, gate_up_weight, input.device)


def _out_fake(
    input: torch.Tensor,
    gate_up_weight: torch.Tensor,
    input_scale: torch.Tensor,
    gate_up_weight_scale: torch.Tensor,
    output: torch.Tensor,
    output_scale: torch.Tensor,
    backend: str,
) -> None:
    tensors = (input, gate_up_weight, input_scale, gate_up_weight_scale, output, output_scale)
    check_arguments(*tensors, backend)
    check(*tensors)


_OPERANDS = "Tensor input, Tensor gate_up_weight, Tensor input_scale, Tensor gate_up_weight_scale"
define(f"fp8_swiglu_quantize({_OPERANDS}, str backend) -> (Tensor, Tensor)", _implementation, _fake)
define(
    f"fp8_swiglu_quantize_out({_OPERANDS}, Tensor(a!) output, Tensor(b!) output_scale, "
    "str backend) -> ()",
    _out_implementation,
    _out_fake,
    grad=False,
)


@explained_by(_describe)
def fp8_blockwise_swiglu_quantize_fp8(
    input: torch.Tensor,
    gate_up_weight: torch.Tensor,
    input_scale: torch.Tensor,
    gate_up_weight_scale: torch.Tensor,
    *,
    output: torch.Tensor | None = None,
    output_scale: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first half of a gated MLP on FP8: two products, SwiGLU and the quantizer, in one call.

        gate, up = the products of `farro.fp8_blockwise_linear_bf16`, kept in FP32
        v        = bf16(bf16(silu(gate)) * up)
        scale    = max(max|v| / 448, 1e-12)           for each row and 128 columns
        q        = e4m3(clamp(v * (1 / scale), +-448))

    silu(x) = x / (1 + exp(-x)), in FP32. A group of v that holds NaN or Inf keeps that as its
    scale and gets NaN codes. Products in FP32 are summed in an order of each back end's own, so
    a v next to a rounding boundary may differ by one step of BF16 between them, and its code by
    one step of E4M3. The result is the input of `farro.fp8_blockwise_linear_bf16`.

    Args:
        input: float8_e4m3fn [M,K]; row-major preferred, any positive strides are read in place.
        gate_up_weight: float8_e4m3fn [2N,K]: N rows of the gate projection, then N of the up
            projection.
        input_scale: fp32 [M, ceil(K/128)]; row-major, column-major or any positive strides.
        gate_up_weight_scale: fp32 [2 * ceil(N/128), ceil(K/128)]: the scales of the gate's blocks,
            then those of the up projection's (each half is quantized by itself).
        output: float8_e4m3fn [M,N], any positive strides; written completely and returned.
        output_scale: fp32 [M, ceil(N/128)], likewise: row-major, column-major or any strides.
            Neither may share memory with an input or with the other.
        backend: "auto", "reference", "cpu", "triton" or "cuda"; an explicit one never falls back.

    Returns:
        (q, scale): `output` and `output_scale`, fresh and contiguous where they were not given.
        M, N and K may be 0 and need not be multiples of 128; without a K all codes are 0.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: shapes that do not fit, an odd number of weight rows, a zero stride, mixed
            devices, outputs that overlap each other or an input.
        UnsupportedError: the asked back end cannot run this here (see farro.explain).
        Nothing is written before all checks pass. No backward.
    """
    tensors = (input, gate_up_weight, input_scale, gate_up_weight_scale, output, output_scale)
    check_arguments(*tensors, backend)
    plain = is_plain(*tensors)
    if output is None and output_scale is None:
        call = _implementation if plain else ops.fp8_swiglu_quantize
        result: tuple[torch.Tensor, torch.Tensor] = call(*tensors[:4], backend)
        return result
    if output is None or output_scale is None:
        check(*tensors)  # before a shape of a wrong argument is taken for that of the other output
        made = _outputs(input, gate_up_weight, input.device)
        output = made[0] if output is None else output
        output_scale = made[1] if output_scale is None else output_scale
    call_out = _out_implementation if plain else ops.fp8_swiglu_quantize_out
    call_out(*tensors[:4], output, output_scale, backend)
    return output, output_scale


def warm(device: torch.device, shape: tuple[int, ...]) -> list[Callable[[], Any]]:
    """Calls that compile what (M, N, K) needs, N columns of the result: each layout of scales."""
    m, n, k = shape

    def scales(rows: int, columns: int, column_major: bool) -> torch.Tensor:
        if column_major:
            return torch.zeros(columns, rows, device=device).T
        return torch.zeros(rows, columns, device=device)

    def call(read: bool, written: bool) -> Any:
        return fp8_blockwise_swiglu_quantize_fp8(
            torch.zeros(m, k, dtype=E4M3, device=device),
            torch.zeros(2 * n, k, dtype=E4M3, device=device),
            scales(m, blocks(k), read),
            torch.zeros(2 * blocks(n), blocks(k), device=device),
            output_scale=scales(m, blocks(n), written),
        )

    return [
        functools.partial(call, read, written)
        for read in (False, True)
        for written in (False, True)
    ]
