"""The Triton kernels compile for architectures that are not here, with Triton's compiler alone."""

from __future__ import annotations

import pytest
import torch

from farro.arch import arch_named
from farro.ops.int8_gemm import triton as gemm
from farro.ops.int8_gemm import triton_configs
from farro.ops.int8_quantize import triton as quantizer
from farro.ops.moe_route import triton_finalize, triton_plan
from farro.ops.nvfp4_group_mm import product as group_mm
from farro.ops.nvfp4_group_mm import triton as grouped
from farro.problem import Problem

pytest.importorskip("triton")
from farro.triton_launch import compile_only, resources

ARCHS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")


def meta(*shape, dtype=torch.int8):
    return torch.empty(shape, dtype=dtype, device="meta")


def gemm_problem(m, n, k, group_size, arch, output=torch.bfloat16):
    groups = -(-k // group_size)
    tensors = {
        "a": meta(m, k),
        "b": meta(n, k).T,
        "scale_a": meta(m, groups, dtype=torch.float32),
        "scale_b": meta(groups, n, dtype=torch.float32),
        "bias": meta(n, dtype=output),
        "out": meta(m, n, dtype=output),
    }
    params = {"group_size": group_size}
    return tuple(tensors.values()), Problem.of("int8_gemm", tensors, params, arch_named(arch))


def compiled(config, tensors, problem):
    call = gemm.prepare(config, *tensors, triton_configs.group_of(problem))
    return compile_only(call.kernel, call.args(*tensors), call.options, problem.arch.capability)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("m, group_size", [(1, 256), (64, 32), (300, 64), (1024, 128)])
def test_chosen_gemm(m, group_size, arch):
    tensors, problem = gemm_problem(m, 4096, 4096, group_size, arch)
    config = gemm.config(problem)
    kernel = compiled(config, tensors, problem)
    ptx = kernel.asm["ptx"]
    assert f".target sm_{problem.arch.capability[0]}" in ptx
    assert any(name in ptx for name in ("mma.sync", "wgmma.mma_async", "tcgen05.mma"))
    registers, stack = resources(kernel)
    assert stack <= 64, f"{config} spills {stack} bytes ({registers} registers)"
    assert kernel.metadata.shared <= triton_configs.shared_bytes(config, problem)


@pytest.mark.parametrize("arch", ARCHS)
def test_awkward_gemm(arch):
    """No alignment anywhere, K no multiple of the group: it must compile, whatever the speed."""
    tensors, problem = gemm_problem(33, 77, 201, 64, arch)
    assert compiled(gemm.config(problem), tensors, problem).asm["cubin"]


@pytest.mark.parametrize("family", triton_configs.FAMILIES)
def test_families_use_what_they_promise(family):
    """On SM90: no spills among samples of a family, wgmma where tiles allow it, TMA where asked."""
    tensors, problem = gemm_problem(1024, 4096, 4096, 128, "sm_90")
    pool = gemm.candidates(problem)
    if family == "pointers":  # never near the best on this architecture, but legal
        pool = [c for c in gemm.configs(problem) if c.tile in ((128, 128), (128, 64))]
        pool = [c for c in pool if (c.swap, c.warps, c.block_k) == (False, 8, 128)]
    found = [c for c in pool if c.family == family and c.group_m == 8]
    if family == "specialized" and not triton_configs.triton_specializes():
        assert found == []
        return
    assert found
    for config in found[:: max(1, len(found) // 3)]:
        kernel = compiled(config, tensors, problem)
        ptx = kernel.asm["ptx"]
        assert "wgmma.mma_async" in ptx and ".s32.s8.s8" in ptx, config
        assert ("cp.async.bulk.tensor" in ptx) == (family != "pointers"), config
        assert "fma.rn.f32" in ptx and "fma.rn.ftz" not in ptx, config
        if config.block_m != 256 or config.block_k != 128:  # the one that spills at G128
            assert resources(kernel)[1] <= 64, config
        assert kernel.metadata.shared <= triton_configs.shared_bytes(config, problem), config


@pytest.mark.parametrize("group_size", (32, 64, 128, 256))
@pytest.mark.parametrize("output", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("count", (1, pytest.param(None, marks=pytest.mark.slow)))
def test_rings_fit_in_shared_memory(output, group_size, count, generator):
    """The estimate that decides what is legal is no lower than what the compiler takes."""
    tensors, problem = gemm_problem(48, 4096, 4096, group_size, "sm_90", output)
    rings = [c for c in gemm.configs(problem) if c.family == "ring" and c.group_m == 8]
    deepest = list({(c.swap, c.block_m, c.block_n, c.block_k): c for c in rings}.values())
    for pick in torch.randperm(len(deepest), generator=generator)[:count].tolist():
        config = deepest[pick]
        kernel = compiled(config, tensors, problem)
        assert kernel.metadata.shared <= triton_configs.shared_bytes(config, problem), config


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.float64))
def test_quantizer(dtype, arch):
    for shape, group_size in (((4096, 4096), 256), ((3, 300), 32)):
        x = meta(*shape, dtype=dtype)
        q = meta(*shape)
        scale = meta(shape[0], -(-shape[1] // group_size), dtype=torch.float32)
        params = {"group_size": group_size}
        problem = Problem.of("int8_quantize", {"x": x}, params, arch_named(arch))
        kernel, _, args, options = quantizer.prepare(
            quantizer.config(problem), x, q, scale, group_size
        )
        code = compile_only(kernel, args, options, problem.arch.capability)
        ptx = code.asm["ptx"]
        assert "fma.rn.f32" in ptx and "div.rn.f32" in ptx and "div.full" not in ptx
        assert resources(code)[1] == 0
        if shape[1] % group_size == 0:
            wide = "ld.global.v2.b64" if dtype is torch.float64 else "ld.global.v4.b32"
            assert wide in ptx


PLANS = [
    *((arch, 1024, 8192, torch.int64) for arch in ARCHS),
    ("sm_90", 1024, 8192, torch.int32),
    ("sm_90", None, 8192, torch.int64),
    ("sm_80", None, 3, torch.int32),
]


@pytest.mark.parametrize("arch, cap, tokens, dtype", PLANS)
def test_plans(arch, cap, tokens, dtype):
    """No spills, the shared memory that every chip has, and ids read 16 bytes at a time."""
    ids = meta(tokens, 8, dtype=dtype)
    params = {"num_local_experts": 128, "cap": cap}
    problem = Problem.of("moe_route", {"topk_ids": ids}, params, arch_named(arch))
    rows = ids.numel() if cap is None else 128 * cap
    sizes = ((128 + (cap is None),), (tokens, 8), (rows,), (rows,))
    kernel, _, args, options = triton_plan.prepare(
        triton_plan.config(problem), ids, *(meta(*s, dtype=torch.int32) for s in sizes), 0, cap
    )
    code = compile_only(kernel, args, options, problem.arch.capability)
    assert code.metadata.shared <= 99 << 10
    assert resources(code)[1] <= 64
    if ids.numel() % 8192 == 0:
        assert "ld.global.v4.b32" in code.asm["ptx"] or "ld.global.v2.b64" in code.asm["ptx"]


@pytest.mark.parametrize("arch", ARCHS)
def test_sums_of_rows(arch):
    for topk, tokens, k, weights in ((8, 8192, 2048, True), (2, 33, 77, False)):
        bf16 = torch.bfloat16
        tensors = {
            "fused": meta(64, 128, k, dtype=bf16),
            "route_dest": meta(tokens, topk, dtype=torch.int32),
            "topk_weights": meta(tokens, topk, dtype=torch.float32) if weights else None,
            "out": meta(tokens, k, dtype=bf16),
        }
        problem = Problem.of("moe_finalize", tensors, {}, arch_named(arch))
        names = ("out", "fused", "route_dest", "topk_weights")
        kernel, _, args, options = triton_finalize.prepare(
            triton_finalize.config(problem), *(tensors[name] for name in names)
        )
        code = compile_only(kernel, args, options, problem.arch.capability)
        assert resources(code)[1] == 0
        assert "fma.rn.f32" not in code.asm["ptx"]  # products are rounded before they are added
        if k % 8 == 0:
            assert "ld.global.v4.b32" in code.asm["ptx"]


GROUPS = [
    *((arch, 32, 4096, 7168, 16, True, False) for arch in ARCHS),
    ("sm_90", 8, 4096, 14336, 64, True, True),
    ("sm_90", 32, 7168, 2048, 128, False, False),
    ("sm_80", 3, 96, 160, 128, True, False),
]


@pytest.mark.parametrize("arch, e, m, k, cap, coded, ragged", GROUPS)
def test_grouped_products(arch, e, m, k, cap, coded, ragged):
    """Tensor cores, no spills, and the shared memory that every chip has."""
    rows = (e * cap,) if ragged else (e, cap)
    code, brain = torch.uint8, torch.bfloat16
    operands = (
        *(meta(e, m, k // n, dtype=code) for n in (4, 16, 32)),
        meta(*rows, k // 2, dtype=code) if coded else meta(*rows, k, dtype=brain),
        meta(*rows, k // 32, dtype=code) if coded else None,
        meta(e, dtype=torch.float32),
        meta(e + ragged, dtype=torch.int32),
    )
    out = meta(*rows, m, dtype=brain)
    name = "group_mm_ragged" if ragged else "group_mm"
    problem = group_mm.problem_of(name, out, operands, (0, 1, 1), arch_named(arch))
    config = grouped.config(problem)
    kernel, _, args, options = grouped.prepare(config, out, *operands)
    code = compile_only(kernel, args, options, problem.arch.capability)
    ptx = code.asm["ptx"]
    assert any(mma in ptx for mma in ("mma.sync", "wgmma.mma_async", "tcgen05.mma"))
    assert code.metadata.shared <= 99 << 10
    registers, stack = resources(code)
    assert stack <= 64, f"{config} spills {stack} bytes ({registers} registers)"
    if k % 128 == 0:
        assert "ld.global.v4.b32" in ptx or "cp.async.cg.shared.global" in ptx
