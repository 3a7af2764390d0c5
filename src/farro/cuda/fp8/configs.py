"""FP8 products on SM90a: which problems and configurations the kernels take, and the choice of one.

gemm.py launches them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...problem import Problem, TensorSpec
from ...tuning import FEW_ROWS, chosen, preferred, table, takes

SHARED_LIMIT = 232448  # bytes a CTA may use on SM90
_SHARED_OF_SM = 233472  # of which each CTA costs 1 KiB more than it uses
_ALIGNMENT = 1024  # of shared memory, for the 128-byte swizzle
DEPTH = 128  # bytes of K in a stage, as in the .cu files
SCALE_STAGES, SCALE_BLOCKS = 3, 4  # of kernels for many rows
_LONGEST = 2**31 - 2**10  # a row's index plus a tile stays an int
_LARGEST_GRID_Y = 65535
# rows of a tile -> columns
_LARGE = {256: (64, 80, 96, 112, 128), 128: (*range(64, 257, 16),)}
# of 128 rows, only by tables and pins: by blocks 176 hardly won, the others are not timed
_BY_NAME = (176, 208, 224, 240)
_STAGED = (192, 208, 224, 240, 256)  # columns of tiles of 128 rows whose results may leave by TMA
_MOST_STAGES = 8  # of kernels for many rows; deeper rings never won
_SMALL = (8, 16, 32, 64, 128)  # tokens of a tile, beside 64 weight rows
_CLUSTERS = (1, 2, 4, 8)
_LONG = (32, 64)  # tokens of tiles that need not be ahead, or may share weights
_FORMS = ((True, 1), (False, 1), (True, 2))  # ahead, multicast
BIAS, RESIDUAL, GELU = 1, 2, 4  # bits of the epilogue
_MOST_IN_CLUSTERS = 300  # CTAs, where multiprocessors have tiles enough a cluster never won


@dataclass(frozen=True)
class Config:
    """One native configuration. `rows` x `columns` is the tile of the output [M, N]."""

    policy: str  # "large" (persistent) or "small" (operands swapped)
    rows: int
    columns: int
    stages: int
    cluster: int = 1  # small: CTAs that share K
    raster: int = 8  # large: row tiles visited together
    staged: bool = False  # large: results leave by TMA, while the next tile's products run
    ahead: bool = True  # small: a block multiplies while the one before is promoted
    multicast: int = 1  # small: CTAs with other tokens that share the loads of weights

    @property
    def tile(self) -> tuple[int, int]:
        return self.rows, self.columns

    @property
    def name(self) -> str:
        split = f", K in {self.cluster}" if self.cluster > 1 else ""
        more = (", staged" if self.staged else "") + ("" if self.ahead else ", one by one")
        more += f", weights to {self.multicast}" if self.multicast > 1 else ""
        return f"sm90 {self.policy} {self.rows}x{self.columns}{split}{more}"

    @property
    def warps(self) -> int:
        return 12 if self.policy == "large" else 6

    @property
    def ctas(self) -> int:
        """Of a cluster."""
        return self.cluster * self.multicast

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Kind:
    """What the kernels are compiled for, beside a configuration."""

    scaled: bool  # blocks of 128 of K have scales
    fast: bool = False  # the tensor cores add all of K
    epilogue: int = 0


def across(columns: int) -> int:
    """Blocks of the weight's scales that a tile's columns may lie in, wherever it begins."""
    return 2 if columns <= DEPTH + math.gcd(DEPTH, columns) else 3


def shared_bytes(config: Config, scaled: bool) -> int:
    """What the kernel's Shared / Layout adds up to, with room to align."""
    data = config.stages * (config.rows + config.columns) * DEPTH
    if config.policy == "large":
        scales = (
            SCALE_STAGES * SCALE_BLOCKS * (config.rows + across(config.columns)) * 4
            if scaled
            else 0
        )
        results = config.rows * config.columns * 2 if config.staged else 0
        return data + results + scales + 16 * (config.stages + SCALE_STAGES) + _ALIGNMENT
    scales = (config.rows + 4) * 4 if scaled else 0
    return data + config.stages * (scales + 16) + _ALIGNMENT


def refuses(config: Config, kind: Kind, m: int = 1) -> str | None:
    """Why the kernels do not have this configuration, or cannot for M rows; None if they can."""
    c = config
    sizes = (c.rows, c.columns, c.stages, c.cluster, c.raster, c.multicast)
    if any(type(size) is not int or size < 1 for size in sizes) or c.stages < 3:
        return "sizes are positive ints, and a ring has three stages at the least"
    if not type(c.staged) is type(c.ahead) is bool or c.raster > 64:
        return "staged and ahead are True or False, and raster 64 at most"
    if shared_bytes(c, kind.scaled) > SHARED_LIMIT:
        return f"{shared_bytes(c, kind.scaled)} bytes of shared memory, the limit is {SHARED_LIMIT}"
    if c.policy == "large":
        return _refuses_large(c, kind)
    if c.policy != "small" or c.rows not in _SMALL or c.columns != 64 or c.cluster not in _CLUSTERS:
        return "no such tile"
    if c.staged:
        return "only tiles for many rows stage their results"
    if not _has_form(c, kind):
        return "no such form of a tile for few rows"
    if c.rows * (64 + 4) * 4 > c.stages * (c.rows + 64) * DEPTH:
        return "the totals do not fit where the operands were"
    tall = m > _LARGEST_GRID_Y * c.rows * c.multicast
    return f"more than {_LARGEST_GRID_Y} tiles of tokens" if tall else None


def _has_form(c: Config, kind: Kind) -> bool:
    """Beside K split, what products with promotion were found to gain from."""
    if c.ahead and c.multicast == 1:
        return True
    whole = c.rows in _LONG and c.cluster == 1
    return not kind.fast and whole and (c.ahead, c.multicast) in _FORMS


def _refuses_large(c: Config, kind: Kind) -> str | None:
    of_small = c.cluster, c.ahead, c.multicast
    if c.columns not in _LARGE.get(c.rows, ()) or of_small != (1, True, 1):
        return "no such tile"
    if c.staged and (not kind.fast or c.rows != 128 or c.columns not in _STAGED):
        return "no such tile stages its results"
    # FP32 registers a thread: totals, and one wave's partial sums
    waves = c.rows // 128
    sums = c.columns // 2 * (waves if kind.fast else waves + 1)
    return f"{sums} registers of sums would spill" if sums > 192 else None


def configs(kind: Kind, m: int) -> Iterator[Config]:
    """Every legal configuration."""
    large = (
        Config("large", rows, columns, stages, raster=raster, staged=staged)
        for rows, widths in _LARGE.items()
        for columns in widths
        for staged in (False, True)
        for stages in range(3, _MOST_STAGES + 1)
        for raster in (4, 8, 16)
    )
    small = (
        Config("small", tokens, 64, stages, cluster, ahead=ahead, multicast=multicast)
        for tokens in _SMALL
        for stages in (3, 4, 6, 8, 12, 16)
        for cluster in _CLUSTERS
        for ahead, multicast in _FORMS
        if stages > 3 or not ahead
    )
    yield from (c for c in (*large, *small) if refuses(c, kind, m) is None)


def candidates(kind: Kind, m: int, n: int, k: int) -> list[Config]:
    """The legal configurations worth timing: some dozens, by the number of rows."""
    found = list(configs(kind, m))
    few = [c for c in found if c.policy == "small" and _serves_few(c, m, n, k)]
    many = [c for c in found if c.policy == "large" and _serves_many(c, kind, m, n)]
    return few + sorted(many, key=lambda c: _cycles(c, kind, m, n, k, 132))


def _serves_few(c: Config, m: int, n: int, k: int) -> bool:
    tiles = -(-m // c.rows) * -(-n // 64)
    if m > 256 or (m > FEW_ROWS and c.stages not in (6, 8, 12)):
        return False
    if (m <= c.rows // 2 and c.rows > min(_SMALL)) or c.rows * 4 < min(m, 128):
        return False
    if not c.ahead:  # it is the CTA beside that multiplies meanwhile
        return tiles > 132
    if c.multicast > 1:  # and no CTA has no token
        return tiles <= _MOST_IN_CLUSTERS and m > c.rows
    return c.cluster == 1 or (tiles * c.cluster <= _MOST_IN_CLUSTERS and k >= 2 * c.cluster * DEPTH)


def _serves_many(c: Config, kind: Kind, m: int, n: int) -> bool:
    few = m <= 8 * c.rows or n <= 2 * c.columns  # all orders of tiles are alike, or nearly
    return m > FEW_ROWS and _deepest(c, kind) and (c.raster == 8 or not few)


def _deepest(c: Config, kind: Kind) -> bool:
    return c.stages == _MOST_STAGES or refuses(replace(c, stages=c.stages + 1), kind) is not None


@functools.lru_cache(maxsize=64)
def _tried(kind: Kind) -> tuple[Config, ...]:
    """Each tile for many rows, with its deepest ring."""
    found = (c for c in configs(kind, 1) if c.policy == "large" and c.raster == 8)
    found = (c for c in found if c.columns not in _BY_NAME and not c.staged)
    return tuple(c for c in found if _deepest(c, kind))


def _cycles(c: Config, kind: Kind, m: int, n: int, k: int, multiprocessors: int) -> float:
    """About what a tile for many rows takes: fitted to some 60 times on an H200, most to 5 %.

    A block of K takes as long as the tensor cores do, or as its operands take to be read from and
    written to shared memory, and a while for promotion; a tile has a start and an end.
    """
    rounds = -(-(-(-m // c.rows) * -(-n // c.columns)) // multiprocessors)
    waves = c.rows // 64
    products, operands = waves * 2 * c.columns, waves * (64 + c.columns) + c.rows + c.columns
    block = 1.05 * max(products, operands) + (0 if kind.fast else 20 * waves)
    return rounds * (2000 + c.rows * c.columns / 50 + -(-k // DEPTH) * block)


def _staged(c: Config, kind: Kind, m: int, n: int, k: int, multiprocessors: int) -> Config | None:
    """The tile with its results staged, where that is likely to pay.

    It spares a tile some 800 cycles and costs a stage of the ring, 13 cycles a block of K: by the
    times at K = 1536 and 4096.
    """
    if k > 8192 or -(-m // c.rows) * -(-n // c.columns) <= multiprocessors:  # nothing follows
        return None
    found = (replace(c, stages=stages, staged=True) for stages in range(c.stages, 2, -1))
    return next((s for s in found if refuses(s, kind) is None), None)


def heuristic(kind: Kind, m: int, n: int, k: int, multiprocessors: int = 132) -> Config:
    """A legal configuration for any problem, where no table has one."""
    if m > 64:
        best = min(_tried(kind), key=lambda c: _cycles(c, kind, m, n, k, multiprocessors))
        if m > 256 or -(-m // best.rows) * -(-n // best.columns) * 2 > multiprocessors:
            return _staged(best, kind, m, n, k, multiprocessors) or best
    tokens = next((t for t in (8, 16, 32, 64) if m <= t), 64)
    tiles = -(-m // tokens) * -(-n // 64)
    cluster = 1
    while cluster < 8 and tiles * cluster * 2 <= multiprocessors and k >= 4 * cluster * DEPTH:
        cluster *= 2
    resident = max(1, min(3, -(-tiles * cluster // multiprocessors)))
    room = _SHARED_OF_SM // resident - 1024  # the system takes 1 KiB for each CTA
    found = [Config("small", tokens, 64, stages, cluster) for stages in (12, 8, 6, 4)]
    best = next((c for c in found if shared_bytes(c, kind.scaled) <= room), found[-1])
    if not kind.scaled or tokens != 64:
        return best
    if multiprocessors / 2 < 2 * tiles <= multiprocessors and k >= 16 * DEPTH:
        return Config("small", 32, 64, 16, multicast=2)
    together = Config("small", 64, 64, 3, ahead=False)
    more = not _in_one_round(best, kind, m, n, multiprocessors)
    return together if more and _in_one_round(together, kind, m, n, multiprocessors) else best


def tuned(problem: Problem, kind: Kind, exact: Mapping[str, Any]) -> Config:
    """The tuned table's configuration for a product of input [M,K] and weight [N,K], or ours."""
    (m, k), n = problem.spec("input").shape, problem.spec("weight").shape[0]
    rows, count = table(problem.operator, problem.arch.device), problem.arch.multiprocessors
    arguments = (rows, {"backend": "cuda", **exact}, {"m": m, "n": n, "k": k}, count)
    legal = takes(Config, lambda c: refuses(c, kind, m))

    def at_once(values: dict[str, Any]) -> bool:
        return legal(values) and _in_one_round(Config(**values), kind, m, n, count)

    found = chosen(*arguments, at_once) if m <= FEW_ROWS else None
    found = found or chosen(*arguments, legal, far=False)
    return heuristic(kind, m, n, k, count) if found is None else Config(**found)


def yields(problem: Problem, exact: Mapping[str, Any]) -> str | None:
    """What the tuned table says another back end does faster, "auto" leaves to that one."""
    (m, k), n = problem.spec("input").shape, problem.spec("weight").shape[0]
    rows = table(problem.operator, problem.arch.device)
    sizes = {"m": m, "n": n, "k": k}
    # Triton has no rows in a shipped table yet: once it gets them, say here what it takes
    count, others = problem.arch.multiprocessors, ("cuda", "triton")
    backend = preferred(rows, exact, sizes, count, {}, others)
    if backend in (None, "cuda"):
        return None
    return f"{backend} is faster here by the tuned table"


def small_registers(config: Config, kind: Kind) -> int:
    """What a thread of the small kernel needs at most; its machine code is held to that."""
    sets = 1 if kind.fast else 3 if config.ahead else 2
    return max(56, 40 + config.rows // 2 * sets)


def _resident(config: Config, kind: Kind) -> int:
    """CTAs of the small kernel that a multiprocessor has room for: by memory and registers."""
    by_registers = 65536 // (32 * config.warps * small_registers(config, kind))
    return min(by_registers, _SHARED_OF_SM // (shared_bytes(config, kind.scaled) + 1024))


def _ctas(config: Config, m: int, n: int) -> int:
    """Of the small kernel."""
    return -(-m // (config.rows * config.multicast)) * -(-n // config.columns) * config.ctas


def _in_one_round(config: Config, kind: Kind, m: int, n: int, count: int) -> bool:
    """Whether all CTAs of the small kernel are resident together."""
    return _ctas(config, m, n) <= count * _resident(config, kind)


def unfit(name: str, spec: TensorSpec) -> str | None:
    """Why TMA cannot read a row-major matrix of bytes as it lies, or None."""
    rows, columns = spec.shape
    if columns > 1 and spec.stride[1] != 1:
        return f"{name} must be row-major: its stride along K is {spec.stride[1]}"
    lead = spec.stride[0] if rows > 1 else columns
    if lead % 16:
        return f"{name}'s leading stride is {lead}; TMA needs a multiple of 16"
    if lead < columns:
        return f"{name}'s leading stride is {lead}, below K = {columns}: its rows overlap"
    if spec.align < 16:
        return f"{name}'s address is aligned to {spec.align} bytes; TMA needs 16"
    return None


def why_not(x: TensorSpec, weight: TensorSpec, name: str = "weight") -> str | None:
    """Any M, K % 16 == 0 and N % 16 == 0, row-major operands that TMA can read."""
    (m, k), n = x.shape, weight.shape[0]
    if n % 16 or k % 16:
        return f"N = {n} and K = {k} must be multiples of 16"
    if 0 in (m, n, k):
        return None
    if max(m, n, k) > _LONGEST:
        return f"a dimension is longer than {_LONGEST}"
    return unfit("input", x) or unfit(name, weight)


def must_run(x: TensorSpec, weight: TensorSpec) -> bool:
    """What the operators declare: whole rows of aligned 16-byte pieces, N % 16 == 0, any M."""
    (m, k), n = x.shape, weight.shape[0]
    if n % 16 or k % 16 or max(m, n, k) > _LONGEST:
        return False

    def lies(spec: TensorSpec) -> bool:
        lead = spec.stride[0] if spec.shape[0] > 1 else k
        return spec.align >= 16 and spec.stride[1] == 1 and lead % 16 == 0 and lead >= k

    return 0 in (m, n, k) or (lies(x) and lies(weight))
