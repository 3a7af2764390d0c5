"""group_mm_swiglu_quant: the first product of a layer, its gated activation, and the quantizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...checks import check_size
from ...dispatch import Kernel, Operator, not_installed
from ...functional import Functional
from ...problem import Problem, TensorSpec
from ..nvfp4_quantize import dense
from ..nvfp4_quantize.activation import Gated
from ..nvfp4_quantize.checks import check_contiguous, check_gscale
from ..nvfp4_quantize.dense import check_activation, gating
from . import product, sm90_configs, sm90_gated
from .checks import check_operands, check_types

_NAME = "group_mm_swiglu_quant"
_CHOICE = ("config_id", "cluster", "expected_rows")
_OPERANDS = ("a_comp", "e_meta", "sfa", "b_act", "sfb", "alphas", "expert_num_tokens")


@dataclass(frozen=True)
class Steps:
    """The configurations of the two kernels that run one after the other."""

    product: Any
    quantizer: Any
    policy: str = "two launches"


def _problems(problem: Problem) -> tuple[Problem, Problem]:
    """Those of group_mm into new memory, and of silu_mul_quant_act on its result."""
    (e, rows, _), features = problem.spec("b_act").shape, problem.spec("a_comp").shape[1]
    stride = (rows * features, features, 1)
    between = TensorSpec((e, rows, features), stride, torch.bfloat16)
    tensors = dict(problem.tensors)
    params = tuple((name, problem.param(name)) for name in _CHOICE)
    operands = tuple((name, tensors[name]) for name in _OPERANDS)
    first = Problem("nvfp4_group_mm", problem.arch, (("out", between), *operands), params)
    given = tuple((name, tensors[name]) for name in ("gscale", "expert_num_tokens"))
    activation = (("activation", problem.param("activation")),)
    second = Problem("nvfp4_quantize", problem.arch, (("x2", between), *given), activation)
    return first, second


_QUANTIZERS = {"cuda": "triton"}  # back ends whose products another one's quantizer follows


def _steps_of(backend: str) -> tuple[Kernel, Kernel]:
    quantizer = _QUANTIZERS.get(backend, backend)
    return product.OPERATOR.first_of(backend), dense.OPERATOR.first_of(quantizer)


def _one_launch() -> Kernel:
    """The product's native kernel, whose result passes the activation and the quantizer."""
    multiply = product.OPERATOR.first_of("cuda")

    def why_not(problem: Problem) -> str | None:
        one, _ = _problems(problem)
        return multiply.why_not(one) or sm90_gated.why_not(problem, multiply.config(one))

    def config(problem: Problem) -> sm90_configs.Config:
        return sm90_gated.config(problem, multiply.config(_problems(problem)[0]))

    def must_run(problem: Problem) -> bool:
        one, _ = _problems(problem)
        return multiply.must_run(one) and why_not(problem) is None

    return Kernel(
        "nvfp4_group_mm_swiglu_quant.cuda_sm90",
        "cuda",
        run="ops.nvfp4_group_mm.sm90_gated:run",
        bind="ops.nvfp4_group_mm.sm90_gated:bind",
        needs=multiply.needs,
        why_not=why_not,
        config=config,
        must_run=must_run,
    )


def _chain(backend: str, **more: Any) -> Kernel:
    """group_mm and silu_mul_quant_act of one back end, so their bytes are its result."""
    first, second = _steps_of(backend)

    def why_not(problem: Problem) -> str | None:
        one, two = _problems(problem)
        missing = None if second.backend == backend else not_installed(second.backend)
        return first.why_not(one) or missing or second.why_not(two)

    def config(problem: Problem) -> Steps:
        one, two = _problems(problem)
        return Steps(first.config(one), second.config(two))

    def must_run(problem: Problem) -> bool:
        one, two = _problems(problem)
        return first.must_run(one) and second.must_run(two)

    return Kernel(
        f"nvfp4_group_mm_swiglu_quant.{backend}",
        backend,
        run=f"ops.nvfp4_group_mm.fused:run_{backend}",
        bind=f"ops.nvfp4_group_mm.fused:bind_{backend}",
        needs=first.needs,
        why_not=why_not,
        config=config,
        must_run=must_run,
        **more,
    )


def _binder(backend: str) -> Callable[[Steps], Callable[..., None]]:
    kernels = _steps_of(backend)

    def bind(config: Steps) -> Callable[..., None]:
        """run() with its configuration, for calls alike in all but their tensors' addresses."""
        multiply, quantize = (
            kernel.bound(own) for kernel, own in zip(kernels, (config.product, config.quantizer))
        )

        def run(
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
            shape = (*b_act.shape[:-1], a_comp.shape[1])
            x2 = torch.empty(shape, dtype=torch.bfloat16, device=b_act.device)
            multiply(x2, a_comp, e_meta, sfa, b_act, sfb, alphas, counts)
            quantize(x2, gscale, counts, how, codes, scales)

        return run

    return bind


bind_cuda, bind_cpu, bind_triton, bind_reference = map(
    _binder, ("cuda", "cpu", "triton", "reference")
)


def _runner(bind: Callable[[Steps], Callable[..., None]]) -> Callable[..., None]:
    def run(
        config: Steps,
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
        operands = (a_comp, e_meta, sfa, b_act, sfb, alphas, counts)
        bind(config)(*operands, gscale, how, codes, scales)

    return run


run_cuda, run_cpu, run_triton, run_reference = map(
    _runner, (bind_cuda, bind_cpu, bind_triton, bind_reference)
)

# A kernel's run: (config, a_comp, e_meta, sfa, b_act, sfb, alphas, counts, gscale, how, codes,
# scales). Scales of rows at or past an expert's count are 0x38, their codes unspecified.
KERNELS = (_one_launch(), *map(_chain, ("cuda", "cpu", "triton", "reference")))
OPERATOR = Operator(
    "nvfp4_group_mm_swiglu_quant",
    KERNELS,
    functions=(_NAME,),
    families=("nvfp4",),
    at_top=False,
)


def _check_types(*given: Any) -> None:
    operands, gscale, (features, k, *tactic), how = given[:7], given[7], given[8:13], given[13:17]
    check_types(_NAME, operands, features, k, tactic, "auto", gscale=gscale)
    check_activation(_NAME, *how)
    check_size(_NAME, "expected_rows", given[17])


def _check(*given: Any) -> None:
    _check_types(*given)
    operands, gscale, (features, k, *_) = given[:7], given[7], given[8:]
    check_operands(_NAME, operands, features, k)
    if features % 64:
        raise ValueError(
            f"{_NAME}: features is {features}, the rows of gate and up together; needed a multiple "
            "of 64"
        )
    check_gscale(_NAME, gscale, operands[0].shape[0])
    check_contiguous(_NAME, a_comp=operands[0], gscale=gscale)


def _problem(*given: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    tensors = {**dict(zip(_OPERANDS, given)), "gscale": given[7]}
    return tensors, {
        "config_id": given[10],
        "cluster": (given[11], given[12]),
        "expected_rows": given[17],
        "activation": gating(*given[13:17]),
    }


_fused = Functional(
    _NAME,
    OPERATOR,
    "nvfp4_group_mm_swiglu_quant(Tensor a_comp, Tensor e_meta, Tensor sfa, Tensor b_act, "
    "Tensor? sfb, Tensor alphas, Tensor expert_num_tokens, Tensor gscale, SymInt features, "
    "SymInt k, int config_id, int cluster_m, int cluster_n, bool interleaved, str activation, "
    "float beta, float linear_beta, SymInt expected_rows) -> (Tensor, Tensor)",
    check_types=_check_types,
    check=_check,
    outputs=lambda a_comp, e_meta, sfa, b_act, *_: dense.quantized(
        b_act, *b_act.shape[:-1], a_comp.shape[1] // 2
    ),
    problem=_problem,
    launch=lambda run, *given: run(*given[:8], gating(*given[13:17]), *given[18:]),
)


@_fused.explained
def group_mm_swiglu_quant(
    a_comp: torch.Tensor,
    e_meta: torch.Tensor,
    sfa: torch.Tensor,
    b_act: torch.Tensor,
    sfb: torch.Tensor | None,
    alphas: torch.Tensor,
    expert_num_tokens: torch.Tensor,
    gscale: torch.Tensor,
    features: int,
    k: int,
    config_id: int = 0,
    cluster_m: int = 1,
    cluster_n: int = 1,
    interleaved: bool = False,
    activation: str = "silu",
    beta: float = 1.0,
    linear_beta: float = -1.0,
    *,
    expected_rows: int = 0,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gate-and-up product of each expert, its gated activation, and the result in NVFP4.

    On one back end the same bytes as `group_mm` followed by `silu_mul_quant_act`:

        x2[e] = bf16(alphas[e] * dequant(b_act[e]) @ dequant(w[e]).T)           [n_e, 2N]
        y     = bf16(bf16(silu(gate)) * up), or "situ" with beta and linear_beta
        codes, scales = NVFP4 of y with the factor gscale

    Args:
        a_comp, e_meta, sfa, b_act, sfb, alphas, expert_num_tokens, k, config_id, cluster_m,
            cluster_n, expected_rows, backend: as group_mm takes them.
        gscale: fp32 [E] or [1], the factor of the activations that this makes.
        features: 2N, the rows of gate and up together, a multiple of 64.
        interleaved: the weight's rows are [gate | up], or in the order of interleave_gate_up_rows.
        activation, beta, linear_beta: as silu_mul_quant_act takes them.

    Returns:
        (b_act uint8 [E, max_n, N/2], sfb uint8 [E, max_n, N/32]) for the next product. In rows at
        or past n_e, codes are unspecified and scales 0x38.

    Raises what group_mm and silu_mul_quant_act raise.
    """
    tactic = (config_id, cluster_m, cluster_n)
    result: tuple[torch.Tensor, torch.Tensor] = _fused(
        *(a_comp, e_meta, sfa, b_act, sfb, alphas, expert_num_tokens, gscale, features, k),
        *(*tactic, interleaved, activation, beta, linear_beta, expected_rows),
        backend=backend,
    )
    return result
