"""group_mm and group_mm_ragged: one product an expert, in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..._ops import define, is_plain, ops
from ...arch import Arch
from ...checks import check_no_overlap, check_size
from ...dispatch import Kernel, Operator, explained_by, remember, select
from ...problem import Problem, kind_of
from . import cpu, sm90_configs, tactics, triton
from .checks import check_operands, check_out, check_types, count_name

# A kernel's run: (config, out, a_comp, e_meta, sfa, b_act, sfb, alphas, counts). out [E, max_n, M]
# comes with counts int32 [E]; ragged, out is [R, M] and counts are the E + 1 offsets. sfb is None
# with BF16 activations. What is at or past an expert's count is neither read nor written.
KERNELS = (
    Kernel(
        "nvfp4_group_mm.cuda_sm90",
        "cuda",
        run="ops.nvfp4_group_mm.sm90:run",
        bind="ops.nvfp4_group_mm.sm90:bind",
        needs=frozenset({"wgmma"}),
        why_not=sm90_configs.why_not,
        config=sm90_configs.config,
        must_run=sm90_configs.must_run,
        configs=sm90_configs.candidates,
    ),
    Kernel(
        "nvfp4_group_mm.cpu",
        "cpu",
        run="ops.nvfp4_group_mm.cpu:run",
        needs=frozenset({"cpu"}),
        why_not=tactics.only_choices_of_its_own,
        config=cpu.config,
        must_run=lambda problem: tactics.illegal(problem) is None,
    ),
    Kernel(
        "nvfp4_group_mm.triton",
        "triton",
        run="ops.nvfp4_group_mm.triton:run",
        bind="ops.nvfp4_group_mm.triton:bind",
        needs=frozenset({"triton"}),
        why_not=triton.why_not,
        config=triton.config,
        must_run=triton.must_run,
        configs=triton.configs,
    ),
    Kernel(
        "nvfp4_group_mm.reference",
        "reference",
        run="ops.nvfp4_group_mm.reference:run",
        why_not=tactics.only_choices_of_its_own,
        must_run=lambda problem: tactics.only_choices_of_its_own(problem) is None,
    ),
)
OPERATOR = Operator(
    "nvfp4_group_mm",
    KERNELS,
    functions=(
        *("group_mm", "group_mm_ragged", "group_mm_configs", "all_tactics", "suggest_tactic"),
        *("valid_clusters", "interleave_gate_up_rows"),
    ),
    families=("nvfp4",),
    at_top=False,
)
_PADDED, _RAGGED = "group_mm", "group_mm_ragged"

Operands = tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor | None,
    torch.Tensor,
    torch.Tensor,
]


def problem_of(
    name: str,
    out: torch.Tensor,
    operands: Operands,
    tactic: tuple[int, int, int],
    arch: Arch | None = None,
    expected_rows: int = 0,
) -> Problem:
    names = ("out", "a_comp", "e_meta", "sfa", "b_act", "sfb", "alphas", count_name(name))
    params = {
        "config_id": tactic[0],
        "cluster": tuple(tactic[1:]),
        "expected_rows": expected_rows,
    }
    return Problem.of("nvfp4_group_mm", dict(zip(names, (out, *operands))), params, arch)


def _check(
    name: str,
    out: torch.Tensor,
    operands: Sequence[Any],
    features: int,
    k: int,
    tactic: Sequence[int],
    expected_rows: int,
    backend: str,
) -> None:
    check_types(name, operands, features, k, tactic, backend, out=out)
    check_size(name, "expected_rows", expected_rows)
    check_operands(name, operands, features, k)
    check_out(name, out, operands[3], features)


_RUNNERS: dict[Any, Any] = {}


def _launch(
    name: str,
    out: torch.Tensor,
    operands: Operands,
    features: int,
    k: int,
    tactic: tuple[int, int, int],
    expected_rows: int,
    backend: str,
) -> None:
    key = (*map(kind_of, (out, *operands)), features, k, tactic, expected_rows, backend)
    run = _RUNNERS.get(key)
    if run is None:
        _check(name, out, operands, features, k, tactic, expected_rows, backend)
        problem = problem_of(name, out, operands, tactic, expected_rows=expected_rows)
        run = select(OPERATOR, problem, backend).run
        remember(_RUNNERS, key, run)
    if out.numel():
        inputs = dict(zip(("a_comp", "e_meta", "sfa", "b_act", "sfb", "alphas"), operands))
        check_no_overlap(name, "out", out, **inputs)
        run(out, *operands)
        torch.autograd.graph.increment_version(out)  # kernels that write by address do not


def _implementation(
    out: torch.Tensor,
    a_comp: torch.Tensor,
    e_meta: torch.Tensor,
    sfa: torch.Tensor,
    b_act: torch.Tensor,
    sfb: torch.Tensor | None,
    alphas: torch.Tensor,
    counts: torch.Tensor,
    features: int,
    k: int,
    config_id: int,
    cluster_m: int,
    cluster_n: int,
    expected_rows: int,
    backend: str,
) -> None:
    operands = (a_comp, e_meta, sfa, b_act, sfb, alphas, counts)
    tactic = (config_id, cluster_m, cluster_n)
    _launch(_PADDED, out, operands, features, k, tactic, expected_rows, backend)


def _ragged_implementation(
    out: torch.Tensor,
    a_comp: torch.Tensor,
    e_meta: torch.Tensor,
    sfa: torch.Tensor,
    b_act: torch.Tensor,
    sfb: torch.Tensor | None,
    alphas: torch.Tensor,
    offsets: torch.Tensor,
    features: int,
    k: int,
    config_id: int,
    expected_rows: int,
    backend: str,
) -> None:
    operands = (a_comp, e_meta, sfa, b_act, sfb, alphas, offsets)
    _launch(_RAGGED, out, operands, features, k, (config_id, 1, 1), expected_rows, backend)


def _fake(out: torch.Tensor, *given: Any) -> None:
    features, k, *tactic, expected_rows, backend = given[7:]
    _check(_PADDED, out, given[:7], features, k, tactic, expected_rows, backend)


def _ragged_fake(out: torch.Tensor, *given: Any) -> None:
    features, k, config_id, expected_rows, backend = given[7:]
    _check(_RAGGED, out, given[:7], features, k, (config_id, 1, 1), expected_rows, backend)


_TENSORS = (
    "Tensor(a!) out, Tensor a_comp, Tensor e_meta, Tensor sfa, Tensor b_act, Tensor? sfb, "
    "Tensor alphas, Tensor counts, SymInt features, SymInt k, int config_id"
)
define(
    f"nvfp4_group_mm({_TENSORS}, int cluster_m, int cluster_n, SymInt expected_rows, "
    "str backend) -> ()",
    _implementation,
    _fake,
    grad=False,
)
define(
    f"nvfp4_group_mm_ragged({_TENSORS}, SymInt expected_rows, str backend) -> ()",
    _ragged_implementation,
    _ragged_fake,
    grad=False,
)


def _describe(
    out: torch.Tensor,
    a_comp: torch.Tensor,
    e_meta: torch.Tensor,
    sfa: torch.Tensor,
    b_act: torch.Tensor,
    sfb: torch.Tensor | None,
    alphas: torch.Tensor,
    expert_num_tokens: torch.Tensor,
    features: int,
    k: int,
    config_id: int = 0,
    cluster_m: int = 1,
    cluster_n: int = 1,
    *,
    expected_rows: int = 0,
    backend: str = "auto",
    arch: Arch | None = None,
) -> tuple[Operator, Problem, str]:
    operands = (a_comp, e_meta, sfa, b_act, sfb, alphas, expert_num_tokens)
    tactic = (config_id, cluster_m, cluster_n)
    _check(_PADDED, out, operands, features, k, tactic, expected_rows, backend)
    problem = problem_of(_PADDED, out, operands, tactic, arch, expected_rows)
    return OPERATOR, problem, backend


def _describe_ragged(
    out: torch.Tensor,
    a_comp: torch.Tensor,
    e_meta: torch.Tensor,
    sfa: torch.Tensor,
    b_act: torch.Tensor,
    sfb: torch.Tensor | None,
    alphas: torch.Tensor,
    expert_offsets: torch.Tensor,
    features: int,
    k: int,
    config_id: int = 0,
    *,
    expected_rows: int = 0,
    backend: str = "auto",
    arch: Arch | None = None,
) -> tuple[Operator, Problem, str]:
    operands = (a_comp, e_meta, sfa, b_act, sfb, alphas, expert_offsets)
    tactic = (config_id, 1, 1)
    _check(_RAGGED, out, operands, features, k, tactic, expected_rows, backend)
    problem = problem_of(_RAGGED, out, operands, tactic, arch, expected_rows)
    return OPERATOR, problem, backend


@explained_by(_describe)
def group_mm(
    out: torch.Tensor,
    a_comp: torch.Tensor,
    e_meta: torch.Tensor,
    sfa: torch.Tensor,
    b_act: torch.Tensor,
    sfb: torch.Tensor | None,
    alphas: torch.Tensor,
    expert_num_tokens: torch.Tensor,
    features: int,
    k: int,
    config_id: int = 0,
    cluster_m: int = 1,
    cluster_n: int = 1,
    *,
    expected_rows: int = 0,
    backend: str = "auto",
) -> torch.Tensor:
    """Products of each expert's tokens with its paired-4:8 sparse NVFP4 weight, in one launch:

        out[e, :n_e] = bf16(alphas[e] * dequant(b_act[e, :n_e]) @ dequant(w[e]).T)

    with n_e = expert_num_tokens[e] clamped to [0, max_n], dequant = codes times block scales, and
    FP32 accumulation. Every operand is exact in FP16 and BF16, so back ends differ only in the
    order of the sum. Without activation quantization (W4A16): b_act in BF16 and sfb = None.

    Args:
        out: bf16 [E, max_n, M]; rows at or past n_e keep their bytes. Returned.
        a_comp, e_meta, sfa: what `compress` gave: uint8 [E, M, K/4], [E, M, K/16], [E, M, K/32].
        b_act: uint8 [E, max_n, K/2], two e2m1 codes a byte, or bf16 [E, max_n, K].
        sfb: uint8 [E, max_n, K/32], UE4M3 scales, or None. Rows at or past n_e of b_act and sfb are
            never read.
        alphas: fp32 [E]: the alpha of quantize_weight, over the activations' gscale.
        expert_num_tokens: int32 [E], on the device.
        features: M, the out-features. A multiple of 32, 0 too.
        k: K, the in-features. A multiple of 32, 0 too.
        config_id, cluster_m, cluster_n: a tactic (see all_tactics); 0, 1, 1 leaves the choice to
            the kernel.
        expected_rows: how many rows an expert has on average, where the caller knows it and max_n
            says little; 0 where not. Tiles are chosen by it, and with them perhaps the order of
            the sum.
        backend: "auto", "reference", "cpu", "triton" or "cuda"; an explicit one never falls back.
        All tensors contiguous, on one device. E is 1 to 4096.

    Raises:
        TypeError: an argument of the wrong type or dtype, a missing sfb.
        ValueError: shapes that do not fit features, k and each other, not contiguous, mixed
            devices, an out that overlaps an input, a config_id that does not exist.
        UnsupportedError: the asked back end, or the tactic, cannot run this (see farro.explain).
        Nothing is written before all checks pass. No gradients are recorded.
    """
    operands = (a_comp, e_meta, sfa, b_act, sfb, alphas, expert_num_tokens)
    tactic = (config_id, cluster_m, cluster_n)
    check_types(_PADDED, operands, features, k, tactic, backend, out=out)
    check_size(_PADDED, "expected_rows", expected_rows)
    call = _implementation if is_plain(out, *operands) else ops.nvfp4_group_mm
    call(out, *operands, features, k, *tactic, expected_rows, backend)
    return out


@explained_by(_describe_ragged)
def group_mm_ragged(
    out: torch.Tensor,
    a_comp: torch.Tensor,
    e_meta: torch.Tensor,
    sfa: torch.Tensor,
    b_act: torch.Tensor,
    sfb: torch.Tensor | None,
    alphas: torch.Tensor,
    expert_offsets: torch.Tensor,
    features: int,
    k: int,
    config_id: int = 0,
    *,
    expected_rows: int = 0,
    backend: str = "auto",
) -> torch.Tensor:
    """group_mm on rows that are sorted by expert, without padding:

        out[o_e : o_(e+1)] = bf16(alphas[e] * dequant(b_act[o_e : o_(e+1)]) @ dequant(w[e]).T)

    with o = expert_offsets clamped to [0, R]. Memory goes by routed tokens, not by E * max_n.

    Args:
        out: bf16 [R, M]; rows that no expert has, from expert_offsets[E] on, keep their bytes.
        b_act: uint8 [R, K/2], or bf16 [R, K] with sfb = None; rows that no expert has are never
            read.
        sfb: uint8 [R, K/32], or None.
        expert_offsets: int32 [E + 1], not decreasing, on the device.
        The others as group_mm takes them.

    Returns out, and raises what group_mm raises.
    """
    operands = (a_comp, e_meta, sfa, b_act, sfb, alphas, expert_offsets)
    check_types(_RAGGED, operands, features, k, (config_id, 1, 1), backend, out=out)
    check_size(_RAGGED, "expected_rows", expected_rows)
    call = _ragged_implementation if is_plain(out, *operands) else ops.nvfp4_group_mm_ragged
    call(out, *operands, features, k, config_id, expected_rows, backend)
    return out
