"""A row of a tuned table that is broken anywhere is passed over by every operator's choice.

Tables are files that people copy, edit and share: junk in one may cost its row, never a call.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from typing import Any

import pytest
import torch

from farro import dispatch, tuning
from farro.arch import arch_named
from farro.dispatch import Kernel
from farro.problem import Problem

from .contract.samples import SAMPLES

DEVICE = "a_chip"
JUNK = (
    *(None, True, False, -1, 0, 3, 7, 2**31, 2**62, 2**64, 10**400, -(10**400)),
    *(1.5, 16.0, 1e300, float("nan"), float("inf"), float("-inf")),
    *("", "16", "nonsense", "cuda", [], [[]], [16], {}, {"a": 1}, {"backend": []}),
)
# fields for which some small numbers of the list above are as good as any other
RIGHT = {
    **{name: (3, 7) for name in ("stages", "raster", "group_m")},
    **{"programs": (0, 3, 7), "promote": (0,)},
}


@dataclasses.dataclass
class Found:
    """A problem of a kernel whose choice reads a table, and what it looks for there."""

    kernel: Kernel
    problem: Problem
    usual: Any  # its choice without a table
    exact: dict[str, Any]
    sizes: dict[str, int]
    rivals: dict[str, Any] | None  # what `yields` looks for, if that reads the table

    @functools.cached_property
    def other(self) -> Any:
        """A legal configuration that it does not choose by itself."""
        listed = (c for c in self.kernel.configs(self.problem) if c != self.usual)
        found = next(listed, None)
        return found or dataclasses.replace(self.usual, stages=self.usual.stages - 1)

    @property
    def row(self) -> dict[str, Any]:
        return {**self.exact, **self.sizes, "us": 1.0, "config": self.other.as_dict()}

    @property
    def model(self) -> dict[str, Any]:
        about = {"tile": list(self.other.tile), "model": [0.01, 0.0, 0.0]}
        return {**self.exact, **about, "config": self.other.as_dict()}


def _found() -> dict[str, Found]:
    """Few rows and many, of every kernel with a table, on an architecture that runs it."""
    found = {}
    asked: list[tuple[dict[str, Any], dict[str, int]]] = []

    def spy(rows, exact, sizes, legal, nearest=tuning._nearest):
        asked.append((dict(exact), dict(sizes)))
        return nearest(rows, exact, sizes, legal)

    arch = dataclasses.replace(arch_named("sm_90"), device=DEVICE)
    generator = torch.Generator().manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "_nearest", spy)
        for sample, m in itertools.product(SAMPLES, (40, 512)):
            if sample.function not in dispatch._DESCRIBERS or not sample.kernels:
                continue
            sizes = dict.fromkeys(sample.sizes, 512)
            inputs = sample.first(generator, "meta", m=m, **sizes)
            operator, problem, _ = dispatch._DESCRIBERS[sample.function](**inputs, arch=arch)
            for kernel in operator.kernels:
                asked.clear()
                usual = kernel.config(problem) if kernel.configs is not None else None
                if not asked:
                    continue
                key, named = asked[-1]
                kernel.yields(problem)
                rivals = asked[-1][0] if asked[-1][0].get("backend") == "auto" else None
                found[f"{kernel.name} {m}"] = Found(kernel, problem, usual, key, named, rivals)
    return found


FOUND = _found()
# tables of products may hold models of many rows' times
MODELLED = [n for n, f in FOUND.items() if n.endswith(" 512") and f.sizes.keys() == {"m", "n", "k"}]


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Write the user's table of an operator, as text that json reads again."""
    monkeypatch.setenv("FARRO_TUNED_DIR", str(tmp_path))

    def write(operator, *rows):
        path = tuning.user_path(operator, DEVICE)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"rows": rows}))
        tuning._read.cache_clear()

    yield write
    tuning._read.cache_clear()


def _fields(config, prefix=()):
    for name, value in config.items():
        yield (*prefix, name)
        if isinstance(value, dict):
            yield from _fields(value, (*prefix, name))


def _changed(config, path, value):
    copy = json.loads(json.dumps(config))
    at = copy
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = value
    return copy


def _right(path, value, given):
    if type(value) is not type(given):
        return False
    return isinstance(given, bool) or value == given or value in RIGHT.get(path[-1], ())


def _assert_passed_over(found, broken, written):
    """None of the rows changes the choice: all in one table, then one by one to name it."""
    written(found.problem.operator, *broken)
    if found.kernel.config(found.problem) != found.usual:
        for row in broken:
            written(found.problem.operator, row)
            assert found.kernel.config(found.problem) == found.usual, row


@pytest.mark.parametrize("name", FOUND)
def test_junk_is_passed_over(name, written):
    found = FOUND[name]
    kernel, problem, other, row = found.kernel, found.problem, found.other, found.row
    config = row["config"]
    written(problem.operator, row)
    assert kernel.config(problem) == other, "the row is not read as it is"
    broken = [{**row, "config": {**config, "newer": 1}}]
    for path in _fields(config):
        given = config
        for part in path:
            given = given[part]
        changes = (_changed(config, path, junk) for junk in JUNK if not _right(path, junk, given))
        broken += [{**row, "config": changed} for changed in changes]
    for missing in config:
        less = {k: v for k, v in config.items() if k != missing}
        if tuning.parsed(type(other), less) is None:  # others have a default
            broken.append({**row, "config": less})
    broken += [{**row, "config": junk} for junk in JUNK]
    for key, value in found.exact.items():
        broken += [{**row, key: junk} for junk in JUNK if junk != value]
    for key in found.sizes:  # but for sizes that a problem may have
        sizes = [j for j in JUNK if type(j) is int and 0 <= j < 2**63]
        broken += [{**row, key: junk} for junk in JUNK if not any(junk is j for j in sizes)]
    _assert_passed_over(found, broken, written)
    written(problem.operator, *broken, row)  # none of them hides the good one
    assert kernel.config(problem) == other


@pytest.mark.parametrize("name", MODELLED)
def test_broken_models_are_passed_over(name, written):
    found = FOUND[name]
    kernel, problem, row = found.kernel, found.problem, found.model
    written(problem.operator, row)
    modelled = kernel.config(problem)
    broken = [{**row, field: junk} for field in ("model", "tile") for junk in JUNK]
    numbers = [j for j in JUNK if type(j) in (int, float) and 0 <= j <= 1e12]
    broken += [{**row, "model": [1, j, 1]} for j in JUNK if not any(j is n for n in numbers)]
    sides = [j for j in JUNK if type(j) is int and 0 < j < 2**63]
    broken += [{**row, "tile": [64, j]} for j in JUNK if not any(j is n for n in sides)]
    _assert_passed_over(found, broken, written)
    written(problem.operator, *broken, row)
    assert kernel.config(problem) == modelled


def test_some_choices_read_models(written):
    read = []
    for name in MODELLED:
        found = FOUND[name]
        written(found.problem.operator, found.model)
        read += [name] if found.kernel.config(found.problem) == found.other else []
    assert {name.split(".")[0] for name in read} >= {"int8_gemm", "fp8_linear"}


@pytest.mark.parametrize("named", [*JUNK, "reference", "cpu"])
@pytest.mark.parametrize("name", [n for n, found in FOUND.items() if found.rivals])
def test_no_row_leaves_a_problem_to_a_back_end_that_is_none(name, named, written):
    found = FOUND[name]
    operator, row = found.problem.operator, {**found.rivals, **found.sizes}
    written(operator, {**row, "config": {"backend": named}})
    assert found.kernel.yields(found.problem) is None
    written(operator, {**row, "config": {"backend": "triton"}})
    assert "triton is faster" in found.kernel.yields(found.problem)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"rows":' * 100_000, '{"rows": ' + "9" * 5000])
def test_files_that_no_parser_ends_count_as_none(text, tmp_path, monkeypatch):
    monkeypatch.setenv("FARRO_TUNED_DIR", str(tmp_path))
    path = tuning.user_path("toy", DEVICE)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    tuning._read.cache_clear()
    assert tuning.table("toy", DEVICE) == ()
    tuning._read.cache_clear()


def test_every_operator_with_tables_is_among_them():
    tabled = {path.parts[-3] for path in tuning._OPS.glob("*/tuned/*.json")}
    assert tabled <= {found.problem.operator for found in FOUND.values()}
