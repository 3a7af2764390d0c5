"""The native moe_ffn's configurations: all of them, which are legal, and which one to take."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...problem import Problem, TensorSpec
from ...tuning import nearest, table, takes
from .triton_configs import Sizes, sizes

SHARED_LIMIT = 232448  # bytes a CTA may use on SM90
_SHARED_OF_SM = 233472  # of which each CTA costs 1 KiB more than it uses
_ALIGNMENT = 1024  # of shared memory, for the 128-byte swizzle
_DEPTH = 128  # bytes of K in a stage, as in sm90.cu
_LONGEST = 2**31 - 2**10  # a row's index plus a tile stays an int
_MOST_STAGES = 12
_OUT_ROWS, _OUT_SLOTS = (
    32,
    3,
)  # of BF16 rows that leave shared memory together, as in sm90_layout.cuh
WIDTHS = (8, 16, 32, 64, 128)  # routes of a tile


@dataclass(frozen=True)
class Tile:
    """Up to `routes` by 64 * warpgroups * waves weight rows: of gate/up, half as many features."""

    routes: int
    warpgroups: int
    waves: int  # times 64 weight rows of a warpgroup
    stages: int
    ctas: int = 1  # a multiprocessor
    raster: int = 8  # tiles of routes that are visited together
    gathered: bool = False  # gate/up: a launch of its own brings the rows of routes together

    @property
    def rows(self) -> int:
        return 64 * self.warpgroups * self.waves

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)


@dataclass(frozen=True)
class Config:
    """The tiles of both products."""

    gate_up: Tile
    down: Tile
    policy: str = "native, routes on wgmma's narrow side"

    @property
    def tile(self) -> tuple[int, int]:
        return self.gate_up.routes, self.gate_up.rows

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        tiles = {name: Tile(**values[name]) for name in ("gate_up", "down")}
        return cls(**{**values, **tiles})


def cluster_of(tile: Tile, gated: bool, group: int) -> int:
    """CTAs that share the maxima of a group."""
    return max(1, 2 * group // tile.rows) if gated else 1


def shared_bytes(tile: Tile, gated: bool, group: int, experts: int) -> int:
    """What the kernel's Traits add up to, with room to align."""
    t, groups = tile, max(_DEPTH // group, 1)
    stage = (t.rows + t.routes) * _DEPTH + 16
    staged = 0  # results on their way out
    if t.waves == 2 and exchanges(t) and (t.routes == 128 or t.gathered):
        staged = t.warpgroups * (t.routes * 64 if gated else _OUT_SLOTS * _OUT_ROWS * 128)
    slots = max(3, t.stages // max(group // _DEPTH, 1))
    scales = slots * ((t.rows + t.routes) * 4 * groups + 16)
    maxima = 0
    if gated:
        own, parts = max(1, 32 * t.waves // group), max(1, t.rows // 2 // group)
        maxima = 4 * t.warpgroups * own * t.routes * 8 + 3 * parts * t.routes * 4
    barriers = 32 if t.routes == 128 and (t.gathered or not gated) else 16
    return t.stages * stage + staged + scales + maxima + barriers + 8 * (experts + 1) + _ALIGNMENT


def registers(tile: Tile, gated: bool) -> int:
    """Of a thread that multiplies, as the kernel's Traits have them."""
    launched = min(65536 // (tile.threads * tile.ctas) // 8 * 8, 240)
    if not exchanges(tile):
        return launched
    given = 56 if gated and not tile.gathered else 40
    return min((launched * (tile.warpgroups + 1) - given) // tile.warpgroups // 8 * 8, 240)


def exchanges(tile: Tile) -> bool:
    """Whether warpgroups that multiply take registers from the one that copies."""
    return tile.routes * tile.waves >= 128


def _needed(tile: Tile, group: int) -> int:
    """Registers of sums, totals, addresses and scales: with fewer the compiler spills."""
    groups = max(_DEPTH // group, 1)
    together = 1 if tile.waves > 1 or tile.routes > 32 else min(groups, 64 // tile.routes)
    return (together + tile.waves) * tile.routes // 2 + (32 if exchanges(tile) else 44)


def refuses_tile(tile: Tile, gated: bool, group: int, experts: int) -> str | None:
    """Why the kernels do not have this tile, or None."""
    t = tile
    numbers = (t.routes, t.warpgroups, t.waves, t.stages, t.ctas, t.raster)
    if any(type(number) is not int or number < 1 for number in numbers):
        return "sizes are positive ints"
    if t.routes not in WIDTHS or t.warpgroups not in (1, 2, 4) or t.waves > 2 or t.rows > 256:
        return "no such tile"
    if t.stages <= max(group // _DEPTH, 1) or t.ctas > 4 or t.raster > 64:
        return "no such ring or number of CTAs"
    if type(t.gathered) is not bool or (t.gathered and not gated):
        return "only rows of gate/up are gathered"
    if group == 32 and t.waves * t.routes > 128:
        return "a group of 32 leaves too few registers"
    if registers(t, gated) < _needed(t, group):
        return f"{registers(t, gated)} registers a thread, of {_needed(t, group)}"
    need = shared_bytes(t, gated, group, experts)
    if need > min(SHARED_LIMIT, _SHARED_OF_SM // t.ctas - 1024):
        return f"{need} bytes of shared memory for each of {t.ctas} CTAs"
    return None


def refuses(config: Config, problem: Problem) -> str | None:
    """Why this configuration is not legal for the problem, or None."""
    if config.policy != Config.policy:
        return f"no policy is called {config.policy!r}"
    s = sizes(problem)
    if config.gate_up.gathered and s.h % 16:
        return f"rows of {s.h} bytes; those that are gathered are multiples of 16"
    return refuses_tile(config.gate_up, True, s.group, s.experts) or refuses_tile(
        config.down, False, s.group, s.experts
    )


def deepest(tile: Tile, gated: bool, group: int, experts: int) -> Tile | None:
    """With as many stages as there is room for."""
    for stages in range(_MOST_STAGES, 1, -1):
        deep = replace(tile, stages=stages)
        if refuses_tile(deep, gated, group, experts) is None:
            return deep
    return None


# --- which problems ------------------------------------------------------------------------------


def _illegible(name: str, spec: TensorSpec, along: int) -> str | None:
    """Why TMA and 16-byte copies cannot read rows along a dimension."""
    if spec.stride[along] != 1 and spec.shape[along] > 1:
        return f"{name}'s stride along its products' K is {spec.stride[along]}; needed 1"
    for d, (size, stride) in enumerate(zip(spec.shape, spec.stride)):
        if d != along and size > 1 and (stride % 16 or stride < spec.shape[along]):
            return (
                f"{name}'s stride of dimension {d} is {stride}; needed a multiple of 16 that is "
                f"not below {spec.shape[along]}"
            )
    if spec.align < 16:
        return f"{name}'s address is aligned to {spec.align} bytes; needed 16"
    return None


def why_not(problem: Problem) -> str | None:
    """Why these kernels cannot run the problem, or None."""
    s = sizes(problem)
    routes = s.tokens * s.topk
    if not (routes and s.experts and s.h):
        return None
    if s.i % 8:
        return f"I is {s.i}; needed a multiple of 8"
    if max(s.h, 2 * s.i, s.tokens, routes) > _LONGEST:
        return f"a dimension, or the number of routes, is above {_LONGEST}"
    if (routes // WIDTHS[0] + s.experts + 1) * (max(s.h, s.i) // 32 + 1) > _LONGEST:
        return f"more than {_LONGEST} tiles"
    for name, along in (("x_int8", 1), ("w_gate_up", 1), ("w_down", 1)):
        reason = _illegible(name, problem.spec(name), along)
        if reason is not None:
            return reason
    return None


def must_run(problem: Problem) -> bool:
    """Any routes, group, layout and scales, where rows begin at multiples of 16 bytes."""
    s = sizes(problem)
    few = s.tokens * s.topk <= 1 << 22 and max(s.h, s.i) <= 1 << 20
    if not few or s.h % 16 or s.i % 16:
        return False
    specs = [problem.spec(name) for name in ("x_int8", "w_gate_up", "w_down")]
    steps = [n for t in specs for d, n in enumerate(t.stride) if d != 1]
    return not any(n % 16 for n in steps) and all(
        t.stride[1] == 1 and _illegible("", t, 1) is None for t in specs
    )


# --- which one to take ---------------------------------------------------------------------------


def heuristic(problem: Problem) -> Config:
    """A tile that holds what most experts have; few weight rows where tiles would be few."""
    s = sizes(problem)
    return Config(_usual(s, problem, True), _usual(s, problem, False))


# (routes, warpgroups, waves, CTAs a multiprocessor), as they were fastest on an H200 up to so many
# rows of an expert
_USUAL = {
    True: ((6, (16, 4, 1, 1)), (12, (32, 4, 1, 1)), (384, (64, 2, 2, 1))),
    False: ((6, (16, 2, 1, 2)), (20, (32, 2, 1, 2)), (64, (64, 2, 2, 1))),
}
_MOST = (128, 2, 2, 1)
_GATHERED = 64  # with more rows than this, those of gate/up are brought together first
_LONE = (8, 2, 1, 1)  # its ring is the deepest: a multiprocessor has one tile or two
# Where groups of 32, or the tables of many experts, leave no room
_SMALLER = ((64, 2, 2, 1), (32, 2, 1, 2), (32, 2, 1, 1), (16, 2, 1, 1), (8, 2, 1, 1), (8, 1, 1, 1))


def _usual(s: Sizes, problem: Problem, gated: bool) -> Tile:
    active = max(1, min(s.tokens * s.topk, s.experts))
    kind = next((kind for most, kind in _USUAL[gated] if s.rows <= most), _MOST)
    tiles = active * (-(-s.i // 128) if gated else -(-s.h // 128))
    few = (3 * problem.arch.multiprocessors) // (2 if gated else 4)
    if kind == _USUAL[gated][0][1] and tiles < few:
        kind = _LONE
    for routes, warpgroups, waves, ctas in (kind, *_SMALLER):
        if routes <= kind[0]:
            gathered = gated and routes >= 64 and s.rows > _GATHERED and s.h % 16 == 0
            tile = Tile(routes, warpgroups, waves, 2, ctas, gathered=gathered)
            found = deepest(tile, gated, s.group, s.experts)
            if found is not None:
                return found
    raise AssertionError(f"no room for the tables of {s.experts} experts")


def config(problem: Problem) -> Config:
    """The tuned table's configuration for the nearest problem, else the heuristic's."""
    s = sizes(problem)
    legal = takes(Config, lambda c: refuses(c, problem))

    found = nearest(
        table("moe_ffn", problem.arch.device),
        {"backend": "cuda", "group_size": s.group},
        {"m": s.tokens, "e": s.experts, "topk": s.topk, "n": s.i, "k": s.h},
        legal,
    )
    return heuristic(problem) if found is None else Config.from_dict(found)


def tiles(gated: bool, group: int, experts: int) -> Iterator[Tile]:
    """Each tile that there is, with the deepest ring; rows are gathered for wide ones."""
    for routes in WIDTHS:
        for warpgroups, waves in ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2)):
            for ctas in (1, 2, 4):
                for gathered in (False, True) if gated and routes >= 64 and ctas == 1 else (False,):
                    tile = Tile(routes, warpgroups, waves, 2, ctas, gathered=gathered)
                    found = deepest(tile, gated, group, experts)
                    if found is not None:
                        yield found


@functools.lru_cache(maxsize=64)
def configs(problem: Problem) -> list[Config]:
    """Those that a tuner may time: each tile of one product beside the usual one of the other.

    Where experts are spread over ranks, they have fewer rows than `sizes` counts: a rank cannot
    know. Two waves share what a row of tokens costs, which is little in narrow tiles.
    """
    s, usual = sizes(problem), heuristic(problem)

    def plausible(gated: bool) -> Iterator[Tile]:
        for tile in tiles(gated, s.group, s.experts):
            few = tile.waves == 1 or tile.routes >= 64
            if tile.gathered and s.h % 16:
                continue
            if few and min(s.rows, 64) // 8 <= tile.routes <= max(4 * s.rows, 16):
                yield tile

    found = [replace(usual, gate_up=tile) for tile in plausible(True)]
    found += [replace(usual, down=tile) for tile in plausible(False)]
    return list(dict.fromkeys([usual, *found]))
