"""int8_gemm in the benchmark: realistic codes and scales, cuBLAS, Humming and Triton beside it."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from ..formats.int8_group import group_count, quantize
from ..ops.int8_gemm import int8_gemm
from . import int8_figures, peers
from .case import Adapter, Case, Missing, Options, Sizes, Subject

_MODELS = (
    {"n": 4096, "k": 4096},
    {"n": 4096, "k": 7168},
    {"n": 7168, "k": 16384},
    {"n": 24576, "k": 1536},
)
SHAPES = {
    "default": _MODELS,
    "between": _MODELS,  # for tuning: rows where the fastest family changes
    "heldout": ({"n": 5120, "k": 13824}, {"n": 11008, "k": 4096}),
    "cpu": ({"n": 4096, "k": 4096},),
    "dense": ({"n": 4096, "k": 4096}, {"n": 7168, "k": 16384}),
}
ROWS = {
    "default": (1, 16, 64, 256, 1024, 4096, 8192),
    "between": (128,),
    "heldout": (3, 48, 200, 1500),
    "cpu": (1, 16, 128, 1024),
    "dense": tuple(range(1, 257)),
}
_CEILING = (8192, 8192, 8192)
_CPU_CEILING = (512, 2048, 2048)


@functools.lru_cache(maxsize=2)
def weights(
    n: int, k: int, group_size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [N,K] and scales [ceil(K/G), N] of normal values, as the quantizer leaves them."""
    generator = torch.Generator(device=device).manual_seed(n * 1000003 + k)
    codes = torch.empty(n, k, dtype=torch.int8, device=device)
    scale = torch.empty(n, group_count(k, group_size), device=device)
    step = max(1, (1 << 26) // k)
    for top in range(0, n, step):
        rows = slice(top, min(top + step, n))
        x = torch.randn(rows.stop - top, k, device=device, generator=generator) * k**-0.5
        codes[rows], scale[rows] = quantize(x, group_size)
    return codes, scale.T.contiguous()


def activations(
    m: int, k: int, group_size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fresh codes [M,K] and scales [M, ceil(K/G)]."""
    return quantize(torch.randn(m, k, device=device), group_size)


@functools.lru_cache(maxsize=1)
def _weight64(n: int, k: int, group_size: int, device: torch.device) -> torch.Tensor:
    codes, scale = weights(n, k, group_size, device)
    return peers.exact(codes, scale.T, group_size)


def build(sizes: Sizes, options: Options) -> Case:
    m, n, k = sizes["m"], sizes["n"], sizes["k"]
    group_size, device = options.group_size, options.device
    codes, scale_b = weights(n, k, group_size, device)
    a, scale_a = activations(m, k, group_size, device)
    groups = group_count(k, group_size)
    kwargs = {"group_size": group_size, "output_dtype": options.dtype}

    @functools.cache
    def truth() -> torch.Tensor:
        x = peers.exact(a, scale_a, group_size)
        return x @ _weight64(n, k, group_size, device).T

    def others() -> Iterator[Subject | Missing]:
        operands = peers.Operands(a, scale_a, codes, scale_b, group_size, options)
        yield from peers.dense(operands)

    def forced(function: object, config: object) -> torch.Tensor:
        out = torch.empty(m, n, dtype=options.dtype, device=device)
        function(config, a, codes.T, scale_a, scale_b, None, out, group_size)  # type: ignore
        return out

    return Case(
        sizes={"m": m, "n": n, "k": k},
        options=options,
        ops=2 * m * n * k,
        nbytes=m * k + n * k + 4 * groups * (m + n) + m * n * options.dtype.itemsize,
        function=int8_gemm,
        args=(a, codes.T, scale_a, scale_b),
        kwargs=kwargs,
        truth=truth,
        peers=others,
        run=forced,
    )


def ceiling(device: torch.device) -> Subject | Missing:
    """The fastest INT8 product of the library, without any scales, on one large problem."""
    m, n, k = _CEILING if device.type == "cuda" else _CPU_CEILING
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return Missing("int8 ceiling", "torch._int_mm needs SM80")
    a = activations(m, k, 256, device)[0]
    b = activations(n, k, 256, device)[0]
    library = "cuBLAS" if device.type == "cuda" else "oneDNN"
    name = f"{library} INT8 to INT32, no scales, {m} x {n} x {k}"
    return Subject(name, "ceiling", lambda: torch._int_mm(a, b.T))


def ceiling_ops(device: torch.device) -> int:
    m, n, k = _CEILING if device.type == "cuda" else _CPU_CEILING
    return 2 * m * n * k


ADAPTER = Adapter(
    "int8_gemm",
    build,
    SHAPES,
    ROWS,
    group_sizes=(32, 64, 128, 256),
    ceiling=ceiling,
    ceiling_ops=ceiling_ops,
    figures=int8_figures.GEMM,
    summary="INT8 product with scales grouped along K, activations already quantized",
)
