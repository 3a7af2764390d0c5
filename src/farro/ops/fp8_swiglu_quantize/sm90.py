"""fp8_swiglu_quantize on SM90a: tiles and launches of the kernels of sm90_*.cu."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ...cuda import tensor_map
from ...cuda.fp8 import configs, gemm
from ...cuda.launch import Launch, Launches, kernel_function
from ...problem import Problem, TensorSpec
from ...tuning import chosen, table, takes

_COLUMNS = 128  # of gate, and of up, in a tile
_FOLDER = "ops/fp8_swiglu_quantize"
_ROWS = {"large": (64, 128), "medium": (64, 128), "small": (8, 16, 32, 64)}
_SPLITS = (1, 2, 4)
_RESTS = (0, 1, 2)


@dataclass(frozen=True)
class Config:
    """`rows` x 128 outputs a tile, `stages` in the ring."""

    # "large" (persistent), "medium" (halves of a tile in a cluster), "small" (and operands swapped)
    policy: str
    rows: int
    stages: int
    split: int = 1  # medium, small: runs of K
    raster: int = 8  # large: row tiles visited together
    rest: int = 0  # large: columns beyond whole rounds go to medium tiles, with so many runs of K

    @property
    def tile(self) -> tuple[int, int]:
        return self.rows, _COLUMNS

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def shared_bytes(config: Config) -> int:
    """What the kernel's Shared / Layout adds up to, with room to align."""
    c = config
    if c.policy == "large":
        scales = configs.SCALE_STAGES * configs.SCALE_BLOCKS * (c.rows + 2) * 4
        barriers = 16 * (c.stages + configs.SCALE_STAGES)
        return c.stages * (c.rows + 2 * _COLUMNS) * 128 + scales + barriers + 1024
    if c.policy == "medium":
        scales = configs.SCALE_STAGES * configs.SCALE_BLOCKS * (c.rows + 2) * 4
        barriers = 16 * (c.stages + configs.SCALE_STAGES)
        return c.stages * (c.rows + _COLUMNS) * 128 + scales + barriers + 1024
    return c.stages * ((c.rows + _COLUMNS) * 128 + (c.rows + 4) * 4 + 16) + 1024


def refuses(config: Config, m: int = 1) -> str | None:
    """Why the kernels do not have this configuration, or None."""
    c = config
    sizes = (c.rows, c.stages, c.split, c.raster)
    if any(type(size) is not int or size < 1 for size in sizes):
        return "sizes are positive ints"
    if c.rows not in _ROWS.get(c.policy, ()) or not 3 <= c.stages <= 16 or c.raster > 64:
        return "no such tile"
    if shared_bytes(c) > configs.SHARED_LIMIT:
        return f"{shared_bytes(c)} bytes of shared memory, the limit is {configs.SHARED_LIMIT}"
    if c.split not in ((1,) if c.policy == "large" else _SPLITS):
        return "no such split of K"
    if type(c.rest) is not int or c.rest not in (_RESTS if c.policy == "large" else (0,)):
        return "no such split of the rest's K"
    return None if c.policy != "small" or m <= 65535 * c.rows else "too many tiles of tokens"


def candidates(problem: Problem) -> list[Config]:
    """Those worth timing, by the number of rows."""
    m = problem.spec("input").shape[0]
    rasters = (4, 8, 16) if m > 1024 else (8,)
    large = [
        Config("large", r, _deepest(r), raster=raster) for r in (64, 128) for raster in rasters
    ]
    small = [
        Config("small", rows, stages, split)
        for rows in _ROWS["small"]
        for stages in (4, 6, 8, 12)
        for split in _SPLITS
        if m > rows // 2 or rows == 8
    ]
    # where tiles of 128 columns are few, or a last round of them is
    medium = [
        Config("medium", rows, stages, split)
        for rows, stages in ((64, 8), (128, 6))
        for split in _SPLITS
        if m > rows // 2
    ]
    more = [Config("large", 128, _deepest(128), rest=rest) for rest in _RESTS if rest]
    found = [*(large if m > 32 else ()), *(small if m <= 128 else ())]
    found += [*(medium if 32 < m <= 512 else ()), *(more if 128 < m <= 512 else ())]
    return [c for c in found if refuses(c, m) is None]


def _deepest(rows: int) -> int:
    return max(stages for stages in range(3, 9) if refuses(Config("large", rows, stages)) is None)


def why_not(problem: Problem) -> str | None:
    """Row-major operands that TMA can read, K and N multiples of 16, codes in rows of words."""
    x, weight, out = (problem.spec(n) for n in ("input", "gate_up_weight", "output"))
    k, n = x.shape[1], out.shape[1]
    if n % 16 or k % 16:
        return f"N = {n} and K = {k} must be multiples of 16"
    reason = configs.why_not(x, weight, "gate_up_weight")
    if reason is not None or 0 in (*out.shape, k):
        return reason
    if _in_words(out):
        return None
    return "output must be row-major, its rows at addresses that are multiples of 4"


def _in_words(codes: TensorSpec) -> bool:
    row = codes.stride[0] if codes.shape[0] > 1 else 0
    return codes.stride[1] == 1 and row % 4 == 0 and codes.align >= 4


def must_run(problem: Problem) -> bool:
    """Rows of 16-byte aligned pieces, codes in rows of words, K and N multiples of 16, any M."""
    x, weight, out = (problem.spec(n) for n in ("input", "gate_up_weight", "output"))
    return out.shape[1] % 16 == 0 and configs.must_run(x, weight) and _in_words(out)


def config(problem: Problem) -> Config:
    """The tuned table's, else by the number of rows."""
    (m, k), n = problem.spec("input").shape, problem.spec("output").shape[1]
    legal = takes(Config, lambda c: refuses(c, m))

    found = chosen(
        table("fp8_swiglu_quantize", problem.arch.device),
        {"backend": "cuda"},
        {"m": m, "n": n, "k": k},
        problem.arch.multiprocessors,
        legal,
    )
    if found is not None:
        return Config(**found)
    if m > 64:
        return Config("large", 128, _deepest(128))
    tokens = next(t for t in _ROWS["small"] if m <= t)
    tiles, split = -(-n // _COLUMNS), 1
    while split < 4 and tiles * 4 * split <= problem.arch.multiprocessors and k >= 512 * split:
        split *= 2
    return Config("small", tokens, 8 if tokens < 64 else 6, split)


def kernel_name(config: Config) -> tuple[str, str]:
    """Source file and name expression."""
    c = config
    source = f"{_FOLDER}/sm90_{c.policy}.cu"
    if c.policy == "large":
        return source, f"fp8_swiglu<{c.rows // 64}, {c.stages}>"
    if c.policy == "medium":
        return source, f"fp8_swiglu_medium<{c.rows // 64}, {c.stages}, {c.split}>"
    return source, f"fp8_swiglu_small<{c.rows}, {c.stages}, {c.split}>"


class _Output(ctypes.Structure):
    """`struct Output` of fp8_swiglu.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scale")),
        *((name, ctypes.c_int64) for name in ("codes_row", "scale_row", "scale_block")),
        *((name, ctypes.c_int) for name in ("columns", "first_tile", "tiles")),
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
) -> Launch | Launches:
    """The launch, or both, for these addresses; M, N and K are not 0."""
    tensors = (x, weight, input_scale, weight_scale, output, output_scale)
    count = torch.cuda.get_device_properties(x.get_device()).multi_processor_count
    tiles, rest = -(-output.shape[1] // _COLUMNS), rest_of(config)
    whole = _whole_rounds(config, len(x), tiles, count)
    if rest is None or whole in (0, tiles):
        return _prepare(config if whole or rest is None else rest, tensors, 0, tiles, count)
    first = _prepare(config, tensors, 0, whole, count)
    return Launches(first, _prepare(rest, tensors, whole, tiles - whole, count, overlaps=True))


def rest_of(config: Config) -> Config | None:
    """What the columns beyond whole rounds of large tiles go to."""
    if config.rest == 0:
        return None
    return Config("medium", config.rows, 6 if config.rows == 128 else 8, config.rest)


def _whole_rounds(config: Config, m: int, tiles: int, multiprocessors: int) -> int:
    """Of `tiles` columns of tiles, those in rounds that fill the multiprocessors."""
    row_tiles = -(-m // config.rows)
    return tiles * row_tiles // multiprocessors * multiprocessors // row_tiles


def _prepare(
    config: Config,
    tensors: tuple[torch.Tensor, ...],
    first: int,
    tiles: int,
    multiprocessors: int,
    overlaps: bool = False,
) -> Launch:
    """Of `tiles` columns of tiles from `first` on."""
    x, weight, input_scale, weight_scale, output, output_scale = tensors
    (m, k), n = x.shape, output.shape[1]
    device, size, c = x.get_device(), shared_bytes(config), config
    pitches = [t.stride(0) if t.shape[0] > 1 else k for t in (x, weight)]
    tokens = tensor_map.encode(x.data_ptr(), m, k, pitches[0], c.rows, 128)
    tiles_m, cluster = -(-m // c.rows), 1 if c.policy == "large" else 2 * c.split
    if c.policy == "large":
        groups = _COLUMNS // 16
        rows = tensor_map.encode_groups(weight.data_ptr(), 2 * n, k, pitches[1], groups, 128)
        grid, threads = (min(multiprocessors, tiles_m * tiles), 1, 1), 128 + 2 * c.rows
    else:
        rows = tensor_map.encode(weight.data_ptr(), 2 * n, k, pitches[1], 64, 128)
        grid, threads = (tiles * cluster, tiles_m, 1), 320
    if c.policy == "medium":
        grid, threads = (tiles * tiles_m * cluster, 1, 1), 64 + 2 * c.rows
    maps = (rows, tokens) if c.policy == "small" else (tokens, rows)
    function = kernel_function(*kernel_name(c), "sm_90a", device, size)
    problem = gemm.parameters(
        x, weight, None, raster=c.raster, input_scale=input_scale, weight_scale=weight_scale
    )
    scale_strides = output_scale.stride()
    addresses = output.data_ptr(), output_scale.data_ptr()
    result = _Output(*addresses, output.stride(0), *scale_strides, n, first, tiles)
    parameters = (*maps, problem, result)
    return Launch(device, function, grid, threads, size, cluster, parameters, overlaps)


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
