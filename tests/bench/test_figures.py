"""Figures from rows: which cases count, means, the worst point, what is met, what is told."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from farro.bench import OPERATORS, adapter, builders, figures, kept, plans, runner
from farro.bench import fp8_figures as fp8
from farro.bench.case import Missing, Options, Subject
from farro.bench.figures import Figure, Goal

CPU = torch.device("cpu")


def rows(m, us, floor=1.0, group="default", variant="fast", **sizes):
    """Rows of one case: `us` of each subject."""
    about = {"set": group, "m": m, "n": 4096, "k": 4096, "variant": variant, **sizes}
    about |= {"dtype": "bfloat16", "cold": True}
    found = [{"subject": "read floor", "role": "floor", "us": floor}]
    found += [{"subject": name, "role": "peer", "us": value} for name, value in us.items()]
    return [{**row, **about} for row in found]


def against_peer(**more):
    return Figure("peer", lambda p: figures.over(p.fastest("torch"), p.ours), **more)


def test_a_figure_has_the_mean_and_the_worst_of_its_points():
    given = [
        *rows(1, {"farro auto": 10.0, "torch a": 20.0, "torch b": 40.0, "other": 1.0}),
        *rows(2, {"farro auto": 10.0, "torch a": 5.0}),
        *rows(3, {"farro auto": 10.0}),  # no peer: no point
        *rows(4, {"farro auto": 10.0, "torch a": 1.0}, group="dense"),
    ]
    (one,) = figures.judge([against_peer(needed=Goal(1.0, 0.4), aim=Goal(worst=0.6))], given)
    assert one["points"] == 2
    assert one["mean"] == pytest.approx(1.0) and one["worst"] == 0.5
    assert one["worst_at"] == "2 x 4096 x 4096 fast"
    assert one["needed_met"] and not one["aim_met"]
    (line,) = figures.lines([one])
    assert "mean 1.000 (needed 1, aim -)" in line and "worst 0.500 (needed 0.4, aim 0.6)" in line
    assert line.endswith("needed met, aim MISSED")
    assert "stopped early" in figures.lines([one], partly=True)[0]


def test_differences_have_an_arithmetic_mean_and_less_can_be_better():
    given = [*rows(1, {"farro auto": 3.0}), *rows(2, {"farro auto": 8.0}, floor=2.0)]
    figure = Figure("over", lambda p: p.ours - p.floor, Goal(4.0), Goal(5.0, 5.0), True, "us")
    (one,) = figures.judge([figure], given)
    assert (one["mean"], one["worst"], one["needed_met"], one["aim_met"]) == (4.0, 6.0, True, False)


def test_a_figure_without_points_says_so():
    (one,) = figures.judge([against_peer()], [])
    assert one["points"] == 0 and "not measured" in figures.lines([one])[0]


def test_fp8_figures_take_the_cases_that_they_are_about():
    name = "torch._scaled_mm"
    fast, precise, compiled = f"{name} fast", f"{name} precise", ", compiled epilogue"
    given = [
        *rows(1024, {"farro auto": 10.0, fast: 9.0, precise: 11.0}),
        *rows(1024, {"farro auto": 11.0, fast: 9.0, precise: 11.0}, variant="default"),
        *rows(64, {"farro auto": 11.0, fast: 12.0, precise: 13.0}, floor=10.0),
        *rows(64, {"farro auto": 8.0, fast: 12.0}, floor=5.0, n=64),
        *rows(1024, {"farro auto": 20.0, fast: 18.0, precise: 1.0}, variant="bias_fast"),
        *rows(1024, {"farro auto": 22.0, precise + compiled: 44.0}, variant="gelu"),
    ]
    found = {one["figure"]: one for one in figures.judge(fp8.LINEAR, given)}
    assert found["fast, M >= 256, against _scaled_mm fast"]["mean"] == pytest.approx(0.9)
    assert found["default, M >= 256, against _scaled_mm precise"]["mean"] == pytest.approx(1.0)
    assert found["default, M >= 256, against _scaled_mm fast"]["mean"] == pytest.approx(9 / 11)
    large = "M <= 64, weights of 16 MB and more, "
    assert found[f"{large}time over the read floor"]["worst"] == pytest.approx(1.1)
    assert found[f"{large}against the fastest peer"]["worst"] == pytest.approx(12 / 11)
    assert found["M <= 64, smaller weights, time less the read floor"]["worst"] == 3.0
    assert found["bias, against _scaled_mm(bias=)"]["worst"] == pytest.approx(0.9)
    gelu = found["GELU or residual, against _scaled_mm and a compiled kernel"]
    assert gelu["worst"] == pytest.approx(2.0)
    assert found["bias, time over the product's alone"]["mean"] == pytest.approx(2.0)
    assert found["gelu, time over the product's alone"]["mean"] == pytest.approx(2.0)
    assert found["residual, time over the product's alone"]["points"] == 0


def test_swiglu_figures_compare_with_two_launches_and_with_the_product_alone():
    us = {"farro auto": 10.0, fp8.ALONE: 9.5, f"farro {fp8.TWO}": 14.0, f"DeepGEMM {fp8.TWO}": 12.0}
    given = rows(1, us, variant="rows", n=1024, k=2048)
    found = [one["worst"] for one in figures.judge(fp8.SWIGLU, given)]
    assert found == [pytest.approx(v) for v in (10 / 9.5, 1.4, 1.4, 1.2)]


@pytest.mark.parametrize("operator", OPERATORS)
def test_figures_of_an_operator_have_names_of_their_own(operator):
    names = [figure.name for figure in adapter(operator).figures]
    assert len(set(names)) == len(names)


def test_a_brief_run_leaves_out_what_ranks_behind_and_judges_its_rows():
    found = adapter("fp8_linear")
    each = [Options(CPU, variant=name, peers="none") for name in ("fast", "gelu")]
    session = runner.open_session(
        found, CPU, [], None, backends=("cpu",), rounds=1, quick=True, brief=True
    )
    listed = plans.cases(found, {"given": ({"n": 32, "k": 128},)}, (2, 64), each)
    result = runner.run(session, listed)
    ours = [(row["variant"], row["m"]) for row in result["rows"] if row["role"] == "farro"]
    assert ours == [("fast", 64), ("fast", 2), ("gelu", 64)]
    assert len(result["figures"]) == len(fp8.LINEAR)


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator_has_brief_cases(operator):
    found = adapter(operator)
    forms = found.variants or (None,)
    for form in forms[:1]:
        for shape in found.shapes["default"]:
            rows = [shape["m"]] if "m" in shape else found.rows["default"]
            ranks = [found.rank({**shape, "m": m}, Options(CPU, variant=form)) for m in rows]
            assert min(ranks) <= found.telling


def test_everything_runs_all_subjects_and_names_those_that_fail(monkeypatch):
    ran = []

    def fails():
        raise ZeroDivisionError("no")

    case = dataclasses.replace(
        adapter("fp8_linear").build({"m": 2, "n": 32, "k": 128}, Options(CPU, variant="fast")),
        peers=lambda: [
            Missing("a", "is not installed"),
            Subject("b", "peer", fails),
            Subject("c", "peer", lambda: ran.append("c")),
        ],
    )
    fake = dataclasses.replace(adapter("fp8_linear"), build=lambda sizes, options: case)
    monkeypatch.setattr(builders, "adapter", lambda operator: fake)
    kept.kept("weight", lambda: torch.zeros(1))
    tasks = runner.everything(
        fake,
        [
            runner.Plan(group, {"m": 2, "n": 32, "k": 128}, case.options)
            for group in ("default", "dense")
        ],
        ("cpu",),
    )
    (task,) = tasks
    with pytest.raises(RuntimeError, match="b: ZeroDivisionError: no"):
        builders.run_all(task)
    assert ran == ["c"] and not kept._KEPT
