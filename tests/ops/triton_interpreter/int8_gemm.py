"""The Triton int8_gemm in the interpreter: every configuration family that it can run, bit for bit.

The Gluon kernel ("ring") has no interpreter; test_int8_gemm_triton.py runs it on a GPU.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

import farro
from farro.arch import interpreting
from farro.catalogue import operator_named
from farro.ops.int8_gemm import reference, triton
from farro.ops.int8_gemm.triton import Config
from farro.testing import GemmCase, assert_bit_equal, int8_gemm_cases

from ..exact_arithmetic import gemm_element
from . import fused

pytestmark = [
    pytest.mark.skipif(not interpreting(), reason="run by run_again"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, on Inf * 0
]
# the largest cases belong to a GPU
CASES = [
    pytest.param(case, marks=() if case.quick else pytest.mark.slow)
    for case in int8_gemm_cases()
    if case.m * case.n * case.k <= 4_000_000
]
KERNEL = next(k for k in operator_named("int8_gemm").kernels if k.backend == "triton")
GROUP_SIZES = (32, 64, 128, 256)
needs_fma = pytest.mark.skipif(not fused(), reason="this interpreter's tl.fma rounds twice")

# family, swap, block_m, block_n, block_k, group_m, warps, stages
FORCED = [
    Config("pointers", False, 32, 32, 128, 8, 4, 3),
    Config("pointers", False, 16, 64, 256, 4, 2, 2),
    Config("pointers", True, 64, 16, 256, 8, 4, 4),
    Config("pointers", True, 16, 16, 512, 8, 1, 2),
    Config("pointers", True, 32, 64, 128, 16, 4, 3),
    Config("descriptors", False, 64, 32, 128, 8, 4, 3),
    Config("descriptors", True, 64, 16, 256, 8, 4, 3),
    Config("descriptors", True, 16, 32, 512, 8, 2, 2),
    Config("specialized", False, 128, 32, 128, 8, 4, 2),
    Config("specialized", True, 128, 64, 128, 4, 4, 2),
]


def seed_of(generator: torch.Generator) -> int:
    return int(torch.randint(2**31, (1,), generator=generator))


def forced(config: Config, given: dict) -> torch.Tensor:
    """What `config` writes over a poisoned output."""
    m, n = given["a"].shape[0], given["b"].shape[1]
    out = torch.full((m, n), float("nan"), dtype=given["output_dtype"])
    names = ("a", "b", "scale_a", "scale_b", "bias")
    triton.run(config, *(given[name] for name in names), out, given["group_size"])
    return out


def expected(given: dict) -> torch.Tensor:
    out = torch.empty(given["a"].shape[0], given["b"].shape[1], dtype=given["output_dtype"])
    names = ("a", "b", "scale_a", "scale_b", "bias")
    reference.run(None, *(given[name] for name in names), out, given["group_size"])
    return out


@needs_fma
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("config", FORCED, ids=str)
def test_every_family_equals_the_reference(config, group_size, generator):
    # 19 rows and 35 columns leave tails in every tile, 592 a tail in K for every group size
    other = ((512, "wide"), (16, "nonfinite"))[(FORCED.index(config) + group_size // 64) % 2]
    for k, scales in ((592, "signed"), other):
        case = GemmCase("forced", 19, 35, k, group_size, scales=scales, bias=torch.float16)
        given = case.build(seed=seed_of(generator)).arguments
        assert_bit_equal(forced(config, given), expected(given), f"k={k}")


@needs_fma
def test_rational_arithmetic(generator):
    for group_size in GROUP_SIZES:
        case = GemmCase("exact", 3, 4, 300, group_size, scales="wide", codes="extremes")
        given = case.build(seed=seed_of(generator)).arguments
        a, b = given["a"].tolist(), given["b"].T.tolist()
        sa, sb = given["scale_a"].tolist(), given["scale_b"].T.tolist()
        rows = [
            [gemm_element(a[i], b[j], sa[i], sb[j], group_size) for j in range(4)] for i in range(3)
        ]
        want = torch.tensor(rows, dtype=torch.float64).float()
        for config in (FORCED[0], FORCED[2]):
            assert_bit_equal(forced(config, given), want)


@needs_fma
def test_one_rounding_a_group():
    """Terms -1 and 4097 * fp32(1/4097) leave what only a fused multiply-add keeps."""
    given = GemmCase("telling", 5, 6, 304, 128, codes="telling").build().arguments
    for config in FORCED:
        assert (forced(config, given) == 2.0**-36).all()


@needs_fma
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(case, generator):
    if case.output is torch.bfloat16:  # the interpreter truncates where a GPU rounds
        case = dataclasses.replace(case, output=torch.float32)
    outcome = case.build(seed=seed_of(generator)).check(KERNEL)
    assert outcome.status == ("refused" if case.b == "packed" else "ok"), outcome.detail


@needs_fma
def test_any_strides(generator):
    """Strides that no other case has: every second element of everything, and rows 3 apart."""
    a = torch.randint(-128, 128, (20, 401), dtype=torch.int8, generator=generator)[::2, ::2]
    b = torch.randint(-128, 128, (402, 90), dtype=torch.int8, generator=generator)[::2, ::3]
    scale_a = torch.rand(4, 20, generator=generator).T[::2]
    scale_b = torch.rand(30, 8, generator=generator).T[::2]
    given = dict(a=a, b=b, scale_a=scale_a, scale_b=scale_b, bias=None, group_size=64)
    given["output_dtype"] = torch.float32
    want = expected(given)
    for config in FORCED[:5]:
        space = torch.full((40, 90), float("nan"))
        out = space[::4, 1::3]
        names = ("a", "b", "scale_a", "scale_b", "bias")
        triton.run(config, *(given[name] for name in names), out, 64)
        assert_bit_equal(out, want)
        assert space.isnan().sum() == space.numel() - out.numel()  # nothing else was written


@needs_fma
def test_rows_do_not_depend_on_the_batch(generator):
    case = GemmCase("batch", 130, 40, 300, 128, scales="signed")
    given = case.build(seed=seed_of(generator)).arguments
    whole = farro.int8_gemm(**given, backend="triton")
    for m in (1, 2, 17, 33, 65, 128):
        part = {**given, "a": given["a"][:m], "scale_a": given["scale_a"][:m]}
        assert_bit_equal(farro.int8_gemm(**part, backend="triton"), whole[:m])


def test_empty_k_writes_zeros_or_the_bias():
    for bias in (None, torch.arange(5.0)):
        out = torch.full((3, 5), float("nan"))
        a, b = torch.empty(3, 0, dtype=torch.int8), torch.empty(0, 5, dtype=torch.int8)
        scales = torch.empty(3, 0), torch.empty(0, 5)
        triton.run(FORCED[0], a, b, *scales, bias, out, 64)
        assert torch.equal(out, torch.zeros(3, 5) + (0 if bias is None else bias))
