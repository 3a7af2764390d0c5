"""Grouped products through Triton, on SM80 and newer: one launch, programs share all tiles."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ...arch import interpreting
from ...dispatch import remember
from ...problem import Problem, TensorSpec
from ...triton_launch import Launcher, specialization
from ...tuning import nearest, table, takes
from .tactics import illegal, rows_of, tactic_of, variant_of

_INT32 = 0x7FFFFFFF
_WIDTHS = (16, 32, 64, 128)
_STAGES = (1, 2, 3)
_PROCESSORS = 132  # of a device that is not here
_EXPERTS = 128  # whose counts a program reads, or a larger power of two: few kernels to compile
_PER_PROCESSOR = 4  # programs at a time, or a few more


@dataclass(frozen=True)
class Config:
    """A tile of triton_kernel.py: weight rows x tokens."""

    rows: int
    tokens: int
    warps: int
    stages: int
    policy: str = "decoded in registers, dense products"

    @property
    def tile(self) -> tuple[int, int]:
        """Tokens and weight rows."""
        return self.tokens, self.rows

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        return cls(**values)


def must_run(problem: Problem) -> bool:
    return tactic_of(problem).name == "auto" and why_not(problem) is None


def why_not(problem: Problem) -> str | None:
    """Why this kernel cannot run the problem, or None."""
    tactic = tactic_of(problem)
    reason = illegal(problem)
    if reason is not None:
        return reason
    if tactic.split_k > 1:
        return f"it does not split K, as tactic {tactic.name!r} asks"
    if tactic.tokens and tactic.tokens not in _WIDTHS:
        return f"tactic {tactic.name!r} has {tactic.tokens} tokens; it has {_WIDTHS}"
    e, m, _ = problem.spec("a_comp").shape
    rows = problem.spec("out").shape[-2]
    if e * (rows // 16 + 1) * (m // 64 + 1) > _INT32:
        return f"more than {_INT32} tiles"
    return None


def refuses(config: Config, problem: Problem) -> str | None:
    """Why this configuration is not legal for the problem, or None."""
    if config.rows not in (64, 128) or config.tokens not in _WIDTHS:
        return f"tiles have 64 or 128 weight rows and {_WIDTHS} tokens"
    if config.policy != Config.policy:
        return f"no policy is called {config.policy!r}"
    if config.warps not in (4, 8) or config.stages not in _STAGES:
        return f"they have 4 or 8 warps, and {_STAGES} stages"
    if config.rows * config.tokens > 32 * 32 * config.warps and config.tokens < 128:
        return "more than 32 sums a thread would spill"
    if config.tokens == 128 and config.warps < 8:
        return "so many tokens would spill with 4 warps"
    tactic = tactic_of(problem)
    if tactic.tokens and (config.rows, config.tokens) != (tactic.rows, tactic.tokens):
        return f"tactic {tactic.name!r} was asked for"
    return None


def _fit(rows: int, tokens: int, problem: Problem) -> Config:
    warps = 8 if rows * tokens > 64 * 64 else 4
    overlaps = "wgmma" in problem.arch.features and tokens <= 32
    return Config(rows, tokens, warps, 2 if overlaps else 1)


def heuristic(problem: Problem) -> Config:
    """The narrowest tile that holds an expert's tokens, as far as their capacity tells."""
    tactic = tactic_of(problem)
    if tactic.tokens:
        return _fit(tactic.rows, tactic.tokens, problem)
    rows = rows_of(problem)
    tokens = next((width for width in _WIDTHS if width >= rows), _WIDTHS[-1])
    return _fit(64, tokens, problem)


def config(problem: Problem) -> Config:
    """The tuned table's configuration for the nearest problem, else the heuristic's."""
    e, m, quarter = problem.spec("a_comp").shape
    legal = takes(Config, lambda c: refuses(c, problem))

    found = nearest(
        table("nvfp4_group_mm", problem.arch.device),
        {"backend": "triton", "variant": variant_of(problem)},
        {"m": rows_of(problem), "e": e, "n": m, "k": quarter * 4},
        legal,
    )
    return heuristic(problem) if found is None else Config.from_dict(found)


def configs(problem: Problem) -> list[Config]:
    """Those that a tuner may time."""
    found = [
        Config(rows, tokens, warps, stages)
        for rows in (64, 128)
        for tokens in _WIDTHS
        for warps in (4, 8)
        for stages in _STAGES
    ]
    return [c for c in found if refuses(c, problem) is None]


class _Bound:
    """run() for calls of one Problem: all but addresses is worked out once for each device."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.launchers: dict[int | None, Launcher] = {}

    def __call__(
        self,
        out: torch.Tensor,
        a_comp: torch.Tensor,
        e_meta: torch.Tensor,
        sfa: torch.Tensor,
        b_act: torch.Tensor,
        sfb: torch.Tensor | None,
        alphas: torch.Tensor,
        counts: torch.Tensor,
    ) -> None:
        tensors = (out, a_comp, e_meta, sfa, b_act, sfb, alphas, counts)
        launcher = self.launchers.get(out.device.index)
        if launcher is None:
            prepared = prepare(*(self.config, out, a_comp, e_meta, sfa, b_act, sfb, alphas, counts))
            launcher = _launcher(self.config, out.device.index, *prepared)
            self.launchers[out.device.index] = launcher
        launcher(*tensors)


def _launcher(
    config: Config,
    device: int | None,
    kernel: Any,
    grid: tuple[int, int, int],
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> Launcher:
    tensors, numbers, constants = args[:8], args[8:12], args[12:]
    key = (
        *(kernel, device, constants, config.warps),
        tuple(t is None or t.data_ptr() % 16 == 0 for t in tensors),
        tuple(specialization(number)[2] for number in numbers),
    )
    return Launcher(kernel, key, device, grid, args[8:], options, (None,) * 8)


def bind(config: Config) -> Callable[..., None]:
    """run() with its configuration, for calls alike in all but their tensors' addresses."""
    return _Bound(config)


_BOUND: dict[Any, Callable[..., None]] = {}


def run(
    config: Config,
    out: torch.Tensor,
    a_comp: torch.Tensor,
    e_meta: torch.Tensor,
    sfa: torch.Tensor,
    b_act: torch.Tensor,
    sfb: torch.Tensor | None,
    alphas: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Write the experts' rows of out, launched on the current stream of its device."""
    if out.numel() == 0:
        return
    tensors = (out, a_comp, e_meta, sfa, b_act, sfb, alphas, counts)
    key = (config, *(None if t is None else TensorSpec.of(t) for t in tensors))
    bound = _BOUND.get(key)
    if bound is None:
        bound = bind(config)
        remember(_BOUND, key, bound)
    bound(*tensors)


@functools.lru_cache(maxsize=16)
def _processors(index: int | None) -> int:
    if index is None:
        return _PROCESSORS
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def prepare(
    config: Config,
    out: torch.Tensor,
    a_comp: torch.Tensor,
    e_meta: torch.Tensor,
    sfa: torch.Tensor,
    b_act: torch.Tensor,
    sfb: torch.Tensor | None,
    alphas: torch.Tensor,
    counts: torch.Tensor,
) -> tuple[Any, tuple[int, int, int], tuple[Any, ...], dict[str, Any]]:
    """The kernel, grid, complete positional arguments and options; meta tensors are accepted."""
    from .triton_kernel import products

    e, m, quarter = a_comp.shape
    ragged, limit = out.dim() == 2, out.shape[-2]
    steps = quarter // 8
    # at most so many tiles, whatever the counts; ragged experts may each begin another one
    tiles = -(-limit // config.tokens) * (1 if ragged else e) + (e if ragged else 0)
    programs = min(tiles * -(-m // config.rows), _PER_PROCESSOR * _processors(out.device.index))
    constants = (
        *(max(_EXPERTS, 1 << (e - 1).bit_length()), config.rows, config.tokens, config.stages),
        *(sfb is not None, ragged, steps % 4 == 0),
        *(_aligned(a_comp) and _aligned(e_meta), _aligned(b_act), interpreting()),
    )
    given = (out, a_comp, e_meta, sfa, b_act, sfb, alphas, counts)
    options = {"num_warps": config.warps}
    grid = (max(programs, 1), 1, 1)
    return products, grid, (*given, e, limit, m // 32, steps, *constants), options


def _aligned(tensor: torch.Tensor) -> bool:
    """Whether its 32-bit words can be read as such."""
    return tensor.is_meta or tensor.data_ptr() % 4 == 0
