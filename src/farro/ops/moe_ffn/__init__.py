"""moe_ffn: the experts of a mixture in INT8, from token rows and routes to the weighted sum."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from ...dispatch import Kernel, Operator
from ...functional import Functional
from . import cpu, sm90_configs, triton
from .checks import ARGUMENTS, NAME, check, check_types
from .triton_configs import best_pairs
from .warm import calls

# A kernel's run: (config, x, scale_x, w_gate_up, scale_gate_up, w_down, scale_down, topk_ids,
# topk_weights, out, group_size, interleaved); out [T,H] is contiguous and not empty.
KERNELS = (
    Kernel(
        "moe_ffn.cuda_sm90",
        "cuda",
        run="ops.moe_ffn.sm90:run",
        bind="ops.moe_ffn.sm90:bind",
        compile="ops.moe_ffn.sm90:compile_products",
        needs=frozenset({"wgmma"}),
        why_not=sm90_configs.why_not,
        config=sm90_configs.config,
        must_run=sm90_configs.must_run,
        configs=sm90_configs.configs,
        further=best_pairs,
    ),
    Kernel(
        "moe_ffn.cpu",
        "cpu",
        run="ops.moe_ffn.cpu:run",
        needs=frozenset({"cpu"}),
        config=cpu.config,
        must_run=lambda problem: True,
    ),
    Kernel(
        "moe_ffn.triton",
        "triton",
        run="ops.moe_ffn.triton:run",
        bind="ops.moe_ffn.triton:bind",
        needs=frozenset({"triton"}),
        why_not=triton.why_not,
        config=triton.config,
        must_run=triton.must_run,
        configs=triton.configs,
        further=best_pairs,
    ),
    Kernel(
        "moe_ffn.reference",
        "reference",
        run="ops.moe_ffn.reference:run",
        must_run=lambda problem: True,
    ),
)
OPERATOR = Operator(NAME, KERNELS, functions=(NAME,), families=("int8", "moe"))


def _out(*given: Any) -> tuple[torch.Tensor]:
    x, output_dtype = given[0], given[10]
    return (torch.empty(x.shape, dtype=output_dtype, device=x.device),)


def _problem(
    *given: Any,
) -> tuple[dict[str, torch.Tensor | None], dict[str, Hashable]]:
    params = {
        "group_size": given[8],
        "interleaved": given[9] == "interleaved",
        "output_dtype": given[10],
    }
    return dict(zip(ARGUMENTS, given)), params


def _launch(run: Callable[..., None], *given: Any) -> None:
    *tensors, group_size, gate_up_layout, _, out = given
    run(*tensors, out, group_size, gate_up_layout == "interleaved")


_moe_ffn = Functional(
    NAME,
    OPERATOR,
    "moe_ffn(Tensor x_int8, Tensor scale_x, Tensor w_gate_up, Tensor scale_gate_up, "
    "Tensor w_down, Tensor scale_down, Tensor topk_ids, Tensor topk_weights, int group_size, "
    "str gate_up_layout, ScalarType output_dtype) -> Tensor",
    check_types=check_types,
    check=check,
    outputs=_out,
    problem=_problem,
    launch=_launch,
)


@_moe_ffn.explained
def moe_ffn(
    x_int8: torch.Tensor,
    scale_x: torch.Tensor,
    w_gate_up: torch.Tensor,
    scale_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    scale_down: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    group_size: int = 256,
    gate_up_layout: str = "concatenated",
    output_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> torch.Tensor:
    """The experts of a mixture on INT8 rows. For every token t and slot j, of expert topk_ids[t,j]:

        gate, up = bf16(x[t] @ w_gate_up[expert])             as farro.int8_gemm computes it
        h        = silu(gate) * up                            in FP32
        q, s     = farro.quantize_int8_groups(h, G)           groups along I
        y[t,j]   = bf16(q @ w_down[expert])                   as farro.int8_gemm computes it
        out[t]   = sum over j of topk_weights[t,j] * y[t,j]   in FP32, in slot order, from +0

    and one conversion of out to output_dtype. silu(x) = x / (1 + exp(-x)) in FP32: its last bits
    are the back end's ("cpu" and "reference" round it correctly), all else is the same everywhere.
    A token's result never depends on the other tokens.

    Args:
        x_int8: int8 [T,H], as quantize_int8_groups gives it; each row is read where it lies, once
            for every expert that it goes to.
        scale_x: fp32 [T, ceil(H/G)].
        w_gate_up: int8, logical [E,H,2I]: `rows.transpose(1, 2)` of rows [E,2I,H] preferred.
        scale_gate_up: fp32 [E, ceil(H/G), 2I].
        w_down: int8, logical [E,I,H]: `rows.transpose(1, 2)` of rows [E,H,I] preferred.
        scale_down: fp32 [E, ceil(I/G), H].
        topk_ids: int32 or int64 [T, topk]. A route to an id outside [0, E) is dropped, on every
            back end, whatever its weight. An expert may come twice in a token, or never.
        topk_weights: fp32 [T, topk].
        group_size: G, 32, 64, 128 or 256; neither H nor I need be a multiple.
        gate_up_layout: columns of w_gate_up and of scale_gate_up are [gate | up], "concatenated",
            or [g0, u0, g1, u1, ...], "interleaved".
        output_dtype: bfloat16, float16 or float32.
        backend: "auto", "reference", "cpu", "triton" or "cuda"; an explicit one never falls back.
        All tensors with any positive strides. T, topk, H, I and E may be 0; E is at most 4096.

    Returns:
        [T,H] in output_dtype, contiguous; zeros where no route was kept.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: shapes that do not fit, a zero stride, mixed devices, another group_size or
            gate_up_layout.
        UnsupportedError: the asked back end cannot run this here (see farro.explain).
        Ids are never checked (that would synchronize): see `farro.moe.check_routing`. No backward.
    """
    result: torch.Tensor = _moe_ffn(
        *(x_int8, scale_x, w_gate_up, scale_gate_up, w_down, scale_down, topk_ids, topk_weights),
        *(group_size, gate_up_layout, output_dtype),
        backend=backend,
    )
    return result


def warm(device: torch.device, shape: tuple[int, ...]) -> list[Callable[[], Any]]:
    """Calls that compile what M tokens need: N intermediate features, K features of a token."""
    return calls(OPERATOR, device, shape)
