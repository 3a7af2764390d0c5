"""The Triton quantizers of NVFP4 activations in the interpreter, byte for byte."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from farro import moe, nvfp4
from farro.arch import interpreting
from farro.catalogue import operator_named
from farro.ops.nvfp4_quantize import triton, triton_configs
from farro.ops.nvfp4_quantize.triton_configs import Config
from farro.testing import CASES, assert_bit_equal

from . import fused

pytestmark = [
    pytest.mark.skipif(not interpreting(), reason="run by run_again"),
    pytest.mark.skipif(not fused(), reason="this interpreter's tl.fma rounds twice"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, on Inf * 0
]
OPERATORS = ("nvfp4_quantize", "nvfp4_scatter", "nvfp4_scatter_fp4", "nvfp4_dequantize")
# small ones of those that `farro verify --quick` runs; a GPU runs all cases
FEW = [
    (name, case)
    for name in OPERATORS
    for case in CASES[name]()
    if case.quick and case.e <= 5 and case.k <= 96 and case.layout == "contiguous"
]


CONFIGS = (Config(2, 1, 50), Config(4, 1, 1), Config(2, 1, 3), Config(8, 2, 1))


def check(operator: str, case, generator: torch.Generator) -> None:
    kernel = next(k for k in operator_named(operator).kernels if k.backend == "triton")
    seed = int(torch.randint(2**31, (1,), generator=generator))
    outcome = case.build(seed=seed).check(kernel)
    assert outcome.status == "ok", outcome.detail


@pytest.mark.parametrize("operator, case", FEW, ids=str)
def test_cases(operator, case, generator):
    check(operator, case, generator)


@pytest.mark.parametrize("operator, config", zip(OPERATORS, CONFIGS), ids=str)
def test_any_configuration(operator, config, generator):
    """Tiles that end within a row, one program for all, more programs than there is work."""
    kernel = next(k for k in operator_named(operator).kernels if k.backend == "triton")
    object.__setattr__(kernel, "config", lambda problem: config)
    try:
        functions = dict.fromkeys(case.function for case in CASES[operator]())
        for function in functions:
            case = next(c for c in CASES[operator]() if c.function == function)
            changed = dataclasses.replace(
                case, name=f"{function} {config}", k=160, cap=3, tokens=4, weights=True
            )
            check(operator, changed, generator)
    finally:
        object.__setattr__(kernel, "config", triton_configs.config)


def test_every_value_through_silu_and_the_quantizer(generator):
    """All 65536 values as gates, and as activations, in one tile after another."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    every = bits.view(torch.bfloat16).view(1, 32, 2048)
    up = torch.randn(every.shape, generator=generator).bfloat16()
    x2, one = torch.cat((every, up), -1), torch.tensor([0.37])
    counts = torch.tensor([32], dtype=torch.int32)
    got = nvfp4.silu_mul_quant_act(x2, one, counts, 0, backend="triton")
    want = nvfp4.silu_mul_quant_act(x2, one, counts, 0, backend="reference")
    for result, expected in zip(got, want):
        assert_bit_equal(result, expected)
    shuffled = every.flatten()[torch.randperm(65536, generator=generator)].view(32, 2048)
    got = nvfp4.quant_rows(shuffled, one, backend="triton")
    for result, expected in zip(got, nvfp4.quant_rows(shuffled, one, backend="reference")):
        assert_bit_equal(result, expected)


@pytest.mark.parametrize("ragged", (False, True))
def test_tokens_quantized_once(ragged, generator, monkeypatch):
    """As many tokens as make it worth two launches, which the interpreter need not wait for."""
    tokens, topk, experts, k = 7, 2, 3, 64
    x = torch.randn(tokens, k, generator=generator).bfloat16()
    ids = torch.randint(experts + 1, (tokens, topk), generator=generator)
    gscale = torch.tensor([3.0])
    if ragged:
        offsets, _, token, route = moe.dispatch_plan_ragged(ids, 0, experts)
        given = (x, token, route, None, gscale, offsets)
        function, used = nvfp4.scatter_quant_act_ragged, torch.arange(len(token)) < offsets[-1]
    else:
        counts, _, token, route = moe.dispatch_plan(ids, 0, experts, 5)
        given = (x, token, route, None, gscale, counts, 5)
        function, used = nvfp4.scatter_quant_act_planned, torch.arange(5) < counts[:, None]
    want = function(*given, backend="reference")
    for many in (0, tokens + 1):
        monkeypatch.setattr(triton, "_MANY_TOKENS", many)
        codes, scales = function(*given, backend="triton")
        assert_bit_equal(scales, want[1])
        assert_bit_equal(codes[used], want[0][used])
