"""README's table of FP8 products, from results made up for it."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def page(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    spec = importlib.util.spec_from_file_location("fp8_speed", ROOT / "docs" / "fp8_speed.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules.pop("group_size", None)
    return module


def save(folder, operator, rows):
    common = {"n": 4096, "k": 4096, "set": "default", "cold": True}
    about = {"machine": {"gpu": "a GPU"}, "versions": {"torch": "2"}, "command": "farro bench"}
    about |= {"date": "2026-11-30T", "commit": "abc", "operator": operator}
    folder.mkdir(exist_ok=True)
    rows = [{**common, "variant": v, "subject": s, "m": m, "us": us} for v, s, m, us in rows]
    (folder / f"{operator}.json").write_text(json.dumps({**about, "rows": rows}))


def test_the_best_peer_stands_beside_each_form(page, tmp_path):
    mine = "farro auto"
    linear = [
        *(("default", mine, 16, 12.0), ("default", "torch._scaled_mm precise", 16, 14.0)),
        ("default", "torch._scaled_mm fast", 16, 1.0),  # another accumulation
        *(("fast", mine, 16, 11.0), ("fast", "torch._scaled_mm fast", 16, 10.5)),
        *(("bias", mine, 16, 1.0), ("default", "farro triton", 16, 2.0)),
    ]
    blocks = [
        *(("plain", mine, 16, 13.0), ("plain", "DeepGEMM", 16, 15.0)),
        ("plain", "Humming FP8 128-block", 16, 14.5),
        ("plain", "cuBLAS BF16", 16, 1.0),
        ("plain", mine, 1, 9.0),
    ]
    for name in ("chip", "cpu_x"):
        save(tmp_path / name, "fp8_linear", linear)
        save(tmp_path / name, "fp8_blockwise_linear", blocks)
    text = page.summary([tmp_path / "chip", tmp_path / "cpu_x"])
    assert text.count("farro bench") == 2
    cells = "12.0 (torch._scaled_mm precise 14.0) | 11.0 (torch._scaled_mm fast 10.5)"
    assert f"| 16, 4096, 4096 | {cells} | 13.0 (Humming FP8 128-block 14.5) |" in text
    assert "| 1, 4096, 4096 |  |  | 9.0 |" in text
    assert text.index("| 1, 4096") < text.index("| 16, 4096")


def test_nothing_measured_is_said(page, tmp_path):
    save(tmp_path / "cpu_x", "fp8_linear", [("default", "farro auto", 16, 12.0)])
    assert page.summary([tmp_path / "cpu_x"]) == "FP8 on a GPU: not measured yet.\n"
