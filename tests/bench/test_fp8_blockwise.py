"""The benchmarks of 128-block FP8 products: forms, truth, and peers with stand-ins for a GPU."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from farro.bench import adapter, fp8_peers, humming
from farro.bench.case import Missing, Options, Subject
from farro.bench.fp8_blockwise_linear import VARIANTS
from farro.bench.fp8_swiglu_quantize import swiglu_quantize
from farro.bench.runner import relative_error
from farro.ops.fp8_blockwise_linear import cpu
from farro.ops.fp8_blockwise_linear.reference import product

CPU = torch.device("cpu")
SIZES = {"m": 33, "n": 160, "k": 320}


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_form_gives_the_truth(variant):
    case = adapter("fp8_blockwise_linear").build(SIZES, Options(CPU, variant=variant))
    assert relative_error(case.function(*case.args, **case.kwargs), case.truth()) < 4e-3
    _, problem = case.problem()
    forced = case.run(cpu.run, cpu.config(problem))
    assert torch.equal(forced, case.function(*case.args, **case.kwargs, backend="cpu"))
    assert (case.args[2].stride(0) == 1) == (variant == "columns")
    bias = 2 * 160 if variant in ("bias", "gelu") else 0
    assert case.nbytes == 33 * 320 + 160 * 320 + 4 * 3 * (33 + 2) + 2 * 33 * 160 + bias


@pytest.mark.parametrize("n", (256, 160))
def test_swiglu_gives_the_truth(n):
    sizes = {**SIZES, "n": n}
    case = adapter("fp8_swiglu_quantize").build(sizes, Options(CPU, variant="rows"))
    result = case.function(*case.args, **case.kwargs)
    assert 1e-2 < relative_error(case.value(result), case.truth()) < 4e-2
    operator, problem = case.problem()
    kernel = next(k for k in operator.kernels if k.backend == "cpu")
    forced = case.run(kernel.function(), kernel.config(problem))
    want = case.function(*case.args, backend="cpu")
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(forced, want))
    assert case.ops == 4 * 33 * n * 320


def test_swiglu_in_two_kernels_is_the_same():
    case = adapter("fp8_swiglu_quantize").build({**SIZES, "n": 256}, Options(CPU, variant="rows"))
    x, weight, x_scale, weight_scale = case.args
    both = product(x, weight, x_scale, weight_scale).bfloat16()  # 256 is whole blocks
    peer = case.value(swiglu_quantize(both))
    assert relative_error(peer, case.truth()) < 4e-2
    assert relative_error(peer, case.value(case.function(*case.args))) < 2e-2


def operands(m=5, n=160, k=1152, peers="default"):
    case = adapter("fp8_blockwise_linear").build(
        {"m": m, "n": n, "k": k}, Options(CPU, variant="plain", peers=peers)
    )
    return case, fp8_peers.Blocks(*case.args, case.options)


@pytest.mark.parametrize("m", (1, 5))
def test_scales_lie_as_cublas_reads_them(monkeypatch, m):
    """What torch checks: column-major scales of the input, rows of 16 bytes of the weight's."""

    def scaled_mm(a, b, *, scale_a, scale_b, out_dtype):
        assert scale_a.shape == (m, 9) and scale_a.stride() == (1, m)
        assert scale_b.T.shape == (2, 9) and scale_b.T.stride() == (12, 1)
        return product(a, b.T, scale_a, scale_b.T.contiguous()).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    case, given = operands(m)
    result = fp8_peers._cublas_blocks(given)()
    assert relative_error(result, case.truth()) < 4e-3


def test_deep_gemm_gets_the_same_codes(monkeypatch):
    case, given = operands()
    assert isinstance(fp8_peers._deep_gemm(given), Missing)  # not installed where tests run
    seen = []

    def fp8_gemm_nt(left, right, out, disable_ue8m0_cast):
        assert disable_ue8m0_cast
        out.copy_(product(left[0], right[0], left[1], right[1]))
        seen.append(left[1].stride())

    module = types.SimpleNamespace(
        fp8_gemm_nt=fp8_gemm_nt,
        get_mn_major_tma_aligned_tensor=lambda scale: scale.T.contiguous().T,
    )
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    monkeypatch.setattr(fp8_peers.importlib.util, "find_spec", lambda name: module)
    name, call = fp8_peers._deep_gemm(given)
    assert name == "DeepGEMM" and relative_error(call(), case.truth()) < 4e-3
    assert seen == [(1, 5)]


def test_an_epilogue_follows_each_product(monkeypatch):
    monkeypatch.setattr(fp8_peers, "compiled", lambda function: function)
    y, bias = torch.randn(4, 8).bfloat16(), torch.randn(8)
    plain = fp8_peers.Epilogue()
    assert [s.name for s in plain.behind([("a", lambda: y)])] == ["a"]
    behind = fp8_peers.Epilogue(bias, y, True).behind([("a", lambda: y), ("b", lambda: -y)])
    first, second = behind
    assert (first.name, second.name) == ("a, compiled epilogue", "b, compiled epilogue")
    for subject, sign in ((first, 1), (second, -1)):
        v = sign * y.double() + bias.double() + y.double()
        want = torch.nn.functional.gelu(v, approximate="tanh")
        assert relative_error(subject.call(), want) < 4e-3


def test_a_compiled_function_is_compiled_for_the_shapes_of_each_case(monkeypatch):
    from torch._dynamo import config

    calls = []
    monkeypatch.setattr(torch, "compile", lambda f, dynamic: calls.append(dynamic) or f)
    fp8_peers.compiled.cache_clear()
    with config.patch(recompile_limit=8):  # of shapes, then torch runs eagerly
        one, other = fp8_peers.compiled(abs), fp8_peers.compiled(abs)
        assert config.recompile_limit >= 1000
    fp8_peers.compiled.cache_clear()
    assert one(-1) == other(-1) == 1
    assert calls == [False]  # forms of an operator share what was compiled
    assert config.accumulated_recompile_limit >= 1000


def test_humming_gets_the_values_of_the_blocks():
    case, given = operands()
    assert given.form.label == "FP8 128-block"
    assert given.form.weight == {"dtype": "float8e4m3", "group_size": 128, "group_size_n": 128}
    want = given.x(torch.float32).double() @ given.weight(torch.float32).double().T
    assert relative_error(want, case.truth()) < 1e-6
    (missing,) = humming.humming(given)
    assert missing == Missing("Humming FP8 128-block", "not installed: pip install humming-kernels")


def test_peers_on_a_cpu():
    case = adapter("fp8_blockwise_linear").build(SIZES, Options(CPU, variant="plain"))
    (bf16,) = case.peers()
    assert isinstance(bf16, Subject) and bf16.name == "oneDNN BF16"
    assert relative_error(bf16.call(), case.truth()) < 1e-2
