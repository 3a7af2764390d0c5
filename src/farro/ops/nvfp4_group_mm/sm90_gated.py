"""group_mm_swiglu_quant on SM90a in one launch: the product's kernel with another result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ...cuda.fp8.gemm import Prepared
from ...problem import Problem
from ...tuning import nearest, table, takes
from ..nvfp4_quantize.activation import Gated
from . import sm90_configs
from .sm90 import Gate, launches, room_for
from .sm90_configs import Config, refuses
from .tactics import tactic_of


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
    """The tuned table's configuration for the nearest problem, else as the product's own."""
    experts, bf16 = _facts(problem)
    own = fit(product, problem)
    assert own is not None

    def reason(c: Config) -> str | None:
        if c.split != product.split:
            return "sums in another order than the product's"
        return refuses(c, experts, bf16, gated=True)

    if tactic_of(problem).tokens:
        return own
    _, m, quarter = problem.spec("a_comp").shape
    found = nearest(
        table("nvfp4_group_mm_swiglu_quant", problem.arch.device),
        {"backend": "cuda", "coded": not bf16},
        {"m": problem.spec("b_act").shape[1], "e": experts, "n": m, "k": quarter * 4},
        takes(Config, reason),
    )
    return own if found is None else Config(**found)


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


def candidates(problem: Problem, product: Config) -> list[Config]:
    """Those that a tuner may time: sums in the product's order."""
    experts, bf16 = _facts(problem)
    tokens = problem.spec("b_act").shape[1]
    found = []
    for c in sm90_configs.configs(experts, bf16, gated=True):
        if c.split == product.split and sm90_configs.plausible(c, tokens):
            found.append(c)
    return found


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
