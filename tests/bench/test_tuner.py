"""farro tune on the CPU, with the CPU kernel's blocks as configurations to choose among."""

from __future__ import annotations

import dataclasses
import json
import os
import time

import pytest
import torch

import farro.ops.int8_gemm as int8_gemm
from farro import tuning
from farro.bench import adapter, builders, plans, results, tuner
from farro.bench.case import Options
from farro.ops.int8_gemm import cpu

CPU = torch.device("cpu")
SHAPE = {"n": 64, "k": 96}


def blocks(problem):
    base = cpu.config(problem)
    return [dataclasses.replace(base, columns=c, groups=g) for c in (16, 64) for g in (1, 3)]


@pytest.fixture
def tunable(monkeypatch):
    """int8_gemm with a CPU kernel that has configurations."""
    kernels = tuple(
        dataclasses.replace(k, configs=blocks) if k.backend == "cpu" else k
        for k in int8_gemm.OPERATOR.kernels
    )
    operator = dataclasses.replace(int8_gemm.OPERATOR, kernels=kernels)
    monkeypatch.setattr(int8_gemm, "OPERATOR", operator)


def make(tmp_path, said=None, **more):
    said = [] if said is None else said
    return tuner.Tuner(
        *(adapter("int8_gemm"), CPU, "cpu", tmp_path / "cpu.json"),
        jobs=0,
        deadline=time.monotonic() + 60,
        say=said.append,
        progress=lambda *a: None,
        **more,
    )


def listed(*rows):
    found = adapter("int8_gemm")
    return list(plans.cases(found, {"given": (SHAPE,)}, rows, [Options(CPU, 32)]))


def test_measures_writes_a_table_and_goes_on_where_it_stopped(tunable, tmp_path):
    said: list[str] = []
    first = make(tmp_path, said)
    entries = tuner.tune(first, listed(1, 40))
    assert [e["problem"]["m"] for e in entries] == [1, 40]
    for entry in entries:
        assert entry["measured"] == len(entry["times"]) >= 4
        assert entry["best_us"] <= entry["chosen_us"]
        assert entry["best_us"] == min(us for _, us in entry["times"][:1])
    table = json.loads(first.table.read_text())
    assert table["operator"] == "int8_gemm" and 1 <= len(table["rows"]) <= 2
    assert {"backend", "group_size", "m", "n", "k", "config"} <= table["rows"][0].keys()
    cpu.Config(**table["rows"][0]["config"])
    said.clear()
    again = tuner.tune(make(tmp_path, said), listed(1, 40, 7))
    assert "3 problems, 2 of them measured before" in said
    assert [e["problem"]["m"] for e in again] == [1, 40, 7] and again[:2] == entries
    assert len(tuner.tune(make(tmp_path, fresh=True), listed(7))) == 1


def damaged(whole):
    entry = json.loads(whole)["entries"][0]
    return {
        "truncated": whole[: len(whole) // 2],
        "empty": "",
        "text": "# notes",
        "another file": json.dumps({"rows": []}),
        "foreign entries": json.dumps({"entries": [{"us": 3}]}),
        "no list": json.dumps({"entries": {"a": 1}}),
        "numbers as text": json.dumps({"entries": [{**entry, "best_us": "3"}]}),
        "times of another form": json.dumps({"entries": [{**entry, "times": [1, 2]}]}),
        "no end": "[" * 100_000,
    }


def test_an_unreadable_log_is_an_error_and_nothing_is_lost(tunable, tmp_path):
    first = make(tmp_path)
    tuner.tune(first, listed(1, 40))
    whole, table = first.log.read_text(), first.table.read_text()
    for name, text in damaged(whole).items():
        first.log.write_text(text)
        with pytest.raises(ValueError, match=r"cannot be read as a log .*--fresh"):
            tuner.tune(make(tmp_path), listed(7))
        assert first.table.read_text() == table, name
        assert first.log.read_text() == text, name
    first.log.unlink()
    first.log.mkdir()
    with pytest.raises(ValueError, match="cannot be read as a log"):
        tuner.tune(make(tmp_path), listed(7))
    first.log.rmdir()
    first.log.write_text(whole)
    assert len(tuner.tune(make(tmp_path), listed(7))) == 3
    first.log.write_text("")
    assert len(tuner.tune(make(tmp_path, fresh=True), listed(7))) == 1


def test_a_lost_table_is_made_again_from_the_log(tunable, tmp_path):
    session = make(tmp_path)
    tuner.tune(session, listed(3))
    rows = json.loads(session.table.read_text())["rows"]
    session.table.unlink()
    tuner.tune(make(tmp_path), listed(3))
    assert json.loads(session.table.read_text())["rows"] == rows


def test_a_second_tuner_of_a_table_is_refused(tunable, tmp_path, monkeypatch):
    pytest.importorskip("fcntl")
    measure, refused = tuner._measure, []

    def beside(session, *rest):
        monkeypatch.setattr(tuner, "_measure", measure)
        with pytest.raises(ValueError, match="another farro tune is measuring") as told:
            tuner.tune(make(tmp_path, fresh=True), listed(7))
        refused.append(told.value)
        assert len(tuner.tune(make(tmp_path, keep=False), listed(7))) == 1
        assert len(tuner.tune(make(tmp_path / "another"), listed(7))) == 1
        measure(session, *rest)

    monkeypatch.setattr(tuner, "_measure", beside)
    tuner.tune(make(tmp_path), listed(3))
    assert len(refused) == 1
    assert [e["problem"]["m"] for e in tuner.tune(make(tmp_path), listed(7))] == [3, 7]


def test_files_of_two_processes_have_names_of_their_own(tunable, tmp_path, monkeypatch):
    from pathlib import Path

    replaced = []
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda s, to: (replaced.append(s.name), replace(s, to))[1])
    session = make(tmp_path)
    tuner.tune(session, listed(3))
    results.save(tmp_path / "result.json", {"rows": [{"m": 1}], "schema": 1})
    assert len(replaced) == 3 and all(f".{os.getpid()}." in name for name in replaced)
    assert not list(tmp_path.glob("*.part"))


def test_a_command_without_time_tells_of_no_table(tunable, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from farro.cli import app

    monkeypatch.setenv("FARRO_TUNED_DIR", str(tmp_path))
    given = ["tune", "--device", "cpu", "--shapes", "64x96", "--m", "1", "--group-size", "32"]
    told = CliRunner().invoke(app, [*given, "--jobs", "0", "--budget-s", "0"])
    assert told.exit_code == 0 and "time is up" in told.stderr
    assert "wrote" not in told.stdout and not list(tmp_path.rglob("cpu.json"))
    wrong = CliRunner().invoke(app, [*given, "--device", "gpu"])
    assert wrong.exit_code == 2 and "--device is 'gpu'" in wrong.stderr


def test_a_dry_run_writes_nothing(tunable, tmp_path):
    assert len(tuner.tune(make(tmp_path, keep=False), listed(3))) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_written_table_is_found_by_calls(tunable, tmp_path, monkeypatch):
    monkeypatch.setenv("FARRO_TUNED_DIR", str(tmp_path))
    session = make(tmp_path)
    session.table = tuning.user_path("int8_gemm", "cpu")
    entries = tuner.tune(session, listed(5))
    rows = tuning.table("int8_gemm", "cpu")
    exact = {"backend": "cpu", "group_size": 32}
    assert tuning.nearest(rows, exact, {"m": 6, **SHAPE}) == entries[0]["best"]


def test_a_limit_takes_a_sample_and_the_choice_of_today(tunable, tmp_path):
    (entry,) = tuner.tune(make(tmp_path, limit=2), listed(5))
    assert 2 <= entry["measured"] <= 3 and entry["chosen_us"] is not None


def test_wrong_and_failing_configurations_never_win(tunable, tmp_path, monkeypatch):
    right = cpu.run

    def run(config, a, b, scale_a, scale_b, bias, out, group_size):
        if config.columns == 16 and config.groups == 1:
            raise RuntimeError("cannot launch")
        if config.columns == 16:
            return  # unwritten, so what the check poisoned
        right(config, a, b, scale_a, scale_b, bias, out, group_size)
        if config.groups == 1:
            out[0, 0] += 1

    monkeypatch.setattr(cpu, "run", run)
    said: list[str] = []
    (entry,) = tuner.tune(make(tmp_path, said), listed(5))
    assert entry["best"]["columns"] == 64 and entry["best"]["groups"] > 1
    assert any("WRONG" in line for line in said)
    assert any("does not run" in line and "cannot launch" in line for line in said)


def test_nothing_to_tune_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="has configurations"):
        tuner.tune(make(tmp_path), listed(1))


def test_a_builder_that_dies_costs_one_task(monkeypatch):
    sizes, options = (("m", 1), ("n", 8), ("k", 32)), Options(CPU, 32)
    good = builders.Task("int8_gemm", sizes, options, "cpu", cpu.Config(1, 8, 1, False, ""))
    bad = dataclasses.replace(good, config=Dies())
    odd = dataclasses.replace(good, config=None)
    told = []
    answers = builders.build(
        [good, bad, odd, good], 1, time.monotonic() + 100, lambda done, total: told.append(done)
    )
    assert answers[0] is answers[3] is None
    assert answers[1] == "its process died"
    assert "AttributeError" in answers[2]
    assert told == [1, 2, 3, 4]
    assert builders.build([good], 1, time.monotonic() - 1, print) == {}


class Dies:
    """A configuration that ends the process that reads it."""

    def __getattr__(self, name):
        import os

        if name.startswith("__"):
            raise AttributeError(name)
        os._exit(7)


def test_variants_are_tuned_and_their_rows_found_by_calls(tmp_path, monkeypatch):
    """The FP8 quantizers have kinds and no group size; their codes err more than INT8's."""
    from farro.ops import fp8_quantize
    from farro.ops.fp8_quantize import cpu as quantizer

    def blocks_of_rows(problem):
        return [quantizer.Config(rows) for rows in (128, 256)]

    kernels = tuple(
        dataclasses.replace(k, configs=blocks_of_rows) if k.backend == "cpu" else k
        for k in fp8_quantize.OPERATOR.kernels
    )
    operator = dataclasses.replace(fp8_quantize.OPERATOR, kernels=kernels)
    monkeypatch.setattr(fp8_quantize, "OPERATOR", operator)
    found = adapter("fp8_quantize")
    session = dataclasses.replace(make(tmp_path), adapter=found)
    options = [Options(CPU, variant=kind) for kind in ("per_tensor", "128x128")]
    listed = list(plans.cases(found, {"given": ({"k": 160},)}, (300,), options))
    entries = tuner.tune(session, listed)
    assert [e["problem"]["variant"] for e in entries] == ["per_tensor", "128x128"]
    assert all("group_size" not in e["problem"] for e in entries)
    rows = json.loads(session.table.read_text())["rows"]
    assert {row["variant"] for row in rows} == {"per_tensor", "128x128"}
    for entry in entries:
        exact = {"backend": "cpu", "variant": entry["problem"]["variant"]}
        assert tuning.nearest(tuple(rows), exact, {"m": 310, "k": 160}) == entry["best"]


def test_a_table_s_configuration_is_what_a_quantizer_chooses(monkeypatch):
    from farro.arch import arch_named
    from farro.ops.fp8_quantize import triton
    from farro.problem import Problem

    x = torch.empty(1024, 4096, dtype=torch.bfloat16, device="meta")
    arch = dataclasses.replace(arch_named("sm_90"), device="some_gpu")
    problem = Problem.of("fp8_quantize", {"x": x}, {"kind": "1x128"}, arch)
    chosen = next(c for c in triton.configs(problem) if c != triton.heuristic(problem))
    row = {"backend": "triton", "variant": "1x128", "m": 1000, "k": 4096}
    illegal = {**chosen.as_dict(), "width": 64}
    rows = ({**row, "m": 1024, "config": illegal}, {**row, "config": chosen.as_dict()})
    monkeypatch.setattr(triton, "table", lambda operator, device: rows)
    assert triton.config(problem) == chosen
    other = Problem.of("fp8_quantize", {"x": x}, {"kind": "per_row"}, arch)
    assert triton.config(other) == triton.heuristic(other)
