"""What the quantizers' Triton kernels can run, and in which tiles."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from ...formats.nvfp4 import BLOCK
from ...problem import Problem
from ...triton_gemm import powers_of_two
from ...tuning import nearest, table, takes
from .activation import Gated
from .checks import source

_INT32 = 0x7FFFFFFF
_GRID = 65535
_SPARE = 1 << 26  # a loop's counter passes the end by a step of all programs
# 32-blocks of one tile, by how many values there are in all
_TILES = ((64, 1 << 22), (32, 1 << 19), (16, 0))


@dataclass(frozen=True)
class Config:
    """A program takes tiles of `blocks` 32-blocks of one row; `programs` in all share the rows."""

    blocks: int
    warps: int
    programs: int
    policy: str = "tiles of a row in registers"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        return cls(**values)


def _experts(problem: Problem) -> int:
    """Regions of a launch's second grid dimension."""
    x = source(problem)
    if problem.operator == "nvfp4_scatter" and problem.param("by") != "plan":
        return 1
    if problem.operator in ("nvfp4_scatter", "nvfp4_scatter_fp4"):
        return problem.spec("expert_num_tokens").shape[0]
    if problem.operator == "nvfp4_dequantize" and len(x.shape) == 2:
        factors = problem["gscale"]
        return x.shape[0] if factors is not None and math.prod(factors.shape) > 1 else 1
    return x.shape[0] if len(x.shape) > 2 else 1


def _rows(problem: Problem) -> int:
    """Rows, or routes, that the programs of one region share."""
    if problem.operator == "nvfp4_scatter" and problem.param("by") == "routes":
        return problem.spec("flat_tok").shape[0]
    if problem.operator in ("nvfp4_scatter", "nvfp4_scatter_fp4"):
        cap = problem.param("cap")
        assert isinstance(cap, int)
        return cap
    return math.prod(source(problem).shape[:-1]) // max(1, _experts(problem))


def why_not(problem: Problem) -> str | None:
    """Why these kernels cannot run the problem, or None."""
    if _experts(problem) > _GRID:
        return f"more than {_GRID} experts"
    for name, spec in problem.tensors:
        if spec is not None and max(spec.shape, default=0) > _INT32:
            return f"{name} is longer than {_INT32}"
    if _rows(problem) * _blocks(problem) > _INT32 - _SPARE:
        return f"more than {_INT32} blocks of 32 in the rows of one expert, or of all routes"
    return None


def must_run(problem: Problem) -> bool:
    """Any alignment and count of rows, up to the 4096 experts of the format."""
    return why_not(problem) is None


def _blocks(problem: Problem) -> int:
    """32-blocks of a row of the result."""
    columns = source(problem).shape[-1]
    if problem.operator in ("nvfp4_scatter_fp4", "nvfp4_dequantize"):
        columns *= 2
    if problem.operator == "nvfp4_quantize" and problem.param("activation") is not None:
        columns //= 2
    return max(1, columns // BLOCK)


def _most(problem: Problem) -> int:
    """Values a thread may hold: float64, as situ takes it, leaves room for few."""
    if problem.operator != "nvfp4_quantize":
        return 64
    how = problem.param("activation")
    return 8 if isinstance(how, Gated) and how.activation == "situ" else 64


def heuristic(problem: Problem) -> Config:
    """A configuration for any problem, where no table has one."""
    total = math.prod(source(problem).shape)
    blocks = next(tile for tile, least in _TILES if total >= least)
    if problem.arch.name == "cpu":  # the interpreter, which takes its time for each tile
        return Config(min(64, 1 << (_blocks(problem) - 1).bit_length()), 8, 8)
    blocks = min(blocks, 1 << (_blocks(problem) - 1).bit_length())
    return Config(blocks, max(1, blocks // min(16, _most(problem))), 4096)


def refuses(config: Config, problem: Problem) -> str | None:
    """Why this configuration is not legal for the problem, or None."""
    if config.policy != Config.policy:
        return f"no policy is called {config.policy!r}"
    if not powers_of_two(config.blocks, config.warps) or config.warps > 32:
        return "blocks and warps are powers of two, and warps at most 32"
    if not 0 < config.programs <= _SPARE:
        return f"there are 1 to {_SPARE} programs"
    held = config.blocks * BLOCK // (32 * config.warps)
    return f"{held} values a thread would spill" if held > _most(problem) else None


def _row(problem: Problem) -> tuple[dict[str, str], dict[str, int]]:
    """What a row of a tuned table says of such a problem: m rows or tokens, n experts, k."""
    exact, shape = {"backend": "triton"}, source(problem).shape
    sizes = {"m": math.prod(shape[:-1]), "k": _blocks(problem) * BLOCK}
    if problem.operator == "nvfp4_scatter":
        exact["variant"] = {"plan": "planned"}.get(by := str(problem.param("by")), by)
    elif problem.operator == "nvfp4_quantize" and problem["expert_num_tokens"] is None:
        exact["variant"] = "quant_rows"
    elif problem.operator == "nvfp4_quantize":
        gated = problem.param("activation") is not None
        exact["variant"] = "silu_mul_quant_act" if gated else "quant_act"
        sizes |= {"m": shape[1], "n": shape[0]}
    return exact, sizes


def config(problem: Problem) -> Config:
    """The tuned table's configuration for the nearest problem, else the heuristic's."""
    legal = takes(Config, lambda c: refuses(c, problem))

    exact, sizes = _row(problem)
    found = nearest(table(problem.operator, problem.arch.device), exact, sizes, legal)
    return heuristic(problem) if found is None else Config.from_dict(found)


def configs(problem: Problem) -> list[Config]:
    """Those that a tuner may time: smaller and larger tiles, fewer and more programs."""
    found = []
    for blocks in (8, 16, 32, 64, 128):
        for warps in (1, 2, 4, 8):
            if 4 <= blocks // warps <= 64:
                found += [Config(blocks, warps, programs) for programs in (1024, 4096, 16384)]
    return [config for config in found if refuses(config, problem) is None]


def copying(blocks: int) -> Config:
    """For copy_rows and rows of so many blocks: 16 bytes a thread."""
    tile = max(8, min(128, 1 << (blocks - 1).bit_length()))
    return Config(tile, max(1, tile // 32), 8192)
