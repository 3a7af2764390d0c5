"""The generated parts of docs/qsnr.md come from results of `farro qsnr`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from farro.evaluation.loading import Checkpoint, Text, Windows
from farro.evaluation.qsnr.measure import Study
from farro.evaluation.qsnr.report import as_dict
from farro.evaluation.qsnr.run import Result, Settings

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def noise_study(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    import noise_study

    yield noise_study
    for name in ("noise_study", "group_size"):
        sys.modules.pop(name, None)


@pytest.fixture
def device(tmp_path, generator) -> Path:
    """A folder of results with one study of random tensors."""
    settings = Settings(blocks=(16, 32), rotations=("none",))
    study = Study(settings.blocks, settings.rotations)
    for kind in ("weights", "inputs"):
        study.add(kind, "layer", torch.randn(50, 64, generator=generator))
    result = Result(
        settings,
        Checkpoint(tmp_path / "tiny", "BF16", "BF16 100%", 1),
        Text("words", "the rain"),
        Windows(torch.zeros(2, 8, dtype=torch.long), 2, 16, False),
        torch.device("cpu"),
        torch.bfloat16,
        study,
        "2026-01-01T00:00:00Z",
        {},
        ["a note"],
    )
    folder = tmp_path / "chip"
    folder.mkdir()
    content = as_dict(result, ["farro", "qsnr"])
    (folder / "qsnr.json").write_text(json.dumps(content))
    return folder


def test_tables_hold_what_was_measured(noise_study, device):
    text = noise_study.tables([device])
    content = json.loads((device / "qsnr.json").read_text())
    cells = {(c["of"], c["block"], c["format"], c["scale"]): c["mean_db"] for c in content["cells"]}
    assert "**tiny** (checkpoint in BF16, loaded as bfloat16)" in text and "`farro qsnr`" in text
    row = next(line for line in text.splitlines() if line.startswith("| as it is | 32 |"))
    shown = [cell.strip() for cell in row.strip("|").split("|")]
    assert shown[2] == f"{cells['weights', 32, 'int8', 'fp32']:.1f}"
    assert "- A note." in text and "40.35 and 31.50 dB; here weights" in text
    assert "| INT8, FP32 | INT8, E8M0 | FP8 E4M3, FP32 |" in text


def test_without_results_it_says_so(noise_study, tmp_path, device):
    assert "Not measured yet" in noise_study.tables([tmp_path])
    assert "not measured yet" in noise_study.plot([tmp_path], "x.png")
    noise_study.draw([tmp_path], tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()
    assert noise_study.plot([device], "x.png").endswith("](x.png)\n")
    noise_study.draw([device], tmp_path / "plots" / "x.png")
    assert (tmp_path / "plots" / "x.png").read_bytes().startswith(b"\x89PNG")
