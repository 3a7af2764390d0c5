"""The harness on the CPU with tiny sizes: rows, errors, missing peers, steps, the command line."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from typer.testing import CliRunner

from farro.bench import OPERATORS, adapter, plans, results, runner, timing
from farro.bench.case import Missing, Options, Subject
from farro.bench.runner import Plan

CPU = torch.device("cpu")
TINY = {"n": 24, "k": 96}


def invoke(*arguments: str):
    from farro.cli import app

    return CliRunner().invoke(app, ["bench", *arguments])


def run(operator="int8_gemm", group="given", rows=(1, 5), shape=TINY, **options):
    found = adapter(operator)
    shape = {name: size for name, size in shape.items() if name in found.shapes["default"][0]}
    variant = found.variants[0] if found.variants else ""
    each = Options(CPU, **{"group_size": 32, "variant": variant, **options})
    session = runner.open_session(found, CPU, ["farro", "bench"], None, quick=True, rounds=1)
    listed = list(plans.cases(found, {group: (shape,)}, rows, [each]))
    return runner.run(session, listed)


def subjects(result):
    return list(dict.fromkeys(row["subject"] for row in result["rows"]))


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator_gives_rows_of_the_schema(operator, tmp_path):
    result = run(operator)
    path = tmp_path / "deep" / "result.json"
    results.save(path, result)
    assert results.load(path) == json.loads(json.dumps(result))
    assert not result["failed"]
    assert {"date", "command", "machine", "versions", "ceilings", "settings"} <= result.keys()
    assert result["versions"]["torch"] == torch.__version__
    assert result["ceilings"]["read"]["gbs"] > 0 and result["ceilings"]["copy"]["gbs"] > 0
    assert [row["m"] for row in result["rows"] if row["role"] == "floor"] == [1, 5]
    assert {"farro auto", "farro cpu"} <= set(subjects(result))
    for row in result["rows"]:
        assert row["us"] > 0 and math.isfinite(row["us"])
        if row["role"] == "floor":
            continue
        assert row["us_low"] <= row["us"] <= row["us_high"] and row["runs"] >= 5
        assert row["error"] is not None and row["error"] < 2 * adapter(operator).max_error, row
        assert row["floor_percent"] == pytest.approx(100 * row["floor_us"] / row["us"])
        if row["role"] == "farro":
            assert row["peak_bytes"] is None or row["peak_bytes"] >= 0
    text = path.read_text()
    assert "NaN" not in text and str(tmp_path) not in text


def test_the_bytes_and_operations_of_a_product():
    case = adapter("int8_gemm").build({"m": 3, **TINY}, Options(CPU, 32))
    assert case.ops == 2 * 3 * 24 * 96
    assert case.nbytes == 3 * 96 + 24 * 96 + 4 * 3 * (3 + 24) + 2 * 3 * 24
    case = adapter("int8_quantize").build({"m": 3, "k": 100}, Options(CPU, 32))
    assert case.nbytes == 2 * 300 + 300 + 4 * 3 * 4


def test_truth_is_the_product_of_the_codes():
    case = adapter("int8_gemm").build({"m": 4, "n": 7, "k": 80}, Options(CPU, 32, torch.float32))
    a, b, scale_a, scale_b = case.args
    want = torch.zeros(4, 7, dtype=torch.float64)
    for k in range(80):
        scales = scale_a[:, k // 32, None].double() * scale_b[k // 32].double()
        want += a[:, k, None].double() * b[k].double() * scales
    torch.testing.assert_close(case.truth(), want, rtol=1e-12, atol=1e-14)
    assert runner.relative_error(case.function(*case.args, **case.kwargs), want) < 1e-6


def test_a_wrong_result_shows_in_its_error_and_nan_never_passes():
    truth = torch.randn(40, 30, dtype=torch.float64)
    assert runner.relative_error(truth.float(), truth) < 1e-7
    assert runner.relative_error(truth * 1.1, truth) == pytest.approx(0.1)
    assert math.isnan(runner.relative_error(truth * math.nan, truth))
    with pytest.raises(ValueError, match="shape"):
        runner.relative_error(truth[:3], truth)


def test_missing_and_failing_peers_are_named_and_do_not_hide_the_others(monkeypatch):
    found = adapter("int8_gemm")

    def build(sizes, options):
        def boom():
            raise RuntimeError("no such kernel\nsecond line")

        case = found.build(sizes, options)
        peers = lambda: [  # noqa: E731
            Missing("absent peer", "not installed: pip install absent"),
            Subject("broken peer", "peer", boom),
            Subject("good peer", "peer", case.truth),
        ]
        return dataclasses.replace(case, peers=peers)

    session = runner.open_session(
        *(dataclasses.replace(found, build=build), CPU, [], None),
        backends=("auto",),
        quick=True,
        rounds=1,
    )
    sizes = {"m": 2, **TINY}
    result = runner.run(session, [Plan("given", sizes, Options(CPU, 32))] * 2)
    cases = ["int8_gemm M=2 N=24 K=96 G32 (given)"] * 2
    assert result["missing"] == [
        {"name": "absent peer", "reason": "not installed: pip install absent", "cases": cases},
        {"name": "broken peer", "reason": "RuntimeError: no such kernel", "cases": cases},
    ]
    assert "good peer" in subjects(result) and "broken peer" not in subjects(result)


def test_a_failure_of_farro_fails_the_run(monkeypatch):
    from farro.ops.int8_gemm import cpu

    def broken(*args):
        raise RuntimeError("planted")

    monkeypatch.setattr(cpu, "run", broken)
    monkeypatch.setattr("farro.ops.int8_gemm._RUNNERS", {})
    monkeypatch.setattr("farro.bench.case.select", lambda *a: _choice(*a))
    answer = invoke("int8_gemm", "--shapes", "17x40", "--m", "2", "--group-size", "32", "--quick")
    assert answer.exit_code == 1
    assert "planted" in answer.output + answer.stderr


def _choice(operator, problem, backend):
    from farro.dispatch import select

    select.cache_clear()
    return select(operator, problem, backend)


def test_humming_is_named_where_it_is_not_installed():
    from farro.bench.humming import humming
    from farro.bench.peers import Operands

    a = torch.ones(2, 32, dtype=torch.int8)
    scale = torch.ones(2, 1)
    operands = Operands(a, scale, a, scale.T, 32, Options(CPU, 32))
    (missing,) = humming(operands)
    assert isinstance(missing, Missing) and "humming-kernels" in missing.reason


def test_dense_sweep_tells_its_largest_step():
    rows = [
        {"set": "dense", "role": "farro", "subject": "farro auto", "m": m, "n": 8, "k": 9, "us": us}
        | {"group_size": 32, "dtype": "bfloat16"}
        for m, us in ((1, 10.0), (2, 11.0), (3, 22.0), (4, 20.0), (9, 500.0))
    ]
    (step,) = runner.steps(rows[::-1])
    assert step["largest_step"] == 2.0 and step["between"] == [2, 3] and step["us"] == [11.0, 22.0]
    result = run(group="dense", rows=(1, 2, 3))
    assert {row["subject"] for row in result["rows"]} == {"read floor", "farro auto"}
    assert result["steps"][0]["largest_step"] >= 1


def test_stops_at_its_budget_and_says_so(tmp_path):
    found = adapter("int8_quantize")
    output = tmp_path / "r.json"
    session = runner.open_session(found, CPU, [], None, quick=True, deadline=-1.0, output=output)
    result = runner.run(session, [Plan("given", {"m": 1, "k": 32}, Options(CPU, 32))])
    assert result["rows"] == [] and result["settings"]["stopped_early"] is True
    assert results.load(output)["settings"]["stopped_early"] is True


@pytest.mark.parametrize(
    ("operator", "first"),
    [
        ("nvfp4_moe", {"m": 128, "variant": "gate_up", "n": 768}),
        ("nvfp4_group_mm", {"m": 16, "variant": "w4a4", "n": 4096, "k": 7168, "e": 32}),
    ],
)
def test_a_budget_runs_the_most_telling_cases_first(operator, first, monkeypatch):
    found = adapter(operator)
    seen = []

    def run_case(session, plan):
        seen.append({**plan.sizes, "variant": plan.options.variant, "set": plan.group})
        return []

    monkeypatch.setattr(runner, "run_case", run_case)
    sets = {name: found.shapes[name] for name in ("dense", "heldout", "default")}
    options = [Options(CPU, variant=name) for name in found.variants[::-1]]
    listed = list(plans.cases(found, sets, None, options))
    session = runner.open_session(found, CPU, [], None, quick=True, deadline=math.inf)
    runner.run(session, listed)
    assert len(seen) == len(listed) and first.items() <= seen[0].items()
    assert [case["set"] for case in seen].index("dense") == sum(c["set"] != "dense" for c in seen)
    if operator == "nvfp4_moe":
        assert session.result["settings"]["routing"]["seed"] == 20261129
        assert {case["n"] for case in seen[:4]} == {768, 1536, 14336, 2048}


def test_a_shape_with_rows_of_its_own_is_taken_with_those():
    found = adapter("nvfp4_group_mm")
    sets = plans.parse_shapes(found, "default,64x96,64x96x2")
    assert sets["given"] == ({"n": 64, "k": 96}, {"n": 64, "k": 96, "e": 2})
    listed = list(plans.cases(found, {"default": sets["default"]}, None, [Options(CPU)]))
    assert len(listed) == len(sets["default"]) == 12
    assert {"e": 8, "m": 2048, "n": 28672, "k": 4096} in [plan.sizes for plan in listed]
    listed = list(plans.cases(found, {"default": sets["default"]}, (1, 2), [Options(CPU)]))
    assert [plan.sizes["m"] for plan in listed] == [1, 2] * 12


def test_cold_runs_flush_more_than_the_cache():
    """By reading: lines that were written would go back to memory during the call."""
    clock = timing.CpuTimer(cold=True)
    assert clock._flush.nbytes >= 4 * timing.cache_bytes() > 1 << 16
    read: list[int] = []

    class Watched:
        def sum(self) -> None:
            read.append(1)

    clock._flush = Watched()  # type: ignore[assignment]
    clock.few(lambda: read.append(0), 3)
    assert read == [1, 0, 1, 0, 1, 0]
    assert timing.CpuTimer()._flush.nbytes == 8


def test_peak_memory_of_a_call():
    clock = timing.CpuTimer()
    held = clock.peak_bytes(lambda: torch.ones(50_000_000, dtype=torch.int8).max())
    if held is None:
        pytest.skip("this system does not tell")
    assert 45e6 < held < 75e6
    keep = [torch.ones(100_000, dtype=torch.int8) for _ in range(300)]
    del keep  # freed, yet resident until the allocator is asked to give it back
    again = clock.peak_bytes(lambda: torch.ones(20_000_000, dtype=torch.int8).max())
    assert 18e6 < again < 45e6


def test_plans_of_sets_and_sizes():
    found = adapter("int8_gemm")
    assert plans.parse_rows("1,16,64-66") == (1, 16, 64, 65, 66)
    for text in ("", "a", "1-", "-3"):
        with pytest.raises(ValueError, match="--m"):
            plans.parse_rows(text)
    sets = plans.parse_shapes(found, "heldout,100x200,300X400")
    assert sets["heldout"] == found.shapes["heldout"]
    assert sets["given"] == ({"n": 100, "k": 200}, {"n": 300, "k": 400})
    for text in ("", "nonsense", "4096", "1x2x3"):
        with pytest.raises(ValueError, match="--shapes"):
            plans.parse_shapes(found, text)
    listed = list(plans.cases(found, sets, None, [Options(CPU, 32), Options(CPU, 64)]))
    assert len(listed) == 2 * (2 * 4 + 2 * 7)


@pytest.mark.parametrize("operator", OPERATORS)
def test_named_sets_have_rows(operator):
    found = adapter(operator)
    assert found.rows.keys() >= {"default", "heldout", "cpu", "dense"}
    own = {name for name, shapes in found.shapes.items() if all("m" in shape for shape in shapes)}
    assert found.shapes.keys() - own <= found.rows.keys() <= found.shapes.keys()
    assert found.rows["dense"] == tuple(range(1, 257))


def test_bench_prints_a_table_or_json_and_writes_plots(tmp_path):
    output, figures = tmp_path / "r.json", tmp_path / "plots"
    common = ("--n", "24", "--k", "96", "--m", "1,3", "--group-size", "32,64", "--quick")
    answer = invoke("int8_gemm", *common, "--output", str(output), "--plots", str(figures))
    assert answer.exit_code == 0, answer.output
    assert "farro cpu" in answer.output and "oneDNN BF16" in answer.output
    assert {row["group_size"] for row in results.load(output)["rows"]} == {32, 64}
    drawn = sorted(path.name for path in figures.iterdir())
    assert drawn == ["int8_gemm-24x96-g32-m.png", "int8_gemm-24x96-g64-m.png"]
    assert figures.joinpath(drawn[0]).read_bytes().startswith(b"\x89PNG")
    answer = invoke("int8_gemm", *common, "--json", "--peers", "none")
    content = json.loads(answer.stdout)
    assert content["schema"] == results.SCHEMA
    assert not any("oneDNN" in row["subject"] for row in content["rows"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("int8_gem",), "int8_gemm"),
        (("int8_gemm", "--group-size", "48"), "group_size is 48"),
        (("int8_gemm", "--group-size", "x"), "not a number"),
        (("int8_gemm", "--variant", "x"), "int8_gemm has one form"),
        (("fp8_quantize", "--variant", "1x64"), "1x128"),
        (("int8_gemm", "--dtype", "int8"), "bfloat16"),
        (("int8_gemm", "--n", "5"), "--k"),
        (("int8_gemm", "--shapes", "foo"), "heldout"),
        (("int8_gemm", "--check", "/no/such/file.json"), "file.json"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments, words):
    answer = invoke(*arguments)
    assert answer.exit_code == 2
    assert words in answer.stderr and len(answer.stderr.strip().splitlines()) == 1
