"""--check finds planted regressions, --check-auto an auto that falls behind."""

from __future__ import annotations

import copy
import json

import pytest
from typer.testing import CliRunner

from farro.bench import results

ARGUMENTS = ("int8_gemm", "--n", "24", "--k", "96", "--m", "1,3", "--group-size", "32", "--quick")


def row(subject="farro auto", us=100.0, error=1e-3, role="farro", **more):
    sizes = {"m": 16, "n": 64, "k": 64, "group_size": 32, "dtype": "bfloat16", "cold": True}
    return {"subject": subject, "role": role, "us": us, "error": error, **sizes, **more}


def result(*rows, operator="int8_gemm", device="h200"):
    return {"operator": operator, "machine": {"device": device}, "rows": list(rows)}


def test_slower_than_the_margin_is_a_regression():
    before = result(row(us=100), row(m=64, us=50), row("peer", role="peer", us=10))
    now = result(row(us=109), row(m=64, us=56), row("peer", role="peer", us=99))
    lines, compared = results.regressions(now, before, 0.10)
    assert compared == 2
    assert len(lines) == 1 and "64 x 64 x 64 G32: 56.0 us, was 50.0 (1.12x)" in lines[0]
    assert results.regressions(now, before, 0.15) == ([], 2)


def test_a_larger_error_is_a_regression():
    before = result(row(error=1e-3))
    assert results.regressions(result(row(error=1.4e-3)), before, 0.1) == ([], 1)
    for error in (2e-3, None):
        lines, _ = results.regressions(result(row(error=error)), before, 0.1)
        assert len(lines) == 1 and "error" in lines[0]


def test_rows_of_other_sets_do_not_stand_for_each_other():
    """The dense sweep times sizes again, with fewer runs."""
    before = result(row(us=100, set="default"), row(us=125, set="dense"))
    now = result(row(us=130, set="default"), row(us=126, set="dense"))
    lines, compared = results.regressions(now, before, 0.1)
    assert compared == 2 and len(lines) == 1 and "130.0 us, was 100.0" in lines[0]
    rows = [row("farro auto", 120, set="default", kernel="int8_gemm.cuda")]
    rows += [row("farro triton", 100, set="default"), row("farro auto", 100, set="dense")]
    assert len(results.behind(rows)[0]) == 1


def test_a_kernel_that_is_gone_is_a_regression():
    before = result(row(), row("farro triton", 90), row("farro triton", 50, m=99))
    lines, _ = results.regressions(result(row()), before, 0.1)
    assert lines == ["farro triton at 16 x 64 x 64 G32: not measured now, was 90.0 us"]
    assert results.regressions(result(row("farro cuda")), before, 0.1) == ([], 0)


@pytest.mark.parametrize(
    ("option", "value"), [("--peers", "huming"), ("--backend", "cdua"), ("--rounds", "0")]
)
def test_wrong_names_are_refused(option, value):
    from farro.cli import app

    told = CliRunner().invoke(app, ["bench", *ARGUMENTS, option, value])
    assert told.exit_code == 2 and option in told.stderr and value in told.stderr


def test_results_of_other_machines_or_operators_do_not_compare():
    for other in (result(device="cpu"), result(operator="int8_quantize")):
        with pytest.raises(ValueError, match=r"another (machine|operator)"):
            results.regressions(result(), other, 0.1)


def test_replays_of_graphs_do_not_compare_with_calls():
    """A replay leaves out the host's share: a brief run would hide what became slower."""
    graphs = {**result(row(us=50)), "settings": {"timed": "replays of a CUDA graph of each call"}}
    calls = {**result(row(us=50)), "settings": {}}
    for now, before in ((graphs, calls), (calls, graphs)):
        with pytest.raises(ValueError, match="another way of timing"):
            results.regressions(now, before, 0.1)
    assert results.regressions(graphs, graphs, 0.1) == ([], 1)


def test_auto_behind_a_back_end():
    kernel = {"kernel": "int8_gemm.cuda"}
    rows = [
        row("farro auto", 100, **kernel),
        row("farro triton", 96),
        row("farro cuda", 104),
        row("Int8Linear forward", 1),
        row("farro auto", 106, m=3, **kernel),
        row("farro triton", 100, m=3),
    ]
    lines, compared = results.behind(rows)
    assert compared == 2
    assert len(lines) == 1 and "3 x 64 x 64" in lines[0] and "farro triton" in lines[0]
    assert "int8_gemm.cuda" in lines[0]
    assert results.behind([row("farro auto")]) == ([], 0)


def test_load_tells_what_is_wrong(tmp_path):
    for name, text, words in (
        ("a.json", "{", "not JSON"),
        ("b.json", "[]", "not a result"),
        ("c.json", '{"schema": 99, "rows": []}', "not a result"),
        ("d.json", '{"schema": 1, "rows": []}', "not a result"),
        ("e.json", json.dumps({**result(row()), "schema": 1, "rows": {}}), "not a result"),
        ("f.json", json.dumps({**result(1), "schema": 1}), "not a result"),
        ("g.json", json.dumps({**result(row(us="9")), "schema": 1}), "not a result"),
        ("h.json", json.dumps({**result(row(us=0)), "schema": 1}), "not a result"),
        ("i.json", "[" * 100_000, r"i\.json: not JSON"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=words):
            results.load(tmp_path / name)
    (tmp_path / "j.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"j\.json: not JSON"):
        results.load(tmp_path / "j.json")
    (tmp_path / "k.json").write_text(json.dumps({**result(row()), "schema": 1}))
    assert len(results.load(tmp_path / "k.json")["rows"]) == 1
    with pytest.raises(ValueError, match=r"none\.json"):
        results.load(tmp_path / "none.json")


def test_check_fails_the_command_on_a_planted_regression(tmp_path):
    from farro.cli import app

    path = tmp_path / "before.json"
    first = CliRunner().invoke(app, ["bench", *ARGUMENTS, "--output", str(path)])
    assert first.exit_code == 0, first.output
    content = json.loads(path.read_text())
    slow, fast = copy.deepcopy(content), copy.deepcopy(content)
    for entry in slow["rows"]:
        entry["us"] *= 1000
    for entry in fast["rows"]:
        entry["us"] /= 1000
    answers = {}
    for name, planted in (("slow", slow), ("fast", fast)):
        results.save(path, planted)
        answers[name] = CliRunner().invoke(
            app, ["bench", *ARGUMENTS, "--check", str(path), "--peers", "none"]
        )
    assert answers["slow"].exit_code == 0, answers["slow"].stderr
    assert "4 compared, 0 regressed" in answers["slow"].stderr
    assert answers["fast"].exit_code == 1
    assert "slower: farro auto at 1 x 24 x 96 G32" in answers["fast"].stderr
    other = CliRunner().invoke(
        app, ["bench", *ARGUMENTS[:6], "7", "--group-size", "32", "--quick", "--check", str(path)]
    )
    assert other.exit_code == 2 and "none of these measurements" in other.stderr
