"""Plans through Triton, on SM80 and newer: one launch, in which no program waits for another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ...dispatch import remember
from ...problem import Problem, TensorSpec
from ...triton_launch import Launcher, specialization

_LANES = 128  # routes of a tile's row, as triton_kernel.py has it
_EXPERTS = 4  # of a program
_ROWS = 64  # of a tile of many routes; more spill
_SLICE = 16384  # routes of a program, at least, where there are many
_PROGRAMS = 128  # that a large device runs at a time
_LARGEST = 0x7FFFFFFF - (1 << 23)  # block ends must not wrap


@dataclass(frozen=True)
class Config:
    """How plan_rows splits its work: `rows` x 128 routes a tile, `slices` programs an expert."""

    rows: int
    slices: int
    warps: int
    policy: str = "four experts a program, earlier slices counted"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        return cls(**values)


def sizes(problem: Problem) -> tuple[int, int, int | None]:
    """Routes, experts, rows of an expert (None: ragged)."""
    shape = problem.spec("topk_ids").shape
    experts, cap = problem.param("num_local_experts"), problem.param("cap")
    assert isinstance(experts, int) and (cap is None or isinstance(cap, int))
    return shape[0] * shape[1], experts, cap


def must_run(problem: Problem) -> bool:
    routes, _, cap = sizes(problem)
    return max(routes, cap or 0) <= 1 << 30


def why_not(problem: Problem) -> str | None:
    """Why this kernel cannot run the problem, or None."""
    routes, _, cap = sizes(problem)
    if max(routes, cap or 0) > _LARGEST:
        return f"more than {_LARGEST} routes, or rows of an expert"
    return None


def refuses(config: Config, problem: Problem) -> str | None:
    """Why this configuration is not legal, or None."""
    values = (config.rows, config.warps)
    if any(v < 1 or v & (v - 1) for v in values) or config.slices < 1:
        return "rows and warps are powers of two, slices 1 or more"
    if config.rows > 128:
        return "more than 128 rows: their counts would not fit 16 bits"
    if not 4 <= config.rows * _LANES // (32 * config.warps) <= 64:
        return "a thread has 4 to 64 routes"
    return None


def config(problem: Problem) -> Config:
    """Few routes: one small tile. Many: as many slices as the device runs programs at a time."""
    routes, experts, _ = sizes(problem)
    return config_of(routes, experts)


def config_of(routes: int, experts: int) -> Config:
    """As `config`, from the sizes alone."""
    rows = 1
    while rows < _ROWS and rows * _LANES < routes:
        rows *= 2
    slices = 1
    if rows == _ROWS:
        groups = -(-experts // _EXPERTS)
        slices = max(1, min(-(-routes // _SLICE), _PROGRAMS // groups))
    return Config(rows, slices, min(rows, 16))


def configs(problem: Problem) -> list[Config]:
    """Those that a tuner may time."""
    routes = sizes(problem)[0]
    found = [
        Config(rows, slices, warps)
        for rows in (16, 32, 64, 128)
        for slices in (1, 2, 3, 4, 6, 8)
        for warps in (4, 8, 16, 32)
        if (slices - 1) * rows * _LANES < max(routes, 1)
    ]
    return [c for c in found if refuses(c, problem) is None]


class _Bound:
    """run() for calls of one Problem: all but addresses is worked out once for each device."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.launchers: dict[Any, Launcher] = {}

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
        place = topk_ids.device.index, first_expert
        launcher = self.launchers.get(place)
        if launcher is None:
            prepared = prepare(
                *(self.config, topk_ids, counts, route_dest, src_tok, src_route, first_expert, cap)
            )
            launcher = _launcher(self.config, *prepared)
            self.launchers[place] = launcher
        launcher(topk_ids, counts, route_dest, src_tok, src_route)


def _launcher(
    config: Config,
    kernel: Any,
    grid: tuple[int, int, int],
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> Launcher:
    tensors, numbers, constants = args[:5], args[5:13], args[13:]
    device = tensors[0].device.index
    key = (
        *(kernel, device, constants, config.warps, tensors[0].dtype),
        tuple(t.data_ptr() % 16 == 0 for t in tensors),
        tuple(specialization(number)[2] for number in numbers),  # only whether it needs 64 bits
    )
    return Launcher(kernel, key, device, grid, args[5:], options, (None,) * 5)


def bind(config: Config) -> Callable[..., None]:
    """run() with its configuration, for calls alike in all but their tensors' addresses."""
    return _Bound(config)


_BOUND: dict[Any, Callable[..., None]] = {}


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
    key = (config, *(TensorSpec.of(t) for t in given), cap)
    bound = _BOUND.get(key)
    if bound is None:
        bound = bind(config)
        remember(_BOUND, key, bound)
    bound(*given, first_expert, cap)


def prepare(
    config: Config,
    topk_ids: torch.Tensor,
    counts: torch.Tensor,
    route_dest: torch.Tensor,
    src_tok: torch.Tensor,
    src_route: torch.Tensor,
    first_expert: int,
    cap: int | None,
) -> tuple[Any, tuple[int, int, int], tuple[Any, ...], dict[str, Any]]:
    """The kernel, grid, complete positional arguments and options; meta tensors are accepted."""
    from .triton_kernel import plan_rows

    ragged = cap is None
    routes, experts = topk_ids.numel(), counts.numel() - ragged
    tile = config.rows * _LANES
    tiles = -(-routes // tile)
    length = -(-tiles // config.slices)
    slices = -(-tiles // max(length, 1)) or 1  # none of them empty
    strides = topk_ids.stride()
    numbers = (routes, *strides, first_expert, experts, cap or 0, slices, length)
    flat = topk_ids.is_contiguous()
    whole = routes % tile == 0
    constants = (max(topk_ids.shape[1], 1), flat, whole, config.rows, 128 * config.warps, ragged)
    grid = (-(-experts // _EXPERTS), slices, 1)
    given = (topk_ids, counts, route_dest, src_tok, src_route)
    return plan_rows, grid, (*given, *numbers, *constants), {"num_warps": config.warps}
