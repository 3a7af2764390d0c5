"""Launches of int8_gemm's native kernels on SM90a: which kernel, its parameters, prepared calls."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import torch

from ...cuda import tensor_map
from ...cuda.launch import Launch, kernel_function
from ...dispatch import insert
from .sm90 import DEPTH, Config, shared_bytes

_OUT = {torch.bfloat16: "BFloat16", torch.float16: "Float16", torch.float32: "float"}
_BIAS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}


class _Parameters(ctypes.Structure):
    """`struct Problem` of the .cu files."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("scale_a", "scale_b", "bias", "out")),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("scale_a_row", "scale_a_group", "scale_b_group", "scale_b_column"),
                *("out_row", "out_column", "bias_stride"),
            )
        ),
        *(
            (name, ctypes.c_int)
            for name in (
                "m",
                "n",
                "k",
                "bias_kind",
                "raster",
                "tile_rows",
                "vector",
                "scale_a_vector",
                "scale_b_vector",
            )
        ),
    )


def kernel_name(config: Config, group_size: int, dtype: torch.dtype) -> tuple[str, str]:
    """Source file and name expression."""
    out = _OUT[dtype]
    if config.policy == "large":
        waves = config.rows // 128
        arguments = f"{out}, {group_size}, {config.columns}, {waves}, {config.stages}"
        return "ops/int8_gemm/sm90_large.cu", f"int8_gemm_large<{arguments}>"
    order = 1 if config.ahead else 2 if config.early else 0
    tile = f"{config.rows}, {config.consumers}, {config.stages}, {order}, {config.chunk}"
    tile += f", {config.cluster}, {config.row_cluster}, {config.resident}"
    return "ops/int8_gemm/sm90_small.cu", f"int8_gemm_small<{out}, {group_size}, {tile}>"


def tile_rows(config: Config, m: int) -> int:
    """Rows of A that a tile loads: an even share, in boxes whose rows are a multiple of 8.

    The copy engine takes its time for rows outside of a matrix as well.
    """
    tiles, step = -(-m // (config.rows * config.cluster)) * config.cluster, 8 * config.row_cluster
    return -(-m // (step * tiles)) * step


def _grid(config: Config, m: int, n: int, sms: int) -> tuple[int, int, int]:
    tiles_n, tiles_m = -(-n // config.columns), -(-m // config.rows)
    if config.policy == "small":
        spread = config.row_cluster
        x = -(-tiles_n // spread) * spread * config.cluster
        return x, -(-tiles_m // config.cluster), 1
    return min(sms, tiles_m * tiles_n), 1, 1


# Prepared launches of all problems, 2.4 KB each: bounded together, since a model has hundreds of
# weights and a server sees any number of rows
_LAUNCHES: dict[Any, Launch] = {}
_LAUNCH_LIMIT = 16384
_next_problem = itertools.count()


class _Bound:
    """run() for calls alike in all but addresses: a launch is prepared once for each of these."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.problem = next(_next_problem)

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        group_size: int,
    ) -> None:
        key = (
            *(a.data_ptr(), b.data_ptr(), scale_a.data_ptr(), scale_b.data_ptr(), out.data_ptr()),
            *(bias if bias is None else bias.data_ptr(), a.get_device(), self.problem),
        )
        launch = _LAUNCHES.get(key)
        if launch is None:
            if a.shape[1] == 0:  # nothing to sum, and no TMA descriptor of nothing
                # a sum over nothing is +0, and +0 + -0 is +0
                out.zero_() if bias is None else out.copy_((bias.float() + 0.0).expand_as(out))
                return
            if out.numel() == 0:
                return
            with torch.cuda.device(a.device):
                launch = _prepare(self.config, a, b, scale_a, scale_b, bias, out, group_size)
            insert(_LAUNCHES, key, launch, _LAUNCH_LIMIT)
        launch.on_current_stream()


def bind(config: Config) -> Callable[..., None]:
    """run() with its configuration, for calls alike in all but their tensors' addresses."""
    return _Bound(config)


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
    bind(config)(a, b, scale_a, scale_b, bias, out, group_size)


def _readable(scale: torch.Tensor, count: int) -> bool:
    """Whether `count` neighbours along the last dimension may be read as one aligned vector."""
    if count == 1:
        return True
    aligned = scale.data_ptr() % (4 * count) == 0 and scale.stride(0) % count == 0
    return scale.stride(1) == 1 and aligned


def _prepare(
    config: Config,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    group_size: int,
) -> Launch:
    (m, k), n = a.shape, b.shape[1]
    device = a.get_device()
    source, name = kernel_name(config, group_size, out.dtype)
    size = shared_bytes(config, group_size)
    function = kernel_function(source, name, "sm_90a", device, size)
    # a single row has no leading stride to speak of, but TMA wants one that is a multiple of 16
    a_pitch = a.stride(0) if m > 1 else -(-k // 16) * 16
    b_pitch = b.stride(1) if n > 1 else -(-k // 16) * 16
    box = tile_rows(config, m)
    maps = (
        tensor_map.encode(a.data_ptr(), m, k, a_pitch, box // config.row_cluster, DEPTH),
        tensor_map.encode(b.data_ptr(), n, k, b_pitch, config.columns // config.cluster, DEPTH),
    )
    row_bytes = out.stride(0) * out.element_size()
    vector = out.stride(1) == 1 and row_bytes % 16 == 0 and out.data_ptr() % 16 == 0
    parameters = _Parameters(
        *(scale_a.data_ptr(), scale_b.data_ptr(), None if bias is None else bias.data_ptr()),
        *(out.data_ptr(), *scale_a.stride(), *scale_b.stride(), *out.stride()),
        *(1 if bias is None else bias.stride(0), m, n, k),
        *(0 if bias is None else _BIAS[bias.dtype], config.raster, box, int(vector)),
        next(v for v in (4, 2, 1) if _readable(scale_a, v)),
        4 if n % 4 == 0 and _readable(scale_b, 4) else 1,
    )
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return Launch(
        device,
        function,
        _grid(config, m, n, sms),
        32 * config.warps,
        size,
        config.cluster * config.row_cluster,
        (*(maps if config.policy == "large" else maps[::-1]), parameters),
    )
