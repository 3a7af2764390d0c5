"""fp8_quantize through Triton, on SM80 and newer, for contiguous or strided rows.

One launch, two for a tensor's scale where the tensor does not fit in one program's registers. From
SM89 the chip converts to E4M3, below it integer arithmetic does; the bytes are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ...dispatch import remember
from ...formats.fp8 import BLOCK
from ...problem import Problem, TensorSpec
from ...triton_gemm import powers_of_two
from ...triton_launch import Launcher, specialization
from ...tuning import nearest, table, takes
from ..int8_quantize.triton import collapse

_INT32 = 0x7FFFFFFF
# Elements of one program, by how many there are in all: 64 a thread where that fills the device
_ELEMENTS = ((8192, 8192 * 512), (2048, 2048 * 256), (1024, 0))
_LONGEST_ROW = 16384  # that a program holds in registers
_LARGEST_TENSOR = 32768
_PROGRAMS = 512  # at most, that reduce a tensor: each of the next launch reads all their maxima
_MAX_DIMS = 3
_GROUPS, _LONG, _TENSOR = "groups in registers", "rows in two passes", "two launches"


@dataclass(frozen=True)
class Config:
    """What one program of triton_kernel.py takes: rows x groups of `width` elements each."""

    rows: int
    groups: int
    width: int
    warps: int
    convert: bool = False  # by the chip's instruction, which SM89 and newer have
    programs: int = 0  # that reduce a whole tensor in a launch of their own
    policy: str = _GROUPS

    @property
    def tile(self) -> tuple[int, int]:
        """Rows, and elements of each row."""
        return self.rows, self.groups * self.width

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        return cls(**values)


def why_not(problem: Problem) -> str | None:
    """Why this kernel cannot run the problem, or None."""
    x = problem.spec("x")
    dims = collapse(x.shape, x.stride)
    if len(dims) > _MAX_DIMS:
        return (
            f"x's leading dimensions need {len(dims)} strides, this kernel takes {_MAX_DIMS}; "
            "x.contiguous() or a reshape makes them fewer"
        )
    if math.prod(x.shape[:-1]) > _INT32 or x.shape[-1] > _INT32 - 65536:
        return f"more than {_INT32} rows, or rows longer than that"
    return None


def _above(value: int) -> int:
    """The smallest power of two that is not below value."""
    return 1 << max(0, value - 1).bit_length()


def _sizes(problem: Problem) -> tuple[int, int]:
    shape = problem.spec("x").shape
    return max(1, math.prod(shape[:-1])), max(1, shape[-1])


def _fit(elements: int, per_thread: int, problem: Problem) -> Config:
    """Programs of about `elements`, threads of about `per_thread`."""
    m, k = _sizes(problem)
    kind = problem.param("kind")
    convert = "fp8_mma" in problem.arch.features
    rows, groups, width, programs, policy = 1, 1, BLOCK, 0, _GROUPS
    if kind == "128x128":
        rows = min(BLOCK, _above(m))
    elif kind == "1x128":
        whole = max(1, elements // BLOCK)
        groups_of_row = -(-k // BLOCK)
        groups = min(whole, groups_of_row & -groups_of_row, 16)
        rows = max(1, min(whole // groups, 32))
    elif kind == "per_row":
        width = min(_above(k), _LONGEST_ROW)
        rows = max(1, min(elements // width, 32))
        if k > width:
            rows, policy = 1, _LONG
    elif _above(m) * _above(k) <= _LARGEST_TENSOR:
        rows, width, per_thread = _above(m), _above(k), 32
    else:
        dividing = k & -k
        width = min(dividing if dividing >= 256 else _above(k), 1024)
        rows = min(_above(m), max(1, elements // width))
        tiles = -(-m // rows) * -(-k // width)
        programs, policy = min(_PROGRAMS, _above(tiles)), _TENSOR
    warps = max(1, min(32, rows * groups * width // (32 * per_thread)))
    return Config(rows, groups, width, warps, convert, programs, policy)


def heuristic(problem: Problem) -> Config:
    """A configuration for any problem, where no table has one."""
    total = math.prod(_sizes(problem))
    elements = next(e for e, least in _ELEMENTS if total >= least)
    return _fit(elements, 64 if elements > 1024 else 16, problem)


def refuses(config: Config, problem: Problem) -> str | None:
    """Why this configuration is not legal for the problem, or None."""
    m, k = _sizes(problem)
    kind = problem.param("kind")
    numbers = (config.rows, config.groups, config.width, config.warps)
    if not powers_of_two(*numbers) or config.warps > 32:
        return "rows, groups, width and warps are powers of two, and warps at most 32"
    if config.programs and (config.policy != _TENSOR or not powers_of_two(config.programs)):
        return "a power of two of programs reduces a whole tensor, and nothing else"
    if config.convert and "fp8_mma" not in problem.arch.features:
        return "only SM89 and newer convert to E4M3"
    if config.rows * config.groups * config.width // (32 * config.warps) > 128:
        return "more than 128 elements a thread would spill"
    if config.policy == _TENSOR:
        fits = kind == "per_tensor" and config.groups == 1 and 0 < config.programs <= 4096
        return None if fits else "two launches are for a whole tensor"
    if config.policy == _LONG:
        fits = kind == "per_row" and config.rows == config.groups == 1
        return None if fits else "two passes are for single rows"
    if config.policy != _GROUPS:
        return f"no policy is called {config.policy!r}"
    groups_fit = {
        "per_tensor": config.rows >= m and config.width >= k and config.groups == 1,
        "per_row": config.width >= k and config.groups == 1,
        "1x128": config.width == BLOCK,
        "128x128": config.width == BLOCK and config.rows == min(BLOCK, _above(m)),
    }
    return None if groups_fit[str(kind)] else f"its groups are not those of {kind}"


def config(problem: Problem) -> Config:
    """The tuned table's configuration for the nearest problem, else the heuristic's."""
    shape = problem.spec("x").shape
    legal = takes(Config, lambda c: refuses(c, problem))

    found = nearest(
        table("fp8_quantize", problem.arch.device),
        {"backend": "triton", "variant": problem.param("kind")},
        {"m": math.prod(shape[:-1]), "k": shape[-1]},
        legal,
    )
    return heuristic(problem) if found is None else Config.from_dict(found)


def configs(problem: Problem) -> list[Config]:
    """Those that a tuner may time: more and fewer elements a program and a thread."""
    sizes = ((e, t) for e in (1024, 2048, 4096, 8192, 16384) for t in (16, 32, 64))
    found = dict.fromkeys(_fit(elements, per_thread, problem) for elements, per_thread in sizes)
    return [config for config in found if refuses(config, problem) is None]


# kernel, grid, complete positional arguments, options
_Launch = tuple[Any, tuple[int, int, int], tuple[Any, ...], dict[str, Any]]


def prepare(
    config: Config,
    x: torch.Tensor,
    q: torch.Tensor,
    scale: torch.Tensor,
    kind: str,
    partial: torch.Tensor | None = None,
) -> list[_Launch]:
    """The launches of a problem; meta tensors are accepted. `partial` is int32 [programs]."""
    from . import triton_kernel as kernels

    k = x.shape[-1]
    dims = collapse(tuple(x.shape), x.stride())
    rows = math.prod(size for size, _ in dims)
    sizes = [size for size, _ in dims[1:]] + [1] * (_MAX_DIMS - len(dims))
    strides = [step for _, step in dims] + [0] * (_MAX_DIMS - len(dims))
    numbers = (rows, k, *sizes, *strides, x.stride(-1))
    options = {"num_warps": config.warps, "enable_fp_fusion": False}
    tiles = -(-rows // config.rows) * -(-k // (config.groups * config.width))
    grid = (tiles, 1, 1)
    tensors: tuple[Any, ...] = (x, q, scale)
    if config.policy == _TENSOR:
        tile = (tiles, config.width, config.rows, len(dims), config.programs)
        reduce = (x, partial, *numbers, *tile)
        tensors = (x, partial, q, scale)
        return [
            (kernels.largest_of_tensor, (config.programs, 1, 1), reduce, options),
            (kernels.quantize_tensor, grid, (*tensors, *numbers, *tile, config.convert), options),
        ]
    if config.policy == _LONG:
        args = (*tensors, *numbers, config.width, len(dims), config.convert)
        return [(kernels.quantize_long_rows, (rows, 1, 1), args, options)]
    even = k % (config.width * config.groups) == 0
    tall = kind in ("per_tensor", "128x128")
    shape = (config.width, config.rows, config.groups, len(dims), even, tall)
    args = (*tensors, *numbers, *shape, config.convert)
    return [(kernels.quantize_groups, grid, args, options)]


class _Bound:
    """run() for calls of one Problem: all but addresses is worked out once for each device."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.launchers: dict[int | None, list[Launcher]] = {}

    def __call__(self, x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, kind: str) -> None:
        partial = None
        if self.config.programs:
            partial = torch.empty(self.config.programs, dtype=torch.int32, device=x.device)
        launchers = self.launchers.get(x.device.index)
        if launchers is None:
            launchers = _launchers(self.config, x, q, scale, kind, partial)
            self.launchers[x.device.index] = launchers
        if partial is None:
            launchers[0](x, q, scale)
        else:
            launchers[0](x, partial)
            launchers[1](x, partial, q, scale)


def _launchers(
    config: Config,
    x: torch.Tensor,
    q: torch.Tensor,
    scale: torch.Tensor,
    kind: str,
    partial: torch.Tensor | None,
) -> list[Launcher]:
    made = []
    for kernel, grid, args, options in prepare(config, x, q, scale, kind, partial):
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        rest = args[len(tensors) :]
        key = (
            *(kernel, x.device.index, kind, config, x.dtype),
            tuple(t.data_ptr() % 16 == 0 for t in tensors),
            # k and the strides; Triton is told not to specialize on the other integers
            tuple(specialization(rest[i]) for i in (1, 4, 5, 6, 7)),
            rest[9 if config.programs else 8 :],
        )
        nothing = (None,) * len(tensors)
        made.append(Launcher(kernel, key, x.device.index, grid, rest, options, nothing, True))
    return made


def bind(config: Config) -> Callable[..., None]:
    """run() with its configuration, for calls alike in all but their tensors' addresses."""
    return _Bound(config)


_BOUND: dict[Any, Callable[..., None]] = {}


def run(config: Config, x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, kind: str) -> None:
    """Write codes and scales, launched on the current stream of x's device."""
    if q.numel() == 0:
        return
    key = (config, kind, TensorSpec.of(x), q.data_ptr() & 15, scale.data_ptr() & 15)
    bound = _BOUND.get(key)
    if bound is None:
        bound = bind(config)
        remember(_BOUND, key, bound)
    bound(x, q, scale, kind)
