"""The NVFP4 quantizers in the benchmark: right values, and kernels that a tuner can force."""

from __future__ import annotations

import pytest
import torch

from farro import nvfp4
from farro.bench import adapter, runner
from farro.bench.case import Options
from farro.bench.nvfp4_quantize import formula
from farro.testing import assert_bit_equal

CPU = torch.device("cpu")
SIZES = {"m": 5, "n": 2, "k": 96}
FORMS = [(name, v) for name in ("nvfp4_quantize", "nvfp4_scatter") for v in adapter(name).variants]


def test_what_a_user_would_write_is_near_but_for_ties(generator):
    x = torch.randn(7, 96, generator=generator).bfloat16()
    (codes, scales), (q, sf) = formula(x, torch.ones(1)), nvfp4.quant_rows(x, torch.ones(1))
    assert_bit_equal(scales, sf)
    assert (nvfp4.dequantize_act(codes, sf) - nvfp4.dequantize_act(q, sf)).abs().max() <= 1.0


@pytest.mark.parametrize("operator, variant", FORMS)
def test_a_case_gives_values_and_forces_kernels(operator, variant):
    case = adapter(operator).build(SIZES, Options(CPU, variant=variant))
    result = case.function(*case.args)
    error = runner.relative_error(case.value(result), case.truth())
    assert 0.01 < error < adapter(operator).max_error
    for peer in case.peers():
        assert runner.relative_error(peer.value(peer.call()), case.truth()) < 0.2
    known, problem = case.problem()
    kernel = next(k for k in known.kernels if k.backend == "cpu")
    forced = case.run(kernel.function(), kernel.config(problem))
    assert torch.equal(case.value(forced), case.value(result))
    assert_bit_equal(forced[1], result[1])
    assert case.nbytes > sum(t.nbytes for t in case.args if isinstance(t, torch.Tensor)) / 4
