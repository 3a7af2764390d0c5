"""fp8_linear in the benchmark: codes with one scale, and what torch has for each epilogue."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..formats.fp8 import quantize
from ..ops import fp8_linear
from . import fp8_figures, int8_gemm, peers
from .case import Adapter, Case, Missing, Options, Sizes, Subject
from .fp8_peers import Epilogue, per_tensor
from .kept import kept

# M, N, K of linear layers in models that are served in FP8
_MODELS = (
    *((1, 2048, 4096), (1, 8192, 4096), (16, 4096, 4096), (32, 8192, 4096), (64, 1024, 512)),
    *((51, 2560, 2048), (51, 2048, 8192), (712, 2560, 2048), (970, 2048, 2048)),
    *((768, 32768, 2048), (768, 2048, 16384), (1024, 1024, 1024), (512, 4304, 1152)),
    (768, 1152, 4304),
)
MODELS = tuple({"n": n, "k": k, "m": m} for m, n, k in _MODELS)
SHAPES: dict[str, tuple[dict[str, int], ...]] = {
    **int8_gemm.SHAPES,
    "default": (*int8_gemm.SHAPES["default"], {"n": 28672, "k": 4096}),
    "models": MODELS,
}
ROWS = int8_gemm.ROWS
# name -> the function, and whether sums are accumulated fast; the first two matter most
VARIANTS: dict[str, tuple[Callable[..., torch.Tensor], bool]] = {
    "default": (fp8_linear.fp8_linear_bf16, False),
    "fast": (fp8_linear.fp8_linear_bf16, True),
    "bias": (fp8_linear.fp8_linear_bias_bf16, False),
    "gelu": (fp8_linear.fp8_linear_bias_gelu_bf16, False),
    "residual": (fp8_linear.fp8_linear_residual_bf16, False),
    "bias_fast": (fp8_linear.fp8_linear_bias_bf16, True),
    "gelu_fast": (fp8_linear.fp8_linear_bias_gelu_bf16, True),
    "residual_fast": (fp8_linear.fp8_linear_residual_bf16, True),
}
_MAIN_ROWS = (1, 64, 1024, 8192)


def rank(
    main: tuple[str, ...], models: tuple[dict[str, int], ...], sizes: Sizes, options: Options
) -> int:
    """The main forms before others; few M, and problems of models, before the other M."""
    few = sizes["m"] in _MAIN_ROWS or dict(sizes) in models
    return 2 * (options.variant not in main) + (not few)


def _weight(n: int, k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [N,K] of normal values and their scale, as the quantizer leaves them."""

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator(device=device).manual_seed(n * 1000003 + k)
        x = torch.randn(n, k, device=device, generator=generator) * k**-0.5
        return quantize(x, "per_tensor")

    made: tuple[torch.Tensor, torch.Tensor] = kept(("fp8_linear", n, k, device), make)
    return made


@functools.lru_cache(maxsize=1)
def _weight64(n: int, k: int, device: torch.device) -> torch.Tensor:
    return _weight(n, k, device)[0].double()


def build(sizes: Sizes, options: Options) -> Case:
    m, n, k, device = sizes["m"], sizes["n"], sizes["k"], options.device
    function, fast = VARIANTS[options.variant]
    form = options.variant.removesuffix("_fast")
    name = {"gelu": "bias_gelu", "fast": "none", "default": "none"}.get(form, form)
    weight, weight_scale = _weight(n, k, device)
    x, x_scale = quantize(torch.randn(m, k, device=device), "per_tensor")
    alpha = x_scale * weight_scale  # on the device, as it is for dynamic activations
    given: dict[str, torch.Tensor] = {}
    if "bias" in name:
        given["bias"] = torch.randn(n, device=device).bfloat16()
    if "residual" in name:
        given["residual"] = torch.randn(m, n, device=device).bfloat16()
    epilogue = Epilogue(given.get("bias"), given.get("residual"), form == "gelu")

    @functools.cache
    def truth() -> torch.Tensor:
        v = alpha.double() * (x.double() @ _weight64(n, k, device).T)
        for term in given.values():
            v = v + term.double()
        return torch.nn.functional.gelu(v, approximate="tanh") if epilogue.gelu else v

    def forced(run: Callable[..., None], config: Any) -> torch.Tensor:
        out = torch.empty(m, n, dtype=torch.bfloat16, device=device)
        run(config, x, weight, alpha, epilogue.bias, epilogue.residual, out, name, fast)
        return out

    def others() -> Iterator[Subject | Missing]:
        if epilogue.nothing and peers.wanted(options, "bf16"):
            yield peers.bf16(x.bfloat16(), weight.bfloat16())
        if peers.wanted(options, "scaled_mm"):
            yield from per_tensor(x, weight, (x_scale, weight_scale), epilogue)

    return Case(
        sizes={"m": m, "n": n, "k": k},
        options=options,
        ops=2 * m * n * k,
        nbytes=m * k + n * k + 2 * m * n + sum(term.nbytes for term in given.values()),
        function=function,
        args=(x, weight),
        kwargs={"alpha": alpha, "fast_accum": fast, **given},
        truth=truth,
        peers=others,
        run=forced,
    )


def ceiling(device: torch.device) -> Subject | Missing:
    """The library's FP8 product with fast accumulation, on one large problem."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        return Missing("fp8 ceiling", "torch._scaled_mm needs a GPU of SM89")
    # codes of the quantizer's: the clock depends on the data
    a, b = (quantize(torch.randn(8192, 8192, device=device), "per_tensor")[0] for _ in range(2))
    one = torch.ones((), device=device)
    fast = next(iter(per_tensor(a, b, (one, one), Epilogue())))
    assert isinstance(fast, Subject)
    return Subject("cuBLAS FP8, fast accumulation, 8192 x 8192 x 8192", "ceiling", fast.call)


def ceiling_ops(device: torch.device) -> int:
    return 2 * 8192**3


ADAPTER = Adapter(
    "fp8_linear",
    build,
    SHAPES,
    ROWS,
    variants=tuple(VARIANTS),
    rank=functools.partial(rank, ("default", "fast"), MODELS),
    tuned_as=lambda options: {"fast_accum": VARIANTS[options.variant][1]},
    max_error=2e-2,  # of fast accumulation
    exact=False,
    ceiling=ceiling,
    ceiling_ops=ceiling_ops,
    figures=fp8_figures.LINEAR,
    summary="FP8 product with one scale and a fused epilogue, activations already quantized",
)
