"""The Triton fp8_blockwise_linear in the interpreter: every family, against exact sums.

Results are FP32 here, since the interpreter truncates BF16; the kernels convert to any dtype.
"""

from __future__ import annotations

import math

import pytest
import torch

from farro.arch import interpreting
from farro.ops.fp8_blockwise_linear import triton
from farro.ops.fp8_blockwise_linear.triton import Config
from farro.problem import Problem
from farro.testing import FP32_SUM, BlockwiseCase, assert_bit_equal, blockwise_cases
from farro.testing.compare import far_from_exact

pytestmark = [
    pytest.mark.skipif(not interpreting(), reason="run by run_again"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, on Inf * 0
]
# the interpreter takes a second for some cases; the largest ones belong to a GPU
CASES = [
    pytest.param(case, marks=() if case.quick else pytest.mark.slow)
    for case in blockwise_cases()
    if case.m * case.n * case.k <= 4_000_000
]
NAMES = ("input", "weight", "input_scale", "weight_scale", "bias")

# family, swap, block_m, block_n, block_k, group_m, warps, stages
FORCED = [
    Config("decoded", False, 32, 32, 128, 8, 4, 2),
    Config("decoded", True, 64, 16, 256, 8, 4, 4),
    Config("pointers", False, 32, 64, 64, 8, 4, 3),
    Config("pointers", True, 64, 16, 128, 8, 4, 3),
    Config("pointers", True, 16, 32, 256, 4, 1, 2),
    Config("descriptors", False, 64, 32, 128, 8, 4, 3),
    Config("descriptors", True, 128, 16, 128, 8, 4, 3),
]
forced = pytest.mark.parametrize("config", FORCED, ids=str)


def seed_of(generator: torch.Generator) -> int:
    return int(torch.randint(2**31, (1,), generator=generator))


def written_by(config: Config, arguments, out: torch.Tensor) -> torch.Tensor:
    tensors = (*(arguments[name] for name in NAMES), out)
    triton.run(config, *tensors, arguments["activation"] is not None)
    return out


def far(config: Config, call, out: torch.Tensor) -> str | None:
    """What is too far from the exact result, as FP32 sums go."""
    magnitude = call.magnitude.nan_to_num(0.0, posinf=0.0)
    got = written_by(config, call.arguments, out)
    # beside the sums: exp and division of GELU, a few units in the last place
    return far_from_exact(got, call.expected[0], magnitude, FP32_SUM, frobenius=1.0, cosine=-1.0)


@forced
def test_every_family(config, generator):
    # 19 rows and 70 columns leave tails in every tile, 208 one in the last block
    for k, scales, codes in ((208, "signed", "full"), (16, "wide", "largest")):
        case = BlockwiseCase("forced", 19, 70, k, scales=scales, codes=codes, bias=torch.float32)
        call = case.build(seed=seed_of(generator))
        assert far(config, call, torch.full((19, 70), math.nan)) is None, f"k={k}"


@forced
def test_exact_sums_have_the_same_bits_in_every_family(config, generator):
    case = BlockwiseCase("exact", 20, 140, 272, codes="small", scales="powers")
    call = case.build(seed=seed_of(generator))
    out = written_by(config, call.arguments, torch.full((20, 140), math.nan))
    assert_bit_equal(out, call.expected[0].float() + 0.0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(case, generator):
    call = case.build(seed=seed_of(generator))
    tensors = {name: call.arguments[name] for name in NAMES}
    out = torch.full((case.m, case.n), math.nan)
    if call.out is not None:  # a view of the same layout, of FP32
        out = torch.full_like(call.out.base, math.nan, dtype=torch.float32).as_strided(
            *(call.out.view.shape, call.out.view.stride(), call.out.view.storage_offset())
        )
    params = {"activation": case.activation}
    problem = Problem.of("fp8_blockwise_linear", {**tensors, "out": out}, params)
    assert triton.why_not(problem) is None
    chosen = triton.config(problem)
    assert chosen.family == "decoded" and triton.refuses(chosen, problem) is None
    assert far(chosen, call, out) is None


def test_rows_do_not_depend_on_the_batch(generator):
    """In one configuration, that is; NumPy's products take another order for another shape."""
    call = BlockwiseCase("batch", 70, 140, 300).build(seed=seed_of(generator))
    config = FORCED[1]
    whole = written_by(config, call.arguments, torch.empty(70, 140))
    for m in (1, 17, 65):
        part = {**call.arguments}
        part["input"], part["input_scale"] = part["input"][:m], part["input_scale"][:m]
        assert_bit_equal(written_by(config, part, torch.empty(m, 140)), whole[:m])


def test_empty_k_writes_zeros_or_the_bias():
    for bias in (None, torch.arange(5.0)):
        case = BlockwiseCase("empty", 3, 5, 0)
        arguments = {**case.build().arguments, "bias": bias}
        out = written_by(FORCED[0], arguments, torch.full((3, 5), math.nan))
        assert torch.equal(out, torch.zeros(3, 5) + (0 if bias is None else bias))
