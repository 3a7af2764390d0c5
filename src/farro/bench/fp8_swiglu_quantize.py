"""fp8_swiglu_quantize in the benchmark: one call, or a product and a compiled kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..formats.fp8 import BLOCK, E4M3, blocks, dequantize, quantize
from ..ops.fp8_blockwise_linear import fp8_blockwise_linear_bf16
from ..ops.fp8_swiglu_quantize import fp8_blockwise_swiglu_quantize_fp8
from . import fp8_figures, fp8_linear
from .case import Adapter, Case, Missing, Options, Sizes, Subject
from .fp8_blockwise_linear import values64
from .fp8_peers import Blocks, block_products, compiled
from .fp8_quantize import formula
from .int8_gemm import ROWS
from .kept import kept

# N is a half of the rows of the weight: columns of the result
_MODELS = (
    {"n": 14336, "k": 4096},
    {"n": 2048, "k": 7168},
    {"n": 12288, "k": 4096},
    {"n": 18432, "k": 7168},
)
_SMALL = ((1024, 2048), (2048, 4096), (768, 4096), (1024, 8192))
SHAPES: dict[str, tuple[dict[str, int], ...]] = {
    "default": _MODELS,
    "between": _MODELS,  # for tuning
    # of gate and up together: shorter than 20 MB, and two longer ones
    "models": (
        *({"n": n, "k": k, "m": m} for n, k in _SMALL for m in (1, 16, 64)),
        *({"n": 16384, "k": 2048, "m": 768}, {"n": 6144, "k": 4096, "m": 128}),
    ),
    "heldout": ({"n": 6912, "k": 2560}, {"n": 10944, "k": 2048}),
    "cpu": ({"n": 2048, "k": 2048},),
    "dense": ({"n": 14336, "k": 4096},),
}
VARIANTS = ("rows", "columns")  # how the activations' scales lie


def _weight(n: int, k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [2N,K] of gate and up, quantized apart, and both's scales."""

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator(device=device).manual_seed(n * 1000003 + k)
        draw = functools.partial(torch.randn, n, k, device=device, generator=generator)
        halves = [quantize(draw() * k**-0.5, "128x128") for _ in range(2)]
        return torch.cat([q for q, _ in halves]), torch.cat([scale for _, scale in halves])

    made: tuple[torch.Tensor, torch.Tensor] = kept(("fp8_swiglu_quantize", n, k, device), make)
    return made


def swiglu_quantize(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[gate | up] -> codes and scales, in plain torch operators: what a user would write."""
    gate, up = y.chunk(2, -1)
    v = torch.nn.functional.silu(gate.float()).to(torch.bfloat16) * up
    return formula(v, "1x128")


def _value(result: Any) -> torch.Tensor:
    q, scale = result
    return dequantize(q, scale, "1x128", torch.float32).double()


def build(sizes: Sizes, options: Options) -> Case:
    m, n, k, device = sizes["m"], sizes["n"], sizes["k"], options.device
    weight, weight_scale = _weight(n, k, device)
    x, x_scale = quantize(torch.randn(m, k, device=device), "1x128")
    if options.variant == "columns":
        x_scale = x_scale.T.contiguous().T

    @functools.cache
    def products() -> tuple[torch.Tensor, torch.Tensor]:
        rows, of_up = values64(x, x_scale, "1x128"), blocks(n)
        gate = rows @ values64(weight[:n], weight_scale[:of_up], "128x128").T
        return gate, rows @ values64(weight[n:], weight_scale[of_up:], "128x128").T

    @functools.cache
    def truth() -> torch.Tensor:
        gate, up = products()
        return torch.nn.functional.silu(gate).mul_(up)

    def forced(function: Any, config: Any) -> Any:
        q = torch.empty(m, n, dtype=E4M3, device=device)
        scale = torch.empty(m, blocks(n), device=device)
        function(config, x, weight, x_scale, weight_scale, q, scale)
        return q, scale

    def others() -> Iterator[Subject | Missing]:
        operands = Blocks(x, weight, x_scale, weight_scale, options)
        yield from _two_kernels(operands, lambda: torch.cat(products(), 1))

    return Case(
        sizes={"m": m, "n": n, "k": k},
        options=options,
        ops=4 * m * n * k,
        nbytes=sum(t.nbytes for t in (x, weight, x_scale, weight_scale))
        + m * n
        + 4 * m * blocks(n),
        function=fp8_blockwise_swiglu_quantize_fp8,
        args=(x, weight, x_scale, weight_scale),
        kwargs={},
        truth=truth,
        peers=others,
        value=_value,
        run=forced,
    )


def _two_kernels(
    operands: Blocks, truth: Callable[[], torch.Tensor]
) -> Iterator[Subject | Missing]:
    """A product of gate and up together, farro's and others', and a compiled kernel behind it.

    `truth` is of farro's product, which is timed alone too.
    """
    name = fp8_figures.TWO
    if operands.options.device.type != "cuda":
        return
    if operands.weight_codes.shape[0] % (2 * BLOCK):
        yield Missing(name, "blocks of gate and up share scales where 128 does not divide N")
        return
    finish = compiled(swiglu_quantize)
    mine = functools.partial(
        fp8_blockwise_linear_bf16,
        *(operands.input, operands.weight_codes, operands.input_scale, operands.weight_scale),
    )
    yield Subject(fp8_figures.ALONE, "peer", mine, truth=truth)
    for found in (("farro", mine), *block_products(operands)):
        if isinstance(found, Missing):
            yield found
            continue
        whose, product = found

        def both(product: Any = product) -> Any:
            return finish(product())

        yield Subject(f"{whose} {name}", "peer", both, value=_value)


ADAPTER = Adapter(
    "fp8_swiglu_quantize",
    build,
    SHAPES,
    ROWS,
    variants=VARIANTS,
    rank=functools.partial(fp8_linear.rank, ("rows",), SHAPES["models"]),
    tuned_as=lambda options: {},
    max_error=5e-2,  # 3 bits of significand
    exact=False,
    figures=fp8_figures.SWIGLU,
    summary="gate and up projection of 128-block codes, SwiGLU and the quantizer, in one call",
)
