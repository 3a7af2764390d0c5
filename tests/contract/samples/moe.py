"""Samples of mixtures: plans, the sum over a token's rows, the experts in INT8."""

from __future__ import annotations

from typing import Any

import torch

import farro
from farro.arch import interpreting
from farro.testing.moe_ffn import MoeCase, operands
from farro.testing.moe_route import finalize

from .sample import Argument, Sample


def _plan(
    generator: torch.Generator,
    m: int = 17,
    topk: int = 3,
    experts: int = 5,
    cap: int | None = 9,
    first: int = 2,
    dtype: torch.dtype = torch.int32,
    exact: bool = True,
) -> dict[str, Any]:
    """Ids of this rank, of its neighbours and of nobody; more routes to some experts than fit."""
    ids = torch.randint(-1, first + experts + 2, (m, topk), generator=generator)
    ids = torch.where(torch.rand(m, topk, generator=generator) < 0.3, first + 1, ids)
    given = {"topk_ids": ids.to(dtype), "first_expert": first, "num_local_experts": experts}
    return given if cap is None else {**given, "cap": cap}


def _ragged(generator: torch.Generator, **options: Any) -> dict[str, Any]:
    return _plan(generator, **{**options, "cap": None})


def _empty_plan(inputs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Nothing is kept: no counts, and -1 everywhere."""
    ids, experts, cap = inputs["topk_ids"], inputs["num_local_experts"], inputs.get("cap")
    rows = ids.numel() if cap is None else experts * cap
    counts = torch.zeros(experts + (cap is None), dtype=torch.int32)
    return counts, *(
        torch.full(shape, -1, dtype=torch.int32) for shape in (tuple(ids.shape), (rows,), (rows,))
    )


_WRONG_PLAN = {
    "one dimension": (
        {"topk_ids": torch.zeros(6, dtype=torch.int32)},
        ValueError,
        ("topk_ids", "[6]", "[T, topk]", "reshape"),
    ),
    "first_expert -1": ({"first_expert": -1}, ValueError, ("first_expert", "-1", "0 or more")),
    "first_expert 1.0": ({"first_expert": 1.0}, TypeError, ("first_expert", "float")),
    "first_expert 2^31": ({"first_expert": 1 << 31}, ValueError, ("first_expert", "2^31")),
    "no experts": ({"num_local_experts": 0}, ValueError, ("num_local_experts", "0", "4096")),
    "4097 experts": ({"num_local_experts": 4097}, ValueError, ("num_local_experts", "4097")),
    "experts True": ({"num_local_experts": True}, TypeError, ("num_local_experts", "bool")),
}
_PLAN_ARGUMENTS = {"topk_ids": Argument((torch.int32, torch.int64), any_shape=True)}


def _tokens(inputs: dict[str, Any]) -> tuple[int, int, int]:
    return inputs["topk_ids"].shape[0], 1, 1


DISPATCH_PLAN = Sample(
    name="dispatch_plan",
    operator="moe_route",
    function=farro.dispatch_plan,
    make=_plan,
    arguments=_PLAN_ARGUMENTS,
    variants={
        "over capacity": {"topk": 2},
        "int64, room": {"dtype": torch.int64, "cap": 100, "m": 300, "topk": 8, "experts": 13},
        "one": {"m": 1, "topk": 1, "experts": 1, "cap": 1, "first": 0},
    },
    empties={
        "no tokens": {"m": 0},
        "no routes": {"topk": 0},
        "no rows": {"cap": 0},
        "nothing": {"m": 0, "topk": 0, "cap": 0},
    },
    empty_result=_empty_plan,
    sizes=("topk", "cap"),
    wrong={
        **_WRONG_PLAN,
        "cap None": ({"cap": None}, TypeError, ("cap", "NoneType")),
        "cap -1": ({"cap": -1}, ValueError, ("cap", "-1")),
        "too many rows": ({"cap": 1 << 30}, ValueError, ("cap", "2^31", "int32")),
    },
    required=lambda backend, problem: backend in ("reference", "cpu", "triton"),
    records_grad=False,
    warm_shape=_tokens,
)

DISPATCH_PLAN_RAGGED = Sample(
    name="dispatch_plan_ragged",
    operator="moe_route",
    function=farro.dispatch_plan_ragged,
    make=_ragged,
    arguments=_PLAN_ARGUMENTS,
    variants={
        "int32": {"topk": 2},
        "int64": {"dtype": torch.int64, "m": 300, "topk": 8, "experts": 13},
        "one": {"m": 1, "topk": 1, "experts": 1, "first": 0},
    },
    empties={"no tokens": {"m": 0}, "no routes": {"topk": 0}, "nothing": {"m": 0, "topk": 0}},
    empty_result=_empty_plan,
    sizes=("topk",),
    wrong=_WRONG_PLAN,
    required=lambda backend, problem: backend in ("reference", "cpu", "triton"),
    records_grad=False,
    warm_shape=_tokens,
)


def _finalize(
    generator: torch.Generator,
    m: int = 17,
    topk: int = 3,
    experts: int = 4,
    cap: int = 6,
    k: int = 150,
    flat: bool = False,
    weights: bool = True,
    exact: bool = True,
) -> dict[str, Any]:
    """Routes of which each token keeps at least one, if there are any rows."""
    rows = experts * cap
    fused = torch.randn(experts, cap, k, generator=generator)
    weight = torch.rand(m, topk, generator=generator)
    if interpreting():  # nothing that its BF16 would truncate
        fused = torch.randint(-4, 5, fused.shape, generator=generator).float()
        weight = torch.exp2(torch.randint(-1, 2, weight.shape, generator=generator).float())
    dest = torch.randint(-2, rows + 2, (m, topk), generator=generator)
    if topk and rows:
        dest[:, -1] = torch.randint(rows, (m,), generator=generator)
    fused = fused.bfloat16()
    return {
        "fused": fused.flatten(0, 1) if flat else fused,
        "route_dest": dest.int(),
        "topk_weights": weight if weights else None,
    }


MOE_FINALIZE = Sample(
    name="moe_finalize",
    operator="moe_finalize",
    function=finalize,
    make=_finalize,
    arguments={
        "fused": Argument((torch.bfloat16,), any_shape=True),
        "route_dest": Argument((torch.int32,), rows=0),
        "topk_weights": Argument((torch.float32,), rows=0, required=False),
    },
    variants={
        "padded": {"topk": 2},
        "ragged": {"flat": True, "topk": 9, "k": 64},
        "one": {"m": 1, "topk": 1, "experts": 1, "cap": 1, "k": 1},
    },
    empties={
        "no tokens": {"m": 0},
        "no columns": {"k": 0},
        "no routes": {"topk": 0},
        "no rows": {"cap": 0},
        "no experts": {"experts": 0, "flat": True},
    },
    empty_result=lambda inputs: (
        torch.zeros(
            *(inputs["route_dest"].shape[0], inputs["fused"].shape[-1]), dtype=torch.bfloat16
        ),
    ),
    sizes=("k",),
    out=lambda inputs: (
        (inputs["route_dest"].shape[0], inputs["fused"].shape[-1]),
        torch.bfloat16,
    ),
    wrong={
        "fused [K]": (
            {"fused": torch.zeros(150, dtype=torch.bfloat16)},
            ValueError,
            ("fused", "[150]", "[E, cap, K]", "[R, K]"),
        ),
        "fused 4-D": (
            {"fused": torch.zeros(1, 4, 6, 150, dtype=torch.bfloat16)},
            ValueError,
            ("fused", "[1, 4, 6, 150]", "[E, cap, K]"),
        ),
    },
    required=lambda backend, problem: backend in ("reference", "cpu", "triton"),
    records_grad=False,
    warm_shape=lambda inputs: (inputs["route_dest"].shape[0], 1, inputs["fused"].shape[-1]),
)

# --- moe_ffn -------------------------------------------------------------------------------------


def _moe_ffn(
    generator: torch.Generator,
    m: int = 17,
    n: int = 70,
    k: int = 100,
    topk: int = 2,
    experts: int = 2,
    group_size: int = 64,
    layout: str = "concatenated",
    dtype: torch.dtype = torch.float32,
    ids: torch.dtype = torch.int64,
    exact: bool = True,
) -> dict[str, Any]:
    """Gates that are their own silu, if `exact`; weights as views of rows [E,2I,H] and [E,H,I]."""
    values = "exact" if exact else "usual"
    case = MoeCase("", m, topk, experts, k, n, group_size, layout, values=values, id_dtype=ids)
    made = operands(generator, case)
    for name in ("w_gate_up", "w_down"):
        made[name] = made[name].transpose(1, 2).contiguous().transpose(1, 2)
    return {
        **made,
        "group_size": group_size,
        "gate_up_layout": layout,
        "output_dtype": dtype,
    }


def _moe_shape(inputs: dict[str, Any]) -> tuple[int, int, int]:
    return inputs["x_int8"].shape[0], *inputs["w_down"].shape[1:]


MOE_FFN = Sample(
    name="moe_ffn",
    operator="moe_ffn",
    function=farro.moe_ffn,
    make=_moe_ffn,
    arguments={
        "x_int8": Argument((torch.int8,), rows=0),
        "scale_x": Argument((torch.float32,), rows=0),
        "w_gate_up": Argument((torch.int8,)),
        "scale_gate_up": Argument((torch.float32,)),
        "w_down": Argument((torch.int8,)),
        "scale_down": Argument((torch.float32,)),
        "topk_ids": Argument((torch.int32, torch.int64), rows=0),
        "topk_weights": Argument((torch.float32,), rows=0),
    },
    variants={
        "g64": {},
        "g32 bf16 interleaved": {
            **{"group_size": 32, "dtype": torch.bfloat16, "layout": "interleaved"},
            **{"ids": torch.int32, "k": 64, "n": 32},
        },
        "g256 fp16": {"group_size": 256, "dtype": torch.float16, "n": 300},
        "one": {"m": 1, "topk": 1, "experts": 1, "n": 1, "k": 1},
    },
    empties={
        "no tokens": {"m": 0},
        "no routes": {"topk": 0},
        "no experts": {"experts": 0},
        "no intermediate features": {"n": 0},
        "no features": {"k": 0},
        "nothing": {"m": 0, "n": 0, "k": 0, "topk": 0, "experts": 0},
    },
    empty_result=lambda inputs: (
        torch.zeros(inputs["x_int8"].shape, dtype=inputs["output_dtype"]),
    ),
    sizes=("n", "k"),
    long={"group_size": 256, "experts": 1, "topk": 1},
    wrong={
        "group_size 48": ({"group_size": 48}, ValueError, ("group_size", "48", "64")),
        "group_size True": ({"group_size": True}, ValueError, ("group_size", "True")),
        "another group_size": ({"group_size": 32}, ValueError, ("scale_x", "[17, 2]", "[17, 4]")),
        "gate_up_layout": (
            {"gate_up_layout": "stacked"},
            ValueError,
            ("gate_up_layout", "'stacked'", "interleaved"),
        ),
        "gate_up_layout None": ({"gate_up_layout": None}, TypeError, ("gate_up_layout", "None")),
        "output_dtype str": ({"output_dtype": "bf16"}, TypeError, ("output_dtype", "str")),
        "output_dtype fp64": (
            {"output_dtype": torch.float64},
            TypeError,
            ("output_dtype", "float64", "bfloat16"),
        ),
        "w_gate_up is rows [E,2I,H]": (
            {"w_gate_up": torch.zeros(2, 140, 100, dtype=torch.int8)},
            ValueError,
            ("w_gate_up", "[2, 140, 100]", "transpose(1, 2)"),
        ),
        "w_gate_up of an odd number of columns": (
            {"w_gate_up": torch.zeros(2, 100, 139, dtype=torch.int8)},
            ValueError,
            ("w_gate_up", "139", "even"),
        ),
        "w_down is rows [E,H,I]": (
            {"w_down": torch.zeros(2, 100, 70, dtype=torch.int8)},
            ValueError,
            ("w_down", "[2, 100, 70]", "[2, 70, 100]", "transpose(1, 2)"),
        ),
        "too many experts": (
            {"w_gate_up": torch.zeros(4097, 100, 2, dtype=torch.int8)},
            ValueError,
            ("w_gate_up", "4097", "4096"),
        ),
    },
    required=lambda backend, problem: backend in ("reference", "cpu", "triton"),
    warm_shape=_moe_shape,
)

SAMPLES = (DISPATCH_PLAN, DISPATCH_PLAN_RAGGED, MOE_FINALIZE, MOE_FFN)
