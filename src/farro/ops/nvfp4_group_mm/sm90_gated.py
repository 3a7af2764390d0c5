"""group_mm_swiglu_quant on SM90a in one launch: the product's kernel with another result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ...cuda.fp8.gemm import Prepared
from ...problem import Problem
from ..nvfp4_quantize.activation import Gated
from .sm90 import Gate, launches, room_for
from .sm90_configs import Config, refuses


def _facts(problem: Problem) -> tuple[int, bool]:
    """Experts, and whether activations are BF16."""
    return problem.spec("a_comp").shape[0], problem["sfb"] is None


def fit(product: Config, problem: Problem) -> Config | None:
    """The product's own configuration with as many stages as fit beside sums in shared memory.

    The order of a sum depends on nothing but how K is split, which stays.
    """
    experts, bf16 = _facts(problem)
    own = replace(product, stages=min(product.stages, 12))
    while refuses(own, experts, bf16, gated=True) is not None:
        if own.stages <= 3:
            return None
        own = replace(own, stages=own.stages - 1)
    return own


def config(problem: Problem, product: Config) -> Config:
    """The product's own, so that the fused form has its bits."""
    own = fit(product, problem)
    assert own is not None
    return own


def why_not(problem: Problem, product: Config) -> str | None:
    """Why this kernel cannot run a problem whose product the product's kernel runs, or None."""
    how = problem.param("activation")
    assert isinstance(how, Gated)
    if how.activation != "silu":
        return f"activation {how.activation!r} follows the product in a launch of its own"
    if problem.spec("a_comp").shape[2] == 0:
        return "K is 0"
    if fit(product, problem) is None:
        return f"no room for the tables of {_facts(problem)[0]} experts"
    return None


class _Bound:
    """run() for calls alike in all but addresses."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.prepared = Prepared()

    def __call__(
        self,
        a_comp: torch.Tensor,
        e_meta: torch.Tensor,
        sfa: torch.Tensor,
        b_act: torch.Tensor,
        sfb: torch.Tensor | None,
        alphas: torch.Tensor,
        counts: torch.Tensor,
        gscale: torch.Tensor,
        how: Gated,
        codes: torch.Tensor,
        scales: torch.Tensor,
    ) -> None:
        if scales.numel() == 0:
            return
        expanded = room_for(self.config, b_act, a_comp.shape[2] * 4, sfb is not None)
        operands = (a_comp, e_meta, sfa, b_act, sfb, alphas, counts)
        gate = Gate(gscale, how.interleaved, codes, scales)
        given = (self.config, gate, (a_comp, e_meta, sfa), b_act, sfb, alphas, counts, expanded)
        key = (*operands, gscale, how.interleaved, codes, scales, expanded)
        self.prepared.run(codes.device, key, lambda: launches(*given))


def bind(config: Config) -> Callable[..., None]:
    """run() with its configuration, for calls alike in all but their tensors' addresses."""
    return _Bound(config)


def run(
    config: Config,
    a_comp: torch.Tensor,
    e_meta: torch.Tensor,
    sfa: torch.Tensor,
    b_act: torch.Tensor,
    sfb: torch.Tensor | None,
    alphas: torch.Tensor,
    counts: torch.Tensor,
    gscale: torch.Tensor,
    how: Gated,
    codes: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    """Write codes and scales, launched on the current stream of their device."""
    operands = (a_comp, e_meta, sfa, b_act, sfb, alphas, counts)
    bind(config)(*operands, gscale, how, codes, scales)
