"""The study of FP8 sums: its model of tensor cores, and the tables made from a small run of it."""

from __future__ import annotations

import importlib.util
import json
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def module(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture(scope="module")
def study():
    return module(ROOT / "benchmarks" / "fp8_accumulation.py")


@pytest.fixture(scope="module")
def page():
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return module(ROOT / "docs" / "fp8_numerics.py")
    finally:
        sys.path.remove(str(ROOT / "docs"))


def cut(value, unit):
    """Toward zero, in rational numbers."""
    return int(value / unit) * unit


def unit_of(value):
    unit = Fraction(1)
    while abs(value) >= unit * 2**14:
        unit *= 2
    while abs(value) < unit * 2**13:
        unit /= 2
    return unit


def by_hand(x, weight, promote):
    """The model, in rational numbers."""
    total, acc = Fraction(0), Fraction(0)
    for start in range(0, len(x), 32):
        terms = [Fraction(a) * Fraction(b) for a, b in zip(x[start : start + 32], weight[start:])]
        largest = max(map(abs, (*terms, acc)))
        if largest:
            unit = unit_of(largest)
            acc = cut(acc, unit) + sum(cut(term, unit) for term in terms)
            acc = cut(acc, unit_of(acc)) if acc else acc
        if promote and (start + 32) % promote == 0:
            total, acc = Fraction(float(torch.tensor(float(total + acc)).float())), Fraction(0)
    return float(torch.tensor(float(total + acc)).float())


@pytest.mark.parametrize("promote", (64, None))
def test_the_model_is_that_of_rational_numbers(study, promote):
    x, weight = (torch.randn(3, 128).to(torch.float8_e4m3fn).double() for _ in range(2))
    x[1], x[2, :40] = 0, 0
    found = study.tensor_core(x, weight, promote)
    for i in range(3):
        for j in range(3):
            assert found[i, j].item() == by_hand(x[i].tolist(), weight[j].tolist(), promote)


def test_the_model_is_exact_where_14_bits_hold_the_sum(study):
    x, weight = (torch.randint(-3, 4, (8, 256)).double() for _ in range(2))
    exact = x @ weight.T
    for promote in (128, None):
        assert torch.equal(study.tensor_core(x, weight, promote).double(), exact)
    scale = torch.rand(8, 8, 2)
    want = sum(
        scale[..., i].double() * (x[:, part] @ weight[:, part].T)
        for i, part in enumerate((slice(0, 128), slice(128, 256)))
    )
    found = study.tensor_core(x, weight, 128, scale)
    assert (found.double() - want).abs().max() <= 2.0**-23 * want.abs().max()


def test_what_is_cut_off_adds_up(study):
    x = torch.full((1, 8192), 1.125, dtype=torch.float64)
    exact = x @ x.T
    errors = [float(1 - study.tensor_core(x, x, p).double() / exact) for p in (128, 512, None)]
    assert 0 <= errors[0] < errors[1] < errors[2] < 1


@pytest.fixture(scope="module")
def result(study, tmp_path_factory):
    folder = tmp_path_factory.mktemp("results") / "cpu_x"
    study.main(["--output", str(folder)], lambda device: study.rows(device, (256,), 1))
    return folder


def test_rows_tell_errors_that_belong_together(study, result):
    rows = json.loads((result / "fp8_accumulation.json").read_text())["rows"]
    by = {(row["data"], row["scales"], row["way"]): row for row in rows}
    for data in study.DATA:
        rounding = by[data, "tensor", "exact, rounded to BF16"]
        assert rounding["error"] is None and rounding["quantization_error"] > 1e-3
        single = by[data, "tensor", "FP32"]
        assert single["error"] < 1e-6
        assert single["bf16_error"] == pytest.approx(rounding["bf16_error"], rel=1e-2)
        often = by[data, "tensor", "14 bits, promoted every 128"]
        never = by[data, "tensor", "14 bits, never promoted"]
        assert 1e-5 < often["error"] <= never["error"] < 1e-2
        assert by[data, "block", "farro cpu"]["source"] == "measured"
        assert by[data, "tensor", "farro cpu"]["bf16_error"] < 4e-3


def test_the_page_holds_them(page, result):
    rows = json.loads((result / "fp8_accumulation.json").read_text())["rows"]
    row = next(r for r in rows if r["way"] == "14 bits, never promoted" and r["data"] == "normal")
    text = page.modelled([result])
    assert f"{row['bf16_error']:.1e} ({row['error']:.1e})" in text
    assert "| data | K | exact, rounded to BF16 | FP32 | promoted every 128 |" in text
    measured = page.measured([result])
    assert "cpu_x, blocks of 128" in measured and "On a GPU: not measured yet." in measured
    gpu = result.parent / "chip"
    gpu.mkdir(exist_ok=True)
    (gpu / "fp8_accumulation.json").write_text((result / "fp8_accumulation.json").read_text())
    assert "not measured yet" not in page.measured([result, gpu])


def test_what_fast_accumulation_gains(page, tmp_path):
    assert page.fast([]) == page.modelled([]) == "Not measured yet.\n"
    sizes = {"subject": "farro auto", "set": "default", "m": 16, "n": 32, "k": 64}
    rows = [
        {**sizes, "variant": "default", "us": 12.0, "error": 1.7e-3},
        {**sizes, "variant": "fast", "us": 10.0, "error": 2.1e-3},
        {**sizes, "m": 17, "variant": "fast", "us": 10.0, "error": 2.1e-3},
    ]
    about = {"date": "2026-11-30T", "commit": "abc", "command": "farro bench fp8_linear"}
    about |= {"machine": {"gpu": "a GPU"}, "versions": {"torch": "2"}, "operator": "fp8_linear"}
    for name in ("chip", "cpu_x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "fp8_linear.json").write_text(json.dumps({**about, "rows": rows}))
    text = page.fast([tmp_path / "chip"])
    assert "| 16, 32, 64 | 12.0 | 10.0 | 1.20x | 1.7e-03 | 2.1e-03 |" in text and "17" not in text
    assert page.fast([tmp_path / "cpu_x"]) == "Not measured yet.\n"
