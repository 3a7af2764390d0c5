"""fp8_linear through Triton: its configurations, the interpreter, compilers, and a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import farro
from farro import tuning
from farro.arch import arch_named
from farro.ops.fp8_linear import triton, triton_configs
from farro.ops.fp8_linear.calls import Call, problem_of
from farro.ops.fp8_linear.triton_configs import Config
from farro.problem import Problem, TensorSpec
from farro.testing import (
    FP8_FAST_SUM,
    FP8_PROMOTED_SUM,
    assert_bit_equal,
    assert_close_to_exact,
    exact_linear,
)

from .triton_interpreter import run_again

pytest.importorskip("triton")
from farro.triton_launch import compile_only, resources

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
ARCHS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")


@pytest.mark.slow  # half a minute; the kernels are compiled for five architectures in any run
def test_in_the_interpreter():
    run_again("fp8_linear.py")


def spec(shape, dtype=E4M3, stride=None, align=16):
    return TensorSpec(shape, stride or (shape[1], 1), dtype, align)


def problem(m, n, k, arch="sm_90", fast=False, **tensors):
    given = {
        "input": spec((m, k)),
        "weight": spec((n, k)),
        **dict.fromkeys(("alpha", "bias", "residual")),
        "out": spec((m, n), BF16),
        **tensors,
    }
    params = (("epilogue", "none"), ("fast_accum", fast), ("variant", 0))
    return Problem("fp8_linear", arch_named(arch), tuple(given.items()), params)


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.tuples(*[st.sampled_from([0, 1, 2, 16, 33, 64, 65, 128, 257, 1000, 8192, 24576])] * 3),
    arch=st.sampled_from((*ARCHS, "sm_86", "sm_121")),
    fast=st.booleans(),
    align=st.sampled_from([1, 4, 16]),
    pitch=st.sampled_from([0, 1, 16]),
    turned=st.booleans(),
)
def test_a_choice_for_every_problem(sizes, arch, fast, align, pitch, turned):
    m, n, k = sizes
    stride = (1, max(m, 1)) if turned else (k + pitch, 1)
    tensors = {"input": spec((m, k), stride=stride, align=align)}
    asked = problem(m, n, k, arch, fast, **tensors)
    assert triton.why_not(asked) is None and triton.must_run(asked)
    assert triton.refuses(triton.config(asked), asked) is None


@pytest.mark.parametrize("arch", ARCHS)
def test_every_configuration_is_legal_and_survives_a_table(arch):
    for m, fast in ((1, False), (48, True), (200, True), (4096, False)):
        asked = problem(m, 4096, 4096, arch, fast)
        wanted = triton.candidates(asked)
        assert triton.heuristic(asked) in wanted
        assert 5 < len(wanted) < 130
        assert all(triton.refuses(c, asked) is None for c in wanted)
        assert all(Config.from_dict(c.as_dict()) == c for c in wanted)
        promoted = {c.promote for c in wanted}
        assert (0 in promoted) == (fast or arch == "sm_80")
        assert max(promoted) <= 512
    legal = triton.configs(problem(200, 4096, 4096, arch))
    assert len(set(legal)) == len(legal) > 1000


def test_why_a_configuration_is_refused():
    asked = problem(1024, 4096, 4096)
    good = Config("descriptors", False, 128, 128, 128, 256, 8, 8, 3)
    assert triton.refuses(good, asked) is None
    for change, reason in (
        ({"stages": 6}, "shared memory"),
        ({"warps": 2}, "registers a thread would spill"),
        ({"block_m": 16, "block_n": 16}, "more warps than pieces"),
        ({"promote": 0}, "fast_accum=True allows"),
        ({"block_k": 256, "promote": 128}, "whole steps"),
        ({"promote": 1024, "stages": 1}, "512 of K at the latest"),
        ({"promote": -128}, "or never"),
        ({"family": "ring"}, "the families are"),
        ({"block_n": 96}, "powers of two"),
        ({"block_n": 8}, "16 x 16 x 32"),
        ({"block_m": 512, "block_n": 16}, "at most 256 rows"),
        ({"group_m": 128}, "row tiles"),
        ({"stages": 0}, "stages"),
    ):
        assert reason in triton.refuses(dataclasses.replace(good, **change), asked)
    never = dataclasses.replace(good, promote=0)
    assert triton.refuses(never, problem(1024, 4096, 4096, fast=True)) is None
    ampere = problem(1024, 4096, 4096, "sm_80")
    assert "FP32 without promotion" in triton.refuses(good, ampere)
    assert "tensor copy engine" in triton.refuses(never, ampere)
    for tensors, reason in (
        ({"input": spec((1024, 4096), align=8)}, "no descriptor of input: its pointer is not"),
        ({"weight": spec((4096, 4096), stride=(1, 4096))}, "no descriptor of weight: dimension 1"),
        ({"input": spec((1024, 4096), stride=(4104, 1))}, "no multiple of 16"),
    ):
        assert reason in triton.refuses(good, problem(1024, 4096, 4096, **tensors))
    assert triton.config(problem(16, 64, 0)).family == "pointers"


def test_dimensions_whose_last_tile_would_pass_int32_are_refused():
    for where in range(3):
        longest = [16, 16, 16]
        longest[where] = 2**31 - 2**10
        assert triton.why_not(problem(*longest)) is None
        longest[where] += 16
        asked = problem(*longest)
        assert "a dimension is longer" in triton.why_not(asked) and not triton.must_run(asked)


def test_pinned_tiles_are_legal_where_their_architecture_has_them():
    for arch in ARCHS:
        for fast in (False, True):
            asked = problem(64, 4096, 4096, arch, fast)
            legal = [c for c in triton.variants.values() if triton.refuses(c, asked) is None]
            assert len(legal) >= 5, arch
    assert all(config.name == name for name, config in triton.variants.items())


def test_the_tuned_table_is_asked_first(monkeypatch, tmp_path):
    monkeypatch.setenv("FARRO_TUNED_DIR", str(tmp_path))
    best = Config("pointers", False, 64, 64, 128, 128, 8, 4, 3)
    never = dataclasses.replace(best, promote=0)
    about = {"backend": "triton", "n": 4096, "k": 4096}
    rows = [
        {**about, "fast_accum": False, "m": 1024, "config": best.as_dict()},
        {**about, "fast_accum": False, "m": 1000, "config": never.as_dict()},  # not legal
        {**about, "fast_accum": False, "m": 999, "config": {"another": "version"}},
        {**about, "fast_accum": True, "m": 1000, "config": never.as_dict()},
    ]
    tuning.write(tuning.user_path("fp8_linear", "some_gpu"), "fp8_linear", "some_gpu", rows, None)
    for fast, want in ((False, best), (True, never)):
        asked = problem(1000, 4096, 4096, fast=fast)
        arch = dataclasses.replace(asked.arch, device="some_gpu")
        assert triton.config(dataclasses.replace(asked, arch=arch)) == want
        assert triton.config(asked) == triton.heuristic(asked) != want


# --- compiled without a GPU ----------------------------------------------------------------------


def meta(*shape, dtype=E4M3):
    return torch.empty(shape, dtype=dtype, device="meta")


def call_of(m, n, k, epilogue="none", fast=False):
    return Call(
        epilogue,
        meta(m, k),
        meta(n, k),
        meta(1, dtype=torch.float32) if fast else 0.5,
        meta(n, dtype=BF16) if "bias" in epilogue else None,
        meta(m, n, dtype=BF16) if "residual" in epilogue else None,
        meta(m, n, dtype=BF16),
        fast_accum=fast,
    )


def compiled(config, call, asked):
    tensors = (call.input, call.weight, call.alpha, call.bias, call.residual, call.out)
    decode = triton_configs.decodes(asked)
    launch = triton.prepare(config, *tensors, call.epilogue, call.fast_accum, decode=decode)
    capability = asked.arch.capability
    return compile_only(launch.kernel, launch.args(*tensors), launch.options, capability)


def promotes(kernel) -> bool:
    """Whether the loop adds partial sums: Triton folds a lone product's addition into the product.

    Without an epilogue no other FP32 addition is in the code.
    """
    return "add.f32" in kernel.asm["ptx"] or "add.rn.f32" in kernel.asm["ptx"]


@pytest.mark.parametrize("arch", ARCHS[1:])
def test_promotions_are_in_the_code(arch):
    call = call_of(64, 4096, 4096)
    asked = problem_of(call, arch_named(arch))
    wide = Config("pointers", True, 64, 64, 128, 128, 8, 4, 2)
    assert (triton.refuses(wide, asked) is None) == promotes(compiled(wide, call, asked))
    for block_k, promote in ((64, 128), (128, 256), (128, 512)):
        config = dataclasses.replace(wide, block_k=block_k, promote=promote, stages=1)
        assert promotes(compiled(config, call, asked)), config
    never = dataclasses.replace(wide, promote=0)
    assert not promotes(compiled(never, call, asked))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "m, epilogue, fast", [(1, "bias_gelu", False), (64, "residual", True), (1024, "none", False)]
)
def test_what_is_chosen_compiles(m, epilogue, fast, arch):
    call = call_of(m, 4096, 4096, epilogue, fast)
    asked = problem_of(call, arch_named(arch))
    config = triton.config(asked)
    kernel = compiled(config, call, asked)
    ptx = kernel.asm["ptx"]
    assert f".target sm_{asked.arch.capability[0]}" in ptx
    instruction = {
        "sm_80": "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
        "sm_90": "wgmma.mma_async",
        "sm_100": "tcgen05.mma",
    }.get(arch, "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32")
    assert instruction in ptx
    assert ("cp.async.bulk.tensor" in ptx) == (config.family == "descriptors")
    registers, stack = resources(kernel)
    assert stack <= 64, f"{config} spills {stack} bytes ({registers} registers)"
    assert kernel.metadata.shared <= triton_configs.shared_bytes(config, asked)


@pytest.mark.parametrize("arch", ARCHS)
def test_awkward_sizes_compile(arch):
    """No alignment anywhere, K no multiple of a step: it must compile, whatever the speed."""
    call = call_of(33, 77, 201, "bias_residual")
    asked = problem_of(call, arch_named(arch))
    assert compiled(triton.config(asked), call, asked).asm["cubin"]


@pytest.mark.parametrize("fast", (False, True), ids=("promoted", "fast"))
def test_candidates_on_hopper_do_not_spill(fast):
    for m in (16, 1024):
        call = call_of(m, 4096, 4096, fast=fast)
        asked = problem_of(call, arch_named("sm_90"))
        pool = sorted(triton.candidates(asked), key=lambda c: (c.block_m * c.block_n, c.promote))
        for config in pool[:: max(1, len(pool) // 3)]:
            kernel = compiled(config, call, asked)
            wide = config.block_m >= 64 and config.warps >= 4
            assert ("wgmma.mma_async" in kernel.asm["ptx"]) == wide, config
            assert promotes(kernel) == (config.promote > 0), config
            assert resources(kernel)[1] <= 64, config
            assert kernel.metadata.shared <= triton_configs.shared_bytes(config, asked), config


# --- on a GPU ------------------------------------------------------------------------------------


def operands(m, n, k, generator, device="cuda"):
    codes = [torch.randn(s, k, generator=generator).to(E4M3).to(device) for s in (m, n)]
    bias = torch.randn(n, generator=generator).to(device)
    residual = torch.randn(m, n, generator=generator).to(BF16).to(device)
    return {
        "input": codes[0], "weight": codes[1], "alpha": 0.1, "bias": bias, "residual": residual
    }  # fmt: skip


def on(given, fast):
    call = Call("bias_residual", *given.values(), given["residual"], fast_accum=fast)
    return problem_of(call)


@pytest.mark.gpu
@pytest.mark.parametrize("count", (2, pytest.param(8, marks=pytest.mark.slow)))
@pytest.mark.parametrize("fast", (False, True), ids=("promoted", "fast"))
@pytest.mark.parametrize("family", triton_configs.FAMILIES)
def test_every_family_on_a_gpu(family, fast, count, generator):
    for m, n, k in ((1, 208, 528), (60, 96, 4096), (130, 400, 1040), (300, 1008, 2048)):
        given = operands(m, n, k, generator)
        exact, magnitude = exact_linear(given, "bias_residual")
        legal = [c for c in triton.configs(on(given, fast)) if c.family == family]
        legal = [c for c in legal if c.group_m == 8]
        for config in legal[:: max(1, len(legal) // count)]:
            out = torch.full((m, n), float("nan"), dtype=BF16, device="cuda")
            triton.run(config, *given.values(), out, "bias_residual", fast)
            bound = FP8_FAST_SUM if config.promote == 0 else FP8_PROMOTED_SUM
            frobenius = 1.5e-2 if config.promote == 0 else 4e-3
            what = f"{config} {m}x{n}x{k}"
            assert_close_to_exact(out, exact, magnitude, bound, frobenius, what=what)


@pytest.mark.gpu
def test_promotion_is_what_bounds_long_sums(generator):
    """One-signed sums lose the most: promoted ones stay within 1 %, however long."""
    codes = [torch.rand(s, 16384, generator=generator).add(0.5).to(E4M3).cuda() for s in (64, 128)]
    exact = codes[0].double() @ codes[1].double().T
    for promote in (128, 256, 512):
        config = Config("descriptors", True, 64, 64, 128, promote, 8, 4, 2)
        out = torch.empty(64, 128, dtype=BF16, device="cuda")
        triton.run(config, *codes, 1.0, None, None, out, "none", False)
        assert ((out.double() - exact).abs() / exact).max() < 1e-2, promote


@pytest.mark.gpu
def test_views_and_numbers_on_a_gpu(generator):
    """Strides that need the pointers family, both forms of alpha, launches after the first."""
    for m, n, k in ((3, 1024, 1024), (100, 1000, 1001), (513, 777, 300)):
        given = operands(m, n, k, generator)
        x, weight, _, bias, residual = given.values()
        wide = torch.full((m, 2 * n + 1), float("nan"), dtype=BF16, device="cuda")
        for turn, alpha in enumerate((0.5, -1.0, torch.tensor(2.0), torch.tensor([0.25]))):
            alpha = alpha.cuda() if isinstance(alpha, torch.Tensor) else alpha
            now = {**given, "alpha": alpha}
            exact, magnitude = exact_linear(now, "bias_residual")
            for target in (residual.clone(), residual.T.contiguous().T, wide[:, 1::2]):
                target.copy_(residual)
                views = x if turn % 2 else x.T.contiguous().T
                farro.fp8_linear_bias_residual_bf16(
                    views, weight, bias, target, alpha, backend="triton"
                )
                assert_close_to_exact(target, exact, magnitude, FP8_PROMOTED_SUM)
        assert wide[:, ::2].isnan().all()


@pytest.mark.gpu
def test_pinned_tiles_on_a_gpu(generator):
    given = operands(48, 256, 512, generator)
    x, weight = given["input"], given["weight"]
    exact, magnitude = exact_linear({"input": x, "weight": weight, "alpha": 0.1}, "none")
    ran = 0
    for variant in range(1, 60):
        try:
            name = farro.select_fp8_linear_tile(48, 256, 512, variant)
        except ValueError:
            continue
        out = farro.fp8_linear_bf16(x, weight, 0.1, variant=variant)
        assert_close_to_exact(out, exact, magnitude, FP8_PROMOTED_SUM, what=name)
        assert_bit_equal(farro.fp8_linear_bf16(x, weight, 0.1, variant=variant), out, name)
        ran += 1
    assert ran > 6
