"""dispatch_plan and dispatch_plan_ragged: which row of its expert each route goes to."""

from __future__ import annotations

from typing import Any

import torch

from ..._ops import define, is_plain, ops
from ...arch import Arch
from ...checks import check_backend, check_dtype, check_required, check_size, check_strided
from ...dispatch import Kernel, Operator, explained_by, remember, select
from ...problem import Problem
from . import sm90_plan, triton_plan

ID_DTYPES = (torch.int32, torch.int64)
MAX_EXPERTS = 4096
_INT32 = 0x7FFFFFFF

KERNELS = (
    Kernel(
        "moe_route.cuda_sm90",
        "cuda",
        run="ops.moe_route.sm90_plan:run",
        bind="ops.moe_route.sm90_plan:bind",
        needs=frozenset({"wgmma"}),
        why_not=sm90_plan.why_not,
        config=sm90_plan.config,
        must_run=sm90_plan.must_run,
        configs=sm90_plan.configs,
        compile="ops.moe_route.sm90_plan:compile",
    ),
    Kernel(
        "moe_route.cpu",
        "cpu",
        run="ops.moe_route.cpu:plan",
        needs=frozenset({"cpu"}),
        must_run=lambda problem: True,
    ),
    Kernel(
        "moe_route.triton",
        "triton",
        run="ops.moe_route.triton_plan:run",
        bind="ops.moe_route.triton_plan:bind",
        needs=frozenset({"triton"}),
        why_not=triton_plan.why_not,
        config=triton_plan.config,
        must_run=triton_plan.must_run,
        configs=triton_plan.configs,
    ),
    Kernel(
        "moe_route.reference",
        "reference",
        run="ops.moe_route.reference:plan",
        must_run=lambda problem: True,
    ),
)
OPERATOR = Operator(
    "moe_route",
    KERNELS,
    functions=("dispatch_plan", "dispatch_plan_ragged", "check_routing"),
    families=("nvfp4", "moe"),
)
_PADDED, _RAGGED = "dispatch_plan", "dispatch_plan_ragged"

Plan = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _check_arguments(
    name: str, topk_ids: Any, first_expert: Any, num_local_experts: Any, cap: Any, backend: Any
) -> None:
    check_required(name, topk_ids=topk_ids)
    check_size(name, "first_expert", first_expert)
    check_size(name, "num_local_experts", num_local_experts)
    if cap is not None:
        check_size(name, "cap", cap)
    check_backend(name, backend)


def _check(
    name: str, topk_ids: torch.Tensor, first_expert: int, num_local_experts: int, cap: int | None
) -> None:
    check_ids(name, topk_ids)
    if not 1 <= num_local_experts <= MAX_EXPERTS:
        raise ValueError(
            f"{name}: num_local_experts is {num_local_experts}; needed 1 to {MAX_EXPERTS}"
        )
    if first_expert + num_local_experts > _INT32:
        raise ValueError(f"{name}: first_expert is {first_expert}; needed less than 2^31")
    if cap is not None and num_local_experts * cap > _INT32:
        raise ValueError(
            f"{name}: cap is {cap}, so {num_local_experts} experts have more than 2^31 - 1 rows, "
            "which route_dest (int32) cannot number; needed a smaller cap"
        )


def check_ids(name: str, topk_ids: torch.Tensor) -> None:
    """Expert ids of a router: [T, topk], of a dtype that torch.topk or a model gives."""
    check_dtype(name, "topk_ids", topk_ids, ID_DTYPES)
    if topk_ids.dim() != 2:
        raise ValueError(
            f"{name}: topk_ids has shape {list(topk_ids.shape)}; needed [T, topk]: flatten leading "
            "dimensions with topk_ids.reshape(-1, topk)"
        )
    check_strided(name, topk_ids=topk_ids)
    if topk_ids.numel() > _INT32:
        raise ValueError(
            f"{name}: topk_ids has {topk_ids.numel()} routes; needed less than 2^31, which is what "
            "route_dest (int32) can number: plan fewer tokens at a time"
        )


def _problem(
    topk_ids: torch.Tensor, num_local_experts: int, cap: int | None, arch: Arch | None = None
) -> Problem:
    params = {"num_local_experts": num_local_experts, "cap": cap}
    return Problem.of("moe_route", {"topk_ids": topk_ids}, params, arch)


def _outputs(topk_ids: torch.Tensor, num_local_experts: int, cap: int | None) -> Plan:
    """Padded: counts [E] and E * cap rows. Ragged: offsets [E + 1] and a row for each route."""
    ragged = int(cap is None)  # a bool is no number to symbolic sizes
    rows = topk_ids.numel() if cap is None else num_local_experts * cap

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=topk_ids.device)

    counts = empty(num_local_experts + ragged)
    return counts, empty(*topk_ids.shape), empty(rows), empty(rows)


_RUNNERS: dict[Any, Any] = {}


def _plan(
    topk_ids: torch.Tensor, first_expert: int, num_local_experts: int, cap: int | None, backend: str
) -> Plan:
    strided = topk_ids.layout == torch.strided  # else it has no address, and the checks refuse it
    address = topk_ids.data_ptr() & 15 if strided else None
    key = (
        *(topk_ids.shape, strided and topk_ids.stride(), topk_ids.dtype, topk_ids.device, address),
        *(first_expert, num_local_experts, cap, backend),
    )
    run = _RUNNERS.get(key)
    if run is None:
        name = _RAGGED if cap is None else _PADDED
        _check_arguments(name, topk_ids, first_expert, num_local_experts, cap, backend)
        _check(name, topk_ids, first_expert, num_local_experts, cap)
        run = select(OPERATOR, _problem(topk_ids, num_local_experts, cap), backend).run
        remember(_RUNNERS, key, run)
    made = _outputs(topk_ids, num_local_experts, cap)
    run(topk_ids, *made, first_expert, cap)
    return made


def _implementation(
    topk_ids: torch.Tensor, first_expert: int, num_local_experts: int, cap: int, backend: str
) -> Plan:
    return _plan(topk_ids, first_expert, num_local_experts, cap, backend)


def _ragged_implementation(
    topk_ids: torch.Tensor, first_expert: int, num_local_experts: int, backend: str
) -> Plan:
    return _plan(topk_ids, first_expert, num_local_experts, None, backend)


def _fake(
    topk_ids: torch.Tensor, first_expert: int, num_local_experts: int, cap: int, backend: str
) -> Plan:
    _check_arguments(_PADDED, topk_ids, first_expert, num_local_experts, cap, backend)
    _check(_PADDED, topk_ids, first_expert, num_local_experts, cap)
    return _outputs(topk_ids, num_local_experts, cap)


def _ragged_fake(
    topk_ids: torch.Tensor, first_expert: int, num_local_experts: int, backend: str
) -> Plan:
    _check_arguments(_RAGGED, topk_ids, first_expert, num_local_experts, None, backend)
    _check(_RAGGED, topk_ids, first_expert, num_local_experts, None)
    return _outputs(topk_ids, num_local_experts, None)


define(
    "moe_dispatch_plan(Tensor topk_ids, SymInt first_expert, SymInt num_local_experts, SymInt cap, "
    "str backend) -> (Tensor, Tensor, Tensor, Tensor)",
    _implementation,
    _fake,
)
define(
    "moe_dispatch_plan_ragged(Tensor topk_ids, SymInt first_expert, SymInt num_local_experts, "
    "str backend) -> (Tensor, Tensor, Tensor, Tensor)",
    _ragged_implementation,
    _ragged_fake,
)


def _describe(
    topk_ids: torch.Tensor,
    first_expert: int,
    num_local_experts: int,
    cap: int,
    *,
    backend: str = "auto",
    arch: Arch | None = None,
) -> tuple[Operator, Problem, str]:
    _check_arguments(_PADDED, topk_ids, first_expert, num_local_experts, _size(cap), backend)
    _check(_PADDED, topk_ids, first_expert, num_local_experts, cap)
    return OPERATOR, _problem(topk_ids, num_local_experts, cap, arch), backend


def _describe_ragged(
    topk_ids: torch.Tensor,
    first_expert: int,
    num_local_experts: int,
    *,
    backend: str = "auto",
    arch: Arch | None = None,
) -> tuple[Operator, Problem, str]:
    _check_arguments(_RAGGED, topk_ids, first_expert, num_local_experts, None, backend)
    _check(_RAGGED, topk_ids, first_expert, num_local_experts, None)
    return OPERATOR, _problem(topk_ids, num_local_experts, None, arch), backend


def _size(cap: Any) -> Any:
    """A padded plan has a capacity: None is a wrong type there."""
    check_size(_PADDED, "cap", cap)
    return cap


@explained_by(_describe)
def dispatch_plan(
    topk_ids: torch.Tensor,
    first_expert: int,
    num_local_experts: int,
    cap: int,
    *,
    backend: str = "auto",
) -> Plan:
    """Give each route (t, j) of a router a row of its expert, `cap` rows an expert, in one launch.

    A route to the local expert e = topk_ids[t,j] - first_expert, 0 <= e < E, gets the row
    e * cap + r, where r is its rank among the routes to e in (t, j) order; routes with r >= cap
    are dropped, and so are those to other ranks' experts and ids outside any range. The same
    result on every back end and in every run.

    Args:
        topk_ids: int32 or int64 [T, topk], any positive strides. An expert may come twice in a
            token.
        first_expert: the id of this rank's first expert, 0 or more.
        num_local_experts: E, 1 to 4096.
        cap: rows of each expert, 0 or more; E * cap < 2^31.
        backend: "auto", "reference", "cpu", "triton" or "cuda".

    Returns:
        (expert_num_tokens int32 [E], route_dest int32 [T, topk], src_tok int32 [E*cap],
        src_route int32 [E*cap]), contiguous and completely written: how many rows each expert
        uses, at most cap; the row of each route, -1 for a dropped one; the token t and the route
        t * topk + j of each row, -1 for an unused one.

    Raises:
        TypeError: topk_ids is not int32 or int64, a size is not an int.
        ValueError: another number of dimensions, a zero stride, sizes out of range.
        UnsupportedError: the asked back end cannot run here.
        Ids are never checked (that would synchronize): see `farro.moe.check_routing`.
    """
    _check_arguments(_PADDED, topk_ids, first_expert, num_local_experts, _size(cap), backend)
    call = _implementation if is_plain(topk_ids) else ops.moe_dispatch_plan
    plan: Plan = call(topk_ids, first_expert, num_local_experts, cap, backend)
    return plan


@explained_by(_describe_ragged)
def dispatch_plan_ragged(
    topk_ids: torch.Tensor, first_expert: int, num_local_experts: int, *, backend: str = "auto"
) -> Plan:
    """Give each route (t, j) of a router a row, rows sorted by expert and without gaps.

    A route to the local expert e = topk_ids[t,j] - first_expert, 0 <= e < E, gets the row
    expert_offsets[e] + r, where r is its rank among the routes to e in (t, j) order. Routes to
    other ranks' experts and ids outside any range are dropped; nothing else is, since there is a
    row for every route. The same result on every back end and in every run; one launch.

    Args:
        topk_ids: int32 or int64 [T, topk], any positive strides. An expert may come twice in a
            token.
        first_expert: the id of this rank's first expert, 0 or more.
        num_local_experts: E, 1 to 4096.
        backend: "auto", "reference", "cpu", "triton" or "cuda".

    Returns:
        (expert_offsets int32 [E+1], route_dest int32 [T, topk], src_tok int32 [T*topk], src_route
        int32 [T*topk]), contiguous and completely written: expert e has the rows
        expert_offsets[e] to expert_offsets[e+1], and rows from expert_offsets[E] on are unused;
        the row of each route, -1 for a dropped one; the token t and the route t * topk + j of
        each row, -1 for an unused one.

    Raises what dispatch_plan raises.
    """
    _check_arguments(_RAGGED, topk_ids, first_expert, num_local_experts, None, backend)
    call = _ragged_implementation if is_plain(topk_ids) else ops.moe_dispatch_plan_ragged
    plan: Plan = call(topk_ids, first_expert, num_local_experts, backend)
    return plan
