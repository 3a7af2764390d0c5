"""The native plan and NVFP4 quantizers compile with NVRTC alone and keep values in registers."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("cuda.core", reason="needs cuda-core: pip install 'farro[cuda]'")

from farro.ops.moe_route import sm90_plan, triton_plan
from farro.ops.nvfp4_quantize import sm90_configs
from farro.problem import Problem

from .sass import compiled

QUANTIZERS = (
    *(("rows", kind, False) for kind in ("in_place", "planned", "ragged", "by_routes")),
    ("rows", "ragged", True),
    *(("tokens", kind, False) for kind in ("in_place", "planned")),
    *(("gate", interleaved, False) for interleaved in (False, True)),
)


@pytest.mark.parametrize(("what", "how", "weighted"), QUANTIZERS)
def test_quantizers_keep_values_in_registers(what, how, weighted):
    kernel = compiled(*sm90_configs.kernel_name(what, how, weighted))
    assert kernel.stack == 0 and kernel.registers <= 64, kernel.told


@pytest.mark.parametrize(
    ("wide", "flat", "ragged", "cluster"), [(True, True, False, 8), (False, False, True, 1)]
)
def test_plans_keep_values_in_registers(wide, flat, ragged, cluster):
    kernel = compiled(*sm90_plan.kernel_name(wide, flat, ragged, cluster))
    assert kernel.stack == 0 and kernel.registers <= 64, kernel.told


def problem(tokens, topk, experts, cap):
    ids = torch.empty(tokens, topk, dtype=torch.int64, device="meta")
    from farro.arch import arch_named

    params = {"num_local_experts": experts, "cap": cap}
    return Problem.of("moe_route", {"topk_ids": ids}, params, arch_named("sm_90"))


@pytest.mark.parametrize("cap", (None, 0, 1, 9, 8192))
def test_slices_of_a_plan_cover_all_routes(cap):
    for tokens, topk, experts in itertools.product(
        (0, 1, 511, 8192, 70000), (1, 8), (1, 128, 4096)
    ):
        given = problem(tokens, topk, experts, cap)
        config = sm90_plan.config(given)
        assert sm90_plan.refuses(config, given) is None
        assert sm90_plan.slice_of(config, tokens * topk) * config.ctas >= tokens * topk
        assert sm90_plan.shared_bytes(experts) <= 232448 - 1024 - 64
        assert all(sm90_plan.refuses(c, given) is None for c in sm90_plan.configs(given))
        assert sm90_plan.must_run(given) == triton_plan.must_run(given)


def test_tokens_are_quantized_once_where_that_may_pay():
    config = sm90_configs.Config()
    assert config.pays(8192, 65536, 2048) and config.pays(8192, 16384, 4096)
    assert not config.pays(512, 4096, 2048) and not config.pays(0, 128, 1 << 20)
    assert not sm90_configs.Config(once=4).pays(8192, 16384, 4096)
    assert not sm90_configs.Config(once=0).pays(8192, 65536, 2048)
