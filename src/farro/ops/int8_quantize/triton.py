"""int8_quantize through Triton, on SM80 and newer: one launch for contiguous or strided rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ...dispatch import remember
from ...problem import Problem, TensorSpec
from ...triton_gemm import powers_of_two
from ...triton_launch import Launcher, specialization
from ...tuning import nearest, table, takes

_INT32 = 0x7FFFFFFF
# Elements of one program, by how many there are in all: 64 a thread where that fills the device
_ELEMENTS = ((8192, 8192 * 512), (2048, 2048 * 256), (1024, 0))
_MAX_DIMS = 3
_GRID = 65535


@dataclass(frozen=True)
class Config:
    """What one program of triton_kernel.py takes: rows x groups whole groups."""

    rows: int
    groups: int
    warps: int
    policy: str = "whole groups in registers"

    @property
    def tile(self) -> tuple[int, int]:
        """Rows, and groups of each row."""
        return self.rows, self.groups

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        return cls(**values)


def collapse(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[tuple[int, int]]:
    """(size, stride) of the leading dimensions, neighbours merged where one stride serves both."""
    merged: list[tuple[int, int]] = []
    for size, step in zip(shape[:-1], stride[:-1]):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * step:
            merged[-1] = (merged[-1][0] * size, step)
        else:
            merged.append((size, step))
    return merged or [(1, 0)]


def why_not(problem: Problem) -> str | None:
    """Why this kernel cannot run the problem, or None."""
    x = problem.spec("x")
    dims = collapse(x.shape, x.stride)
    if len(dims) > _MAX_DIMS:
        return (
            f"x's leading dimensions need {len(dims)} strides, this kernel takes {_MAX_DIMS}; "
            "x.contiguous() or a reshape makes them fewer"
        )
    rows = 1
    for size in x.shape[:-1]:
        rows *= size
    if rows > _INT32 or x.shape[-1] > _INT32 - 65536:
        return f"more than {_INT32} rows, or rows longer than that"
    return None


def _power_of_two(value: int) -> int:
    """The largest that divides value."""
    return value & -value


def _fit(elements: int, problem: Problem) -> Config:
    """As many groups of a row as divide it, then rows, until a program has its elements."""
    group = problem.param("group_size")
    assert isinstance(group, int)
    whole = max(1, elements // group)
    groups_of_row = max(1, -(-problem.spec("x").shape[-1] // group))
    groups = min(whole, _power_of_two(groups_of_row), 16)
    # a grid's second dimension ends at 65535: a row of very many groups gives each program more
    while groups * _GRID < groups_of_row:
        groups *= 2
    rows = max(1, min(whole // groups, 32))
    # no fewer threads than 64 elements each ask for, where a program had to take more
    return Config(rows, groups, max(1, elements // 2048, rows * groups * group // 2048))


def heuristic(problem: Problem) -> Config:
    """A configuration for any problem, where no table has one."""
    total = math.prod(problem.spec("x").shape)
    return _fit(next(e for e, least in _ELEMENTS if total >= least), problem)


def refuses(config: Config, problem: Problem) -> str | None:
    """Why this configuration is not legal for the problem, or None."""
    group = problem.param("group_size")
    assert isinstance(group, int)
    if config.policy != Config.policy:
        return f"no policy is called {config.policy!r}"
    if not powers_of_two(config.rows, config.groups, config.warps) or config.warps > 32:
        return "rows, groups and warps are powers of two, and warps at most 32"
    if -(-problem.spec("x").shape[-1] // group) > config.groups * _GRID:
        return "more groups a row than a grid is wide"
    held = config.rows * config.groups * group // (32 * config.warps)
    return f"{held} elements a thread would spill" if held > 128 else None


def config(problem: Problem) -> Config:
    """The tuned table's configuration for the nearest problem, else the heuristic's."""
    shape = problem.spec("x").shape
    legal = takes(Config, lambda c: refuses(c, problem))

    found = nearest(
        table("int8_quantize", problem.arch.device),
        {"backend": "triton", "group_size": problem.param("group_size")},
        {"m": math.prod(shape[:-1]), "k": shape[-1]},
        legal,
    )
    return heuristic(problem) if found is None else Config.from_dict(found)


def configs(problem: Problem) -> list[Config]:
    """Those that a tuner may time: more and fewer elements a program and a thread."""
    found = []
    for elements in (1024, 2048, 4096, 8192, 16384):
        fit = _fit(elements, problem)
        for warps in (1, 2, 4, 8):
            if 16 <= elements // (32 * warps) <= 128:
                found.append(Config(fit.rows, fit.groups, warps))
    return [config for config in found if refuses(config, problem) is None]


class _Bound:
    """run() for calls of one Problem: all but addresses is worked out once for each device."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.launchers: dict[int | None, Launcher] = {}

    def __call__(
        self, x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, group_size: int
    ) -> None:
        launcher = self.launchers.get(x.device.index)
        if launcher is None:
            launcher = _launcher(self.config, x, q, scale, group_size)
            self.launchers[x.device.index] = launcher
        launcher(x, q, scale)


def _launcher(
    config: Config, x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, group_size: int
) -> Launcher:
    kernel, grid, args, options = prepare(config, x, q, scale, group_size)
    numbers, constants = args[3:11], args[11:]
    key = (
        *(kernel, x.device.index, constants, config.warps, x.dtype),
        tuple(t.data_ptr() % 16 == 0 for t in (x, q, scale)),
        specialization(numbers[1]),
        tuple(map(specialization, numbers[4:])),
    )
    return Launcher(kernel, key, x.device.index, grid, args[3:], options, (None,) * 3)


def bind(config: Config) -> Callable[..., None]:
    """run() with its configuration, for calls alike in all but their tensors' addresses."""
    return _Bound(config)


_BOUND: dict[Any, Callable[..., None]] = {}


def run(
    config: Config, x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, group_size: int
) -> None:
    """Write codes and scales, launched on the current stream of x's device."""
    if q.numel() == 0:
        return
    key = (config, group_size, TensorSpec.of(x), q.data_ptr() & 15, scale.data_ptr() & 15)
    bound = _BOUND.get(key)
    if bound is None:
        bound = bind(config)
        remember(_BOUND, key, bound)
    bound(x, q, scale, group_size)


def prepare(
    config: Config, x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, group_size: int
) -> tuple[Any, tuple[int, int, int], tuple[Any, ...], dict[str, Any]]:
    """The kernel, grid, complete positional arguments and options; meta tensors are accepted."""
    from .triton_kernel import quantize_groups

    k = x.shape[-1]
    dims = collapse(tuple(x.shape), x.stride())
    rows = 1
    for size, _ in dims:
        rows *= size
    sizes = [size for size, _ in dims[1:]] + [1] * (_MAX_DIMS - len(dims))
    strides = [step for _, step in dims] + [0] * (_MAX_DIMS - len(dims))
    groups = -(-k // group_size)
    even = k % (group_size * config.groups) == 0
    numbers = (rows, k, *sizes, *strides, x.stride(-1))
    constants = (group_size, config.rows, config.groups, len(dims), even)
    grid = (-(-rows // config.rows), -(-groups // config.groups), 1)
    options = {"num_warps": config.warps, "enable_fp_fusion": False}
    return quantize_groups, grid, (x, q, scale, *numbers, *constants), options
