"""Same inputs, same bits; and no row depends on the other rows.

Scenario 16: results that change with batch size or run. Scenario 5: NaN or Inf in one row.
"""

from __future__ import annotations

import math

import pytest
import torch

from farro.dispatch import explain
from farro.testing import assert_bit_equal, difference

from .samples import tensors

ROWS = (1, 2, 17, 33, 128, 257)


def _first_rows(sample, inputs, count: int):
    """The call on the first `count` rows alone, in fresh contiguous memory."""
    cut = dict(inputs)
    for name, tensor in sample.present(inputs).items():
        rows = sample.arguments[name].rows
        if rows is not None:
            cut[name] = tensor.narrow(rows, 0, count).clone(memory_format=torch.contiguous_format)
    return cut


def test_scenario_16_repeats_are_bit_equal(run, accepted, sample, kernel, device) -> None:
    for name, inputs in accepted():
        want = run(inputs)
        for repeat in range(20):
            for result, expected in zip(run(inputs), want):
                assert_bit_equal(result, expected, f"{name}, repeat {repeat}")


def test_scenario_16_batch_invariance(
    run, accepted, refused, sample, has_rows, kernel, device, exhaustive
) -> None:
    """Row 0, and every other row, has the same bits whatever the number of rows."""
    for number, (name, inputs) in enumerate(accepted(m=max(ROWS))):
        want = run(inputs)
        for count in ROWS if exhaustive or number == 0 else ((33, 1)[number % 2],):
            fewer = _first_rows(sample, inputs, count)
            if refused(fewer):
                continue
            for result, expected in zip(run(fewer), want):
                assert_bit_equal(result, expected[:count], f"{name}, {count} rows")


def test_scenario_16_no_dependence_within_a_configuration(
    run, accepted, refused, sample, has_rows, kernel, device
) -> None:
    """Inexact sums too: among the numbers of rows that `explain` gives the same configuration."""
    name, inputs = accepted(m=max(ROWS), exact=False)[0]
    results: dict[str, tuple[int, tuple[torch.Tensor, ...]]] = {}
    for count in (257, 256, 200, 150, 129, 128, 100, 64, 50, 40, 33, 20, 17, 16, 12, 9, 8, 7, 2, 1):
        fewer = _first_rows(sample, inputs, count)
        if refused(fewer):
            continue
        rows = explain(sample.function, **fewer).rows
        config = next(str(row.config) for row in rows if row.kernel == kernel.name)
        most, want = results.setdefault(config, (count, run(fewer)))
        for result, expected in zip(run(fewer), want):
            assert_bit_equal(result, expected[:count], f"{name}, {count} of {most} rows, {config}")
    assert results


def test_a_row_that_depends_on_the_batch_is_found(generator) -> None:
    """The comparison above can fail: a product summed in another order has other bits."""
    a, b = (torch.randn(64, 4096, generator=generator) for _ in range(2))
    forward, backward = torch.zeros(64, 64), torch.zeros(64, 64)
    for k in range(0, 4096, 64):
        forward += a[:, k : k + 64] @ b[:, k : k + 64].T
        backward += a[:, 4032 - k : 4096 - k] @ b[:, 4032 - k : 4096 - k].T
    assert difference(forward, backward) is not None


def _float_rows(sample, inputs) -> list[str]:
    return [
        name
        for name, tensor in sample.present(inputs).items()
        if sample.arguments[name].rows == 0 and tensor.dtype.is_floating_point
    ]


def _as(tensor: torch.Tensor, value: float) -> float:
    """E4M3 has no infinity: NaN takes its place."""
    return math.nan if tensor.dtype is torch.float8_e4m3fn else value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_scenario_05_non_finite_rows_stay_alone(
    value, run, accepted, sample, has_float_rows, takes_non_finite, kernel, device
) -> None:
    for name, inputs in accepted():
        arguments = _float_rows(sample, inputs)
        assert arguments, f"{sample.name} has no rows of floating point"
        want = run(inputs)
        count = want[0].shape[0]
        row = count // 2
        for argument in arguments:
            bad = inputs[argument].clone()
            bad[row] = _as(bad, value)
            results = run({**inputs, argument: bad})
            others = [i for i in range(count) if i != row]
            for result, expected in zip(results, want):
                assert_bit_equal(result[others], expected[others], f"{name}, {argument}")
            assert sample.shows_non_finite(tuple(r[row] for r in results)), argument


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_scenario_05_non_finite_values_agree_with_the_reference(
    value, run, accepted, sample, takes_non_finite, kernel, device, generator
) -> None:
    """One value in each floating-point argument, all over the variants."""
    for name, inputs in accepted(faithful=True):
        for argument, tensor in sample.present(inputs).items():
            if not tensor.dtype.is_floating_point or not tensor.numel():
                continue
            bad = tensor.contiguous().clone()
            place = int(torch.randint(bad.numel(), (), generator=generator))
            bad.view(-1)[place] = _as(bad, value)
            want = tensors(sample.function(**{**inputs, argument: bad}, backend="reference"))
            for result, expected in zip(run({**inputs, argument: bad}), want):
                sample.compare(result, expected, f"{name}: {argument} at {place}")
