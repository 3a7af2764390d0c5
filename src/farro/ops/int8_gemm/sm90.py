"""int8_gemm on SM90a: which native kernel and tile; sm90_launch.py runs them.

The kernels are sm90_large.cu (many rows) and sm90_small.cu (few); docs/int8-sm90.md explains them.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...problem import Problem
from ...tuning import FEW_ROWS, chosen, nearest, parsed, preferred, table
from . import triton

SHARED_LIMIT = 232448  # bytes a CTA may use on SM90
_SHARED_OF_SM = 233472  # of which each CTA costs 1 KiB more than it uses
_ALIGNMENT = 1024  # of shared memory, for the 128-byte swizzle
_SMS = 132
_LONGEST = 2**31 - 2**10  # a row's index plus a tile stays an int
_LARGEST_GRID_Y = 65535
DEPTH = 128  # bytes of K in a stage, as in the .cu files
_SCALE_STAGES = 3  # of the large kernel
_SCALE_GROUPS = 4  # of one of them
_ROWS = {"large": (256, 128), "small": (8, 16, 32, 64, 128, 160, 192)}
_COLUMNS = {"large": (128, 112, 96), "small": (64,)}
_STAGES = {"large": (3, 4, 5, 6, 7), "small": (3, 4, 5, 6, 7, 8, 10, 12, 16)}
_WHOLE = (160, 192)  # tiles of the small kernel that hold all rows of a call
_WIDTHS = (8, 16, 32, 64, 80, 96, 128)  # rows of one of its warpgroups
# Sums and scales that a thread of the small kernel can hold, by the registers it may have
_HELD = {255: 215, 168: 130, 96: 82, 64: 58, 56: 44}


@dataclass(frozen=True)
class Config:
    """One native configuration. `rows` x `columns` is the tile of the output [M, N]."""

    policy: str  # "large" (persistent) or "small" (operands swapped)
    rows: int
    columns: int
    stages: int
    consumers: int = 2  # warpgroups that multiply
    ahead: bool = False  # small: a chunk multiplies while the one before is promoted
    raster: int = 8  # large: row tiles visited together
    cluster: int = 1  # small: CTAs with the same weights and other tokens, which share their loads
    early: bool = False  # small: sums become floats, and the next chunk multiplies into the same
    chunk: int = 1  # small: groups of K that are multiplied together, of those below 128
    row_cluster: int = 1  # small: CTAs with the same tokens and other weights
    resident: int = 1  # small: CTAs of a multiprocessor that registers leave room for

    @property
    def tile(self) -> tuple[int, int]:
        return self.rows, self.columns

    @property
    def warps(self) -> int:
        return 4 * self.consumers + (4 if self.policy == "large" else 2)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def shared_bytes(config: Config, group_size: int) -> int:
    """What the kernel's Shared / Layout adds up to, with room to align."""
    width = config.rows + config.columns
    data = config.stages * width * DEPTH
    if config.policy == "large":
        barriers = 2 * 8 * (config.stages + _SCALE_STAGES)
        return data + _SCALE_STAGES * _SCALE_GROUPS * width * 4 + barriers + _ALIGNMENT
    groups = max(DEPTH // group_size, 1)
    return data + config.stages * (groups * width * 4 + 16) + _ALIGNMENT


def why_not(problem: Problem) -> str | None:
    """The native kernels read codes by TMA; scales, bias and out may have any strides."""
    a, b = problem.spec("a"), problem.spec("b")
    if len(b.shape) == 3:
        return "b is group-packed, the CPU's layout; pass weight.T"
    (m, k), n = a.shape, b.shape[1]
    if 0 in (m, n, k):
        return None
    if max(m, n, k) > _LONGEST:
        return f"a dimension is longer than {_LONGEST}"
    for name, spec, rows, columns in (("a", a, 0, 1), ("b", b, 1, 0)):
        if spec.stride[columns] != 1 and k > 1:
            layout = "row-major" if name == "a" else "column-major (weight.T)"
            return f"{name} must be {layout}: its stride along K is {spec.stride[columns]}"
        lead = spec.stride[rows] if spec.shape[rows] > 1 else -(-k // 16) * 16
        if lead % 16:
            return f"{name}'s leading stride is {lead}; TMA needs a multiple of 16"
        if lead < k:
            return f"{name}'s leading stride is {lead}, below K = {k}; TMA's rows do not overlap"
        if spec.align < 16:
            return f"{name}'s address is aligned to {spec.align} bytes; TMA needs 16"
    return None


def yields(problem: Problem) -> str | None:
    """What the tuned table says another back end does faster, "auto" leaves to that one."""
    (m, k), n = problem.spec("a").shape, problem.spec("b").shape[-1]
    if problem.spec("out").dtype.itemsize != 2:
        return None  # tables were measured with outputs of 2 bytes; others rule out wide tiles
    group_size = group_of(problem)
    backend = preferred(
        table("int8_gemm", problem.arch.device),
        {"group_size": group_size},
        {"m": m, "n": n, "k": k},
        problem.arch.multiprocessors,
        {
            "cuda": lambda values: _reads(values, group_size, m),
            "triton": lambda values: triton.is_legal(values, problem),
        },
    )
    if backend in (None, "cuda"):
        return None
    return f"{backend} is faster here by the tuned table"


def must_run(problem: Problem) -> bool:
    """16-byte aligned pointers and leading strides; any M, N, K, group, scales, bias and out."""
    a, b = problem.spec("a"), problem.spec("b")
    if len(b.shape) == 3 or a.align < 16 or b.align < 16 or max(*a.shape, *b.shape) > _LONGEST:
        return False
    k = a.shape[1]
    sides = ((a.stride[1], a.stride[0]), (b.stride[0], b.stride[1]))
    return all(along == 1 and lead % 16 == 0 and lead >= k for along, lead in sides)


def configs(problem: Problem) -> list[Config]:
    """Every legal configuration, for tests that force one."""
    m = problem.spec("a").shape[0]
    return [c for c in _every(group_of(problem)) if c.policy == "large" or _fits_grid(c, m)]


_SPREADS: tuple[dict[str, Any], ...] = (
    *({}, {"resident": 2}, {"resident": 3}),
    *({"cluster": 2}, {"cluster": 2, "resident": 2}),
    *({"row_cluster": 2}, {"row_cluster": 2, "resident": 2}),
)


@functools.lru_cache(maxsize=8)
def _every(group_size: int) -> tuple[Config, ...]:
    """The legal configurations for a single row."""
    large = (
        Config("large", rows, columns, stages, raster=raster)
        for rows in _ROWS["large"]
        for columns in _COLUMNS["large"]
        for stages in _STAGES["large"]
        for raster in (4, 8, 16)
    )
    small = (
        Config("small", tokens, 64, stages, consumers, **order, **more)
        for tokens in _ROWS["small"]
        for stages in _STAGES["small"]
        for consumers in (1, 2, 4)
        for order in _orders(group_size)
        for more in _SPREADS
    )
    return tuple(c for c in (*large, *small) if is_legal(c, group_size))


def _fits_grid(config: Config, m: int) -> bool:
    return m <= _LARGEST_GRID_Y * config.rows


def _orders(group_size: int) -> list[dict[str, Any]]:
    """Ways of the small kernel to promote sums."""
    chunks = [c for c in (1, 2, 4) if c * group_size <= max(DEPTH, group_size)]
    ways: tuple[dict[str, Any], ...] = ({}, {"ahead": True}, {"early": True})
    return [way | {"chunk": chunk} for chunk in chunks for way in ways]


def candidates(problem: Problem) -> list[Config]:
    """The legal configurations worth timing: some dozens, by the number of rows."""
    m, n, group_size = problem.spec("a").shape[0], problem.spec("b").shape[1], group_of(problem)

    def deepest(c: Config) -> bool:  # the ring; fewer stages hardly ever won
        more = (s for s in _STAGES[c.policy] if s > c.stages)
        return not any(is_legal(replace(c, stages=s), group_size, m) for s in more)

    def plausible(c: Config) -> bool:
        if c.policy == "large":
            return m > 64 and deepest(c) and (m > 512 or c.raster == 8)
        tiles = -(-m // c.rows)
        fits = m > c.rows // 2 or c.rows == min(_ROWS["small"])
        if m > 256 or not fits or tiles > 2 or (c.cluster > 1 and tiles < 2):
            return False
        if c.rows in _WHOLE and not 128 < m <= c.rows:
            return False
        if c.row_cluster > 1 and m <= 64:  # few tokens are cheap to read twice
            return False
        if c.rows // c.consumers > 96 or (c.consumers > 1 and c.rows // c.consumers < 16):
            return False
        waits = not c.early and c.resident < 3 and c.rows not in _WHOLE
        if waits and c.chunk < max(DEPTH // group_size, 1) // 2:
            return False  # for each product
        rounds = -(-_tiles(m, n, c.rows, 64) // _SMS)
        return c.resident == min(rounds, 3 if c.cluster * c.row_cluster == 1 else 2) and deepest(c)

    return [c for c in configs(problem) if plausible(c)]


def group_of(problem: Problem) -> int:
    group_size = problem.param("group_size")
    assert isinstance(group_size, int)
    return group_size


def is_legal(config: Config, group_size: int, m: int = 1) -> bool:
    """Whether the kernels have this configuration and M rows fit its grid."""
    c = config
    sizes = (c.rows, c.columns, c.stages, c.consumers, c.raster)
    more = (c.cluster, c.chunk, c.row_cluster, c.resident)
    if c.policy not in _ROWS or any(type(x) is not int or x < 1 for x in (*sizes, *more)):
        return False
    if c.rows not in _ROWS[c.policy] or c.columns not in _COLUMNS[c.policy]:
        return False
    if type(c.ahead) is not bool or type(c.early) is not bool or c.raster > 64:
        return False
    units = 2 if c.ahead or c.early else 1
    blocks = max(group_size // DEPTH, 1)  # stages of a unit
    if c.stages <= units * blocks or (c.policy == "large" and c.stages < 2 * blocks):
        return False  # the ring must hold the units in use and let the next one come
    if shared_bytes(c, group_size) > SHARED_LIMIT:
        return False
    if c.policy == "large":
        return c.consumers == 2 and not c.ahead and not c.early and set(more) == {1}
    if (
        c.consumers not in (1, 2, 4)
        or c.rows // c.consumers not in _WIDTHS
        or (c.stages == 7 and c.rows not in _WHOLE)  # 6 and 8 serve the others
        or (c.ahead and c.early)
        or max(DEPTH // group_size, 1) % c.chunk
        or c.cluster * c.row_cluster > 2
        or c.rows % (8 * max(c.consumers, c.row_cluster))  # the swizzle's atoms have eight rows
        or not _fits_grid(c, m)
    ):
        return False
    if c.resident * (shared_bytes(c, group_size) + 1024) > _SHARED_OF_SM:
        return False
    return _held(c, group_size) <= _HELD.get(_register_limit(c), 0)


def _held(c: Config, group_size: int) -> int:
    """Registers of the small kernel's sums and scales."""
    tokens, groups = c.rows // c.consumers, max(DEPTH // group_size, 1)
    if c.resident > 2 or (c.chunk == groups and tokens > 32):  # `kRead` of the .cu file
        read = c.chunk
    elif c.chunk > 2 or tokens <= 32:
        read = groups
    else:
        read = 2
    sets = 2 if c.ahead or c.early else 1
    return (sets * c.chunk + 1) * tokens // 2 + read * tokens // 4 + 2 * c.chunk


def _register_limit(c: Config) -> int:
    """What a thread may have, with `resident` CTAs: four schedulers share the warps evenly."""
    warps = -(-c.warps * c.resident // 4) * 4
    return min(255, 65536 // (32 * warps) // 8 * 8)


def config(problem: Problem) -> Config:
    """The tuned table's, else the heuristic's."""
    group_size, count = group_of(problem), problem.arch.multiprocessors
    (m, k), n = problem.spec("a").shape, problem.spec("b").shape[1]
    rows = table("int8_gemm", problem.arch.device)
    exact, sizes = {"backend": "cuda", "group_size": group_size}, {"m": m, "n": n, "k": k}

    def legal(values: dict[str, Any]) -> bool:
        if values.get("rows") in _WHOLE and (
            m > values["rows"] or _tiles(m, n, values["rows"], 64) > count
        ):
            return False  # a second round takes as long again; it was measured in one
        return _reads(values, group_size, m)

    def at_once(values: dict[str, Any]) -> Config | None:
        """The tile, no wider than M asks, its ring as deep as lets all CTAs be resident."""
        if not legal(values):
            return None
        tile = Config(**values)
        while m <= tile.rows * tile.cluster // 2 and tile.rows > 8 * tile.consumers:
            tile = replace(tile, rows=tile.rows // 2)  # less to multiply and to promote
        rings = (
            replace(tile, stages=stages, resident=resident)
            for stages in reversed(_STAGES["small"])
            for resident in (1, 2, 3)
        )
        fit = (c for c in rings if is_legal(c, group_size, m))
        return next((c for c in fit if _in_one_round(c, group_size, m, n, count)), None)

    if m > FEW_ROWS:
        found = chosen(rows, exact, sizes, count, legal)
        tile = None if found is None else Config(**found)
    elif (measured := nearest(rows, exact | sizes, {}, legal)) is not None:
        tile = Config(**measured)
    else:  # none, where no row's tile is resident: a second round costs more than its ring gains
        found = chosen(rows, exact, sizes, count, lambda values: at_once(values) is not None)
        tile = None if found is None else at_once(found)
    return heuristic(m, n, k, group_size) if tile is None else tile


def _reads(values: dict[str, Any], group_size: int, m: int) -> bool:
    """Whether a row of a table is a legal configuration."""
    found = parsed(Config, values)
    return found is not None and is_legal(found, group_size, m)


def _in_one_round(config: Config, group_size: int, m: int, n: int, count: int) -> bool:
    """Whether all CTAs of the small kernel are resident together, by shared memory and registers.

    The deepest ring is the fastest only where no CTA waits for another to end.
    """
    if config.policy != "small":
        return False
    registers = 48 + _held(config, group_size)
    by_registers = max(config.resident, 65536 // (32 * config.warps * registers))
    by_memory = _SHARED_OF_SM // (shared_bytes(config, group_size) + 1024)
    return _tiles(m, n, config.rows, config.columns) <= count * min(by_memory, by_registers)


def heuristic(m: int, n: int, k: int, group_size: int) -> Config:
    """A legal configuration for any problem, where no table has one."""
    rows = 256 if _tiles(m, n, 256, 128) >= _ONE_WAVE else 128
    if m <= 128 or (m <= 512 and _tiles(m, n, rows, 128) < _ONE_WAVE):
        return _small(m, n, group_size)
    # the width that wastes least of the last wave; a tile's fixed cost is some 16 columns' worth
    costs = {c: -(-_tiles(m, n, rows, c) // _SMS) * (c + 16) for c in (128, 112, 96)}
    cheapest = min(costs, key=costs.__getitem__)
    columns = cheapest if costs[cheapest] < 0.97 * costs[128] else 128
    stages = next(
        s for s in (7, 6, 5, 4, 3) if is_legal(Config("large", rows, columns, s), group_size)
    )
    return Config("large", rows, columns, stages)


_ONE_WAVE = 100  # tiles that keep nearly all of _SMS multiprocessors busy


def _tiles(m: int, n: int, rows: int, columns: int) -> int:
    return -(-m // rows) * -(-n // columns)


def _small(m: int, n: int, group_size: int) -> Config:
    """The narrowest tile for the tokens, its ring as deep as the CTAs of a multiprocessor allow."""
    tokens = next((t for t in _ROWS["small"] if m <= t <= 128), 128)
    if tokens == 64 and (group_size < 256 and _tiles(m, n, 64, 64) < _ONE_WAVE):
        tokens = 32  # twice the CTAs: their second read of the weights comes from L2
    tiles = -(-m // tokens)
    cluster = 2 if tiles == 2 else 1
    resident = max(1, min(2 if cluster > 1 else 3, -(-_tiles(m, n, tokens, 64) // _SMS)))
    groups = max(DEPTH // group_size, 1)
    tries = [
        Config("small", tokens, 64, stages, consumers, cluster=cluster, resident=fit, **order)
        for fit in range(resident, 0, -1)
        for stages in (12, 8, 6, 5, 4, 3)
        for consumers in ((1, 2, 4) if tokens < 128 else (2, 4, 1))
        for order in ({"early": True, "chunk": min(groups, 2)}, {"early": True}, {})
    ]
    return next(c for c in tries if is_legal(c, group_size, m))
