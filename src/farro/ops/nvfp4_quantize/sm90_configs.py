"""What the quantizers of SM90a can run, and how many programs they take."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from typing import Any

from ...formats.nvfp4 import BLOCK
from ...problem import Problem
from .activation import Gated
from .checks import source

_INT32 = 0x7FFFFFFF
_EXPERTS = 4096  # whose first rows are in shared memory
_WARPS = 8  # of a CTA
_FILL = 4096  # unused scales that a warp writes at a time
_MANY_VALUES = 1 << 25  # of all rows, from which quantizing tokens once may save time
KINDS = {"plan": "planned", "ragged": "ragged", "routes": "by_routes"}
_ORDER = ("in_place", "planned", "ragged", "by_routes")  # `Kind` of sm90_rows.cuh


@dataclass(frozen=True)
class Config:
    """`ctas` a multiprocessor. A plan's tokens are quantized once where each has `once` rows here.

    Fewer rows are quantized one by one; with `once` 0 all are. Copies move more bytes than
    quantizing, which has more to compute: with two rows a token they take 0.74 of the time, with
    one 1.04.
    """

    ctas: int = 4
    once: int = 1
    policy: str = "32 blocks of a row a warp"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        return cls(**values)

    def pays(self, tokens: int, rows: int, features: int) -> bool:
        """Whether `rows` at the most can be so many that tokens are quantized once."""
        enough = self.once > 0 and tokens > 0 and rows >= self.once * tokens
        return enough and rows * features >= _MANY_VALUES and tokens * features // BLOCK <= _INT32


def least_rows(config: Config, tokens: int) -> int:
    return min(config.once * tokens, _INT32)


@functools.lru_cache(maxsize=64)
def _processors(device: int) -> int:
    import torch

    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def grid(config: Config, device: int, items: int) -> int:
    """CTAs for so many items of a warp each: one an item up to a full device."""
    return max(1, min(items, config.ctas * _processors(device)))


def kernel_name(what: str, how: str | bool, weighted: bool = False) -> tuple[str, str]:
    """Source file and name expression."""
    path = "ops/nvfp4_quantize/sm90.cu"
    if what == "gate":
        return path, f"nvfp4_gate<{str(bool(how)).lower()}>"
    kind = _ORDER.index(str(how))
    if what == "tokens":
        return path, f"nvfp4_quantize_tokens<{kind}>"
    return path, f"nvfp4_quantize<{kind}, {str(weighted).lower()}>"


def _rows(problem: Problem) -> tuple[int, int, int]:
    """Regions, rows of each, and routes if these decide."""
    if problem.operator == "nvfp4_quantize":
        shape = source(problem).shape
        return (shape[0], shape[1], 0) if len(shape) == 3 else (1, shape[0], 0)
    cap = problem.param("cap")
    assert isinstance(cap, int)
    if problem.operator == "nvfp4_scatter" and problem.param("by") == "ragged":
        return 1, cap, 0
    experts = problem.spec("expert_num_tokens").shape[0]
    if problem.operator == "nvfp4_scatter" and problem.param("by") == "routes":
        return experts, cap, problem.spec("flat_tok").shape[0]
    return experts, cap, 0


def why_not(problem: Problem) -> str | None:
    """Why these kernels cannot run the problem, or None."""
    how = problem.param("activation") if problem.operator == "nvfp4_quantize" else None
    if isinstance(how, Gated) and how.activation != "silu":
        return f"its gated activation is silu, not {how.activation}"
    read = source(problem)
    needed = {"q_sf": 4} if problem.operator == "nvfp4_scatter_fp4" else {}
    for name in (problem.tensors[0][0], *needed):
        least = needed.get(name, 16)
        if problem.spec(name).align < least:
            return f"{name} does not start at a multiple of {least} bytes"
    blocks = read.shape[-1] // (BLOCK // 2 if needed else BLOCK * (2 if how else 1))
    regions, rows, routes = _rows(problem)
    if regions > _EXPERTS:
        return f"more than {_EXPERTS} experts"
    tokens = 1
    for size in read.shape[:-1]:
        tokens *= size
    units = regions * -(-rows * blocks // _FILL)
    if max(tokens * blocks, regions * rows * max(1, -(-blocks // 32)), units) > _INT32 - (1 << 24):
        return f"more than {_INT32 - (1 << 24)} units of rows, or blocks of tokens"
    if routes * max(1, -(-blocks // 32)) > _INT32 - (1 << 24):
        return f"more than {_INT32 - (1 << 24)} units of routes"
    return None


def must_run(problem: Problem) -> bool:
    """Aligned tensors of any size that rows of 31 bits number."""
    return why_not(problem) is None


def config(problem: Problem) -> Config:
    return Config()


def refuses(config: Config, problem: Problem) -> str | None:
    """Why this configuration is not legal for the problem, or None."""
    if not 1 <= config.ctas <= 64:
        return "there are 1 to 64 CTAs a multiprocessor"
    return None if config.once >= 0 else "tokens cannot have fewer than no rows"


def configs(problem: Problem) -> list[Config]:
    """Those that a tuner may time."""
    ctas = (2, 4, 8, 16)
    if problem.operator == "nvfp4_scatter" and problem.param("by") != "routes":
        return [Config(c, once) for c in ctas for once in (0, 2, 4)]
    return [Config(c) for c in ctas]
