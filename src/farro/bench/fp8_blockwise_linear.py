"""fp8_blockwise_linear in the benchmark: 128-block codes, DeepGEMM, cuBLAS and Humming beside."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..formats.fp8 import quantize, spread
from ..ops.fp8_blockwise_linear import fp8_blockwise_linear_bf16
from . import fp8_figures, fp8_linear, humming, peers
from .case import Adapter, Case, Missing, Options, Sizes, Subject
from .fp8_peers import Blocks, Epilogue, block_products
from .kept import kept

# M, N, K, beside those of fp8_linear
_MODELS = ((51, 1536, 1536), (277, 2048, 2048), (2520, 3072, 3072), (128, 12288, 4096))
SHAPES = {
    **fp8_linear.SHAPES,
    "models": (*fp8_linear.MODELS, *({"n": n, "k": k, "m": m} for m, n, k in _MODELS)),
}
ROWS = fp8_linear.ROWS
# "columns": activation scales in column-major order, as some callers have them
VARIANTS = ("plain", "columns", "bias", "gelu")


def _weight(n: int, k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [N,K] of normal values and their scales, as the quantizer leaves them."""

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator(device=device).manual_seed(n * 1000003 + k)
        x = torch.randn(n, k, device=device, generator=generator) * k**-0.5
        return quantize(x, "128x128")

    made: tuple[torch.Tensor, torch.Tensor] = kept(("fp8_blockwise_linear", n, k, device), make)
    return made


@functools.lru_cache(maxsize=1)
def _weight64(n: int, k: int, device: torch.device) -> torch.Tensor:
    return values64(*_weight(n, k, device), "128x128")


def values64(q: torch.Tensor, scale: torch.Tensor, kind: str) -> torch.Tensor:
    """q * scale in float64: exact."""
    return q.double().mul_(spread(scale.double(), q.shape, kind))


def build(sizes: Sizes, options: Options) -> Case:
    m, n, k, device = sizes["m"], sizes["n"], sizes["k"], options.device
    weight, weight_scale = _weight(n, k, device)
    x, x_scale = quantize(torch.randn(m, k, device=device), "1x128")
    if options.variant == "columns":
        x_scale = x_scale.T.contiguous().T
    bias = torch.randn(n, device=device).bfloat16() if options.variant in ("bias", "gelu") else None
    gelu = options.variant == "gelu"

    @functools.cache
    def truth() -> torch.Tensor:
        v = values64(x, x_scale, "1x128") @ _weight64(n, k, device).T
        v = v if bias is None else v + bias.double()
        return torch.nn.functional.gelu(v, approximate="tanh") if gelu else v

    def forced(run: Callable[..., None], config: Any) -> torch.Tensor:
        out = torch.empty(m, n, dtype=torch.bfloat16, device=device)
        run(config, x, weight, x_scale, weight_scale, bias, out, gelu)
        return out

    def others() -> Iterator[Subject | Missing]:
        operands = Blocks(x, weight, x_scale, weight_scale, options)
        yield from _peers(operands, Epilogue(bias, None, gelu))

    return Case(
        sizes={"m": m, "n": n, "k": k},
        options=options,
        ops=2 * m * n * k,
        nbytes=sum(t.nbytes for t in (x, weight, x_scale, weight_scale))
        + 2 * m * n
        + (0 if bias is None else bias.nbytes),
        function=fp8_blockwise_linear_bf16,
        args=(x, weight, x_scale, weight_scale),
        kwargs={"bias": bias, "activation": "gelu_tanh" if gelu else None},
        truth=truth,
        peers=others,
        run=forced,
    )


def _peers(operands: Blocks, epilogue: Epilogue) -> Iterator[Subject | Missing]:
    if epilogue.nothing and peers.wanted(operands.options, "bf16"):
        yield peers.bf16(operands.x(torch.bfloat16), operands.weight(torch.bfloat16))
    found = list(block_products(operands))
    yield from (product for product in found if isinstance(product, Missing))
    yield from epilogue.behind(p for p in found if not isinstance(p, Missing))
    on_gpu = operands.options.device.type == "cuda"
    if epilogue.nothing and on_gpu and peers.wanted(operands.options, "humming"):
        yield from humming.humming(operands)


ADAPTER = Adapter(
    "fp8_blockwise_linear",
    build,
    SHAPES,
    ROWS,
    variants=VARIANTS,
    rank=functools.partial(fp8_linear.rank, ("plain",), SHAPES["models"]),
    tuned_as=lambda options: {},
    exact=False,
    ceiling=fp8_linear.ceiling,
    ceiling_ops=fp8_linear.ceiling_ops,
    figures=fp8_figures.BLOCKWISE,
    summary="FP8 product with a scale for 1x128 and 128x128 blocks, activations already quantized",
)
