"""moe_finalize through Triton, on SM80 and newer: a program has some columns of one token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ...dispatch import remember
from ...problem import Problem, TensorSpec
from ...triton_launch import Launcher, specialization

_INT32 = 0x7FFFFFFF
_GRID = 65535
_MAX_TOPK = 64  # routes are unrolled
_FEW = 132 * 8  # programs below which narrower ones spread the bytes better


@dataclass(frozen=True)
class Config:
    """How many columns a program of sum_rows takes."""

    block: int
    warps: int
    policy: str = "columns of one token"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        return cls(**values)


def _row_count(shape: tuple[int, ...]) -> int:
    return shape[0] if len(shape) == 2 else shape[0] * shape[1]


def must_run(problem: Problem) -> bool:
    topk = problem.spec("route_dest").shape[1]
    return topk <= 32 and problem.spec("fused").shape[-1] <= 1 << 22


def why_not(problem: Problem) -> str | None:
    """Why this kernel cannot run the problem, or None."""
    topk, k = problem.spec("route_dest").shape[1], problem.spec("fused").shape[-1]
    if topk > _MAX_TOPK:
        return f"{topk} routes a token; this kernel unrolls {_MAX_TOPK} at most"
    if problem.spec("out").shape[0] > _INT32 or _row_count(problem.spec("fused").shape) > _INT32:
        return f"more than {_INT32} tokens or rows"
    if k > 1024 * _GRID:
        return f"more than {1024 * _GRID} columns"
    return None


def refuses(config: Config, problem: Problem) -> str | None:
    """Why this configuration is not legal for the problem, or None."""
    if any(v < 1 or v & (v - 1) for v in (config.block, config.warps)):
        return "block and warps are powers of two"
    if not 2 <= config.block // (32 * config.warps) <= 32:
        return "a thread has 2 to 32 columns"
    if problem.spec("fused").shape[-1] > config.block * _GRID:
        return "more columns than a grid is wide"
    return None


def config(problem: Problem) -> Config:
    """32 bytes a thread; few tokens: narrow programs of 16, so that more of the device reads.

    The two loads of a thread wait together: where a token has one of eight rows here, the wait is
    most of a program's time.
    """
    tokens, k = problem.spec("out").shape
    block = 1024
    while block > 256 and tokens * -(-k // block) < _FEW and k <= block // 2 * _GRID:
        block //= 2
    while block > 256 and block >= 2 * k:
        block //= 2
    return Config(block, 2 if block == 1024 else block // 256)


def configs(problem: Problem) -> list[Config]:
    """Those that a tuner may time."""
    found = [
        Config(block, warps) for block in (256, 512, 1024, 2048, 4096) for warps in (1, 2, 4, 8, 16)
    ]
    legal = [c for c in found if refuses(c, problem) is None]
    return [c for c in legal if 4 <= c.block // (32 * c.warps) <= 16]


class _Bound:
    """run() for calls of one Problem: all but addresses is worked out once for each device."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.launchers: dict[int | None, Launcher] = {}

    def __call__(
        self,
        out: torch.Tensor,
        fused: torch.Tensor,
        route_dest: torch.Tensor,
        topk_weights: torch.Tensor | None,
    ) -> None:
        launcher = self.launchers.get(out.device.index)
        if launcher is None:
            launcher = _launcher(self.config, out, fused, route_dest, topk_weights)
            self.launchers[out.device.index] = launcher
        launcher(out, fused, route_dest, topk_weights)


def _launcher(
    config: Config,
    out: torch.Tensor,
    fused: torch.Tensor,
    route_dest: torch.Tensor,
    topk_weights: torch.Tensor | None,
) -> Launcher:
    kernel, grid, args, options = prepare(config, out, fused, route_dest, topk_weights)
    numbers, constants = args[4:16], args[16:]
    tensors = (out, fused, route_dest, topk_weights)
    key = (
        *(kernel, out.device.index, constants, config.warps),
        tuple(t is None or t.data_ptr() % 16 == 0 for t in tensors),
        tuple(map(specialization, (numbers[0], *numbers[3:]))),
    )
    return Launcher(kernel, key, out.device.index, grid, args[4:], options, (None,) * 4)


def bind(config: Config) -> Callable[..., None]:
    """run() with its configuration, for calls alike in all but their tensors' addresses."""
    return _Bound(config)


_BOUND: dict[Any, Callable[..., None]] = {}


def run(
    config: Config,
    out: torch.Tensor,
    fused: torch.Tensor,
    route_dest: torch.Tensor,
    topk_weights: torch.Tensor | None,
) -> None:
    """Write out, launched on the current stream of its device."""
    if out.numel() == 0:
        return
    tensors = (out, fused, route_dest, topk_weights)
    key = (config, *(None if t is None else TensorSpec.of(t) for t in tensors))
    bound = _BOUND.get(key)
    if bound is None:
        bound = bind(config)
        remember(_BOUND, key, bound)
    bound(*tensors)


def prepare(
    config: Config,
    out: torch.Tensor,
    fused: torch.Tensor,
    route_dest: torch.Tensor,
    topk_weights: torch.Tensor | None,
) -> tuple[Any, tuple[int, int, int], tuple[Any, ...], dict[str, Any]]:
    """The kernel, grid, complete positional arguments and options; meta tensors are accepted."""
    from .triton_kernel import sum_rows

    tokens, k = out.shape
    rows = _row_count(tuple(fused.shape))
    # rows that one stride serves are numbered through
    flat = (
        fused.dim() == 2
        or fused.shape[0] == 1
        or fused.stride(0) == fused.shape[1] * fused.stride(1)
    )
    by_expert = (0, *fused.stride()) if fused.dim() == 2 else fused.stride()
    cap = rows if fused.dim() == 2 else fused.shape[1]
    weights = (0, 0) if topk_weights is None else topk_weights.stride()
    numbers = (k, rows, max(cap, 1), *out.stride(), *by_expert, *route_dest.stride(), *weights)
    constants = (route_dest.shape[1], config.block, flat, topk_weights is not None)
    grid = (tokens, -(-k // config.block), 1)
    given = (out, fused, route_dest, topk_weights)
    options = {"num_warps": config.warps, "enable_fp_fusion": False}
    return sum_rows, grid, (*given, *numbers, *constants), options
