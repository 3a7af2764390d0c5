"""The Triton int8_gemm's configurations: all of them, which are legal, and which one to take."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ...problem import Problem, TensorSpec
from ...triton_gemm import (
    DEEPEST,
    LARGEST_BAND,
    LONGEST_STEP,
    WIDEST,
    indescribable,
    powers_of_two,
    shared_limit,
)

_ACCUMULATORS = 160  # 32-bit registers a thread for INT32 partials and FP32 totals
FAMILIES = ("pointers", "descriptors", "specialized", "ring")


@dataclass(frozen=True)
class Config:
    """One way to run the kernels of triton_kernel.py and triton_hopper.py.

    The kernel's own tile is block_m x block_n; with `swap` its rows are the weights (the narrow
    side is left to few tokens). A loop step, or a stage of the ring, covers block_k of K: part of
    a group, or several. Families: "pointers" (any strides), "descriptors" (the copy engine loads),
    "specialized" (descriptors, and one warp loads for the others), "ring" (SM90, triton_hopper.py).
    """

    family: str
    swap: bool
    block_m: int
    block_n: int
    block_k: int
    group_m: int  # row tiles that share their columns while these are in L2
    warps: int  # those that multiply
    stages: int

    @property
    def policy(self) -> str:
        return f"{self.family}, weights as rows" if self.swap else self.family

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of out."""
        return (self.block_n, self.block_m) if self.swap else (self.block_m, self.block_n)

    @property
    def consumers(self) -> int:
        """Of the ring: groups of four warps that multiply."""
        return self.warps // 4

    @property
    def waves(self) -> int:
        """Of the ring: slices of 64 rows that each of them takes, one after the other."""
        return self.block_m // (16 * self.warps)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        return cls(**values)


def sizes(problem: Problem) -> tuple[int, int, int]:
    (m, k), (_, n) = problem.spec("a").shape, problem.spec("b").shape
    return m, n, k


def group_of(problem: Problem) -> int:
    group = problem.param("group_size")
    assert isinstance(group, int)
    return group


def ceil_div(value: int, by: int) -> int:
    return -(-value // by)


def ring_scales(config: Config, scale_a: TensorSpec, scale_b: TensorSpec) -> bool:
    """Whether the ring carries the column scales; else they go through registers."""
    if config.swap:
        return config.block_n >= 64 and indescribable(scale_a, 0) is None
    return config.block_n >= 64 and indescribable(scale_b, 1) is None


# --- which configurations are legal, each reason apart -------------------------------------------


def shared_bytes(config: Config, problem: Problem) -> int:
    """Shared memory of one block, or a little more."""
    sides = config.block_m + config.block_n
    item = problem.spec("out").dtype.itemsize
    if config.family == "ring":
        carried = ring_scales(config, problem.spec("scale_a"), problem.spec("scale_b"))
        stage = sides * config.block_k + (4 * config.block_n if carried else 0) + 16
        output = 64 * config.block_n * item + 16
        if item < 4:  # stored in pieces
            output = min(output, (16384 if config.swap else 8192) + 16)
        return config.stages * stage + config.consumers * output
    step = max(config.block_k, group_of(problem))  # bytes of a row that one loop step reads
    scales = 4 * max(1, config.block_k // group_of(problem))
    loop = config.stages * sides * (step + scales) + 2048
    return max(loop, config.block_m * config.block_n * item)


def _refuse_shared(config: Config, problem: Problem) -> str | None:
    need = shared_bytes(config, problem)
    limit = shared_limit(problem)
    return f"{need} bytes of shared memory, the limit is {limit}" if need > limit else None


def _refuse_registers(config: Config, problem: Problem) -> str | None:
    if config.family == "ring":
        return None
    threads = 32 * config.warps * (2 if config.family == "specialized" else 1)
    need = 2 * config.block_m * config.block_n // threads
    if need > _ACCUMULATORS:
        return f"{need} accumulator registers a thread would spill"
    return None


def _refuse_idle_warps(config: Config, problem: Problem) -> str | None:
    pieces = (config.block_m // 16) * (config.block_n // 8)
    return None if config.warps <= pieces else "more warps than pieces of the tile"


def _refuse_shapes(config: Config, problem: Problem) -> str | None:
    if config.family not in FAMILIES:
        return f"the families are {', '.join(FAMILIES)}"
    if not (0 < config.group_m <= LARGEST_BAND and 0 < config.stages <= DEEPEST):
        return f"a band has 1 to {LARGEST_BAND} row tiles, a loop 1 to {DEEPEST} stages"
    if config.block_m < 16 or config.block_k < 32 or not powers_of_two(config.block_n):
        return "tiles have 16 rows, 32 of K or more, and a power of two of columns"
    if config.block_n < 16 or config.warps < 1:
        return "tiles have 16 columns or more, and a warp at least"
    if max(config.block_m, config.block_n) > WIDEST or config.block_k > LONGEST_STEP:
        return f"tiles have at most {WIDEST} rows and columns, and {LONGEST_STEP} of K"
    if config.family != "ring" and (
        not powers_of_two(config.block_m, config.warps) or config.warps > 8
    ):
        return "tiles and warps of this family are powers of two"
    return None


def _refuse_steps(config: Config, problem: Problem) -> str | None:
    group, step = group_of(problem), config.block_k
    if group % step and step % group:  # a loop walks whole groups, and reads K by them
        return f"a step covers an even part of a group of {group}, or whole groups"
    return None


def _refuse_descriptors(config: Config, problem: Problem) -> str | None:
    if config.family == "pointers":
        return None
    if "tma" not in problem.arch.features:
        return "descriptors need the bulk tensor copy engine (SM90 or newer)"
    for name, along in (("a", 1), ("b", 0)):
        reason = indescribable(problem.spec(name), along)
        if reason is not None:
            return f"no descriptor of {name}: {reason}"
    return None


def _refuse_specialized(config: Config, problem: Problem) -> str | None:
    if config.family != "specialized":
        return None
    if "wgmma" not in problem.arch.features or not triton_specializes():
        return "specialized warps are for SM90 with Triton 3.6"
    if config.warps != 4 or config.block_m < 128 or config.block_k > group_of(problem):
        return "specialized warps need 4 warps, 128 rows and at most one group a step"
    return None


def _ring_steps(group: int) -> tuple[int, ...]:
    """Half a group a stage where a whole one makes ptxas spill the widest tile."""
    return {32: (32,), 64: (32, 64), 128: (64, 128), 256: (128,)}[group]


def _refuse_ring(config: Config, problem: Problem) -> str | None:
    if config.family != "ring":
        return None
    if "wgmma" not in problem.arch.features:
        return "the ring needs Hopper's wgmma (SM90a)"
    group = group_of(problem)
    if config.block_k not in _ring_steps(group):
        steps = " or ".join(map(str, _ring_steps(group)))
        return f"a stage of the ring covers {steps} of K for groups of {group}"
    if config.warps not in (4, 8, 12) or config.block_m not in (
        16 * config.warps,
        32 * config.warps,
    ):
        return "1 to 3 groups of four warps take one or two slices of 64 rows each"
    if config.waves == 2 and config.warps != 8:
        return "two slices each are for two groups of warps"
    if config.block_n > 128 or config.block_n * config.waves > 256:
        return "more than 128 columns would spill"
    if config.stages <= ceil_div(group, config.block_k):
        return "the ring must hold more than one group"
    wide = config.block_n * config.waves > 128
    if wide and not ring_scales(config, problem.spec("scale_a"), problem.spec("scale_b")):
        return "so wide a tile needs column scales that a descriptor can describe"
    return None


_FILTERS: tuple[Callable[[Config, Problem], str | None], ...] = (
    _refuse_shapes,
    _refuse_steps,
    _refuse_registers,
    _refuse_idle_warps,
    _refuse_descriptors,
    _refuse_specialized,
    _refuse_ring,
    _refuse_shared,
)


@functools.lru_cache(maxsize=1)
def triton_specializes() -> bool:
    """Later releases changed the pass; it is used where it was verified on a GPU."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("triton").startswith("3.6.")
    except PackageNotFoundError:
        return False


def refuses(config: Config, problem: Problem) -> str | None:
    """Why this configuration is not legal for the problem, or None."""
    return next((reason for f in _FILTERS if (reason := f(config, problem)) is not None), None)


def _space(group: int) -> Iterator[Config]:
    """All combinations; loop steps below 128 bytes of a row or above 512 are not worth it."""
    steps = [s for s in (group // 2, group, 2 * group, 4 * group) if 128 <= s <= 512]
    sides = (16, 32, 64, 128, 256)
    for family, swap, block_m, block_n, step, group_m, warps, stages in itertools.product(
        FAMILIES[:3],
        (False, True),
        *(sides, sides, steps, (4, 8, 16), (1, 2, 4, 8), (2, 3, 4, 5, 6)),
    ):
        yield Config(family, swap, block_m, block_n, step, group_m, warps, stages)
    for swap, (block_m, warps), block_n, block_k, group_m, stages in itertools.product(
        (False, True),
        ((64, 4), (128, 8), (192, 12), (256, 8)),
        *((16, 32, 64, 128), _ring_steps(group), (4, 8, 16), range(2, 17)),
    ):
        yield Config("ring", swap, block_m, block_n, block_k, group_m, warps, stages)


def configs(problem: Problem) -> list[Config]:
    """Every legal configuration, in a fixed order."""
    return [c for c in _space(group_of(problem)) if refuses(c, problem) is None]


def candidates(problem: Problem) -> list[Config]:
    """The legal configurations worth timing: some dozens, by what bounds the problem."""
    m, n, _ = sizes(problem)
    narrow = min(128, max(16, 1 << (max(m, 1) - 1).bit_length()))
    legal = configs(problem)
    deepest: dict[tuple[Any, ...], int] = {}
    for c in legal:
        if c.family == "ring":
            shape = (c.swap, c.block_m, c.block_n, c.block_k)
            deepest[shape] = max(deepest.get(shape, 0), c.stages)

    def plausible(c: Config) -> bool:
        rows, columns = c.tile
        area = rows * columns
        if m <= 64:  # streaming the weights: enough bytes in flight, few idle rows
            if not c.swap or rows != narrow or columns > 128 or c.group_m != 8:
                return False
            blocks = ceil_div(n, columns)
            if c.family == "ring":
                deep = deepest[c.swap, c.block_m, c.block_n, c.block_k]
                return c.stages in (deep, deep // 2) and blocks >= 30
            flight = c.stages * columns * max(c.block_k, group_of(problem))
            return (
                c.family != "specialized"
                and c.warps == min(4, max(1, area // 128))
                and blocks >= 64
                and flight * max(1, blocks / 132) >= 24 << 10
            )
        if rows > max(64, 2 * narrow) or min(rows, columns) < 64 or (m > 256 and c.swap):
            return False
        varied = m > 512 and c.family in ("specialized", "ring")
        if c.group_m != 8 and not varied:
            return False
        if c.family == "ring":
            deep = deepest[c.swap, c.block_m, c.block_n, c.block_k]
            return c.stages == deep and (area >= 16384 or m <= 512)
        small = 8192 if "wgmma" in problem.arch.features else 4096
        warps = 4 if area <= small or c.family == "specialized" else 8
        return c.warps == warps and c.block_k <= 256 and (area >= 8192 or m <= 512)

    found = [c for c in legal if plausible(c)]
    if "wgmma" in problem.arch.features:
        found = [c for c in found if _near_best_on_hopper(c, m)]
    usual = heuristic(problem)
    return found if usual in found else [*found, usual]


def _near_best_on_hopper(c: Config, m: int) -> bool:
    """Whether a candidate came within about 15 % of the best on the H200, for any problem measured.

    Compiling is what tuning takes longest for; docs/performance-notes.md has the measurements.
    """
    if m <= 32:  # streaming: one depth a width of K keeps enough bytes in flight
        depth = {128: 6, 256: 5, 512: 4}.get(c.block_k)
        return c.family == "ring" or (c.block_m >= 32 and c.stages == depth)
    if m <= 64:
        return c.family == "ring" or (
            c.block_m >= 32 and c.block_k <= 256 and c.stages <= (3 if c.block_m >= 64 else 4)
        )
    if m <= 512:
        narrow = min(c.block_m, c.block_n) == 64 and max(c.block_m, c.block_n) <= 128
        return c.family == "ring" or (c.family == "descriptors" and narrow and c.stages >= 3)
    return c.family == "ring" or (c.family == "descriptors" and c.stages >= 3 and c.group_m == 8)


def _wide_loads(problem: Problem) -> bool:
    """Whether both operands can be read 16 bytes at a time along K."""
    return all(
        spec.align >= 16 and spec.stride[along] == 1 and spec.stride[1 - along] % 16 == 0
        for spec, along in ((problem.spec("a"), 1), (problem.spec("b"), 0))
    )


def heuristic(problem: Problem) -> Config:
    """A legal configuration for any problem, where no table has one."""
    m = sizes(problem)[0]
    group = group_of(problem)
    step = max(group, 128)
    last = Config("pointers", False, 32, 32, 128, 8, 4, 2)
    if not _wide_loads(problem):  # they keep a wide tile out of registers
        tries = []
    elif m <= 64:
        narrow = min(64, max(16, 1 << (max(m, 1) - 1).bit_length()))
        tries = [
            Config("pointers", True, 64, narrow, 128, 8, 4, 6 if narrow < 64 else 3),
            Config("pointers", True, 64, narrow, step, 8, 4, 4),
            Config("pointers", True, 64, narrow, step, 8, 4, 2),
        ]
        if narrow == 64 and "wgmma" in problem.arch.features:  # elsewhere it spills
            tries.insert(0, Config("descriptors", True, 64, 64, step, 8, 4, 2))
    else:
        stage = _ring_steps(group)
        tries = [
            Config("ring", False, 128, 128, stage[-1], 8, 8, 5),
            Config("pointers", False, 64, 64, step, 8, 4, 3),
            Config("pointers", False, 64, 64, 128, 8, 4, 2),
        ]
        if m <= 256:
            tries.insert(0, Config("descriptors", True, 128, 64, step, 8, 4, 4))
        elif group > 32:
            depth = 4 if stage[0] == 128 else 8
            tries.insert(0, Config("ring", False, 256, 128, stage[0], 8, 8, depth))
            tries.insert(1, Config("ring", False, 256, 128, stage[0], 8, 8, depth * 3 // 4))
            tries.insert(3, Config("pointers", False, 128, 128, step, 8, 8, 3))
            tries.insert(4, Config("pointers", False, 128, 64, step, 8, 8, 3))
    return next(c for c in (*tries, last) if refuses(c, problem) is None)
