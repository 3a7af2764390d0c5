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
    assert _nearest(16, group_size=64) == {"value": 2}
    assert _nearest(16, group_size=128) is None
    rows = tuning.table("toy", "chip")
    legal = tuning.nearest(rows, {}, {"m": 16}, lambda config: config["value"] == 2)
    assert legal == {"value": 2}


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
