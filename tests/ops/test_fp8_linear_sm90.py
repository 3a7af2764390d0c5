"""fp8_linear on SM90a without a GPU: its tiles that can be pinned, its choice, its launches."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farro import tuning
from farro.arch import arch_named
from farro.cuda.fp8 import configs, gemm
from farro.cuda.fp8.configs import BIAS, GELU, RESIDUAL, Config, Kind
from farro.formats.fp8 import E4M3
from farro.ops.fp8_linear import reference, sm90
from farro.problem import Problem, TensorSpec
from farro.testing import assert_bit_equal

from .native_facts import matrix, pretend

BF16 = torch.bfloat16
EPILOGUES = {
    "none": 0,
    "residual": RESIDUAL,
    "bias": BIAS,
    "bias_residual": BIAS | RESIDUAL,
    "bias_gelu": BIAS | GELU,
}
SMALL, LARGE = Config("small", 16, 64, 8, 2), Config("large", 256, 128, 4)


def problem_of(m, n, k, epilogue="none", fast=False, device=""):
    tensors = {
        "input": TensorSpec((m, k), (k, 1), E4M3),
        "weight": TensorSpec((n, k), (k, 1), E4M3),
        "alpha": None,
        "bias": TensorSpec((n,), (1,), BF16) if "bias" in epilogue else None,
        "residual": TensorSpec((m, n), (n, 1), BF16) if "residual" in epilogue else None,
        "out": TensorSpec((m, n), (n, 1), BF16),
    }
    arch = dataclasses.replace(arch_named("sm_90"), device=device)
    params = (("epilogue", epilogue), ("fast_accum", fast), ("variant", 0))
    return Problem("fp8_linear", arch, tuple(tensors.items()), params)


@pytest.mark.parametrize("fast", (False, True))
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_every_variant_is_legal(epilogue, fast):
    """For any number of rows that its grid holds: a pinned tile is refused for that alone."""
    assert len(sm90.VARIANTS) == 12
    for name, config in sm90.VARIANTS.items():
        assert name == config.name
        for m in (1, 64, 5000):
            problem = problem_of(m, 64, 64, epilogue, fast)
            assert sm90.kind_of(problem) == Kind(False, fast, EPILOGUES[epilogue])
            assert sm90.refuses(config, problem) is None, name
        tall = sm90.refuses(config, problem_of(2**23, 64, 64, epilogue, fast))
        assert (tall is None) == (config.rows * 65535 >= 2**23 or config.policy == "large")


@settings(max_examples=100, deadline=None)
@given(
    m=st.one_of(st.integers(1, 300), st.integers(1, 2**24)),
    n=st.integers(1, 2**12).map(lambda x: 16 * x),
    k=st.integers(1, 2**12).map(lambda x: 16 * x),
    epilogue=st.sampled_from(list(EPILOGUES)),
    fast=st.booleans(),
    device=st.sampled_from(["", "nvidia_h200"]),
)
def test_every_choice_is_legal(m, n, k, epilogue, fast, device):
    problem = problem_of(m, n, k, epilogue, fast, device)
    assert sm90.why_not(problem) is None and sm90.must_run(problem)
    chosen = sm90.config(problem)
    assert sm90.refuses(chosen, problem) is None
    assert chosen == sm90.config(problem_of(m, n, k, "none", fast, device))
    wanted = sm90.candidates(problem)
    assert wanted and all(sm90.refuses(c, problem) is None for c in wanted)


def test_the_tuned_table_tells_how_sums_are_made(monkeypatch, tmp_path):
    """A tile of fast sums may hold too much for promoted ones."""
    monkeypatch.setenv("FARRO_TUNED_DIR", str(tmp_path))
    wide, plain = Config("large", 128, 256, 4), Config("large", 256, 64, 5)
    near = {"backend": "cuda", "m": 1000, "n": 4096, "k": 4096}
    rows = [
        {**near, "fast_accum": True, "config": wide.as_dict()},
        {**near, "fast_accum": False, "m": 1100, "config": plain.as_dict()},
        {**near, "fast_accum": False, "config": wide.as_dict()},  # not legal
        {**near, "m": 999, "config": plain.as_dict()},  # of another version: it tells neither
    ]
    path = tuning.user_path("fp8_linear", "some_gpu")
    tuning.write(path, "fp8_linear", "some_gpu", rows, None)
    for fast, best in ((True, wide), (False, plain)):
        for epilogue in EPILOGUES:
            problem = problem_of(1000, 4096, 4096, epilogue, fast, "some_gpu")
            assert sm90.config(problem) == best, (epilogue, fast)
    rows = [
        {"backend": "auto", "fast_accum": True, "m": 1000, "config": {"backend": "triton"}},
        {"backend": "auto", "fast_accum": False, "m": 1000, "config": {"backend": "cuda"}},
    ]
    tuning.write(path, "fp8_linear", "some_gpu", [{**near, **row} for row in rows], None)
    for fast, reason in ((True, "triton is faster here by the tuned table"), (False, None)):
        assert sm90.yields(problem_of(1000, 4096, 4096, "bias", fast, "some_gpu")) == reason


def operands(m, n, k):
    return matrix(m, k, dtype=E4M3), matrix(n, k, dtype=E4M3)


@pytest.mark.parametrize("fast", (False, True))
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_what_is_launched(epilogue, fast, monkeypatch):
    pretend(monkeypatch, gemm)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(gemm.Prepared, "_launches", {})
    x, weight = operands(9, 64, 128)
    bias = torch.zeros(64) if "bias" in epilogue else None
    residual = matrix(9, 64, dtype=BF16) if "residual" in epilogue else None
    out = residual if epilogue == "bias_residual" else matrix(9, 64, dtype=BF16)
    bound = sm90.bind(SMALL)
    for alpha in (0.5, 0.25, 0.5, torch.ones(1)):
        bound(x, weight, alpha, bias, residual, out, epilogue, fast)
    launches = list(gemm.Prepared._launches.values())
    assert [launch.fired for launch in launches] == [2, 1, 1]
    kind = Kind(False, fast, EPILOGUES[epilogue])
    for launch, alpha in zip(launches, (0.5, 0.25, 1.0)):
        p = launch.parameters[-1]
        assert launch.function[:2] == gemm.kernel_name(SMALL, kind)
        assert p.alpha == alpha and bool(p.alpha_at) == (alpha == 1.0)
        assert p.out == out.data_ptr() and p.bias == (None if bias is None else bias.data_ptr())
        assert p.residual == (None if residual is None else residual.data_ptr())


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_nothing_to_sum_is_the_reference(epilogue, monkeypatch):
    monkeypatch.setattr(gemm, "prepare", None)  # nothing may be launched
    x, weight = torch.empty(3, 0, dtype=E4M3), torch.empty(16, 0, dtype=E4M3)
    bias = torch.randn(16).to(BF16) if "bias" in epilogue else None
    residual = torch.randn(3, 16).to(BF16) if "residual" in epilogue else None
    for alpha in (2.0, float("nan"), torch.tensor([3.0])):
        want = torch.empty(3, 16, dtype=BF16)
        reference.run(None, x, weight, alpha, bias, residual, want, epilogue, False)
        out = torch.full((3, 32), float("nan"), dtype=BF16)[:, ::2]
        sm90.run(LARGE, x, weight, alpha, bias, residual, out, epilogue, False)
        assert_bit_equal(out, want)
        if epilogue == "bias_residual":  # in place
            both = residual.clone()
            sm90.run(LARGE, x, weight, alpha, bias, both, both, epilogue, False)
            assert_bit_equal(both, want)


def test_nothing_to_write_needs_no_kernel(monkeypatch):
    monkeypatch.setattr(gemm, "prepare", None)
    for m, n in ((0, 16), (4, 0)):
        x, weight = torch.empty(m, 128, dtype=E4M3), torch.empty(n, 128, dtype=E4M3)
        out = torch.empty(m, n, dtype=BF16)
        sm90.run(SMALL, x, weight, 1.0, None, None, out, "none", False)


def test_tiles_that_only_fast_sums_have():
    """Promoted ones would need another accumulator."""
    for config in (Config("large", 128, 256, 3), Config("large", 128, 256, 4)):
        assert configs.refuses(config, Kind(False, True)) is None
        assert "registers" in configs.refuses(config, Kind(False))
        assert isinstance(configs.refuses(config, Kind(True)), str)


def test_results_are_staged_where_tiles_follow_each_other():
    """Where K is not long, so that a stage of the ring less costs little."""
    fast = Kind(False, True)
    assert configs.heuristic(fast, 4096, 24576, 1536) == Config("large", 128, 256, 3, staged=True)
    assert not configs.heuristic(fast, 4096, 24576, 16384).staged
    one_round = configs.heuristic(fast, 512, 4304, 1152)
    assert not one_round.staged
    for kind in (Kind(True), Kind(False)):
        assert not configs.heuristic(kind, 4096, 24576, 1536).staged
        refused = configs.refuses(Config("large", 128, 192, 4, staged=True), kind)
        assert "stages its results" in refused
