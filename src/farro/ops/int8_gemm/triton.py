"""int8_gemm through Triton, on SM80 and newer: configurations, their choice, and the launch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ...arch import interpreting
from ...problem import Problem, TensorSpec
from ...triton_launch import launch, specialization
from ...tuning import nearest, table

# Shared memory of one block in bytes; where an architecture has no row, what they all have
_SHARED = {"sm_80": 163, "sm_87": 163, "sm_90": 227, "sm_100": 227, "sm_103": 227}
_SHARED_KIB = 99
_ACCUMULATORS = 160  # 32-bit registers a thread for INT32 partials and FP32 totals
_INT32 = 0x7FFFFFFF


@dataclass(frozen=True)
class Config:
    """One way to run the kernels of triton_kernel.py.

    The kernel's own tile is block_m x block_n; with `swap` its rows are the weights (the narrow
    side is left to few tokens). A loop step covers block_k of K: part of a group, or several.
    """

    family: str  # "pointers", "descriptors" or "specialized" (descriptors, one warp loads)
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


def _spec(problem: Problem, name: str) -> TensorSpec:
    spec = problem[name]
    assert spec is not None
    return spec


def sizes(problem: Problem) -> tuple[int, int, int]:
    (m, k), (_, n) = _spec(problem, "a").shape, _spec(problem, "b").shape
    return m, n, k


def why_not(problem: Problem) -> str | None:
    """Why these kernels cannot run the problem, or None."""
    b = _spec(problem, "b")
    if len(b.shape) == 3:
        return "b is group-packed for the CPU; pass the logical [K, N] weight"
    if max(sizes(problem)) > _INT32:
        return f"a dimension is longer than {_INT32}"
    return None


def describable(spec: TensorSpec, contiguous: int) -> str | None:
    """Why a tensor descriptor cannot be made of this 2-D int8 tensor, or None."""
    other = 1 - contiguous
    if spec.align < 16:
        return "its pointer is not 16-byte aligned"
    if spec.stride[contiguous] != 1 and spec.shape[contiguous] > 1:
        return "K is not its contiguous dimension"
    if spec.stride[other] % 16 and spec.shape[other] > 1:
        return f"its leading stride {spec.stride[other]} is no multiple of 16"
    if min(spec.shape) == 0:
        return "it is empty"
    return None


# --- which configurations are legal, each reason apart -------------------------------------------


def _refuse_shared(config: Config, problem: Problem) -> str | None:
    step = max(config.block_k, _group(problem))  # bytes of a row that one loop step reads
    scales = 4 * max(1, config.block_k // _group(problem))
    need = config.stages * (config.block_m + config.block_n) * (step + scales) + 2048
    output = config.block_m * config.block_n * _spec(problem, "out").dtype.itemsize
    need = max(need, output)
    limit = _SHARED.get(problem.arch.name, _SHARED_KIB) * 1024
    return f"{need} bytes of shared memory, the limit is {limit}" if need > limit else None


def _refuse_registers(config: Config, problem: Problem) -> str | None:
    groups_of_warps = 2 if config.family == "specialized" else 1
    threads = 32 * config.warps * groups_of_warps
    need = 2 * config.block_m * config.block_n // threads
    if need > _ACCUMULATORS:
        return f"{need} accumulator registers a thread would spill"
    return None


def _refuse_idle_warps(config: Config, problem: Problem) -> str | None:
    pieces = (config.block_m // 16) * (config.block_n // 8)
    return None if config.warps <= pieces else "more warps than pieces of the tile"


def _refuse_descriptors(config: Config, problem: Problem) -> str | None:
    if config.family == "pointers":
        return None
    if "tma" not in problem.arch.features:
        return "descriptors need the bulk tensor copy engine (SM90 or newer)"
    for name, contiguous in (("a", 1), ("b", 0)):
        reason = describable(_spec(problem, name), contiguous)
        if reason is not None:
            return f"no descriptor of {name}: {reason}"
    return None


def _refuse_specialized(config: Config, problem: Problem) -> str | None:
    if config.family != "specialized":
        return None
    if "wgmma" not in problem.arch.features or not _triton_specializes():
        return "specialized warps are for SM90 with Triton 3.6"
    if config.warps != 4 or config.block_m < 128 or config.block_k > _group(problem):
        return "specialized warps need 4 warps, 128 rows and at most one group a step"
    return None


_FILTERS: tuple[Callable[[Config, Problem], str | None], ...] = (
    _refuse_shared,
    _refuse_registers,
    _refuse_idle_warps,
    _refuse_descriptors,
    _refuse_specialized,
)


@functools.lru_cache(maxsize=1)
def _triton_specializes() -> bool:
    """Later releases changed the pass; it is used where it was verified on a GPU."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("triton").startswith("3.6.")
    except PackageNotFoundError:
        return False


def _group(problem: Problem) -> int:
    group = problem.param("group_size")
    assert isinstance(group, int)
    return group


def refuses(config: Config, problem: Problem) -> str | None:
    """Why this configuration is not legal for the problem, or None."""
    return next((reason for f in _FILTERS if (reason := f(config, problem)) is not None), None)


def _space(group: int) -> Iterator[Config]:
    """All combinations; a loop step shorter than 128 bytes of a row or longer than 512 never won"""
    steps = [s for s in (group // 2, group, 2 * group, 4 * group) if 128 <= s <= 512]
    sides = (16, 32, 64, 128, 256)
    for family, swap, block_m, block_n, step, group_m, warps, stages in itertools.product(
        ("pointers", "descriptors", "specialized"),
        (False, True),
        *(sides, sides, steps, (4, 8, 16), (1, 2, 4, 8), (2, 3, 4, 5, 6)),
    ):
        yield Config(family, swap, block_m, block_n, step, group_m, warps, stages)


def configs(problem: Problem) -> list[Config]:
    """Every legal configuration, in a fixed order."""
    return [c for c in _space(_group(problem)) if refuses(c, problem) is None]


def candidates(problem: Problem) -> list[Config]:
    """The legal configurations worth timing: some dozens, by what bounds the problem."""
    m, n, _ = sizes(problem)
    narrow = min(128, max(16, 1 << (max(m, 1) - 1).bit_length()))

    def plausible(c: Config) -> bool:
        rows, columns = c.tile
        area = rows * columns
        if m <= 64:  # streaming the weights: enough bytes in flight, few idle rows
            flight = c.stages * columns * max(c.block_k, _group(problem))
            blocks = _ceil(n, columns) * _ceil(m, rows)
            return (
                c.group_m == 8
                and rows == narrow
                and columns <= 128
                and c.swap
                and c.family != "specialized"
                and c.warps == min(4, max(1, area // 128))
                and blocks >= 64
                and flight * max(1, blocks / 132) >= 24 << 10
            )
        warps = 4 if area <= 8192 or c.family == "specialized" else 8
        return (
            c.warps == warps
            and rows <= max(64, 2 * narrow)
            and (m <= 256 or not c.swap)
            and min(rows, columns) >= 64
            and (area >= 8192 or m <= 512)
            and (c.group_m == 8 or (m > 512 and c.family == "specialized"))
        )

    return [c for c in configs(problem) if plausible(c)]


# --- the choice ----------------------------------------------------------------------------------


def heuristic(problem: Problem) -> Config:
    """A legal configuration for any problem, where no table has one."""
    m, n, k = sizes(problem)
    group = _group(problem)
    few = m <= 64
    narrow = min(64, max(16, 1 << (max(m, 1) - 1).bit_length()))
    big_step, small_step = max(group, 128), min(group, 128) if group >= 128 else 128
    if few:
        wide = 64 if n >= 64 * 96 else 16
        tries = [
            Config("pointers", True, wide, narrow, big_step, 8, 4 if wide == 64 else 2, 4),
            Config("pointers", True, wide, narrow, small_step, 8, 4 if wide == 64 else 2, 3),
        ]
    else:
        tries = [
            Config("specialized", False, 128, 128, small_step, 8, 4, 4),
            Config("pointers", False, 128, 128, small_step, 8, 8, 3),
            Config("pointers", False, 128, 64, small_step, 8, 4, 3),
        ]
    tries.append(Config("pointers", False, 64, 64, min(group, 128), 8, 4, 2))
    return next(c for c in tries if refuses(c, problem) is None)


def config(problem: Problem) -> Config:
    """The tuned table's configuration for the nearest problem, else the heuristic's."""
    m, n, k = sizes(problem)

    def legal(values: dict[str, Any]) -> bool:
        try:
            return refuses(Config.from_dict(values), problem) is None
        except TypeError:  # a table of another version
            return False

    found = nearest(
        table("int8_gemm", problem.arch.device),
        {"backend": "triton", "group_size": _group(problem)},
        {"m": m, "n": n, "k": k},
        legal,
    )
    return heuristic(problem) if found is None else Config.from_dict(found)


# --- the launch ----------------------------------------------------------------------------------


def _ceil(value: int, by: int) -> int:
    return -(-value // by)


@dataclass(frozen=True)
class Launch:
    """What one launch needs: the kernel, its complete positional arguments, grid and options."""

    kernel: Any
    tensors: tuple[Any, ...]
    numbers: tuple[int, ...]
    constants: tuple[Any, ...]
    grid: tuple[int, int, int]
    options: dict[str, Any]

    @property
    def args(self) -> tuple[Any, ...]:
        return (*self.tensors, *self.numbers, *self.constants)


def prepare(
    config: Config,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    group_size: int,
) -> Launch:
    """The launch that computes a problem in a configuration; meta tensors are accepted."""
    from . import triton_kernel

    if config.swap:
        x, y, scale_x, scale_y, o, bias_axis = b.T, a.T, scale_b.T, scale_a.T, out.T, 0
    else:
        x, y, scale_x, scale_y, o, bias_axis = a, b, scale_a, scale_b, out, 1
    bias_axis = -1 if bias is None else bias_axis
    rows, columns = o.shape
    k = x.shape[1]
    block_k = min(config.block_k, group_size)
    unroll = max(1, config.block_k // group_size)
    strides = (
        *scale_x.stride(),
        *scale_y.stride(),
        *(bias.stride() if bias is not None else (1,)),
        *o.stride(),
    )
    common = (group_size, config.block_m, config.block_n, block_k, unroll, config.group_m)
    if config.family == "pointers":
        kernels = triton_kernel.gemm_pointers, triton_kernel.gemm_pointers_swapped
        even = k % max(group_size, config.block_k) == 0
        numbers = (rows, columns, k, *x.stride(), *y.stride(), *strides)
        constants: tuple[Any, ...] = (*common, config.stages, even, bias_axis)
        tensors: tuple[Any, ...] = (x, y, scale_x, scale_y, bias, o)
    else:
        kernels = triton_kernel.gemm_descriptors, triton_kernel.gemm_descriptors_swapped
        numbers = (rows, columns, k, *strides)
        constants = (*common, config.stages, config.family == "specialized", bias_axis)
        tensors = (
            _descriptor(x, config.block_m, block_k),
            _descriptor(y.T, config.block_n, block_k),
            *(scale_x, scale_y, bias, o),
        )
    grid = (_ceil(rows, config.block_m) * _ceil(columns, config.block_n), 1, 1)
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return Launch(kernels[config.swap], tensors, numbers, constants, grid, options)


def _descriptor(tensor: torch.Tensor, rows: int, depth: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    stride = tensor.stride(0)
    if tensor.shape[0] == 1 and stride % 16:  # the stride of a single row is never used
        stride = _ceil(tensor.shape[1], 16) * 16
    return TensorDescriptor(tensor, list(tensor.shape), [stride, 1], [rows, depth])


def run(
    config: Config,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    group_size: int,
) -> None:
    """Write int8_gemm's result to `out`, launched on the current stream of its device."""
    if out.numel() == 0:
        return
    call = prepare(config, a, b, scale_a, scale_b, bias, out, group_size)
    key = (
        call.kernel,
        out.device.index,
        config,
        call.constants,
        out.dtype,
        None if bias is None else bias.dtype,
        tuple(t is None or t.data_ptr() % 16 == 0 for t in (a, b, scale_a, scale_b, bias, out)),
        specialization(call.numbers[0 if config.swap else 1]),
        tuple(map(specialization, call.numbers[2:])),
    )
    launch(call.kernel, key, out.device, call.grid, call.args, call.options)
