"""The NVFP4 quantizers through Triton: in the interpreter, compiled for 5 chips, on a GPU."""

from __future__ import annotations

import re

import pytest
import torch

from farro import moe, nvfp4
from farro.arch import arch_named
from farro.catalogue import operator_named
from farro.dispatch import explain
from farro.ops.nvfp4_quantize import activation, triton, triton_configs
from farro.testing import CASES, assert_bit_equal

from .triton_interpreter import run_again

ARCHS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
OPERATORS = ("nvfp4_quantize", "nvfp4_scatter", "nvfp4_scatter_fp4", "nvfp4_dequantize")


def seed_of(generator: torch.Generator) -> int:
    return int(torch.randint(2**31, (1,), generator=generator))


@pytest.mark.slow  # half a minute; the kernels are compiled for five architectures in any run
def test_in_the_interpreter() -> None:
    run_again("nvfp4_quantize.py")


# compiled only


def meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def calls(experts: int = 32, cap: int = 64, k: int = 7168, tokens: int = 512) -> dict[str, tuple]:
    """Public functions of a large model: their arguments, and those of run()."""
    bf16, fp32, uint8 = torch.bfloat16, torch.float32, torch.uint8
    x, x2 = meta(experts, cap, k, dtype=bf16), meta(experts, cap, 2 * k, dtype=bf16)
    a1, weights = meta(tokens, k, dtype=bf16), meta(tokens, 8, dtype=fp32)
    made = meta(experts, cap, k // 2, dtype=uint8), meta(experts, cap, k // 32, dtype=uint8)
    flat = meta(experts * cap, k // 2, dtype=uint8), meta(experts * cap, k // 32, dtype=uint8)
    q, q_sf = meta(tokens, k // 2, dtype=uint8), meta(tokens, k // 32, dtype=uint8)
    gscale, counts, offsets = meta(experts, dtype=fp32), meta(experts), meta(experts + 1)
    rows, routes = meta(experts * cap), meta(tokens * 8, dtype=torch.int64)
    silu = activation.Gated(True, "silu", 1.0, -1.0)
    situ = activation.Gated(False, "situ", 1.5, 3.0)
    plan = (a1, rows, rows, weights, gscale, counts)
    by_routes = (a1, routes, routes, weights.flatten(), gscale, counts)
    ragged = (a1, rows, rows, None, gscale, offsets)
    quantize, scatter = triton.prepare_quantize, triton.prepare_scatter
    counted = (gscale, counts, 4096)
    n = nvfp4
    return {
        "quant_act": (n.quant_act, (x, *counted), quantize, (x, gscale, counts, None, *made)),
        "silu": (
            *(n.silu_mul_quant_act, (x2, *counted, True)),
            *(quantize, (x2, gscale, counts, silu, *made)),
        ),
        "situ": (
            *(n.silu_mul_quant_act, (x2, *counted, False, "situ", 1.5, 3.0)),
            *(quantize, (x2, gscale, counts, situ, *made)),
        ),
        "plan": (
            *(n.scatter_quant_act_planned, (*plan, cap)),
            *(scatter, (*plan, "plan", cap, *made)),
        ),
        "routes": (
            *(n.scatter_quant_act, (*by_routes, cap)),
            *(scatter, (*by_routes, "routes", cap, *made)),
        ),
        "ragged": (
            *(n.scatter_quant_act_ragged, ragged),
            *(scatter, (*ragged, "ragged", experts * cap, *flat)),
        ),
        "copy": (
            *(n.scatter_fp4_planned, (q, q_sf, rows, counts, cap)),
            *(triton.prepare_copy, (q, q_sf, rows, counts, cap, *made)),
        ),
        "dequantize": (
            *(n.dequantize_act, (*made, gscale)),
            *(triton.prepare_dequantize, (*made, gscale, meta(experts, cap, k, dtype=fp32))),
        ),
    }


def pairs() -> list:
    """Every kernel for every chip; some of them on demand, since each takes half a second."""
    common, first = ("quant_act", "silu", "plan"), ("sm_80", "sm_120")
    return [
        pytest.param(
            *(name, arch), marks=() if name in common or arch in first else pytest.mark.slow
        )
        for name in calls()
        for arch in ARCHS
    ]


@pytest.mark.parametrize("name, arch", pairs())
def test_compiles(name, arch) -> None:
    pytest.importorskip("triton")
    from farro.triton_launch import compile_only, resources

    function, given, prepare, arguments = calls()[name]
    problem = explain(function, *given, arch=arch).problem
    launch = prepare(triton_configs.config(problem), *arguments)
    code = compile_only(
        launch.kernel, launch.args(*arguments), launch.options, arch_named(arch).capability
    )
    ptx = code.asm["ptx"]
    assert f".target {arch}" in ptx
    registers, stack = resources(code)
    assert stack == 0, f"spills {stack} bytes ({registers} registers)"
    assert "div.full" not in ptx and "ex2.approx.f32" not in ptx
    assert name == "situ" or "ftz" not in ptx  # the exponential of float64 looks at its range so
    if name not in ("copy", "dequantize"):
        assert "div.rn.f32" in ptx
        assert "ld.global.v4.b32" in ptx  # 8 values of a thread at once
    if name not in ("silu", "situ"):
        assert not re.search(r"fma\.rn\.f32", ptx), "no product and sum may be fused"
    assert ("fma.rn.f64" in ptx) == (name == "situ")


# on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("operator", OPERATORS)
def test_cases_on_a_gpu(operator, generator) -> None:
    kernel = next(k for k in operator_named(operator).kernels if k.backend == "triton")
    for case in CASES[operator]():
        outcome = case.build("cuda", seed_of(generator)).check(kernel)
        assert outcome.status == "ok", f"{case.name}: {outcome.detail}"


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ("triton", "reference"))
def test_silu_of_every_value_on_a_gpu(backend, generator) -> None:
    """The chain of torch on that GPU, then quant_act; and the bits that a CPU gives."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    every = bits.view(torch.bfloat16).view(1, 32, 2048)
    counts = torch.tensor([32], dtype=torch.int32)
    for up in (torch.ones_like(every), torch.randn(every.shape, generator=generator).bfloat16()):
        x2, one = torch.cat((every, up), -1), torch.tensor([0.37])
        want = nvfp4.silu_mul_quant_act(x2, one, counts, 0, backend="reference")
        x2, one, there = x2.cuda(), one.cuda(), counts.cuda()
        got = nvfp4.silu_mul_quant_act(x2, one, there, 0, backend=backend)
        chain = torch.nn.functional.silu(every.cuda()) * up.cuda()
        again = nvfp4.quant_act(chain, one, there, 0, backend=backend)
        for result, expected, other in zip(got, want, again):
            assert_bit_equal(result, expected, "a CPU")
            assert_bit_equal(result, other, "torch's chain on this GPU")


@pytest.mark.gpu
@pytest.mark.parametrize("e, cap, k", [(128, 8, 2048), (32, 64, 7168), (8, 700, 4096)])
def test_models_on_a_gpu(e, cap, k, generator) -> None:
    x = torch.randn(e, cap, 2 * k, generator=generator).bfloat16().cuda()
    counts = torch.randint(cap + 1, (e,), generator=generator, dtype=torch.int32).cuda()
    gscale = torch.rand(e, generator=generator).cuda() + 0.5
    used = torch.arange(cap, device="cuda") < counts[:, None]
    x[~used] = torch.nan
    first = x[..., :k].contiguous()
    for call in (
        lambda backend: nvfp4.quant_act(first, gscale, counts, 0, backend=backend),
        lambda backend: nvfp4.silu_mul_quant_act(x, gscale, counts, 0, backend=backend),
        lambda backend: nvfp4.silu_mul_quant_act(x, gscale, counts, 0, True, backend=backend),
    ):
        got, want = call("triton"), call("reference")
        assert_bit_equal(got[1], want[1])
        assert_bit_equal(got[0][used], want[0][used])


@pytest.mark.gpu
def test_counts_and_plans_change_under_a_graph(generator) -> None:
    """Fewer rows, then more: unused scales are 0x38 in each replay."""
    a1 = torch.randn(64, 512, generator=generator).bfloat16().cuda()
    tok = torch.randint(64, (8 * 16,), generator=generator, dtype=torch.int32).cuda()
    dest = torch.arange(8 * 16, device="cuda")
    counts = torch.full((8,), 16, dtype=torch.int32, device="cuda")
    gscale = torch.rand(8, generator=generator).cuda() + 0.5
    x = torch.randn(8, 16, 512, generator=generator).bfloat16().cuda()

    def every(backend: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [
            nvfp4.quant_act(x, gscale, counts, 0, backend=backend),
            nvfp4.silu_mul_quant_act(x, gscale, counts, 0, backend=backend),
            nvfp4.scatter_quant_act(
                a1, tok.long(), dest, None, gscale, counts, 16, backend=backend
            ),
            nvfp4.scatter_quant_act_planned(
                a1, tok, tok, None, gscale, counts, 16, backend=backend
            ),
        ]

    every("triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = every("triton")
    for _ in range(3):
        counts.copy_(torch.randint(17, (8,), generator=generator, dtype=torch.int32))
        tok.copy_(torch.randint(64, tok.shape, generator=generator, dtype=torch.int32))
        x.copy_(torch.randn(x.shape, generator=generator))
        used = torch.arange(16, device="cuda") < counts[:, None]
        for result in (r for pair in results for r in pair):
            result.fill_(0xEE)
        graph.replay()
        for (b_act, sfb), (codes, scales) in zip(results, every("reference")):
            assert_bit_equal(sfb, scales)
            assert_bit_equal(b_act[used], codes[used])


@pytest.mark.gpu
def test_tokens_quantized_once_have_the_bytes_of_each_route(generator) -> None:
    """Weights of 1 are as good as none, but each route is then quantized by itself."""
    for tokens, topk, experts, k in ((256, 8, 16, 2048), (600, 3, 40, 96)):
        x = torch.randn(tokens, k, generator=generator).bfloat16().cuda()
        ids = torch.randint(experts + 4, (tokens, topk), generator=generator).cuda()
        gscale, ones = torch.full((1,), 5.0).cuda(), torch.ones(tokens * topk).cuda()
        offsets, _, token, route = moe.dispatch_plan_ragged(ids, 2, experts)
        used = torch.arange(len(token), device="cuda") < offsets[-1]
        given = (gscale, offsets)
        got, want = (
            nvfp4.scatter_quant_act_ragged(x, token, route, w, *given, backend="triton")
            for w in (None, ones)
        )
        assert_bit_equal(got[1], want[1])
        assert_bit_equal(got[0][used], want[0][used])
        counts, _, token, route = moe.dispatch_plan(ids, 2, experts, 64)
        used = torch.arange(64, device="cuda") < counts[:, None]
        given = (gscale, counts, 64)
        got, want = (
            nvfp4.scatter_quant_act_planned(x, token, route, w, *given, backend="triton")
            for w in (None, ones)
        )
        assert_bit_equal(got[1], want[1])
        assert_bit_equal(got[0][used], want[0][used])


@pytest.mark.gpu
def test_scenario_01_offsets_past_2_31_on_a_gpu(generator) -> None:
    """Two experts of 2^31 elements: the last rows of both, and the first of the second."""
    rows, k = 2**16, 2**15
    x = torch.zeros(2, rows, k, dtype=torch.bfloat16, device="cuda")
    places = [(0, 0), (0, rows - 1), (1, 0), (1, rows - 1)]
    own = torch.randn(4, k, generator=generator).bfloat16().cuda()
    for row, (e, r) in zip(own, places):
        x[e, r] = row
    gscale = torch.tensor([1.0, 3.0], device="cuda")
    counts = torch.tensor([rows, rows], dtype=torch.int32, device="cuda")
    b_act, sfb = nvfp4.quant_act(x, gscale, counts, 0, backend="triton")
    for row, (e, r) in zip(own, places):
        q, sf = nvfp4.quant_rows(row[None], gscale[e], backend="reference")
        assert_bit_equal(b_act[e, r], q[0])
        assert_bit_equal(sfb[e, r], sf[0])
    del b_act, sfb
    flat = x.view(-1, k)
    tok = torch.tensor([0, 2 * rows - 1, rows, 5], dtype=torch.int32, device="cuda")
    few = torch.tensor([4], dtype=torch.int32, device="cuda")
    got = nvfp4.scatter_quant_act_planned(
        flat, tok, tok, None, gscale[:1], few, 4, backend="triton"
    )
    want = nvfp4.quant_rows(flat[tok.long()], gscale[:1], backend="reference")
    assert_bit_equal(got[0][0], want[0])
    assert_bit_equal(got[1][0], want[1])


@pytest.mark.gpu
def test_nothing_synchronizes(generator) -> None:
    cases = [case for name in OPERATORS for case in CASES[name]() if case.quick]
    calls = [case.build("cuda", seed_of(generator)) for case in cases]
    for backend in ("triton", "reference"):
        for synchronizing in ("default", "error"):  # compile first
            torch.cuda.set_sync_debug_mode(synchronizing)
            try:
                for call in calls:
                    call.through(backend)
            finally:
                torch.cuda.set_sync_debug_mode("default")
