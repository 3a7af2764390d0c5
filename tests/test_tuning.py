"""Tables of configurations: which applies, the nearest row, and what a damaged file does."""

from __future__ import annotations

import json

import pytest
import torch

from farro import tuning
from farro.dispatch import Kernel, Operator, select
from farro.problem import Problem


@pytest.fixture(autouse=True)
def tables(tmp_path, monkeypatch):
    """The user's directory is empty, and so is the place of the shipped tables."""
    monkeypatch.setenv("FARRO_TUNED_DIR", str(tmp_path / "user"))
    monkeypatch.setattr(tuning, "_OPS", tmp_path / "ops")
    tuning._read.cache_clear()
    yield tmp_path
    tuning._read.cache_clear()


def _row(m: int, value: int, **more: object) -> dict[str, object]:
    return {"m": m, "n": 64, "k": 64, "config": {"value": value}, **more}


def _write_shipped(rows) -> None:
    tuning.write(tuning.shipped_path("toy", "chip"), "toy", "chip", rows, {})


def _write_user(rows) -> None:
    tuning.write(tuning.user_path("toy", "chip"), "toy", "chip", rows, {})


def _nearest(m: int, **exact: object):
    return tuning.nearest(tuning.table("toy", "chip"), exact, {"m": m, "n": 64, "k": 64})


def test_no_table() -> None:
    assert tuning.table("toy", "chip") == ()
    assert _nearest(5) is None


def test_the_users_table_beats_the_shipped_one() -> None:
    _write_shipped([_row(16, 1)])
    assert _nearest(16) == {"value": 1}
    _write_user([_row(16, 2)])
    assert _nearest(16) == {"value": 2}
    assert tuning.table("toy", "another chip") == ()
    assert tuning.table("toy", "") == ()


@pytest.mark.parametrize(
    "m, value", [(0, 1), (1, 1), (3, 1), (5, 16), (16, 16), (60, 16), (70, 256), (9999, 256)]
)
def test_the_nearest_row_by_logarithms(m: int, value: int) -> None:
    _write_shipped([_row(m, m) for m in (1, 16, 256)])
    assert _nearest(m) == {"value": value}


def test_rows_must_agree_where_asked_and_be_legal() -> None:
    _write_shipped([_row(16, 1, group_size=32), _row(1024, 2, group_size=64), _row(16, 3)])
    assert _nearest(512, group_size=64) == {"value": 2}
    assert _nearest(16, group_size=64) is None  # what many rows need says nothing of few
    assert _nearest(16, group_size=128) is None
    rows = tuning.table("toy", "chip")
    legal = tuning.nearest(rows, {}, {"m": 16}, lambda config: config["value"] == 3)
    assert legal == {"value": 3}


def test_a_users_row_does_not_hide_shipped_ones_that_are_nearer() -> None:
    _write_shipped([_row(m, m) for m in (1, 64, 1024, 8192)])
    _write_user([_row(1, -1)])
    assert _nearest(1) == {"value": -1}
    assert [_nearest(m) for m in (64, 1024, 8192)] == [{"value": m} for m in (64, 1024, 8192)]


def test_a_users_models_replace_shipped_ones_of_the_same_kind() -> None:
    kept = {**_model(1, [64, 64], [1.0, 0.0, 0.0]), "group_size": 32}
    _write_shipped([_model(2, [64, 64], [1.0, 0.0, 0.0]), kept])
    _write_user([_model(3, [64, 64], [5.0, 0.0, 0.0])])
    found = tuning.table("toy", "chip")
    assert [row["config"]["value"] for row in found] == [3, 1]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        '{"rows": 3}',
        '{"other": []}',
        '{"rows": [1, {}, "x"]}',
        '{"rows": [{"config": 5}]}',
        '{"rows": [{"config": {}, "m": "16"}]}',
        '{"rows": [{"config": {}, "backend": "x", "tile": [8, 8], "model": 3}]}',
        "\x00",
    ],
)
def test_a_damaged_table_counts_as_none(text: str) -> None:
    path = tuning.user_path("toy", "chip")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert tuning.table("toy", "chip") == ()
    _write_shipped([_row(16, 1)])
    assert _nearest(16) == {"value": 1}


def test_a_table_is_written_whole(tables) -> None:
    _write_user([_row(16, 1)])
    path = tuning.user_path("toy", "chip")
    content = json.loads(path.read_text())
    assert (content["operator"], content["device"]) == ("toy", "chip")
    assert [p.name for p in path.parent.iterdir()] == ["chip.json"]


def test_a_new_table_serves_the_calls_that_follow() -> None:
    """What was decided before it was written is forgotten."""
    kernel = Kernel("toy.reference", "reference", "x:y", config=lambda problem: _nearest(16))
    operator = Operator("toy", (kernel,))
    question = Problem.of("toy", {"x": torch.empty(1)}, {})
    assert select(operator, question).config is None
    _write_user([_row(16, 1)])
    assert select(operator, question).config == {"value": 1}
    _write_user([_row(16, 2)])
    assert select(operator, question).config == {"value": 2}


# --- models of times -----------------------------------------------------------------------------

EXACT = {"backend": "fast"}


def _model(value: int, tile: list[int], model: list[float], backend: str = "fast"):
    return {"backend": backend, "tile": tile, "model": model, "config": {"value": value}}


def _sized(m: int, n: int = 64, k: int = 64) -> dict[str, int]:
    return {"m": m, "n": n, "k": k}


@pytest.mark.parametrize(
    "tile, m, n, multiprocessors, turns",
    [
        ([128, 128], 128, 128, 132, 1),
        ([128, 128], 129, 128, 1, 2),
        ([128, 128], 8192, 4096, 132, 16),  # 2048 / 132 = 15.5
        ([256, 128], 8192, 4096, 132, 8),  # 1024 / 132 = 7.8
        ([256, 128], 8192, 4096, 128, 8),
        ([64, 96], 65, 97, 3, 2),
    ],
)
def test_rounds_of_tiles(tile, m, n, multiprocessors, turns) -> None:
    assert tuning.rounds(tile, m, n, multiprocessors) == turns


def test_a_predicted_time_by_hand() -> None:
    row = _model(1, [256, 128], [1.5, 6.0, 0.25])
    # 4 of the launch, 8 rounds of 1.5 + 6 * 4.096 = 26.076, and 0.25 * 4.096 = 1.024 once
    assert tuning.predicted_us(row, 8192, 4096, 4096, 132) == pytest.approx(213.632)


def test_a_close_row_then_models_then_the_nearest_row() -> None:
    rows = (
        {**EXACT, **_row(1024, 1)},
        _model(2, [64, 64], [5.0, 0.0, 0.0]),
        _model(3, [256, 64], [9.0, 0.0, 0.0]),
    )

    def chosen(m: int, table=rows, legal=lambda config: True, multiprocessors: int = 8):
        found = tuning.chosen(table, EXACT, _sized(m), multiprocessors, legal)
        return None if found is None else found["value"]

    assert chosen(1024) == chosen(1200) == 1  # within a quarter of a doubling
    assert chosen(512) == 2  # 8 tiles in one round
    assert chosen(1300) == 3  # 21 tiles in 3 rounds of 5, or 6 in one of 9
    assert chosen(1300, multiprocessors=32) == 2
    assert chosen(1300, legal=lambda config: config["value"] != 3) == 2
    assert chosen(512, rows[:1]) == 1  # no model
    for m, near in ((512, False), (1200, True)):  # a heuristic is asked before a far row
        found = tuning.chosen(rows[:1], EXACT, _sized(m), 8, far=False)
        assert (found is not None) == near
    assert chosen(512, legal=lambda config: config["value"] == 1) == 1  # none that is legal
    few = ({**EXACT, **_row(16, 4)}, *rows)
    assert chosen(64, few) == chosen(1, few) == 4  # few rows: bytes, not rounds
    assert chosen(64) is chosen(1) is None
    assert chosen(1300, ()) is None
    assert chosen(64, rows[1:]) is None  # models are for many rows
    assert tuning.chosen(rows, {"backend": "other"}, _sized(512), 8) is None
    assert tuning.nearest(rows[1:], EXACT, _sized(512)) is None  # a model is no row


def test_the_fastest_by_models() -> None:
    rows = (_model(2, [64, 64], [5.0, 0.0, 0.0]), _model(3, [256, 64], [9.0, 0.0, 0.0]))
    assert tuning.fastest(rows, EXACT, _sized(1300), 8) == ({"value": 3}, 13.0)
    assert tuning.fastest(rows, EXACT, _sized(512), 8) == ({"value": 2}, 9.0)
    assert tuning.fastest(rows, {"backend": "other"}, _sized(512), 8) is None
    assert tuning.fastest(({**EXACT, **_row(512, 1)},), EXACT, _sized(512), 8) is None


def test_the_preferred_back_end() -> None:
    auto = {"backend": "auto", "m": 1024, "n": 64, "k": 64, "config": {"backend": "near"}}
    slow, fast = (
        _model(1, [64, 64], [9.0, 0.0, 0.0], "slow"),
        _model(2, [64, 64], [5.0, 0.0, 0.0], "fast"),
    )

    def preferred(m: int, *rows, fits=lambda config: True):
        legal = {"slow": lambda config: True, "fast": fits}
        return tuning.preferred(rows, {}, _sized(m), 8, legal, ("near",))

    assert preferred(1024, auto, slow, fast) == "near"
    assert preferred(512, auto, slow, fast) == "fast"
    assert preferred(512, auto, fast) == "near"  # nothing to compare it with
    assert preferred(64, {**auto, "m": 16}, slow, fast) == "near"
    assert preferred(64, auto, slow, fast) is None
    assert preferred(512, slow, fast) == "fast"
    assert preferred(512, slow, fast, fits=lambda config: False) is None  # it cannot run it
    assert preferred(512, fast) is preferred(64, slow, fast) is preferred(64) is None
    strange = {**auto, "config": {"value": 3}}
    assert preferred(1024, strange) is None


GOOD = _model(1, [64, 64], [1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    "change",
    [
        *({"model": m} for m in (3, [], [1.0, 2.0], [1.0, 2.0, 3.0, 4.0], ["1", 2.0, 3.0], None)),
        *({"model": m} for m in ([1.0, 2.0, float("nan")], [1.0, 2.0, float("inf")])),
        *({"tile": t} for t in (None, 64, [64], [64, 64, 64], [64, "64"], [0, 64], [64, -8])),
        *({"tile": [64, 64.0]}, {"backend": None}, {"backend": 3}, {"config": None}),
    ],
    ids=str,
)
def test_malformed_models_are_passed_over(change) -> None:
    _write_user([{**GOOD, **change}, _row(1024, 7, **EXACT)])
    rows = tuning.table("toy", "chip")
    assert len(rows) == 1
    assert tuning.chosen(rows, EXACT, _sized(512), 8) == {"value": 7}
    assert tuning.preferred(rows, {}, _sized(512), 8, {}) is None
    _write_user([GOOD, _row(1024, 7, **EXACT)])
    assert tuning.chosen(tuning.table("toy", "chip"), EXACT, _sized(512), 8) == {"value": 1}
