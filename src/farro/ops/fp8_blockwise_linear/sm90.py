"""fp8_blockwise_linear on SM90a, through the native FP8 kernels of cuda/fp8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...cuda.fp8 import configs, gemm
from ...cuda.fp8.configs import BIAS, GELU, Config, Kind
from ...cuda.fp8.gemm import Prepared
from ...problem import Problem
from . import reference


def kind_of(problem: Problem) -> Kind:
    bias = BIAS if problem["bias"] is not None else 0
    return Kind(True, False, bias | (GELU if problem.param("activation") is not None else 0))


def why_not(problem: Problem) -> str | None:
    """Row-major operands that TMA can read, K and N multiples of 16; scales of any strides."""
    return configs.why_not(problem.spec("input"), problem.spec("weight"))


def must_run(problem: Problem) -> bool:
    """Rows of 16-byte aligned pieces, K and N multiples of 16, any M; scales of any strides."""
    return configs.must_run(problem.spec("input"), problem.spec("weight"))


def config(problem: Problem) -> Config:
    """The tuned table's, else the heuristic's; bias and activation change neither."""
    return configs.tuned(problem, kind_of(problem), {})


def yields(problem: Problem) -> str | None:
    return configs.yields(problem, {})


def candidates(problem: Problem) -> list[Config]:
    (m, k), n = problem.spec("input").shape, problem.spec("weight").shape[0]
    return configs.candidates(kind_of(problem), m, n, k)


class _Bound:
    """run() for calls alike in all but addresses."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.prepared = Prepared()

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        input_scale: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        gelu: bool,
    ) -> None:
        if out.numel() == 0:
            return
        if x.shape[1] == 0:  # nothing to multiply: the epilogue of zeros
            reference.run(None, x, weight, input_scale, weight_scale, bias, out, gelu)
            return
        kind = Kind(True, False, (0 if bias is None else BIAS) | (GELU if gelu else 0))
        scales: dict[str, Any] = {"input_scale": input_scale, "weight_scale": weight_scale}
        self.prepared.run(
            x.device,
            (x, weight, input_scale, weight_scale, bias, out),
            lambda: gemm.prepare(self.config, kind, x, weight, out, **scales, bias=bias),
        )


def bind(config: Config) -> Callable[..., None]:
    """run() with its configuration, for calls alike in all but their tensors' addresses."""
    return _Bound(config)


def run(
    config: Config,
    x: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    gelu: bool,
) -> None:
    """Write the result to `out`, launched on the current stream of its device."""
    bind(config)(x, weight, input_scale, weight_scale, bias, out, gelu)
