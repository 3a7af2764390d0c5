"""The Triton ring kernels on a GPU: a race between stages shows only there.

On the H200, reads of a stage's scales were overtaken by the copy engine that refilled the stage,
where they queued behind slow stores or behind other warps' reads: sums of three consumers were
wrong from K = 7168 on in some runs, and those of every ring where stores are of two bytes each.
"""

from __future__ import annotations

import os
import time

import pytest
import torch

from farro.arch import arch_of
from farro.bench import builders
from farro.bench.case import Options
from farro.ops.int8_gemm import triton, triton_configs
from farro.ops.int8_gemm.triton import Config
from farro.problem import Problem

from .sm90_forced import FP32, GROUP_SIZES, expected, operands, same

pytestmark = pytest.mark.gpu
M, N, K = 512, 384, 8192
TURNS = 8


def rings(problem):
    """Of each tile and stage of the legal rings, the deepest and the shallowest."""
    legal = [c for c in triton.configs(problem) if c.family == "ring" and c.group_m == 8]
    found: dict[tuple[object, ...], list[triton_configs.Config]] = {}
    for c in legal:
        found.setdefault((c.swap, c.block_m, c.block_n, c.warps, c.block_k), []).append(c)
    depth = lambda c: c.stages  # noqa: E731
    return [pick(alike, key=depth) for alike in found.values() for pick in (max, min)]


def compile_in_parallel(configs, group_size):
    device = torch.device("cuda", torch.cuda.current_device())
    options = Options(device, group_size, FP32)
    sizes = (("m", M), ("n", N), ("k", K))
    tasks = [builders.Task("int8_gemm", sizes, options, "triton", c) for c in configs]
    deadline = time.monotonic() + 240
    return builders.build(tasks, min(16, os.cpu_count() or 1), deadline, lambda done, total: None)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", (4, pytest.param(None, marks=pytest.mark.slow)))
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_rings_over_a_long_k(group_size, count, generator):
    """The deepest and the shallowest of a few tiles, others in each run; or of every tile."""
    pytest.importorskip("triton")
    if "wgmma" not in arch_of(torch.device("cuda", torch.cuda.current_device())).features:
        pytest.skip("rings need SM90a")
    inputs = operands(M, N, K, group_size, generator)
    want = expected(inputs, group_size)
    out = torch.empty_like(want)
    names = ("a", "b", "scale_a", "scale_b", "bias", "out")
    problem = Problem.of("int8_gemm", dict(zip(names, (*inputs, out))), {"group_size": group_size})
    configs = rings(problem)
    assert len(configs) > 20
    if count is not None:
        picks = torch.randperm(len(configs), generator=generator)[:count].tolist()
        configs = [configs[i] for i in picks]
    else:
        failed = {t for t in compile_in_parallel(configs, group_size).values() if t is not None}
        assert not failed
    wrong = []
    for config in configs:
        for turn in range(TURNS):
            out.fill_(float("nan"))
            triton.run(config, *inputs, out, group_size)
            try:
                same(out, want, config)
            except AssertionError:
                wrong.append((config, turn))
                break
    assert not wrong, f"{len(wrong)} of {len(configs)}: {wrong}"


@pytest.mark.parametrize("swap", (False, True))
@pytest.mark.parametrize("tile", ((128, 64, 8), (256, 128, 8), (192, 128, 12), (64, 64, 4)))
def test_no_stage_is_refilled_while_it_is_read(tile, swap, generator):
    """Rows of an odd length: every store is of two bytes, and reads of scales queue behind them."""
    pytest.importorskip("triton")
    if "wgmma" not in arch_of(torch.device("cuda", torch.cuda.current_device())).features:
        pytest.skip("rings need SM90a")
    m, n, group_size = 8193, 8192, 64
    inputs = operands(m, n, group_size, group_size, generator)
    want = expected(inputs, group_size).bfloat16()
    out = torch.full((n, m), float("nan"), dtype=torch.bfloat16, device="cuda").T
    block_m, block_n, warps = tile
    config = Config("ring", swap, block_m, block_n, group_size, 8, warps, 4)
    names = ("a", "b", "scale_a", "scale_b", "bias", "out")
    problem = Problem.of("int8_gemm", dict(zip(names, (*inputs, out))), {"group_size": group_size})
    assert triton.refuses(config, problem) is None
    triton.run(config, *inputs, out, group_size)
    same(out, want, config)
