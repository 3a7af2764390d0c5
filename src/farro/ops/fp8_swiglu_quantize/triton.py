"""fp8_swiglu_quantize through Triton, on SM80 and newer: configurations, the choice, the launch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ...arch import interpreting
from ...problem import Problem
from ...triton_gemm import (
    DEEPEST,
    LARGEST_BAND,
    LONGEST,
    Bound,
    Launch,
    describe,
    indescribable,
    powers_of_two,
    run_bound,
    shared_limit,
)
from ...tuning import chosen, table, takes

BLOCK = 128  # of K and of columns: what one scale covers
FAMILIES = ("pointers", "decoded", "descriptors")
_ACCUMULATORS = 192  # 32-bit registers a thread for two totals and a partial sum
_FROM_REGISTERS = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_120")


@dataclass(frozen=True)
class Config:
    """One way to run the kernels of triton_kernel.py: `tokens` rows, 128 columns of gate and up.

    With `swap` the weights are the rows of the tensor cores' operands. Families: "pointers" (any
    strides), "decoded" (the same for devices without FP8 tensor cores: codes are bytes, multiplied
    as float16), "descriptors" (the copy engine loads).
    """

    family: str
    swap: bool
    tokens: int
    block_k: int  # a loop step; blocks of 128 may take several
    group_m: int  # row tiles that share their columns while these are in L2
    warps: int
    stages: int

    @property
    def policy(self) -> str:
        return f"{self.family}, weights as rows" if self.swap else self.family

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of output."""
        return self.tokens, BLOCK

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        return cls(**values)


def sizes(problem: Problem) -> tuple[int, int, int]:
    (m, k), rows = problem.spec("input").shape, problem.spec("gate_up_weight").shape[0]
    return m, rows // 2, k


def why_not(problem: Problem) -> str | None:
    """Why these kernels cannot run the problem, or None."""
    m, n, k = sizes(problem)
    return f"a dimension is longer than {LONGEST}" if max(m, 2 * n, k) > LONGEST else None


def must_run(problem: Problem) -> bool:
    """Any strides, alignment, M, N, K and outputs."""
    return why_not(problem) is None


# --- which configurations are legal, each reason apart -------------------------------------------


def shared_bytes(config: Config, problem: Problem) -> int:
    """Shared memory of one block, or a little more."""
    sides = config.tokens + 2 * BLOCK
    # where tensor cores read registers, the stage in use has left shared memory
    held = config.stages - (problem.arch.name in _FROM_REGISTERS)
    loop = held * sides * (BLOCK + 4) + 2048
    return max(loop, 4 * config.tokens * BLOCK)


def _refuse_shared(config: Config, problem: Problem) -> str | None:
    need, limit = shared_bytes(config, problem), shared_limit(problem)
    return f"{need} bytes of shared memory, the limit is {limit}" if need > limit else None


def _refuse_shapes(config: Config, problem: Problem) -> str | None:
    sides = (config.tokens, config.block_k, config.warps, config.group_m)
    if not powers_of_two(*sides) or config.warps not in (4, 8):
        return "tokens and steps are powers of two, and warps 4 or 8"
    if config.tokens < 16 or not 32 <= config.block_k <= BLOCK:
        return "tensor cores take 16 tokens and 32 of K, one scale covers 128"
    if config.group_m > LARGEST_BAND or not 0 < config.stages <= DEEPEST:
        return f"a band has 1 to {LARGEST_BAND} row tiles, a loop 1 to {DEEPEST} stages"
    if 3 * config.tokens * BLOCK // (32 * config.warps) > _ACCUMULATORS:
        return "two totals and a partial sum would spill"
    return None


def _refuse_family(config: Config, problem: Problem) -> str | None:
    interpreted = problem.arch.name == "cpu"
    fp8 = "fp8_mma" in problem.arch.features or interpreted
    if config.family not in FAMILIES:
        return f"the families are {', '.join(FAMILIES)}"
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
    for name in ("input", "gate_up_weight"):
        reason = indescribable(problem.spec(name), 1)
        if reason is not None:
            return f"no descriptor of {name}: {reason}"
    return None


_FILTERS: tuple[Callable[[Config, Problem], str | None], ...] = (
    _refuse_shapes,
    _refuse_family,
    _refuse_shared,
)


def refuses(config: Config, problem: Problem) -> str | None:
    """Why this configuration is not legal for the problem, or None."""
    return next((reason for f in _FILTERS if (reason := f(config, problem)) is not None), None)


def _space() -> Iterator[Config]:
    for family, swap, tokens, block_k, group_m, warps, stages in itertools.product(
        FAMILIES, (False, True), (16, 32, 64, 128), (64, 128), (4, 8, 16), (4, 8), (2, 3, 4, 5)
    ):
        yield Config(family, swap, tokens, block_k, group_m, warps, stages)


def configs(problem: Problem) -> list[Config]:
    """Every legal configuration, in a fixed order."""
    return [c for c in _space() if refuses(c, problem) is None]


def candidates(problem: Problem) -> list[Config]:
    """The legal configurations worth timing."""
    m = sizes(problem)[0]
    narrow = _narrow(m)

    def plausible(c: Config) -> bool:
        if m <= 64:
            return c.swap and c.tokens == narrow and c.group_m == 8
        banded = c.group_m == 8 or (m > 512 and c.family == "descriptors")
        return banded and min(64, narrow) <= c.tokens <= 2 * narrow and c.stages <= 4

    found = [c for c in configs(problem) if plausible(c)]
    usual = heuristic(problem)
    return found if usual in found else [*found, usual]


def _narrow(m: int) -> int:
    return min(128, max(16, 1 << (max(m, 1) - 1).bit_length()))


def _wide_loads(problem: Problem) -> bool:
    """Whether both operands can be read 16 bytes at a time along K."""
    return all(
        spec.align >= 16 and spec.stride[1] == 1 and spec.stride[0] % 16 == 0
        for spec in (problem.spec("input"), problem.spec("gate_up_weight"))
    )


def heuristic(problem: Problem) -> Config:
    """A legal configuration for any problem, where no table has one."""
    m = sizes(problem)[0]
    family = "pointers" if "fp8_mma" in problem.arch.features else "decoded"
    if not _wide_loads(problem):  # single bytes keep a wide tile out of registers
        return Config(family, False, 16, 32, 8, 8, 2)
    if m <= 64:
        tokens = _narrow(m)
        warps = 4 if tokens == 16 else 8
        tries = [
            Config("descriptors", True, tokens, 128, 8, warps, 4),
            *(Config(family, True, tokens, 64, 8, warps, stages) for stages in (3, 2)),
        ]
    else:
        tries = [
            Config("descriptors", False, 128 if m > 256 else 64, 128, 8, 8, 3),
            *(Config(family, True, 64, 64, 8, 8, stages) for stages in (3, 2)),
        ]
    return next(c for c in tries if refuses(c, problem) is None)


def config(problem: Problem) -> Config:
    """The tuned table's configuration, else the heuristic's."""
    m, n, k = sizes(problem)
    legal = takes(Config, lambda c: refuses(c, problem))

    found = chosen(
        table("fp8_swiglu_quantize", problem.arch.device),
        {"backend": "triton"},
        {"m": m, "n": n, "k": k},
        problem.arch.multiprocessors,
        legal,
    )
    return heuristic(problem) if found is None else Config.from_dict(found)


# --- the launch ----------------------------------------------------------------------------------


def prepare(
    config: Config,
    x: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    output: torch.Tensor,
    output_scale: torch.Tensor,
) -> Launch:
    """The launch that computes a problem in a configuration; meta tensors are accepted."""
    from . import triton_kernel

    m, n = output.shape
    k = x.shape[1]
    grid = (-(-m // config.tokens) * -(-n // BLOCK), 1, 1)
    strides = (t.stride() for t in (input_scale, weight_scale, output, output_scale))
    numbers: tuple[int, ...] = (m, n, k, *itertools.chain.from_iterable(strides))
    shape = (config.group_m, config.stages)
    decoded = config.family == "decoded"
    convert = not decoded and not interpreting()  # whose conversion to FP8 is wrong
    descriptors: tuple[Callable[[torch.Tensor], Any] | None, ...] = (None,) * 6
    if config.family == "descriptors":
        kernel = triton_kernel.swiglu_descriptors
        made = functools.partial(describe, transpose=False, columns=BLOCK)
        sides = (functools.partial(made, rows=rows) for rows in (config.tokens, BLOCK))
        descriptors = (*sides, *(None,) * 4)
        constants: tuple[Any, ...] = (config.tokens, *shape, config.swap, convert)
    else:
        kernel = triton_kernel.swiglu_pointers
        numbers = (*numbers[:3], *x.stride(), *weight.stride(), *numbers[3:])
        even = k % BLOCK == 0
        constants = (config.tokens, config.block_k, *shape, even, config.swap, convert, decoded)
    options = {"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": False}
    order = (0, 1, 2, 3, 4, 5)
    return Launch(kernel, order, descriptors, numbers, 0, constants, grid, options, decoded)


def bind(config: Config) -> Callable[..., None]:
    """run() with its configuration, for calls alike in all but their tensors' addresses."""
    return Bound(prepare, config, 6)


_BOUNDS: dict[Any, Callable[..., None]] = {}


def run(
    config: Config,
    x: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    output: torch.Tensor,
    output_scale: torch.Tensor,
) -> None:
    """Write codes and scales, launched on the current stream of their device."""
    if output.numel():
        tensors = (x, weight, input_scale, weight_scale, output, output_scale)
        run_bound(_BOUNDS, prepare, config, tensors)
