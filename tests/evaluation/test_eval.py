"""farro eval end to end on a tiny model, its figures computed again by other means."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys

import pytest
import torch

import farro
from farro.evaluation.loading import (
    EvaluationError,
    Text,
    choose_device,
    choose_dtype,
    cut_windows,
    find_model,
    inspect_checkpoint,
    load_model,
    load_text,
)
from farro.evaluation.run import LOADED, Settings, evaluate
from farro.evaluation.variants import make_variant, quantized_layers, weight_matrix

from .conftest import byte_tokenizer

np = pytest.importorskip("numpy")
transformers = pytest.importorskip("transformers")
SMALL = {"windows": 3, "window_tokens": 32, "dtype": "float32", "device": "cpu", "new_tokens": 4}


@pytest.fixture(scope="module")
def result(tiny_folder, text_file):
    schemes = ("float32", "int8-g32", "int8-g64")
    return evaluate(Settings(tiny_folder, text_file, schemes, prompt="The rain", **SMALL))


@pytest.fixture(scope="module")
def model(tiny_folder):
    return load_model(tiny_folder, torch.float32, torch.device("cpu"))[0]


def rows(result):
    return {row.name: row for row in result.rows}


@torch.no_grad()
def log_probabilities(model, ids):
    """Of every window, in numpy's float64: [windows, tokens, vocabulary].

    One window at a time, as eval does: a code that rounds the other way would move the result.
    """
    values = torch.cat([model(window[None]).logits for window in ids]).double().numpy()
    values = values - values.max(-1, keepdims=True)
    return values - np.log(np.exp(values).sum(-1, keepdims=True))


# The figures


def test_rows_and_windows(result):
    assert [row.name for row in result.rows] == [LOADED, "float32", "int8-g32", "int8-g64"]
    assert result.windows.ids.shape == (3, 32)
    assert result.notes == []
    assert all(row.seconds > 0 for row in result.rows)


def test_perplexity_is_that_of_an_independent_computation(result, model):
    ids = result.windows.ids
    logs = log_probabilities(model, ids)[:, :-1]
    labels = ids[:, 1:].numpy()
    picked = np.take_along_axis(logs, labels[..., None], -1)
    assert rows(result)[LOADED].perplexity == pytest.approx(math.exp(-picked.mean()), rel=1e-5)


def test_kl_is_zero_for_the_model_itself_and_that_of_float64_for_int8(result, model):
    assert rows(result)[LOADED].kl == 0
    assert rows(result)["float32"].kl == 0
    assert rows(result)["float32"].perplexity == rows(result)[LOADED].perplexity
    p = log_probabilities(model, result.windows.ids)
    for scheme in ("int8-g32", "int8-g64"):
        quantized = make_variant(model, scheme, ("lm_head",), "auto").model
        q = log_probabilities(quantized, result.windows.ids)
        want = (np.exp(p) * (p - q)).sum(-1).mean()
        assert want > 1e-4
        assert rows(result)[scheme].kl == pytest.approx(want, rel=1e-4)


def quantize_in_float64(x, group_size):
    """The spec's quantizer and back, but in float64."""
    x = x.double().numpy()
    k = x.shape[-1]
    x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -k % group_size)])
    groups = x.reshape(*x.shape[:-1], -1, group_size)
    scale = np.maximum(np.abs(groups).max(-1, keepdims=True) / 127, 1e-12)
    return (np.rint(groups / scale) * scale).reshape(x.shape)[..., :k]


def fp8_in_float64(x, dims):
    """E4M3 and back by rounding to steps, with a scale for all of x or for each of its rows."""
    x = x.double().numpy()
    scale = np.maximum(np.abs(x).max(axis=dims, keepdims=True) / 448, 1e-12)
    y = x / scale
    exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(y), 1e-30))), -6)
    step = 2.0 ** (exponent - 3)
    return np.clip(np.rint(y / step) * step, -448, 448) * scale


@pytest.mark.parametrize("scheme", ("fp8-tensor", "fp8-row", "fp8-block128"))
def test_fp8_rows_are_those_of_float64(tiny_folder, text_file, model, scheme):
    """No layer of this model is larger than a block of 128, so a block is a row, or a weight."""
    found = evaluate(Settings(tiny_folder, text_file, (scheme,), **{**SMALL, "windows": 1}))
    row = rows(found)[scheme]
    name = "model.layers.1.mlp.down_proj"
    weight = model.get_submodule(name).weight.detach()
    want = decibels(weight, fp8_in_float64(weight, None))
    assert row.weights.layers[name] == pytest.approx(want, abs=0.05)
    seen = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda m, x: seen.append(x[0]))
    with torch.no_grad():
        model(found.windows.ids)
    hook.remove()
    of_x = None if scheme == "fp8-tensor" else -1
    want = decibels(seen[0], fp8_in_float64(seen[0], of_x))
    assert row.inputs.layers[name] == pytest.approx(want, abs=0.05)
    assert 1e-5 < row.kl < 0.5
    loaded = rows(found)[LOADED]
    assert loaded.layer_bytes / 4 < row.layer_bytes < loaded.layer_bytes / 4 * 1.01


def decibels(x, q):
    x = x.double().numpy()
    return 10 * math.log10((x**2).sum() / ((x - q) ** 2).sum())


def test_weight_noise_is_that_of_float64(result, model):
    noise = rows(result)["int8-g32"].weights
    assert len(noise.layers) == 14
    for name, db in noise.layers.items():
        weight = model.get_submodule(name).weight.detach()
        assert db == pytest.approx(decibels(weight, quantize_in_float64(weight, 32)), abs=0.02)
    assert noise.worst == min(noise.layers.values())
    assert rows(result)[LOADED].weights is None
    assert rows(result)["float32"].weights is None


def test_input_noise_is_that_of_float64_over_all_windows(result, model):
    seen: dict[str, list[torch.Tensor]] = {}
    names = list(rows(result)["int8-g64"].inputs.layers)
    handles = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda module, inputs, name=name: seen.setdefault(name, []).append(inputs[0].clone())
        )
        for name in names
    ]
    with torch.no_grad():
        model(result.windows.ids)
    for handle in handles:
        handle.remove()
    assert len(names) == 14
    for name in names:
        x = torch.cat(seen[name])
        want = decibels(x, quantize_in_float64(x, 64))
        assert rows(result)["int8-g64"].inputs.layers[name] == pytest.approx(want, abs=0.05)


def test_bytes_are_those_of_the_formula(result, model):
    layers = [module for name, module in model.named_modules() if name.endswith("_proj")]
    weights = sum(layer.weight.numel() for layer in layers)
    groups = sum(layer.weight.shape[0] * math.ceil(layer.weight.shape[1] / 32) for layer in layers)
    loaded, small = rows(result)[LOADED], rows(result)["int8-g32"]
    assert loaded.layer_bytes == 4 * weights
    assert small.layer_bytes == weights + 4 * groups
    assert loaded.model_bytes - loaded.layer_bytes == small.model_bytes - small.layer_bytes
    assert result.skipped == {"lm_head": "matches skip pattern 'lm_head'"}


def test_answers_are_what_the_models_generate(result, model):
    assert list(result.answers) == [LOADED, "int8-g64"]
    tokenizer = byte_tokenizer()
    ids = tokenizer("The rain", return_tensors="pt").input_ids
    for _ in range(4):
        with torch.no_grad():
            best = model(ids).logits[0, -1].argmax().view(1, 1)
        ids = torch.cat([ids, best], 1)
        if best.item() == tokenizer.eos_token_id:
            break
    want = tokenizer.decode(ids[0, len("The rain") :], skip_special_tokens=True)
    assert result.answers[LOADED] == want


def test_quantized_copies_share_what_is_not_swapped_and_leave_the_model_alone(model):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    variant = make_variant(model, "int8-g32", ("lm_head",), "auto")
    cast = make_variant(model, "bfloat16", (), "auto")
    assert variant.model.model.embed_tokens.weight is model.model.embed_tokens.weight
    assert cast.model.model.embed_tokens.weight.dtype == torch.bfloat16
    assert list(quantized_layers(variant)) == [layer.name for layer in variant.report.swapped]
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, before[name])


def test_conv1d_weights_are_turned():
    conv = transformers.pytorch_utils.Conv1D(3, 3)
    assert torch.equal(weight_matrix(conv), conv.weight.T)


# Text and windows


def test_windows_do_not_overlap_and_depend_on_the_seed():
    text = Text("bytes", "".join(chr(33 + i % 90) for i in range(1000)))
    first = cut_windows(byte_tokenizer(), text, 30, 5, seed=1)
    assert torch.equal(first.ids, cut_windows(byte_tokenizer(), text, 30, 5, seed=1).ids)
    assert not torch.equal(first.ids, cut_windows(byte_tokenizer(), text, 30, 5, seed=2).ids)
    assert (first.available, first.text_tokens) == (33, 1000)
    every = cut_windows(byte_tokenizer(), text, 30, 99, seed=1)
    tokens = byte_tokenizer()(text.content)["input_ids"]
    assert every.ids.flatten().tolist() == tokens[:990]


def test_a_start_token_begins_every_window_of_a_tokenizer_that_adds_one():
    windows = cut_windows(byte_tokenizer(bos=True), Text("bytes", "abcdefgh" * 9), 10, 3, seed=0)
    assert windows.starts_with_bos
    assert windows.ids.shape == (3, 10)
    assert windows.ids[:, 0].tolist() == [256] * 3
    assert windows.available == 8
    assert not (windows.ids[:, 1:] == 256).any()


def test_short_texts_and_contexts_are_noted(tiny_folder, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("only a few words here")
    settings = dict(SMALL, window_tokens=512)
    result = evaluate(Settings(tiny_folder, path, ("int8-g32",), **settings))
    assert result.windows.ids.shape == (1, 21)
    assert any("128 tokens, the model's whole context" in note for note in result.notes)
    assert any("one window of 21" in note for note in result.notes)
    path.write_text("x")
    with pytest.raises(EvaluationError, match="1 tokens; needed at least 2"):
        evaluate(Settings(tiny_folder, path, ("int8-g32",), **SMALL))


def test_default_text_is_pythons_documentation():
    text = load_text(None)
    assert text.name == "pydoc_data.topics"
    assert len(text.content) > 100_000


# Loading and its errors


def test_checkpoint_precision_comes_from_the_tensors(tiny_folder, tmp_path):
    checkpoint = inspect_checkpoint(tiny_folder)
    assert (checkpoint.precision, checkpoint.detail) == ("F32", "F32 100%")
    assert checkpoint.nbytes == (tiny_folder / "model.safetensors").stat().st_size
    header = json.dumps(
        {
            "a": {"dtype": "BF16", "shape": [30, 10], "data_offsets": [0, 600]},
            "b": {"dtype": "F32", "shape": [100], "data_offsets": [600, 1000]},
        }
    ).encode()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    mixed = inspect_checkpoint(tmp_path)
    assert (mixed.precision, mixed.detail) == ("BF16", "BF16 75%, F32 25%")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "config.json").write_text('{"torch_dtype": "float16"}')
    assert inspect_checkpoint(tmp_path).precision == "float16"


def test_a_checkpoint_that_lacks_weights_is_refused(tiny_folder, tmp_path):
    from safetensors.torch import load_file, save_file

    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_folder / name).read_bytes())
    state = load_file(tiny_folder / "model.safetensors")
    state.pop("model.layers.1.mlp.up_proj.weight")
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EvaluationError, match=r"lacks 1 weights.*up_proj"):
        load_model(tmp_path, torch.float32, torch.device("cpu"))


def test_what_is_no_model_is_refused_in_one_line(tmp_path):
    with pytest.raises(EvaluationError, match="does not exist"):
        find_model(tmp_path / "nothing")
    with pytest.raises(EvaluationError, match=r"no config\.json"):
        find_model(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"not one")
    with pytest.raises(EvaluationError, match="not a GGUF file"):
        find_model(tmp_path / "model.gguf")
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(EvaluationError, match="transformers cannot load") as caught:
        load_model(tmp_path, torch.float32, torch.device("cpu"))
    assert len(str(caught.value).splitlines()) == 1


def test_a_model_without_linear_layers_to_swap_is_refused(tiny_folder, text_file):
    settings = Settings(tiny_folder, text_file, ("int8-g32",), skip=("*",), **SMALL)
    with pytest.raises(EvaluationError, match="swaps no layer"):
        evaluate(settings)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"schemes": ("int4",)}, "'int4'; needed some of int8-g32"),
        ({"schemes": ()}, "no scheme"),
        ({"schemes": ("int8-g32", "int8-g32")}, "twice"),
        ({"windows": 0}, "windows is 0"),
        ({"window_tokens": 1}, "window_tokens is 1"),
        ({"device": "nonsense"}, "cannot be used here"),
        ({"dtype": "int8"}, "needed auto, float32"),
    ],
)
def test_bad_settings_are_refused(change, message, tiny_folder, text_file):
    settings = {"schemes": ("int8-g32",), **SMALL, **change}
    with pytest.raises(EvaluationError, match=message):
        evaluate(Settings(tiny_folder, text_file, **settings))


def test_auto_device_and_dtype():
    device = choose_device("auto")
    assert device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    dtype, reason = choose_dtype("auto", torch.device("cpu"))
    assert dtype in (torch.float32, torch.bfloat16)
    assert reason
    assert choose_dtype("float16", torch.device("cpu"))[0] == torch.float16


# The command


def run_command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "farro", "eval", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
    )


COMMON = ("--windows", 2, "--tokens", 24, "--prompt", "The rain", "--device", "cpu")


def test_command_prints_tables_and_writes_json_and_png(tiny_folder, text_file, tmp_path):
    where = ("--model", tiny_folder, "--text", text_file, "--output", tmp_path / "out")
    done = run_command(*where, *COMMON, "--dtype", "bfloat16")
    assert done.returncode == 0, done.stderr
    for said in ("checkpoint in F32, loaded as bfloat16", "int8-g256", "worst layer", "The rain"):
        assert said in " ".join(done.stdout.split())
    data = json.loads((tmp_path / "out" / "eval.json").read_text())
    schemes = ["int8-g32", "int8-g64", "int8-g128", "int8-g256"]
    schemes += ["fp8-tensor", "fp8-row", "fp8-block128"]
    assert [row["model"] for row in data["rows"]] == [LOADED, "float32", *schemes]
    for row in data["rows"]:
        assert row["perplexity"] > 1
        assert row["seconds_per_forward"] > 0
        if row["model"] in schemes:
            assert 20 < row["weight_sqnr_db"]["median"] < 60
            assert row["input_sqnr_db"]["worst_layer"] in row["input_sqnr_db"]["layers"]
    assert data["versions"]["farro"] == farro.__version__
    assert data["versions"]["transformers"] == transformers.__version__
    assert data["text"]["windows"] == 2
    assert data["model"]["precision"] == "F32"
    png = (tmp_path / "out" / "eval.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", png[16:24])
    assert width > 1000 and height > 500
    assert len(png) > 30_000


def test_json_flag_prints_json_alone(tiny_folder, text_file, tmp_path):
    where = ("--model", tiny_folder, "--text", text_file, "--output", tmp_path)
    done = run_command(*where, *COMMON, "--schemes", "int8-g128", "--skip", "*_proj", "--json")
    assert done.returncode == 2  # nothing is left to quantize
    assert done.stdout == ""
    done = run_command(*where, *COMMON, "--schemes", "int8-g128", "--skip", "k_proj", "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data == json.loads((tmp_path / "eval.json").read_text())
    assert data["skipped"]["model.layers.0.self_attn.k_proj"] == "matches skip pattern 'k_proj'"
    assert "tied to model.embed_tokens.weight" in data["skipped"]["lm_head"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--schemes", "int4"), "farro eval: scheme is 'int4'"),
        (("--model", "no-such-place"), "farro eval: no-such-place does not exist"),
        (("--windows", "0"), "farro eval: "),
    ],
)
def test_errors_are_one_line_and_exit_code_2(arguments, message, tmp_path):
    done = run_command(*arguments, "--output", tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(message)
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_the_default_model_is_read_from_gguf(text_file):
    try:
        path = find_model(None)
    except EvaluationError as error:
        pytest.skip(str(error))
    checkpoint = inspect_checkpoint(path)
    assert checkpoint.precision == "Q4_1"
    result = evaluate(Settings(schemes=("int8-g32",), windows=2, window_tokens=128))
    assert 5 < rows(result)[LOADED].perplexity < 60
    assert 0 < rows(result)["int8-g32"].kl < 0.05
    assert len(rows(result)["int8-g32"].weights.layers) == 210


@pytest.mark.gpu
def test_on_a_gpu_the_figures_are_those_of_the_cpu(result, tiny_folder, text_file):
    settings = dict(SMALL, device="cuda")
    schemes = ("float32", "int8-g32", "int8-g64")
    on_gpu = evaluate(Settings(tiny_folder, text_file, schemes, **settings))
    for here, there in zip(result.rows, on_gpu.rows):
        assert there.perplexity == pytest.approx(here.perplexity, rel=1e-3)
        assert there.kl == pytest.approx(here.kl, rel=2e-2, abs=1e-6)
        assert there.model_bytes == here.model_bytes
