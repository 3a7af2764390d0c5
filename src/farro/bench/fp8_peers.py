"""What a user would run instead of farro's FP8 products, each optional and by its public interface.

A peer gets the codes and scales that farro gets. Where it lacks an epilogue, a kernel that
torch.compile makes of plain torch operators follows its product.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..formats.fp8 import blocks, dequantize
from .case import Missing, Options, Subject
from .peers import Form, wanted

_NAME = "torch._scaled_mm"
Product = Callable[[], torch.Tensor]
_SHAPES = 4096  # more than any run has
_LIMITS = ("recompile_limit", "accumulated_recompile_limit")


@dataclass(frozen=True)
class Epilogue:
    """What follows a product: a bias [N], a residual [M,N], GELU."""

    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    gelu: bool = False

    @property
    def nothing(self) -> bool:
        return self.bias is None and self.residual is None and not self.gelu

    @property
    def only_bias(self) -> bool:
        return self.bias is not None and self.residual is None and not self.gelu

    def behind(self, products: Iterable[tuple[str, Product]]) -> Iterator[Subject]:
        """Each product, by its name, and one compiled kernel behind it where there is anything."""
        for name, product in products:
            if self.nothing:
                yield Subject(name, "peer", product)
                continue

            def both(product: Product = product) -> torch.Tensor:
                finish = compiled(elementwise)
                result: torch.Tensor = finish(product(), self.bias, self.residual, self.gelu)
                return result

            yield Subject(f"{name}, compiled epilogue", "peer", both)


def elementwise(
    y: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, gelu: bool
) -> torch.Tensor:
    """An epilogue as a user would write it behind a product, which was rounded to BF16."""
    v = y.float()
    if bias is not None:
        v = v + bias.float()
    if residual is not None:
        v = v + residual.float()
    if gelu:
        v = torch.nn.functional.gelu(v, approximate="tanh")
    return v.to(torch.bfloat16)


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` compiled for the shapes of each case, at its first call with them."""
    from torch._dynamo import config

    # else torch runs it eagerly, without a word, once it has been compiled for eight shapes
    for name in _LIMITS:
        if hasattr(config, name):
            setattr(config, name, max(_SHAPES, getattr(config, name)))
    found: Callable[..., Any] = torch.compile(function, dynamic=False)
    return found


def per_tensor(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor],
    epilogue: Epilogue,
) -> Iterator[Subject | Missing]:
    """torch._scaled_mm with one scale, fast and precise, its own bias or a compiled epilogue."""
    if x.device.type != "cuda":
        yield Missing(_NAME, "on a CPU it takes seconds")
        return
    products = {
        f"{_NAME} {'fast' if fast else 'precise'}": functools.partial(
            torch._scaled_mm,
            *(x, weight.T),
            scale_a=scales[0],
            scale_b=scales[1],
            out_dtype=torch.bfloat16,
            use_fast_accum=fast,
        )
        for fast in (True, False)
    }
    if epilogue.only_bias:
        for name, product in products.items():
            yield Subject(name, "peer", functools.partial(product, bias=epilogue.bias))
        return
    yield from epilogue.behind(products.items())


@dataclass(frozen=True)
class Blocks:
    """Codes [M,K] and [N,K] with scales [M, ceil(K/128)] and [ceil(N/128), ceil(K/128)]."""

    input: torch.Tensor
    weight_codes: torch.Tensor
    input_scale: torch.Tensor
    weight_scale: torch.Tensor
    options: Options

    @property
    def b(self) -> torch.Tensor:
        return self.weight_codes

    @property
    def form(self) -> Form:
        codes = {"dtype": "float8e4m3", "group_size": 128}
        return Form("FP8 128-block", {**codes, "group_size_n": 128}, codes)

    def x(self, dtype: torch.dtype) -> torch.Tensor:
        return dequantize(self.input, self.input_scale, "1x128", dtype)

    def weight(self, dtype: torch.dtype) -> torch.Tensor:
        return dequantize(self.weight_codes, self.weight_scale, "128x128", dtype)


def block_products(operands: Blocks) -> Iterator[tuple[str, Product] | Missing]:
    """Products of 128-block codes alone, to BF16: name and call, or why there is none."""
    if operands.input.device.type != "cuda":
        return
    if wanted(operands.options, "deepgemm"):
        yield _deep_gemm(operands)
    if wanted(operands.options, "scaled_mm"):
        yield f"{_NAME} 128-block", _cublas_blocks(operands)


def _deep_gemm(operands: Blocks) -> tuple[str, Product] | Missing:
    """DeepGEMM with FP32 scales, those of the activations in the layout that its kernel reads."""
    name = "DeepGEMM"
    if importlib.util.find_spec("deep_gemm") is None:
        return Missing(name, "not installed: pip install sgl-deep-gemm")
    try:
        import deep_gemm

        scale = deep_gemm.get_mn_major_tma_aligned_tensor(operands.input_scale)
    except Exception as error:  # it needs a CUDA toolkit, and torch and Python that fit
        return Missing(name, f"{type(error).__name__}: {error}"[:200])
    left, right = (operands.input, scale), (operands.weight_codes, operands.weight_scale)
    shape = (operands.input.shape[0], operands.weight_codes.shape[0])

    def product() -> torch.Tensor:
        out = torch.empty(shape, dtype=torch.bfloat16, device=operands.input.device)
        deep_gemm.fp8_gemm_nt(left, right, out, disable_ue8m0_cast=True)
        return out

    return name, product


def _cublas_blocks(operands: Blocks) -> Product:
    """torch._scaled_mm with block scales, laid out beforehand as it wants them."""
    m, k = operands.input.shape
    scale_a = operands.input_scale.T.contiguous().T  # column-major
    if m == 1:
        scale_a = torch.as_strided(scale_a, (1, blocks(k)), (1, 1))
    row = -(-blocks(k) // 4) * 4  # rows of 16 bytes
    scale_b = operands.weight_scale.new_zeros(operands.weight_scale.shape[0], row)
    scale_b[:, : blocks(k)] = operands.weight_scale
    return functools.partial(
        torch._scaled_mm,
        *(operands.input, operands.weight_codes.T),
        scale_a=scale_a,
        scale_b=scale_b[:, : blocks(k)].T,
        out_dtype=torch.bfloat16,
    )
