"""Sizes where something changes: thresholds of configurations, primes, tensor-parallel shards.

Scenario 10: right at one size, wrong past a tile threshold. Scenario 9: shards that are no
multiple of 128.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from farro import dispatch
from farro.testing import assert_bit_equal

from .samples import tensors

SWEPT = 300
PRIMES = (7, 9, 577, 727, 859)
LARGE = (1023, 1024, 1025)
SHARDS = (192, 576, 10944)


def _cut(sample, inputs: dict[str, Any], count: int) -> dict[str, Any]:
    """The call on the first `count` rows, as views."""
    cut = dict(inputs)
    for name, tensor in sample.present(inputs).items():
        if sample.arguments[name].rows == 0:
            cut[name] = tensor[:count]
    return cut


def _thresholds(sample, kernel, inputs: dict[str, Any]) -> list[int]:
    """Every M in 1..SWEPT whose configuration is not that of M - 1; its reason, where refused."""
    found, before = [], None
    for m in range(1, SWEPT + 1):
        rows = dispatch.explain(sample.function, **_cut(sample, inputs, m)).rows
        row = next(row for row in rows if row.kernel == kernel.name)
        if (row.verdict, row.config) != before:
            before = (row.verdict, row.config)
            found.append(m)
    return found


@pytest.mark.parametrize("sizes", [(80, 304), (128, 512)], ids=str)
def test_scenario_10_thresholds_of_m(
    sizes, run, accepted, refused, sample, has_rows, is_forward, kernel, device
) -> None:
    """One side and the other of each threshold; rows do not depend on M, so one result serves."""
    options = dict(zip(("n", "k"), sizes))
    options = {name: size for name, size in options.items() if name in sample.sizes}
    _, inputs = accepted(m=max(LARGE), exact=True, **options)[0]
    want = tensors(sample.function(**inputs, backend="reference"))
    thresholds = _thresholds(sample, kernel, inputs)
    assert thresholds[0] == 1
    around = {m + d for m in thresholds for d in (-1, 0, 1)} - {0}
    for m in sorted(around | {*PRIMES, *LARGE}):
        cut = _cut(sample, inputs, m)
        if refused(cut):
            continue
        for result, expected in zip(run(cut), want):
            sample.compare(result, expected[:m], f"M = {m}")


def test_scenario_09_shards(
    run, accepted, sample, not_reference, kernel, device, exhaustive
) -> None:
    """Each shard size in each of the sizes, against the reference."""
    count = 3 if exhaustive else 1
    for name, size in itertools.product(sample.sizes, SHARDS):
        others = {other: 192 for other in sample.sizes if other != name}
        for variant, inputs in accepted(faithful=True, m=5, **{name: size}, **others)[:count]:
            want = tensors(sample.function(**inputs, backend="reference"))
            for result, expected in zip(run(inputs), want):
                sample.compare(result, expected, f"{variant}, {name} = {size}")


def test_each_configuration_gives_the_same_bits(
    run, accepted, sample, has_configs, cuda_only, kernel, device, generator, exhaustive
) -> None:
    """Tests can force any legal configuration; a few of those that `farro tune` would time."""
    describe, heuristic = dispatch._DESCRIBERS[sample.function], kernel.config
    sizes = {name: 1024 for name in sample.sizes}
    for name, inputs in accepted(m=200, **sizes)[:2]:
        want = run(inputs)
        legal = list(kernel.configs(describe(**inputs)[1]))
        assert legal
        for pick in torch.randperm(len(legal), generator=generator)[
            : 6 if exhaustive else 2
        ].tolist():
            dispatch.forget()
            object.__setattr__(kernel, "config", lambda problem, c=legal[pick]: c)
            try:
                results = run(inputs)
            finally:
                object.__setattr__(kernel, "config", heuristic)
            for result, expected in zip(results, want):
                assert_bit_equal(result, expected, f"{name}, {legal[pick]}")
    dispatch.forget()


def test_long_rows(run, accepted, sample, not_reference, cuda_only, kernel, device) -> None:
    """Grids end at 65535 in their second and third dimension: a size of millions of elements."""
    for size in sample.sizes:
        # multiples of 16, since every kernel takes these
        options = {**dict.fromkeys(sample.sizes, 16), size: 3_000_016, **sample.long}
        _, inputs = accepted(m=2, exact=True, **options)[0]
        want = tensors(sample.function(**inputs, backend="reference"))
        for result, expected in zip(run(inputs), want):
            sample.compare(result, expected, f"{size} = 3,000,016")
