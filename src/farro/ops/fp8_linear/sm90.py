"""fp8_linear on SM90a, through the native FP8 kernels of cuda/fp8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...cuda.fp8 import configs, gemm
from ...cuda.fp8.configs import BIAS, GELU, RESIDUAL, Config, Kind
from ...cuda.fp8.gemm import Prepared
from ...problem import Problem
from . import reference

_EPILOGUES = {
    "none": 0,
    "residual": RESIDUAL,
    "bias": BIAS,
    "bias_residual": BIAS | RESIDUAL,
    "bias_gelu": BIAS | GELU,
}
# Tiles that `variant` pins
VARIANTS: dict[str, Config] = {
    config.name: config
    for config in (
        *(Config("large", 256, columns, 4) for columns in (64, 96, 128)),
        *(Config("large", 128, columns, 5) for columns in (64, 96, 128)),
        *(Config("small", tokens, 64, 8) for tokens in (8, 16, 32, 64)),
        *(Config("small", tokens, 64, 8, 4) for tokens in (8, 64)),
    )
}


def kind_of(problem: Problem) -> Kind:
    epilogue = problem.param("epilogue")
    assert isinstance(epilogue, str)
    return Kind(False, bool(problem.param("fast_accum")), _EPILOGUES[epilogue])


def why_not(problem: Problem) -> str | None:
    """Row-major operands that TMA can read, K and N multiples of 16; any bias, residual and out."""
    return configs.why_not(problem.spec("input"), problem.spec("weight"))


def must_run(problem: Problem) -> bool:
    """Rows of 16-byte aligned pieces, K and N multiples of 16; any M, bias, residual and out."""
    return configs.must_run(problem.spec("input"), problem.spec("weight"))


def refuses(config: Config, problem: Problem) -> str | None:
    """Why a pinned tile is not legal for the problem, or None."""
    return configs.refuses(config, kind_of(problem), problem.spec("input").shape[0])


def _exact(problem: Problem) -> dict[str, Any]:
    return {"fast_accum": bool(problem.param("fast_accum"))}


def config(problem: Problem) -> Config:
    """The tuned table's, else the heuristic's; an epilogue changes neither."""
    return configs.tuned(problem, kind_of(problem), _exact(problem))


def yields(problem: Problem) -> str | None:
    return configs.yields(problem, _exact(problem))


def candidates(problem: Problem) -> list[Config]:
    (m, k), n = problem.spec("input").shape, problem.spec("weight").shape[0]
    return configs.candidates(kind_of(problem), m, n, k)


class _Bound:
    """run() for calls alike in all but addresses and alpha."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.prepared = Prepared()

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        alpha: float | torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        out: torch.Tensor,
        epilogue: str,
        fast_accum: bool,
    ) -> None:
        if out.numel() == 0:
            return
        if x.shape[1] == 0:  # nothing to multiply: the epilogue of zeros
            reference.run(None, x, weight, alpha, bias, residual, out, epilogue, fast_accum)
            return
        kind = Kind(False, fast_accum, _EPILOGUES[epilogue])
        self.prepared.run(
            x.device,
            (x, weight, alpha, bias, residual, out),
            lambda: gemm.prepare(
                *(self.config, kind, x, weight, out), alpha=alpha, bias=bias, residual=residual
            ),
        )


def bind(config: Config) -> Callable[..., None]:
    """run() with its configuration, for calls alike in all but their tensors' addresses."""
    return _Bound(config)


def run(
    config: Config,
    x: torch.Tensor,
    weight: torch.Tensor,
    alpha: float | torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    epilogue: str,
    fast_accum: bool,
) -> None:
    """Write the result to `out`, launched on the current stream of its device."""
    bind(config)(x, weight, alpha, bias, residual, out, epilogue, fast_accum)
