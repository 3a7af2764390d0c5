"""The Triton fp8_linear's configurations: all of them, which are legal, and which one to take."""

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

FAMILIES = ("pointers", "descriptors")
PROMOTIONS = (0, 128, 256, 512)  # of K between promotions to FP32; 0 is none
_ACCUMULATORS = 160  # 32-bit registers a thread for partial sums and totals


@dataclass(frozen=True)
class Config:
    """One way to run the kernels of triton_kernel.py.

    The kernel's own tile is block_m x block_n; with `swap` its rows are the weights (the narrow
    side is left to few tokens). Sums of `promote` of K are promoted to FP32; 0 leaves that out.
    Families: "pointers" (any strides) and "descriptors" (the copy engine loads).
    """

    family: str
    swap: bool
    block_m: int
    block_n: int
    block_k: int
    promote: int
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

    @property
    def name(self) -> str:
        rows, columns = self.tile
        sides = f"{self.family}{'_swapped' if self.swap else ''}"
        return f"triton_{sides}_{rows}x{columns}x{self.block_k}_p{self.promote}"

    @property
    def steps(self) -> int:
        """Products of block_k in one step of the loop."""
        return max(1, self.promote // self.block_k)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        return cls(**values)


def sizes(problem: Problem) -> tuple[int, int, int]:
    (m, k), (n, _) = problem.spec("input").shape, problem.spec("weight").shape
    return m, n, k


def decodes(problem: Problem) -> bool:
    """Whether codes become FP16 for want of FP8 tensor cores; sums are then FP32 anyway."""
    return "fp8_mma" not in problem.arch.features


# --- which configurations are legal, each reason apart -------------------------------------------


def shared_bytes(config: Config, problem: Problem) -> int:
    """Shared memory of one block, or a little more."""
    sides = config.block_m + config.block_n
    loop = config.stages * sides * max(config.block_k, config.promote) + 2048
    if decodes(problem):  # FP16 copies of a tile on their way to the tensor cores
        loop += 2 * sides * config.block_k
    return max(loop, config.block_m * config.block_n * 4)


def _refuse_shapes(config: Config, problem: Problem) -> str | None:
    if config.family not in FAMILIES:
        return f"the families are {', '.join(FAMILIES)}"
    sides = (config.block_m, config.block_n, config.block_k, config.warps)
    if not powers_of_two(*sides) or config.warps > 8:
        return "tiles and warps are powers of two, and warps at most 8"
    if min(config.block_m, config.block_n) < 16 or config.block_k < 32:
        return "tensor cores take tiles of 16 x 16 x 32 and more"
    if max(config.block_m, config.block_n) > WIDEST or config.block_k > LONGEST_STEP:
        return f"tiles have at most {WIDEST} rows and columns, and {LONGEST_STEP} of K"
    if not (0 < config.group_m <= LARGEST_BAND and 0 < config.stages <= DEEPEST):
        return f"a band has 1 to {LARGEST_BAND} row tiles, a loop 1 to {DEEPEST} stages"
    return None


def _refuse_shared(config: Config, problem: Problem) -> str | None:
    need, limit = shared_bytes(config, problem), shared_limit(problem)
    return f"{need} bytes of shared memory, the limit is {limit}" if need > limit else None


def _refuse_registers(config: Config, problem: Problem) -> str | None:
    copies = 2 if config.promote else 1
    need = copies * config.block_m * config.block_n // (32 * config.warps)
    if need > _ACCUMULATORS:
        return f"{need} accumulator registers a thread would spill"
    return None


def _refuse_idle_warps(config: Config, problem: Problem) -> str | None:
    pieces = (config.block_m // 16) * (config.block_n // 8)
    return None if config.warps <= pieces else "more warps than pieces of the tile"


def _refuse_promotion(config: Config, problem: Problem) -> str | None:
    if not 0 <= config.promote <= PROMOTIONS[-1]:
        return f"sums are promoted after {PROMOTIONS[-1]} of K at the latest, or never (0)"
    if config.promote % config.block_k:
        return "a promotion comes after whole steps of K"
    if config.promote == config.block_k and "wgmma" not in problem.arch.features:
        return "Triton makes one sum of it again where each product is promoted by itself"
    if config.promote == 0 and not problem.param("fast_accum") and not decodes(problem):
        return "without promotion the tensor cores keep 14 bits: fast_accum=True allows that"
    if config.promote and decodes(problem):
        return "sums of FP16 products are FP32 without promotion"
    return None


def _refuse_descriptors(config: Config, problem: Problem) -> str | None:
    if config.family == "pointers":
        return None
    if "tma" not in problem.arch.features:
        return "descriptors need the bulk tensor copy engine (SM90 or newer)"
    for name in ("input", "weight"):
        reason = indescribable(problem.spec(name), 1)
        if reason is not None:
            return f"no descriptor of {name}: {reason}"
    return None


_FILTERS: tuple[Callable[[Config, Problem], str | None], ...] = (
    _refuse_shapes,
    _refuse_registers,
    _refuse_idle_warps,
    _refuse_promotion,
    _refuse_descriptors,
    _refuse_shared,
)


def refuses(config: Config, problem: Problem) -> str | None:
    """Why this configuration is not legal for the problem, or None."""
    return next((reason for f in _FILTERS if (reason := f(config, problem)) is not None), None)


def _space() -> Iterator[Config]:
    sides = (16, 32, 64, 128, 256)
    for values in itertools.product(
        *(FAMILIES, (False, True), sides, sides, (64, 128, 256), PROMOTIONS),
        *((4, 8, 16), (1, 2, 4, 8), (2, 3, 4, 5, 6)),
    ):
        yield Config(*values)


def configs(problem: Problem) -> list[Config]:
    """Every legal configuration, in a fixed order."""
    return [c for c in _space() if refuses(c, problem) is None]


def candidates(problem: Problem) -> list[Config]:
    """The legal configurations worth timing: some dozens, by what bounds the problem."""
    m = sizes(problem)[0]
    narrow = min(64, max(16, 1 << (max(m, 1) - 1).bit_length()))
    copies = "tma" in problem.arch.features
    roomy = shared_limit(problem) > 128 << 10
    hopper = "wgmma" in problem.arch.features
    steps = (128,) if hopper or m <= 256 else (64, 128)

    def plausible(c: Config) -> bool:
        rows, columns = c.tile
        area = rows * columns
        if c.group_m != 8 or (copies and c.family == "pointers" and _wide_loads(problem)):
            return False
        if m <= 64:  # streaming the weights: enough bytes in flight, few idle rows
            if not c.swap or rows != narrow or not 32 <= columns <= 128:
                return False
            flight = c.stages * columns * max(c.block_k, c.promote)
            deep = 24 << 10 <= flight <= 96 << 10
            return deep and c.block_k >= 128 and c.warps == (4 if columns >= 64 else 2)
        if c.swap and m > 256:
            return False
        if rows > max(64, 2 * narrow) and m <= 128:
            return False
        if min(rows, columns) < 64 or area < (8192 if m > 512 else 4096):
            return False
        warps = 4 if area <= 8192 else 8
        return c.warps == warps and c.block_k in steps and c.stages >= (3 if roomy else 2)

    found = [c for c in configs(problem) if plausible(c)]
    usual = heuristic(problem)
    return found if usual in found else [*found, usual]


def _wide_loads(problem: Problem) -> bool:
    """Whether both operands can be read 16 bytes at a time along K."""
    return all(
        spec.align >= 16 and spec.stride[1] == 1 and spec.stride[0] % 16 == 0
        for spec in (problem.spec("input"), problem.spec("weight"))
    )


def heuristic(problem: Problem) -> Config:
    """A legal configuration for any problem, where no table has one."""
    return next(c for c in tries(problem) if refuses(c, problem) is None)


def tries(problem: Problem) -> Iterator[Config]:
    """Configurations from the best guess to the one that is always legal."""
    m = sizes(problem)[0]
    fast = bool(problem.param("fast_accum")) or decodes(problem)
    # Hopper's sums of 256 of K miss the documented error where all products have one sign; on
    # others Triton needs two steps of K between promotions
    often = 0 if fast else 128 if "wgmma" in problem.arch.features else 256
    if _wide_loads(problem):  # else they keep a wide tile out of registers
        if m <= 64:
            narrow = min(64, max(16, 1 << (max(m, 1) - 1).bit_length()))
            for stages in (5, 4, 3, 2):
                yield Config("descriptors", True, 64, narrow, 128, often, 8, 4, stages)
                yield Config("pointers", True, 64, narrow, 128, often, 8, 4, stages)
        else:
            if m > 256:
                yield Config("descriptors", False, 128, 256, 128, 0 if fast else 128, 8, 8, 4)
                yield Config("descriptors", False, 128, 128, 128, often, 8, 8, 3)
                yield Config("pointers", False, 128, 128, 64, 0 if fast else 128, 8, 8, 3)
            yield Config("descriptors", False, 64, 128, 128, often, 8, 4, 4)
            yield Config("descriptors", False, 64, 128, 128, often, 8, 4, 3)
            for stages in (4, 3, 2):
                yield Config("pointers", False, 64, 64, 128, often, 8, 4, stages)
    yield Config("pointers", False, 32, 32, 64, 0 if fast else 128, 8, 4, 2)


def _variants() -> dict[str, Config]:
    """Tiles that can be pinned: those that the heuristic takes, on any architecture."""
    found = [
        *(Config("descriptors", True, 64, n, 128, 256, 8, 4, 4) for n in (16, 32, 64)),
        *(Config("descriptors", False, 64, n, 128, 256, 8, 4, 3) for n in (64, 128)),
        Config("descriptors", False, 128, 128, 128, 256, 8, 8, 3),
    ]
    for promote in (0, 256):
        found += [Config("pointers", True, 64, n, 128, promote, 8, 4, 3) for n in (16, 32, 64)]
        found += [Config("pointers", False, n, n, 128, promote, 8, 4, 2) for n in (32, 64)]
    found.append(Config("pointers", False, 128, 128, 64, 0, 8, 8, 3))
    return {config.name: config for config in found}


variants = _variants()
