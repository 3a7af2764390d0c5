"""The Triton grouped product in the interpreter."""

from __future__ import annotations

import pytest
import torch

from farro.arch import interpreting
from farro.catalogue import operator_named
from farro.ops.nvfp4_group_mm import triton
from farro.ops.nvfp4_group_mm.triton import Config
from farro.testing import GroupCase, fused_cases, group_mm_cases

pytestmark = [
    pytest.mark.skipif(not interpreting(), reason="run by run_again"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of NaN
]
KERNEL = next(k for k in operator_named("nvfp4_group_mm").kernels if k.backend == "triton")
# sums and results without rounding: the interpreter truncates BF16
EXACT = [c for c in group_mm_cases() if c.values == "exact" and c.quick and c.cap < 40]
OTHERS = [
    *("W4A4 E=3 M=160 K=352 cap=33", "wide", "wide W4A16", "nan", "nan W4A16", "counts wild"),
    *("ragged wide", "ragged counts wild", "ragged nan W4A16"),
]
CONFIGS = [Config(64, 32, 4, 1), Config(128, 16, 4, 2)]


def seed_of(generator: torch.Generator) -> int:
    return int(torch.randint(2**31, (1,), generator=generator))


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_exact_cases(case, generator):
    outcome = case.build(seed=seed_of(generator)).check(KERNEL)
    assert outcome.status == "ok", outcome.detail


def assert_truncated(call, out: torch.Tensor) -> None:
    """As `call.differs`, with twice the room: the interpreter truncates where a GPU rounds."""
    exact, magnitude, used = call._exact
    rows = out.flatten(0, -2)
    assert (rows[~used] == 7).all(), "rows that no token has were written"
    got, want = rows[used].double(), exact[used]
    room = 2.0**-7 * want.abs() + 2.0**-16 * magnitude[used].nan_to_num() + 1e-38
    same = ((got - want).abs() <= room) | (got.isnan() & want.isnan())
    assert same.all(), f"{int((~same).sum())} of {same.numel()} elements differ"


@pytest.mark.parametrize("name", OTHERS)
def test_other_cases(name, generator):
    case = next(c for c in group_mm_cases() if c.name == name)
    call = case.build(seed=seed_of(generator))
    out = call.arguments["out"]
    triton.run(triton.config(call.problem), out, *call.operands)
    assert_truncated(call, out)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_any_configuration(config, generator):
    """Rows of weights, tokens and K that leave tails in every tile; more tiles than programs."""
    for ragged, coded in ((False, True), (True, False)):
        case = GroupCase("forced", 2, 160, 160, 35, ragged, coded, values="exact")
        call = case.build(seed=seed_of(generator))
        out = call.arguments["out"]
        triton.run(config, out, *call.operands)
        assert call.differs(0, out, call.expected[0]) is None


def test_few_programs_take_all_tiles(generator, monkeypatch):
    monkeypatch.setattr(triton, "_processors", lambda index: 1)
    call = GroupCase("few", 2, 96, 64, 20, values="exact").build(seed=seed_of(generator))
    grid = triton.prepare(Config(64, 16, 4, 1), call.arguments["out"], *call.operands)[1]
    assert grid[0] == 4
    out = call.arguments["out"]
    triton.run(Config(64, 16, 4, 1), out, *call.operands)
    assert call.differs(0, out, call.expected[0]) is None


@pytest.mark.parametrize("name", ("counts wild", "halves silu 1.0 -1.0", "exact W4A16 offset"))
def test_fused_cases(name, generator):
    """Truncated BF16 is truncated alike in both."""
    case = next(c for c in fused_cases() if c.name == name)
    kernels = operator_named("nvfp4_group_mm_swiglu_quant").kernels
    kernel = next(k for k in kernels if k.backend == "triton")
    outcome = case.build(seed=seed_of(generator)).check(kernel)
    assert outcome.status == "ok", outcome.detail
