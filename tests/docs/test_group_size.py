"""docs/group-size.md holds what results say: a real evaluation, a real benchmark, of tiny sizes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from farro.bench import adapter, plans, results, runner
from farro.bench.case import Options

from ..evaluation.conftest import text_file, tiny_folder  # noqa: F401 (fixtures)

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("rich")


@pytest.fixture(scope="module")
def page():
    spec = importlib.util.spec_from_file_location("group_size", ROOT / "docs" / "group_size.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def evaluated(tiny_folder, text_file):  # noqa: F811
    from farro.evaluation.report import as_dict
    from farro.evaluation.run import Settings, evaluate

    small = {"windows": 2, "window_tokens": 32, "device": "cpu", "new_tokens": 2}
    schemes = ("float32", "int8-g32", "int8-g256", "fp8-row")
    settings = Settings(tiny_folder, text_file, schemes, dtype="bfloat16", **small)
    return as_dict(evaluate(settings), ["farro", "eval"])


@pytest.fixture(scope="module")
def benched():
    device = torch.device("cpu")
    found = adapter("int8_linear")
    session = runner.open_session(found, device, ["farro", "bench"], False, quick=True, rounds=1)
    options = [Options(device, 32), Options(device, 256)]
    sets = {"given": ({"n": 24, "k": 256},), "dense": ({"n": 24, "k": 256},)}
    return runner.run(session, plans.cases(found, sets, (1, 2), options))


@pytest.fixture
def device(evaluated, benched, page, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "SHAPES", ((24, 256),))
    folder = tmp_path / "cpu_x"
    results.save(folder / "linear.json", benched)
    (folder / "eval.json").write_text(json.dumps(evaluated))
    (folder / "validation.json").write_text("{}")
    return folder


def cells(text: str) -> dict[str, list[str]]:
    """Rows of the tables, by their first cell."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {row[0]: row[1:] for row in rows}


def test_accuracy_tells_each_model(page, device, evaluated):
    text = page.accuracy([device])
    assert "2 windows of 32 tokens of words.txt" in text and "`farro eval`" in text
    rows = cells(text)
    by_model = {row["model"]: row for row in evaluated["rows"]}
    names = {
        "INT8, G 32": "int8-g32",
        "INT8, G 256": "int8-g256",
        "FP8, a scale for each row": "fp8-row",
    }
    for name, model in names.items():
        row, cell = by_model[model], rows[name]
        assert cell[0] == f"{row['perplexity']:.3f}"
        assert float(cell[1]) == pytest.approx(row["kl_nats_per_token"], abs=6e-6)
        noise = row["weight_sqnr_db"], row["input_sqnr_db"]
        want = [f"{n[key]:.1f}" for n in noise for key in ("median", "worst")]
        assert cell[2:6] == want
        assert cell[6] == f"{row['layer_bytes'] / 1e6:.1f}"
    assert rows["loaded, bfloat16"][1:6] == [""] * 5
    assert rows["float32"][1] != "" and rows["float32"][2] == ""


def test_speed_tells_each_size_and_its_ratio(page, device, benched):
    text = page.speed([device])
    assert "On a GPU: not measured yet" in text and "On a CPU: not measured" not in text
    rows = cells(text)
    us = {
        (row["m"], row["group_size"]): row["us"]
        for row in benched["rows"]
        if row["subject"] == "farro auto" and row["set"] == "given"
    }

    def told(us: float) -> str:  # on a busy machine even these take a millisecond
        return f"{us:.0f}" if us >= 1000 else f"{us:.1f}"

    for m in (1, 2):
        g32, g64, _, g256, bf16 = rows[f"{m}, 24, 256"]
        assert g32 == f"{told(us[m, 32])} ({us[m, 32] / us[m, 256]:.2f}x)"
        assert g64 == "" and g256 == f"{told(us[m, 256])} (1.00x)"
        assert bf16.endswith("x)")
    assert set(rows) == {"M, N, K", "1, 24, 256", "2, 24, 256"}


def test_a_later_result_replaces_an_earlier_one(page, device, benched):
    later = {**benched, "date": "2999-01-01T00:00:00Z"}
    later["rows"] = [{**row, "us": 12345.0} for row in benched["rows"]]
    results.save(device / "again.json", later)
    assert cells(page.speed([device]))["1, 24, 256"][0] == "12345 (1.00x)"


def test_one_group_size_alone_compares_nothing(page, device, benched):
    rows = [row for row in benched["rows"] if row["group_size"] == 256]
    results.save(device / "linear.json", {**benched, "rows": rows})
    assert "On a CPU: not measured yet" in page.speed([device])


def test_nothing_measured(page, tmp_path):
    assert page.accuracy([tmp_path]).startswith("Not measured yet")
    assert page.speed([tmp_path]).count("not measured yet") == 2
    assert page.plot([tmp_path], "x.png").startswith("No plot")
    page.draw([tmp_path], tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


def test_the_plot_is_drawn(page, device, tmp_path):
    pytest.importorskip("matplotlib")
    assert "(x.png)" in page.plot([device], "x.png")
    page.draw([device], tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_markers_are_in_the_page():
    text = (ROOT / "docs" / "group-size.md").read_text()
    for name in ("accuracy", "speed", "plot"):
        assert f"<!-- generated:{name} -->" in text
