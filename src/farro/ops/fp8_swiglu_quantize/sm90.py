"""fp8_swiglu_quantize on SM90a: sm90.cu's tiles and its launch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ...cuda import tensor_map
from ...cuda.fp8 import gemm
from ...cuda.launch import Launch, kernel_function
from ...problem import Problem
from ...tuning import chosen, table

_COLUMNS = 128  # of gate, and of up, in a tile
_SOURCE = "ops/fp8_swiglu_quantize/sm90.cu"
_ROWS = (64, 128)


@dataclass(frozen=True)
class Config:
    """`rows` x 128 outputs a tile, `stages` in the ring, `raster` row tiles visited together."""

    rows: int
    stages: int
    raster: int = 8

    @property
    def tile(self) -> tuple[int, int]:
        return self.rows, _COLUMNS

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def shared_bytes(config: Config) -> int:
    """What the kernel's Shared adds up to, with room to align."""
    data = config.stages * (config.rows + 2 * _COLUMNS) * 128
    scales = gemm.SCALE_STAGES * gemm.SCALE_BLOCKS * (config.rows + 2) * 4
    return data + scales + 16 * (config.stages + gemm.SCALE_STAGES) + 1024


def refuses(config: Config) -> str | None:
    """Why the kernel does not have this configuration, or None."""
    sizes = (config.rows, config.stages, config.raster)
    if any(type(size) is not int or size < 1 for size in sizes):
        return "sizes are positive ints"
    if config.rows not in _ROWS or not 3 <= config.stages <= 8 or config.raster > 64:
        return "no such tile"
    if shared_bytes(config) > gemm.SHARED_LIMIT:
        return f"{shared_bytes(config)} bytes of shared memory, the limit is {gemm.SHARED_LIMIT}"
    return None


def candidates(problem: Problem) -> list[Config]:
    """The deepest ring of each tile, in several orders."""
    m = problem.spec("input").shape[0]
    rasters = (4, 8, 16) if m > 1024 else (8,)
    return [Config(rows, _deepest(rows), raster) for rows in _ROWS for raster in rasters]


def _deepest(rows: int) -> int:
    return max(stages for stages in range(3, 9) if refuses(Config(rows, stages)) is None)


def why_not(problem: Problem) -> str | None:
    """Row-major operands that TMA can read, K and N multiples of 16, codes in rows of words."""
    x, weight, out = (problem.spec(n) for n in ("input", "gate_up_weight", "output"))
    if out.shape[1] % 16:
        return f"N = {out.shape[1]} must be a multiple of 16"
    reason = gemm.why_not(x, weight)
    if reason is not None or 0 in out.shape:
        return reason
    row = out.stride[0] if out.shape[0] > 1 else 0
    if out.stride[1] != 1 or row % 4 or out.align < 4:
        return "output must be row-major, its rows at addresses that are multiples of 4"
    return None


def must_run(problem: Problem) -> bool:
    """Contiguous operands and codes at aligned addresses, K and N multiples of 16, any M."""
    x, weight, out = (problem.spec(n) for n in ("input", "gate_up_weight", "output"))
    (m, k), n = x.shape, out.shape[1]
    aligned = min(x.align, weight.align, out.align) >= 16
    lies = all(s.stride == (s.shape[1], 1) or min(s.shape) < 2 for s in (x, weight, out))
    return aligned and lies and k % 16 == n % 16 == 0 and max(m, 2 * n, k) < 2**31 - 2**10


def config(problem: Problem) -> Config:
    """The tuned table's, else the narrower tile for few rows."""
    (m, k), n = problem.spec("input").shape, problem.spec("output").shape[1]

    def legal(values: dict[str, Any]) -> bool:
        try:
            return refuses(Config(**values)) is None
        except TypeError:  # a table of another version
            return False

    found = chosen(
        table("fp8_swiglu_quantize", problem.arch.device),
        {"backend": "cuda"},
        {"m": m, "n": n, "k": k},
        problem.arch.multiprocessors,
        legal,
    )
    if found is not None:
        return Config(**found)
    rows = 64 if m <= 64 else 128
    return Config(rows, _deepest(rows))


class _Output(ctypes.Structure):
    """`struct Output` of sm90.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scale")),
        *((name, ctypes.c_int64) for name in ("codes_row", "scale_row", "scale_block")),
        ("columns", ctypes.c_int),
    )


class _Bound:
    """run() for calls alike in all but addresses."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.prepared = gemm.Prepared()

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        input_scale: torch.Tensor,
        weight_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor,
    ) -> None:
        if output.numel() == 0:
            return
        if x.shape[1] == 0:  # sums over nothing: codes 0 and the smallest scale
            output.copy_(torch.zeros((), dtype=output.dtype, device=output.device))
            output_scale.fill_(1e-12)
            return
        tensors = (x, weight, input_scale, weight_scale, output, output_scale)
        self.prepared.run(x.device, tensors, lambda: prepare(self.config, *tensors))


def prepare(
    config: Config,
    x: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    output: torch.Tensor,
    output_scale: torch.Tensor,
) -> Launch:
    """The launch for these addresses; M, N and K are not 0."""
    (m, k), n = x.shape, output.shape[1]
    device, size = x.get_device(), shared_bytes(config)
    name = f"fp8_swiglu<{config.rows // 64}, {config.stages}>"
    function = kernel_function(_SOURCE, name, "sm_90a", device, size)
    pitches = [t.stride(0) if t.shape[0] > 1 else k for t in (x, weight)]
    maps = (
        tensor_map.encode(x.data_ptr(), m, k, pitches[0], config.rows, 128),
        tensor_map.encode_groups(weight.data_ptr(), 2 * n, k, pitches[1], _COLUMNS // 16, 128),
    )
    problem = gemm.parameters(
        x, weight, None, raster=config.raster, input_scale=input_scale, weight_scale=weight_scale
    )
    result = _Output(
        output.data_ptr(), output_scale.data_ptr(), output.stride(0), *output_scale.stride(), n
    )
    count = torch.cuda.get_device_properties(device).multi_processor_count
    grid = (min(count, -(-m // config.rows) * -(-n // _COLUMNS)), 1, 1)
    threads = 128 + 2 * config.rows
    return Launch(device, function, grid, threads, size, 1, (*maps, problem, result))


def bind(config: Config) -> Callable[..., None]:
    """run() with its configuration, for calls alike in all but their tensors' addresses."""
    return _Bound(config)


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
    bind(config)(x, weight, input_scale, weight_scale, output, output_scale)
