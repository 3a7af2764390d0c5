"""The Triton fp8_swiglu_quantize in the interpreter: every family, against exact sums.

The interpreter truncates FP32 to BF16, so v may be a whole step of BF16 below the exact value.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch

from farro.arch import interpreting
from farro.catalogue import operator_named
from farro.ops.fp8_swiglu_quantize import triton
from farro.ops.fp8_swiglu_quantize.triton import Config
from farro.testing import FP32_SUM, SwigluCase, assert_bit_equal, swiglu_cases
from farro.testing.fp8_swiglu_quantize import far_from_swiglu

from ..fp8_far_gates import check_far_gates

pytestmark = [
    pytest.mark.skipif(not interpreting(), reason="run by run_again"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, on Inf * 0
]
# the interpreter takes a second for a case; the largest ones belong to a GPU
CASES = [
    pytest.param(case, marks=() if case.quick else pytest.mark.slow)
    for case in swiglu_cases()
    if case.m * case.n * case.k <= 2_000_000
]
KERNEL = next(k for k in operator_named("fp8_swiglu_quantize").kernels if k.backend == "triton")
TRUNCATED = 2.0**-7

# family, swap, tokens, block_k, group_m, warps, stages
FORCED = [
    Config("decoded", False, 32, 128, 8, 8, 2),
    Config("decoded", True, 16, 64, 8, 4, 3),
    Config("pointers", False, 16, 32, 4, 8, 2),
    Config("pointers", True, 64, 64, 8, 8, 3),
    Config("descriptors", False, 64, 128, 8, 8, 3),
    Config("descriptors", True, 32, 128, 8, 8, 4),
]
forced = pytest.mark.parametrize("config", FORCED, ids=str)


def seed_of(generator: torch.Generator) -> int:
    return int(torch.randint(2**31, (1,), generator=generator))


def written_by(config: Config, call) -> tuple[torch.Tensor, torch.Tensor]:
    """What a configuration writes over poisoned outputs."""
    given = call.arguments
    m, n = given["input"].shape[0], given["gate_up_weight"].shape[0] // 2
    q = torch.full((m, n), 0x55, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.full((m, -(-n // 128)), math.nan)
    triton.run(config, *list(given.values())[:4], q, scale)
    return q, scale


@forced
def test_every_family(config, generator):
    # 19 rows and 150 columns leave tails in every tile, 208 one in the last block
    for k, scales in ((208, "usual"), (16, "zero")):
        call = SwigluCase("forced", 19, 150, k, scales=scales).build(seed=seed_of(generator))
        found = far_from_swiglu(*written_by(config, call), *call.products, FP32_SUM, TRUNCATED)
        assert found is None, f"k={k}: {found}"


@forced
def test_far_gates(config):
    check_far_gates(functools.partial(triton.run, config), "cpu")


def test_every_family_gives_the_same_bits_where_sums_are_exact(generator):
    case = SwigluCase("exact", 20, 140, 144, codes="small", scales="powers")
    call = case.build(seed=seed_of(generator))
    want = written_by(FORCED[0], call)
    for config in FORCED[1:]:
        q, scale = written_by(config, call)
        assert_bit_equal(q, want[0], str(config))
        assert_bit_equal(scale, want[1], str(config))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(case, generator, monkeypatch):
    """As `farro verify` runs them, with room for truncation instead of rounding."""
    call = dataclasses.replace(case).build(seed=seed_of(generator))
    monkeypatch.setattr(
        "farro.testing.fp8_swiglu_quantize.far_from_swiglu",
        lambda *args: far_from_swiglu(*args, TRUNCATED),
    )
    monkeypatch.setattr("farro.testing.fp8_swiglu_quantize.codes_that_differ", lambda *args: None)
    outcome = call.check(KERNEL)
    assert outcome.status == "ok", outcome.detail


def test_rows_do_not_depend_on_the_batch(generator):
    call = SwigluCase("batch", 20, 140, 144).build(seed=seed_of(generator))
    q, scale = written_by(FORCED[1], call)
    for m in (1, 17):
        part = SwigluCase("batch", 20, 140, 144).build()
        part.inputs = {
            name: dataclasses.replace(place, view=place.view[:m] if "input" in name else place.view)
            for name, place in call.inputs.items()
        }
        fewer = written_by(FORCED[1], part)
        assert_bit_equal(fewer[0], q[:m])
        assert_bit_equal(fewer[1], scale[:m])
