"""Plans on SM90a: one launch of clusters, each of which counts all routes and ranks its slices."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ...cuda.fp8.gemm import Prepared
from ...cuda.launch import Launch, kernel_function
from ...problem import Problem
from .triton_plan import sizes, why_not

__all__ = ["Config", "bind", "config", "configs", "must_run", "run", "why_not"]

THREADS = 512  # of a CTA, which ranks as many routes at a time
CLUSTER = 8
_WARPS = THREADS // 32
_ALONE = 1024  # routes up to which a CTA counts them all as fast as a cluster does
_FILLED = 2048  # rows that a CTA fills, at least, where there are more of these than of routes
_CTAS = 128  # at most: a multiprocessor each, in clusters


@dataclass(frozen=True)
class Config:
    """`ctas` in clusters of `cluster` (1 or 8)."""

    cluster: int
    ctas: int
    policy: str = "clusters that count all routes"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        return cls(**values)


class _Plan(ctypes.Structure):
    """`struct Plan` of sm90_plan.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("ids", "counts", "dest", "token", "route")),
        *((name, ctypes.c_int64) for name in ("stride_t", "stride_k")),
        *(
            (name, ctypes.c_uint32)
            for name in ("routes", "topk", "first", "experts", "cap", "slice")
        ),
    )


def must_run(problem: Problem) -> bool:
    routes, _, cap = sizes(problem)
    return max(routes, cap or 0) <= 1 << 30


def config(problem: Problem) -> Config:
    """As many CTAs as have routes to rank or rows to fill, up to one a multiprocessor."""
    routes, experts, cap = sizes(problem)
    return config_of(routes, experts, cap)


def config_of(routes: int, experts: int, cap: int | None) -> Config:
    """As `config`, from the sizes alone."""
    cluster = 1 if routes <= _ALONE else CLUSTER
    rows = routes if cap is None else experts * cap
    wanted = max(-(-routes // THREADS), -(-rows // _FILLED), 1)
    return Config(cluster, min(-(-wanted // cluster) * cluster, _CTAS))


def refuses(config: Config, problem: Problem) -> str | None:
    """Why this configuration is not legal, or None."""
    if config.cluster not in (1, CLUSTER):
        return f"a cluster has 1 CTA or {CLUSTER}"
    if config.ctas < 1 or config.ctas % config.cluster or config.ctas > 1 << 16:
        return "there are 1 to 65536 CTAs, in whole clusters"
    return None


def configs(problem: Problem) -> list[Config]:
    """Those that a tuner may time."""
    few = sizes(problem)[0] <= 16384
    return [
        *(Config(CLUSTER, ctas) for ctas in (8, 16, 32, 64, 96, 128, 256)),
        *(Config(1, ctas) for ctas in (1, 2, 8, 32, 128) if few),
    ]


def kernel_name(wide: bool, flat: bool, ragged: bool, cluster: int) -> tuple[str, str]:
    """Source file and name expression."""
    flags = ", ".join(str(flag).lower() for flag in (flat, ragged))
    kind = "i64" if wide else "int"
    return "ops/moe_route/sm90_plan.cu", f"plan_routes<{kind}, {flags}, {cluster}>"


def compile(config: Config, problem: Problem) -> None:
    from ...cuda import jit

    spec, ragged = problem.spec("topk_ids"), sizes(problem)[2] is None
    flat = _flat(spec.shape, spec.stride)
    jit.cubin(*kernel_name(spec.dtype is torch.int64, flat, ragged, config.cluster), "sm_90a")


def slice_of(config: Config, routes: int) -> int:
    """Routes that a CTA ranks, at most: whole rounds of its threads."""
    each = -(-routes // config.ctas)
    return max(1, -(-each // THREADS)) * THREADS


def shared_bytes(experts: int) -> int:
    """Five counts of each expert, and one of 16 bits for each warp."""
    return -(-experts // 4) * 4 * (5 * 4 + _WARPS * 2)


def _flat(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    tokens, topk = shape
    return (stride[1] == 1 or topk <= 1) and (stride[0] == topk or tokens <= 1)


def _launch(
    config: Config,
    topk_ids: torch.Tensor,
    counts: torch.Tensor,
    route_dest: torch.Tensor,
    src_tok: torch.Tensor,
    src_route: torch.Tensor,
    first_expert: int,
    cap: int | None,
) -> Launch:
    ragged, routes, topk = cap is None, topk_ids.numel(), topk_ids.shape[1]
    experts = counts.numel() - ragged
    strides = topk_ids.stride()
    flat = _flat(tuple(topk_ids.shape), strides)
    name = kernel_name(topk_ids.dtype is torch.int64, flat, ragged, config.cluster)
    shared = shared_bytes(experts)
    device = topk_ids.get_device()
    function = kernel_function(*name, "sm_90a", device, shared)
    given = (topk_ids, counts, route_dest, src_tok, src_route)
    sizes_ = (routes, max(topk, 1), first_expert, experts, cap or 0, slice_of(config, routes))
    plan = _Plan(*(t.data_ptr() for t in given), *strides, *sizes_)
    grid = (config.ctas, 1, 1)
    return Launch(device, function, grid, THREADS, shared, config.cluster, (plan,))


class _Bound:
    """run() for calls alike in all but addresses and the first expert."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.prepared: dict[tuple[int, int | None], Prepared] = {}

    def __call__(
        self,
        topk_ids: torch.Tensor,
        counts: torch.Tensor,
        route_dest: torch.Tensor,
        src_tok: torch.Tensor,
        src_route: torch.Tensor,
        first_expert: int,
        cap: int | None,
    ) -> None:
        given = (topk_ids, counts, route_dest, src_tok, src_route)
        prepared = self.prepared.setdefault((first_expert, cap), Prepared())
        prepared.run(
            topk_ids.device, given, lambda: _launch(self.config, *given, first_expert, cap)
        )


def bind(config: Config) -> Callable[..., None]:
    """run() with its configuration, for calls alike in all but their tensors' addresses."""
    return _Bound(config)


def run(
    config: Config,
    topk_ids: torch.Tensor,
    counts: torch.Tensor,
    route_dest: torch.Tensor,
    src_tok: torch.Tensor,
    src_route: torch.Tensor,
    first_expert: int,
    cap: int | None,
) -> None:
    """Write a plan, launched on the current stream of topk_ids' device."""
    given = (topk_ids, counts, route_dest, src_tok, src_route)
    _launch(config, *given, first_expert, cap).on_current_stream()
