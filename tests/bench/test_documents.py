"""The committed documents are what docs/generate.py writes, and what it writes from results."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path

import pytest
import torch

from farro.bench import adapter, plans, results, runner
from farro.bench.case import Options

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def generate():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def result():
    device = torch.device("cpu")
    found = adapter("int8_gemm")
    session = runner.open_session(found, device, ["farro", "bench"], True, quick=True, rounds=1)
    sets = {"given": ({"n": 24, "k": 96},), "dense": ({"n": 24, "k": 96},)}
    return runner.run(session, plans.cases(found, sets, (1, 2), [Options(device, 32)]))


def test_committed_documents_are_up_to_date(generate):
    assert generate.outdated() == [], "run `make docs` and commit what it writes"


def test_readme_holds_the_generated_tables():
    text = (ROOT / "README.md").read_text()
    for name in ("support", "performance"):
        assert f"<!-- generated:{name} -->" in text


def test_between_replaces_one_part_only(generate):
    end = "<!-- /generated -->"
    text = f"a\n<!-- generated:x -->\nold\n{end}\nb\n<!-- generated:y -->\n{end}"
    want = text.replace("old\n", "new \\1\n")
    assert generate.between(text, "x", "new \\1\n") == want
    assert generate.between(text, "z", "new") == text


def test_performance_page_of_a_result(generate, result, tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "RESULTS", tmp_path)
    results.save(tmp_path / "chip" / "int8_gemm.json", result)
    text = generate.performance()
    assert "## chip" in text and "### int8_gemm" in text
    assert "**N = 24, K = 96, G 32, bfloat16, cold caches**" in text
    head = next(line for line in text.splitlines() if line.startswith("| M |"))
    for subject in ("read floor", "farro auto", "oneDNN BF16"):
        assert f"| {subject} |" in head
    auto = next(r for r in result["rows"] if r["subject"] == "farro auto" and r["m"] == 2)
    assert f" {generate.number(auto['us'])} |" in text
    assert "the largest step between" in text
    (plot, dense) = generate.plot_names("int8_gemm", result)
    assert plot == "int8_gemm-24x96-g32-m.png" and f"(plots/chip/{plot})" in text
    assert dense == "int8_gemm-24x96-g32-dense.png"


def test_performance_page_of_problems_of_models(generate, result, tmp_path, monkeypatch):
    """One table, whatever N and K; the tables and plots of a shape leave them out."""
    content = copy.deepcopy(result)
    content["rows"] = [row for row in content["rows"] if row["set"] == "given"]
    for row in content["rows"]:
        row["set"] = "models"
        row["n"] += row["m"]
    monkeypatch.setattr(generate, "RESULTS", tmp_path)
    results.save(tmp_path / "chip" / "int8_gemm.json", content)
    text = generate.performance()
    assert "**Problems of models, G 32, bfloat16, cold caches**, microseconds:" in text
    assert "**N = " not in text and "plots/" not in text
    lines = [line for line in text.splitlines() if line.startswith("| M | N | K |")]
    assert len(lines) == 1 and "| farro auto |" in lines[0]
    auto = next(r for r in content["rows"] if r["subject"] == "farro auto" and r["m"] == 2)
    line = next(line for line in text.splitlines() if line.startswith("| 2 | 26 | 96 |"))
    assert f" {generate.number(auto['us'])} |" in line


def test_performance_page_of_experts(generate, result, tmp_path, monkeypatch):
    """One table a form with a line for each problem, whose order is not the one of measuring."""
    monkeypatch.setattr(generate, "RESULTS", tmp_path)
    content = copy.deepcopy(result)
    rows = [row for row in content["rows"] if row["set"] != "dense" and row["m"] == 1]
    layers = ((2048, 7168, 32, 16), (768, 2048, 128, 2048), (2048, 7168, 32, 1))
    content["rows"] = [
        {**row, "n": n, "k": k, "e": e, "m": m, "topk": 8, "variant": "gate_up"}
        for n, k, e, m in layers
        for row in rows
    ]
    results.save(tmp_path / "chip" / "nvfp4_moe.json", content)
    text = generate.performance()
    assert "**Layers, gate_up, bfloat16, cold caches**, microseconds:" in text
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert lines[0].startswith("| layer | M | N | K | E | read floor | farro auto |")
    starts = ("DeepSeek-V3, one rank of eight | 1 |", "DeepSeek-V3, one rank of eight | 16 |")
    for line, start in zip(lines[1:], (*starts, "Qwen3-30B-A3B | 2048 | 768 | 2048 | 128 |")):
        assert line.startswith(f"| {start}")
    assert len(lines) == 4


def test_summary_compares_with_bf16_and_the_best_scaled_peer(
    generate, result, tmp_path, monkeypatch
):
    content = copy.deepcopy(result)
    sizes = {"set": "default", "m": 16, "n": 4096, "k": 4096, "group_size": 256, "cold": True}
    common = {**sizes, "dtype": "bfloat16", "tops": 12.5, "error": 0.0}
    content["rows"] = [
        {"subject": subject, "role": role, "us": us, **common}
        for subject, role, us in (
            ("farro auto", "farro", 10.0),
            ("cuBLAS BF16", "peer", 25.0),
            ("Humming INT8 G256", "peer", 14.0),
            ("Humming INT8 G256 tuned", "peer", 12.0),
        )
    ]
    monkeypatch.setattr(generate, "RESULTS", tmp_path)
    assert "No results yet" in generate.performance_summary()
    results.save(tmp_path / "chip" / "r.json", content)
    assert "| 16, 4096, 4096 | 256 | 10.0 | 12.5 | 25.0 | 2.50x | 12.0 |" in (
        generate.performance_summary()
    )


def test_support_table_tells_what_was_validated(generate, tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "RESULTS", tmp_path)
    before = generate.support_table()
    assert "validated" not in before and "| compiles |" in before
    gpu = {"device": "cuda:0", "arch": "sm_90"}
    kernels = [
        {"kernel": "int8_gemm.triton", "device": "cuda:0", "passed": 36, "failed": 0},
        {"kernel": "int8_quantize.reference", "device": "cuda:0", "passed": 3, "failed": 2},
        {"kernel": "int8_gemm.cpu", "device": "cpu", "passed": 36, "failed": 0},
    ]
    part = {"kernel": "fp8_quantize.triton", "device": "cuda:0", "passed": 9, "failed": 0}
    kernels.insert(0, {**part, "not_run": 4})
    (tmp_path / "chip").mkdir()
    path = tmp_path / "chip" / "validation.json"
    path.write_text(json.dumps({"gpus": [gpu], "kernels": kernels}))
    table = {tuple(line.split(" | ")[:2]): line for line in generate.support_table().splitlines()}
    triton = table["| `int8_gemm`", "triton"].split(" | ")
    columns = ("| operator", "back end", *generate.ARCHS)
    assert triton[columns.index("sm_90")] == "validated (chip, 36 cases)"
    assert triton[columns.index("sm_80")] == "compiles" and triton[columns.index("cpu")] == ""
    assert "9 cases agree, 4 not run yet (chip)" in table["| `fp8_quantize`", "triton"]
    assert "2 cases fail" in table["| `int8_quantize`", "reference"]
    assert "validated" not in table["| `int8_gemm`", "cpu"]  # the host of a GPU is not named
    path.write_text(json.dumps({"gpus": [], "kernels": kernels[3:]}))
    assert "validated (chip, 36 cases)" in generate.support_table()
