"""The Triton moe_ffn's configurations: all of them, which are legal, and which one to take."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...problem import Problem
from ...triton_gemm import DEEPEST, LONGEST, powers_of_two, shared_limit
from ...tuning import nearest, table, takes
from ..moe_route import triton_plan

WIDTHS = (16, 32, 64, 128)  # tokens of a tile
_REGISTERS = 192  # a thread, of sums and of what waits for its group's maximum
_STAGES = (4, 3, 2, 1)
_FROM_SHARED_MEMORY = ("sm_90", "sm_100", "sm_103")  # whose tensor cores read operands there


@dataclass(frozen=True)
class Tile:
    """Tokens x columns of one product; of gate/up, features: half the columns of its weights.

    With `swap` the weights are the rows of the tensor cores' operands.
    """

    tokens: int
    columns: int
    swap: bool
    warps: int
    stages: int


@dataclass(frozen=True)
class Config:
    """The tiles of both products; `block` columns of the result to a program of the sum."""

    gate_up: Tile
    down: Tile
    block: int = 1024
    policy: str = "ragged routes, activation and quantizer in the product"

    @property
    def tile(self) -> tuple[int, int]:
        return self.gate_up.tokens, self.gate_up.columns

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        tiles = {name: Tile(**values[name]) for name in ("gate_up", "down")}
        return cls(**{**values, **tiles})


@dataclass(frozen=True)
class Sizes:
    tokens: int
    topk: int
    experts: int
    h: int
    i: int
    group: int

    @property
    def rows(self) -> int:
        """Of an expert, on average of those that have any."""
        routes = self.tokens * self.topk
        return -(-routes // max(1, min(routes, self.experts)))


def sizes(problem: Problem) -> Sizes:
    experts, i, h = problem.spec("w_down").shape
    group = problem.param("group_size")
    assert isinstance(group, int)
    tokens, topk = problem.spec("topk_ids").shape
    return Sizes(tokens, topk, experts, h, i, group)


def block_k(group: int) -> int:
    """Of one step of the tensor cores' loop."""
    return min(group, 128)


def plan_problem(problem: Problem) -> Problem:
    """That of the ragged plan of the routes."""
    tensors = (("topk_ids", problem.spec("topk_ids")),)
    params = (("num_local_experts", sizes(problem).experts), ("cap", None))
    return Problem("moe_route", problem.arch, tensors, params)


def why_not(problem: Problem) -> str | None:
    """Why these kernels cannot run the problem, or None."""
    s = sizes(problem)
    if max(s.h, 2 * s.i, s.tokens) > LONGEST:
        return f"a dimension is longer than {LONGEST}"
    routes = s.tokens * s.topk
    tiles = (routes // WIDTHS[0] + s.experts + 1) * (max(s.h, s.i) // 32 + 1)
    if max(routes, tiles) > LONGEST:
        return f"more than {LONGEST} routes, or tiles"
    return triton_plan.why_not(plan_problem(problem)) if s.experts else None


def must_run(problem: Problem) -> bool:
    """Any strides, alignment, layout, group and sizes that a layer has."""
    s = sizes(problem)
    return s.tokens * s.topk <= 1 << 22 and max(s.h, s.i) <= 1 << 22


# --- which tiles are legal -----------------------------------------------------------------------


def shared_bytes(tile: Tile, columns: int, group: int) -> int:
    """Shared memory of one block, or a little more; `columns` of the weights."""
    sides = tile.tokens + columns
    loop = tile.stages * sides * (group + 4) + 6144
    return max(loop, 4 * tile.tokens * columns)  # a result that changes hands goes through there


def _refuses_tile(tile: Tile, problem: Problem, paired: bool) -> str | None:
    group = sizes(problem).group
    columns = 2 * tile.columns if paired else tile.columns
    numbers = (tile.tokens, tile.columns, tile.warps)
    if not powers_of_two(*numbers) or not 0 < tile.stages <= DEEPEST:
        return f"tokens, columns and warps are powers of two, stages 1 to {DEEPEST}"
    if tile.tokens not in WIDTHS or not 32 <= columns <= 256 or tile.warps not in (4, 8):
        return f"tiles have {WIDTHS} tokens, 32 to 256 columns of weights and 4 or 8 warps"
    if paired and 4 * tile.columns < group:
        return "more than 4 products a group, written out one after the other, compile too long"
    held = 2 * tile.tokens * columns
    if paired and tile.columns < group:
        held += tile.tokens * group
    if held // (32 * tile.warps) > _REGISTERS:
        return f"{held // (32 * tile.warps)} registers a thread would spill"
    need, limit = shared_bytes(tile, columns, group), shared_limit(problem)
    return f"{need} bytes of shared memory, the limit is {limit}" if need > limit else None


def refuses(config: Config, problem: Problem) -> str | None:
    """Why this configuration is not legal for the problem, or None."""
    if config.policy != Config.policy:
        return f"no policy is called {config.policy!r}"
    if config.block not in (256, 512, 1024, 2048):
        return "a block of the sum has 256 to 2048 columns"
    return _refuses_tile(config.gate_up, problem, True) or _refuses_tile(
        config.down, problem, False
    )


# --- which one to take ---------------------------------------------------------------------------


def _deepest(tile: Tile, problem: Problem, paired: bool) -> Tile:
    """With as many stages as fit, or None."""
    deep = [replace(tile, stages=stages) for stages in _STAGES]
    return next(t for t in deep if _refuses_tile(t, problem, paired) is None)


def heuristic(problem: Problem) -> Config:
    """The narrowest tile that holds an average expert's rows."""
    s = sizes(problem)
    width = next((w for w in WIDTHS if w >= s.rows), WIDTHS[-1])
    # a group waits in registers for its maximum, beside operands where these are there too
    crowded = problem.arch.name not in _FROM_SHARED_MEMORY
    of_gate_up = min(width, 128 >> ((s.group == 256) + crowded))
    return Config(
        _deepest(_usual(of_gate_up, 64, crowded and s.group == 256), problem, True),
        _deepest(_usual(width, 64 if crowded and width == 128 else 128, False), problem, False),
        sum_block(s.tokens, s.h),
    )


def sum_block(tokens: int, h: int) -> int:
    """Columns of a program of the sum: narrow where few tokens would leave the device idle."""
    return 1024 if tokens * -(-h // 1024) >= 1024 else 256


def _usual(tokens: int, columns: int, many: bool) -> Tile:
    return Tile(tokens, columns, tokens < 64, 8 if tokens >= 64 or many else 4, 1)


def config(problem: Problem) -> Config:
    """The tuned table's configuration for the nearest problem, else the heuristic's."""
    s = sizes(problem)
    legal = takes(Config, lambda c: refuses(c, problem))

    found = nearest(
        table("moe_ffn", problem.arch.device),
        {"backend": "triton", "group_size": s.group},
        {"m": s.tokens, "e": s.experts, "topk": s.topk, "n": s.i, "k": s.h},
        legal,
    )
    return heuristic(problem) if found is None else Config.from_dict(found)


def _tiles(problem: Problem, paired: bool) -> Iterator[Tile]:
    """Legal tiles for the rows that an expert has: narrower ones, and one that is wider."""
    rows = sizes(problem).rows
    wide = next((n for n, w in enumerate(WIDTHS) if w >= rows), len(WIDTHS) - 1)
    for tokens, columns, swap, warps, stages in itertools.product(
        WIDTHS[max(0, wide - 1) : wide + 2],
        (32, 64, 128) if paired else (64, 128, 256),
        *((False, True), (4, 8), (2, 3, 4, 6)),
    ):
        tile = Tile(tokens, columns, swap, warps, stages)
        if _refuses_tile(tile, problem, paired) is None:
            yield tile


_PAIRED = 3  # tiles of each product that are timed together


def best_pairs(times: Mapping[Any, float]) -> list[Any]:
    """The best tiles of both products together: `configs` has each beside the usual one alone.

    The launches of a call follow one another, so their times add up, nearly.
    """
    names = ("gate_up", "down")
    usual = {n: Counter(getattr(c, n) for c in times).most_common(1)[0][0] for n in names}
    few: dict[str, list[Any]] = {}
    for name, other in (names, names[::-1]):
        alike = {
            getattr(c, name): us for c, us in times.items() if getattr(c, other) == usual[other]
        }
        few[name] = sorted(alike, key=alike.__getitem__)[:_PAIRED]
    base = next(iter(times))
    pairs = [replace(base, gate_up=a, down=b) for a in few["gate_up"] for b in few["down"]]
    return [pair for pair in pairs if pair not in times]


@functools.lru_cache(maxsize=64)
def configs(problem: Problem) -> list[Config]:
    """Those that a tuner may time: each tile of one product beside the usual one of the other."""
    usual = heuristic(problem)
    found = [replace(usual, gate_up=tile) for tile in _tiles(problem, True)]
    found += [replace(usual, down=tile) for tile in _tiles(problem, False)]
    return list(dict.fromkeys([usual, *found]))
