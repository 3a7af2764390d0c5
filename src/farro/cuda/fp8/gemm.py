"""Launches of the FP8 products on SM90a, large.cu and small.cu.

fp8_linear and fp8_blockwise_linear share these kernels: a template parameter says whether sums are
scaled by blocks of K, another what happens before they are rounded. configs.py chooses.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch

from ...dispatch import insert
from .. import tensor_map
from ..launch import Launch, Launches, kernel_function
from .configs import DEPTH, Config, Kind, shared_bytes

_BIAS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}


class _Parameters(ctypes.Structure):
    """`struct Problem` of fp8_problem.cuh."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (*("alpha_at", "input_scale", "weight_scale", "bias", "residual", "out"),)
        ),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("input_scale_row", "input_scale_block", "weight_scale_row"),
                *("weight_scale_block", "bias_stride", "residual_row", "residual_column"),
                *("out_row", "out_column"),
            )
        ),
        ("alpha", ctypes.c_float),
        *(
            (name, ctypes.c_int)
            for name in (
                *("m", "n", "k", "bias_kind", "raster", "out_vector", "residual_vector"),
                *("bias_vector", "input_scale_vector"),
            )
        ),
    )


def _group(config: Config, n: int) -> int:
    """Columns of a tile for many rows in which each lane's are neighbours: it needs whole ones."""
    return 32 if config.columns % 32 == 0 and n % 32 == 0 else 16


def kernel_name(config: Config, kind: Kind, n: int = 32) -> tuple[str, str]:
    """Source file and name expression; of N = `n` only matters whether it is a multiple of 32."""
    flags = f"{kind.epilogue}, {str(kind.scaled).lower()}, {str(kind.fast).lower()}"
    if config.policy == "large":
        tile = f"{config.columns}, {config.rows // 128}, {config.stages}, {_group(config, n)}"
        tile += f", {str(config.staged).lower()}"
        return "cuda/fp8/large.cu", f"fp8_large<{flags}, {tile}>"
    tile = f"{config.rows}, {config.stages}, {config.cluster}"
    tile += f", {str(config.ahead).lower()}, {config.multicast}"
    return "cuda/fp8/small.cu", f"fp8_small<{flags}, {tile}>"


def _grid(config: Config, m: int, n: int, multiprocessors: int) -> tuple[int, int, int]:
    if config.policy == "small":
        return -(-n // config.columns) * config.ctas, -(-m // (config.rows * config.multicast)), 1
    return min(multiprocessors, -(-m // config.rows) * -(-n // config.columns)), 1, 1


def _vector(tensor: torch.Tensor) -> bool:
    """Whether 16 bytes along a row are one aligned access in every row."""
    step = tensor.element_size()
    row = tensor.stride(0) * step if tensor.shape[0] > 1 else 0
    return tensor.stride(1) == 1 and row % 16 == 0 and tensor.data_ptr() % 16 == 0


def _bias_vector(bias: torch.Tensor) -> bool:
    """Whether eight neighbours are aligned accesses of 16 bytes."""
    whole = bias.dtype != torch.float16 and bias.stride(0) == 1
    return whole and bias.data_ptr() % 16 == 0


def _scale_vector(scale: torch.Tensor) -> int:
    """1: four blocks of a row are one read; 2: four rows of a block; 0: neither."""
    if scale.data_ptr() % 16:
        return 0
    if scale.stride(1) == 1 and (scale.stride(0) % 4 == 0 or scale.shape[0] == 1):
        return 1
    if scale.stride(0) == 1 and scale.stride(1) % 4 == 0 and scale.shape[0] % 4 == 0:
        return 2
    return 0


def parameters(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor | None,
    *,
    raster: int,
    alpha: float | torch.Tensor = 1.0,
    input_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> ctypes.Structure:
    """The kernels' `Problem`."""
    tensors = (input_scale, weight_scale, bias, residual, out)
    matrices = (input_scale, weight_scale), (residual, out)
    scales, results = (
        [stride for t in pair for stride in ((0, 0) if t is None else t.stride())]
        for pair in matrices
    )
    return _Parameters(
        alpha.data_ptr() if isinstance(alpha, torch.Tensor) else None,
        *(None if t is None else t.data_ptr() for t in tensors),
        *scales,
        0 if bias is None else bias.stride(0),
        *results,
        1.0 if isinstance(alpha, torch.Tensor) else alpha,
        *(x.shape[0], weight.shape[0], x.shape[1]),
        0 if bias is None else _BIAS[bias.dtype],
        raster,
        int(out is not None and _vector(out)),
        int(residual is not None and _vector(residual)),
        int(bias is not None and _bias_vector(bias)),
        0 if input_scale is None else _scale_vector(input_scale),
    )


def prepare(
    config: Config,
    kind: Kind,
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    **more: Any,
) -> Launch:
    """The launch for these addresses; M, N and K are not 0. `more` as `parameters` takes it."""
    (m, _), n = x.shape, weight.shape[0]
    device = x.get_device()
    source, name = kernel_name(config, kind, n)
    size = shared_bytes(config, kind.scaled)
    function = kernel_function(source, name, "sm_90a", device, size)
    problem = parameters(x, weight, out, raster=config.raster, **more)
    count = torch.cuda.get_device_properties(device).multi_processor_count
    grid, threads = _grid(config, m, n, count), 32 * config.warps
    maps = _maps(config, x, weight, out if problem.out_vector else None)
    return Launch(device, function, grid, threads, size, config.ctas, (*maps, problem))


def _maps(
    config: Config, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None
) -> tuple[Any, ...]:
    """Descriptors in the order of the kernel's parameters."""
    (m, k), n = x.shape, weight.shape[0]
    # a single row has no leading stride to speak of, but TMA wants a multiple of 16
    pitches = [t.stride(0) if t.shape[0] > 1 else k for t in (x, weight)]
    tokens = tensor_map.encode(x.data_ptr(), m, k, pitches[0], config.rows, DEPTH)
    if config.policy == "large":
        group = _group(config, n)
        box = (config.columns // group, DEPTH, group)
        rows = tensor_map.encode_groups(weight.data_ptr(), n, k, pitches[1], *box)
        if not config.staged or out is None:
            return tokens, rows, tokens  # the last is not used
        pitch = 2 * (out.stride(0) if m > 1 else n)
        box = (config.columns // group, 16, group)
        return tokens, rows, tensor_map.encode_results(out.data_ptr(), m, n, pitch, *box)
    brought = config.columns // config.multicast  # rows, by each CTA
    return tensor_map.encode(weight.data_ptr(), n, k, pitches[1], brought, DEPTH), tokens


class Prepared:
    """Launches by what may differ between calls alike in all but addresses and a float alpha.

    All of a process are bounded together: a model has hundreds of weights, a server any number of
    rows.
    """

    _launches: ClassVar[dict[Any, Launch | Launches]] = {}
    _limit: ClassVar[int] = 16384
    _count: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self) -> None:
        self._kind_of_call = next(self._count)

    def run(
        self, device: torch.device, tensors: Sequence[Any], prepare: Callable[[], Launch | Launches]
    ) -> None:
        """Launch for `tensors` (or floats, or None), prepared when first seen."""
        key = (
            self._kind_of_call,
            device,
            # 0.0 == -0.0, but their products differ
            *[t.data_ptr() if isinstance(t, torch.Tensor) else t or repr(t) for t in tensors],
        )
        launch = self._launches.get(key)
        if launch is None:
            with torch.cuda.device(device):
                launch = prepare()
            insert(self._launches, key, launch, self._limit)
        launch.on_current_stream()
