"""The Triton configurations of 128-block FP8 products: which are legal, and which one to take."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ...problem import Problem
from ...triton_gemm import (
    DEEPEST,
    LARGEST_BAND,
    LONGEST_STEP,
    WIDEST,
    indescribable,
    powers_of_two,
    shared_limit,
)

BLOCK = 128  # of K: what one scale covers
FAMILIES = ("pointers", "decoded", "descriptors")
_ACCUMULATORS = 160  # 32-bit registers a thread for partial sums and totals


@dataclass(frozen=True)
class Config:
    """One way to run the kernels of triton_kernel.py.

    The kernel's own tile is block_m x block_n; with `swap` its rows are the weights (the narrow
    side is left to few tokens). A loop step covers block_k of K: part of a block, or several.
    Families: "pointers" (any strides), "decoded" (the same for devices without FP8 tensor cores:
    codes are multiplied as float16), "descriptors" (the copy engine loads).
    """

    family: str
    swap: bool
    block_m: int
    block_n: int
    block_k: int
    group_m: int  # row tiles that share their columns while these are in L2
    warps: int
    stages: int

    @property
    def policy(self) -> str:
        return f"{self.family}, weights as rows" if self.swap else self.family

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of out."""
        return (self.block_n, self.block_m) if self.swap else (self.block_m, self.block_n)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        return cls(**values)


def sizes(problem: Problem) -> tuple[int, int, int]:
    (m, k), n = problem.spec("input").shape, problem.spec("weight").shape[0]
    return m, n, k


def ceil_div(value: int, by: int) -> int:
    return -(-value // by)


# --- which configurations are legal, each reason apart -------------------------------------------


def shared_bytes(config: Config) -> int:
    """Shared memory of one block, or a little more."""
    sides = config.block_m + config.block_n
    step = max(config.block_k, BLOCK)  # bytes of a row that one loop step reads
    loop = config.stages * sides * (step + 4 * max(1, config.block_k // BLOCK)) + 2048
    return max(loop, 2 * config.block_m * config.block_n)


def _refuse_shared(config: Config, problem: Problem) -> str | None:
    need, limit = shared_bytes(config), shared_limit(problem)
    return f"{need} bytes of shared memory, the limit is {limit}" if need > limit else None


def _refuse_registers(config: Config, problem: Problem) -> str | None:
    need = 2 * config.block_m * config.block_n // (32 * config.warps)
    return f"{need} accumulator registers a thread would spill" if need > _ACCUMULATORS else None


def _refuse_shapes(config: Config, problem: Problem) -> str | None:
    sides = (config.block_m, config.block_n, config.block_k, config.warps, config.group_m)
    if not powers_of_two(*sides) or config.warps > 8:
        return "tiles and warps are powers of two, and warps at most 8"
    if min(config.block_m, config.block_n) < 16 or config.block_k < 32:
        return "tensor cores take tiles of 16 x 16 x 32 and more"
    if max(config.block_m, config.block_n) > WIDEST or config.block_k > LONGEST_STEP:
        return f"tiles have at most {WIDEST} rows and columns, and {LONGEST_STEP} of K"
    if config.group_m > LARGEST_BAND or not 0 < config.stages <= DEEPEST:
        return f"a band has 1 to {LARGEST_BAND} row tiles, a loop 1 to {DEEPEST} stages"
    pieces = (config.block_m // 16) * (config.block_n // 8)
    return None if config.warps <= pieces else "more warps than pieces of the tile"


def _refuse_family(config: Config, problem: Problem) -> str | None:
    if config.family not in FAMILIES:
        return f"the families are {', '.join(FAMILIES)}"
    interpreted = problem.arch.name == "cpu"
    fp8 = "fp8_mma" in problem.arch.features or interpreted
    if config.family == "decoded":
        return None if interpreted or not fp8 else "there are FP8 tensor cores here"
    if not fp8:
        return "FP8 tensor cores are needed (SM89 or newer)"
    if config.family == "pointers":
        return None
    if "tma" not in problem.arch.features and not interpreted:
        return "descriptors need the bulk tensor copy engine (SM90 or newer)"
    if config.block_k != BLOCK:
        return "a step of the copy engine covers one block of K"
    for name in ("input", "weight"):
        reason = indescribable(problem.spec(name), 1)
        if reason is not None:
            return f"no descriptor of {name}: {reason}"
    return None


_FILTERS: tuple[Callable[[Config, Problem], str | None], ...] = (
    _refuse_shapes,
    _refuse_family,
    _refuse_registers,
    _refuse_shared,
)


def refuses(config: Config, problem: Problem) -> str | None:
    """Why this configuration is not legal for the problem, or None."""
    return next((reason for f in _FILTERS if (reason := f(config, problem)) is not None), None)


def _space() -> Iterator[Config]:
    side = (16, 32, 64, 128, 256)
    for family, swap, block_m, block_n, step, group_m, warps, stages in itertools.product(
        FAMILIES,
        (False, True),
        *(side, side, (64, 128, 256), (4, 8, 16), (1, 2, 4, 8), (2, 3, 4, 5, 6)),
    ):
        yield Config(family, swap, block_m, block_n, step, group_m, warps, stages)


def configs(problem: Problem) -> list[Config]:
    """Every legal configuration, in a fixed order."""
    return [c for c in _space() if refuses(c, problem) is None]


def candidates(problem: Problem) -> list[Config]:
    """The legal configurations worth timing: some dozens, by what bounds the problem."""
    m, n, _ = sizes(problem)
    narrow = _narrow(m)

    def plausible(c: Config) -> bool:
        rows, columns = c.tile
        area = rows * columns
        if c.group_m != 8:
            return False
        if m <= 64:  # streaming the weights: enough bytes in flight, few idle rows
            flight = c.stages * columns * max(c.block_k, BLOCK)
            blocks = ceil_div(n, columns)
            return (
                (c.swap and rows == narrow and 32 <= columns <= 128)
                and c.warps == min(4, max(1, area // 128))
                and (c.block_k >= BLOCK and c.stages >= 3)
                and flight * max(1, blocks / 132) >= 24 << 10
            )
        if rows > max(64, 2 * narrow) or min(rows, columns) < 64 or (m > 256 and c.swap):
            return False
        warps = (4,) if area <= 4096 else (8,) if area >= 16384 else (4, 8)
        return c.warps in warps and c.block_k == BLOCK and c.stages >= 3 and area >= 4096

    found = [c for c in configs(problem) if plausible(c)]
    usual = heuristic(problem)
    return found if usual in found else [*found, usual]


def _narrow(m: int) -> int:
    """The narrowest side that holds m tokens, up to 128."""
    return min(128, max(16, 1 << (max(m, 1) - 1).bit_length()))


def _wide_loads(problem: Problem) -> bool:
    """Whether both operands can be read 16 bytes at a time along K."""
    return all(
        spec.align >= 16 and spec.stride[1] == 1 and spec.stride[0] % 16 == 0
        for spec in (problem.spec("input"), problem.spec("weight"))
    )


def heuristic(problem: Problem) -> Config:
    """A legal configuration for any problem, where no table has one."""
    m = sizes(problem)[0]
    decoded = refuses(Config("decoded", False, 32, 32, 128, 8, 4, 2), problem) is None
    family = "decoded" if decoded else "pointers"
    if not _wide_loads(problem):  # single bytes keep a wide tile out of registers
        tries = []
    elif m <= 64:
        narrow = min(64, _narrow(m))
        tries = [
            Config(family, True, 64, narrow, 128, 8, 4, 6 if narrow < 64 else 3),
            Config(family, True, 64, narrow, 128, 8, 4, 3),
        ]
    else:
        tries = [
            Config("descriptors", False, 128, 128, 128, 8, 8, 4),
            Config(family, False, 128, 128, 128, 8, 8, 3),
            Config(family, False, 128, 64, 128, 8, 8, 3),
            Config(family, False, 64, 64, 128, 8, 4, 3),
        ]
        if m <= 256:
            tries.insert(0, Config("descriptors", True, 128, 64, 128, 8, 4, 4))
    last = Config(family, False, 32, 32, 128, 8, 4, 2)
    return next(c for c in (*tries, last) if refuses(c, problem) is None)
