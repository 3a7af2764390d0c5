"""The FP8 quantizers in the benchmark: each kind is a variant, with rows and plots of its own."""

from __future__ import annotations

import pytest
import torch

from farro.bench import adapter, plans, plots, results, runner, table
from farro.bench.case import Missing, Options
from farro.bench.fp8_quantize import formula
from farro.formats.fp8 import KINDS, quantize
from farro.testing import assert_bit_equal

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_user_would_write_gives_the_same_codes(kind, generator):
    x = torch.randn(256, 384, generator=generator)
    for result, want in zip(formula(x, kind), quantize(x, kind)):
        assert_bit_equal(result, want)


@pytest.mark.parametrize("kind", KINDS)
def test_a_case_counts_its_bytes_and_gives_values(kind):
    case = adapter("fp8_quantize").build({"m": 130, "k": 300}, Options(CPU, variant=kind))
    scales = {"per_tensor": 1, "per_row": 130, "1x128": 390, "128x128": 6}[kind]
    assert case.nbytes == 3 * 130 * 300 + 4 * scales
    result = case.function(*case.args)
    assert runner.relative_error(case.value(result), case.truth()) < 3e-2
    operator, problem = case.problem()
    kernel = next(k for k in operator.kernels if k.backend == "cpu")
    for forced, want in zip(case.run(kernel.function(), kernel.config(problem)), result):
        assert_bit_equal(forced, want)
    (peer,) = case.peers()
    assert isinstance(peer, Missing) == (kind in ("1x128", "128x128"))


def test_variants_have_rows_steps_and_plots_of_their_own():
    found = adapter("fp8_quantize")
    session = runner.open_session(found, CPU, ["farro"], None, quick=True, rounds=1)
    options = [Options(CPU, variant=kind) for kind in ("per_row", "1x128")]
    shapes = {"given": ({"k": 256},), "dense": ({"k": 256},)}
    result = runner.run(session, list(plans.cases(found, shapes, (1, 2), options)))
    assert not result["failed"]
    assert all("group_size" not in row for row in result["rows"])
    assert len({results.key(row) for row in result["rows"] if row["set"] == "given"}) == 2 * 2 * 4
    assert [step["variant"] for step in result["steps"]] == ["per_row", "1x128"]
    names = ["256-per_row-m.png", "256-1x128-m.png", "256-per_row-dense.png", "256-1x128-dense.png"]
    assert plots.names(result) == names
    assert results.setting(result["rows"][0]) == "per_row"
    assert "form" in [column.header for column in table.table(result).columns]
