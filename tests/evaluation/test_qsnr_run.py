"""farro qsnr end to end on a tiny model: what is sampled, the report, the command line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from farro.evaluation.loading import Checkpoint, EvaluationError, load_model
from farro.evaluation.qsnr.formats import ELEMENTS, SCALES
from farro.evaluation.qsnr.measure import Cell, Study
from farro.evaluation.qsnr.plot import save_plot
from farro.evaluation.qsnr.report import (
    as_dict,
    columns,
    crossover_lines,
    lines,
    paper_line,
)
from farro.evaluation.qsnr.run import Settings, _notes, measure

from .test_qsnr import decibels_in_float64

pytest.importorskip("transformers")
BY_NAME = {element.name: element for element in ELEMENTS}
SCALE = {scale.name: scale for scale in SCALES}


@pytest.fixture(scope="module")
def settings(tiny_folder, text_file) -> Settings:
    return Settings(
        tiny_folder,
        text_file,
        blocks=(16, 32, 64),
        rotations=("none", "block"),
        rows=1000,
        windows=2,
        window_tokens=24,
        dtype="float32",
        device="cpu",
    )


@pytest.fixture(scope="module")
def result(settings):
    return measure(settings)


@pytest.fixture(scope="module")
def content(result):
    return as_dict(result, ["farro", "qsnr"])


def tensors(result, kind, **changes):
    cell = Cell(kind, BY_NAME["int8"], SCALE["fp32"], 16, "none")
    return result.study.db[dataclasses.replace(cell, **changes)]


def test_every_layer_s_weight_is_measured_whole(result, settings):
    """rows=1000 are all rows; columns are whole blocks: 32 of 48, 64 of 80."""
    model = load_model(settings.model, torch.float32, torch.device("cpu"))[0]
    for name in ("int8", "fp4"):
        found = tensors(result, "weights", element=BY_NAME[name], scale=SCALE["e8m0"], block=16)
        assert len(found) == 14 and "lm_head" not in found
        for layer, db in found.items():
            weight = model.get_submodule(layer).weight.detach()
            x = weight[:, : {48: 32, 80: 64}[weight.shape[1]]]
            want = decibels_in_float64(x, BY_NAME[name], "e8m0", 16)
            assert db == pytest.approx(want, abs=0.02)
    assert len(tensors(result, "weights", block=64)) == 2  # only down_proj is that wide


@torch.no_grad()
def test_inputs_are_those_of_the_forward_and_counted_once(result, settings):
    """q, k and v share one; gate and up another: four a layer."""
    found = tensors(result, "inputs")
    assert len(found) == 8
    assert any(name.endswith("q_proj") for name in found)
    assert not any(name.endswith(("k_proj", "v_proj", "up_proj")) for name in found)
    model = load_model(settings.model, torch.float32, torch.device("cpu"))[0]
    seen = []
    name = "model.layers.1.mlp.down_proj"
    handle = model.get_submodule(name).register_forward_pre_hook(
        lambda module, inputs: seen.append(inputs[0].flatten(0, -2))
    )
    for window in result.windows.ids:
        model(window[None], use_cache=False)
    handle.remove()
    want = decibels_in_float64(torch.cat(seen)[:, :64], BY_NAME["int8"], "fp32", 16)
    assert found[name] == pytest.approx(want, abs=0.02)


def test_rows_are_drawn_by_the_seed(settings):
    few = dataclasses.replace(
        settings, rows=4, formats=("int8",), blocks=(16,), rotations=("none",)
    )
    first, again, other = (
        tensors(measure(dataclasses.replace(few, seed=seed)), "weights") for seed in (1, 1, 2)
    )
    assert first == again != other


def test_json_is_plain_and_complete(content):
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    cells = content["cells"]
    # 3 block sizes x 2 rotations x 2 scales x 4 formats, and E4M3 for 2 of them in 2 block sizes
    assert len([c for c in cells if c["of"] == "weights"]) == 3 * 2 * 8 + 2 * 2 * 2
    assert {c["of"] for c in cells} == {"weights", "inputs"}
    assert all(c["mean_db"] >= c["worst_db"] for c in cells)
    assert {c["scale"] for c in content["by_crest"]} == {"e8m0", "fp32"}
    assert content["model"]["loaded_dtype"] == "float32" and content["notes"] == []
    assert [item["integer"] for item in content["crossover"]] == ["int8", "int4"]
    assert content["crossover"][0]["theory"] == pytest.approx(7.48, abs=0.02)


def test_tables_have_a_line_a_block_and_a_column_a_format(content):
    found = lines(content, "weights")
    assert [line[:2] for line in found[:3]] == [["as it is", b] for b in ("16", "32", "64")]
    assert len(found) == 6 and all(len(line) == 2 + len(columns(content)) for line in found)
    assert columns(content)[:4] == [
        ("int8", "fp32"),
        ("int8", "e8m0"),
        ("fp8", "fp32"),
        ("fp8", "e8m0"),
    ]
    nv = columns(content).index(("fp4", "e4m3"))
    assert found[0][2 + nv] and not found[2][2 + nv]  # not with blocks of 64
    assert "40.35 and 31.50 dB; here weights" in paper_line(content)
    assert "theory 7.48 (paper 7.55)" in crossover_lines(content)[0]


def test_a_plot_is_drawn_from_the_json(content, tmp_path):
    path = tmp_path / "qsnr.png"
    save_plot(json.loads(json.dumps(content)), path)
    first = path.read_bytes()
    assert first.startswith(b"\x89PNG")
    save_plot(content, path)
    assert path.read_bytes() == first


def test_weights_of_few_bits_are_told():
    study = Study((16,), ("none",))
    study.add("weights", "w", torch.randn(4, 16))
    quantized = Checkpoint(Path("m.gguf"), "Q4_1", "Q4_1 100%", 1)
    (note,) = _notes(quantized, study, 1, 0)
    assert "Q4_1" in note and "not those of a model" in note
    assert _notes(dataclasses.replace(quantized, precision="BF16"), study, 1, 0) == []
    (note,) = _notes(dataclasses.replace(quantized, precision="F16"), study, 3, 0)
    assert note.startswith("2 of 3 weights are not measured")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"formats": ("int8", "int9")}, "formats: 'int9'; needed some of int8, fp8, int4, fp4"),
        ({"formats": ()}, "formats: empty"),
        ({"rotations": ("spin",)}, "rotations: 'spin'; needed some of none, block, row"),
        ({"blocks": (16, 48)}, "blocks: 48; needed powers of two"),
        ({"blocks": ()}, "blocks: none given"),
        ({"rows": 0}, "rows is 0; needed 1 or more"),
        ({"skip": ("*",)}, "no linear layer that is not skipped"),
        ({"device": "nonesuch"}, "nonesuch"),
    ],
)
def test_wrong_settings_are_named(settings, changes, words):
    with pytest.raises(EvaluationError, match=words):
        measure(dataclasses.replace(settings, **changes))


def test_the_command_prints_tables_and_writes_files(settings, tmp_path):
    from farro.cli import app

    common = ["qsnr", "--model", str(settings.model), "--text", str(settings.text)]
    common += ["--blocks", "32,16", "--formats", "int8,fp8", "--rotations", "none"]
    common += ["--rows", "8", "--windows", "1", "--tokens", "16", "--dtype", "float32"]
    answer = CliRunner().invoke(app, [*common, "--output", str(tmp_path)])
    assert answer.exit_code == 0, answer.output
    assert "weights, signal to noise" in answer.output and "INT8" in answer.output
    content = json.loads((tmp_path / "qsnr.json").read_text())
    assert content["settings"]["blocks"] == [16, 32]
    assert (tmp_path / "qsnr.png").read_bytes().startswith(b"\x89PNG")
    answer = CliRunner().invoke(app, [*common, "--output", str(tmp_path), "--json"])
    assert json.loads(answer.stdout)["kind"] == "qsnr"
    answer = CliRunner().invoke(app, [*common, "--blocks", "x"])
    assert answer.exit_code == 2 and "'x' is not a number" in answer.stderr
