"""quantize_: what it swaps, what it leaves and says so, and that it checks before it touches."""

from __future__ import annotations

import copy
import gc
import json
import weakref

import pytest
import torch
from torch import nn

import farro
from farro.nn import Int8Linear
from farro.quantize import SCHEMES


class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.up_proj = nn.Linear(width, 2 * width, bias=False)
        self.down_proj = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down_proj(torch.nn.functional.gelu(self.up_proj(x)))


class Model(nn.Module):
    def __init__(self, width=64, vocabulary=50, tied=False):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([Block(width), Block(width)])
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


LINEARS = ["layers.0.up_proj", "layers.0.down_proj", "layers.1.up_proj", "layers.1.down_proj"]


def names(layers):
    return [layer.name for layer in layers]


def reasons(report):
    return {layer.name: layer.reason for layer in report.skipped}


FP8_FORMS = {
    "fp8-tensor": "scaling 'tensor'",
    "fp8-row": "scaling 'row'",
    "fp8-block128": "blocks of 128",
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_swaps_every_linear_but_the_head(scheme):
    model = Model()
    want = copy.deepcopy(model)
    report = farro.quantize_(model, scheme)
    assert names(report.swapped) == LINEARS
    assert reasons(report) == {"lm_head": "matches skip pattern 'lm_head'"}
    for name in LINEARS:
        module = model.get_submodule(name)
        linear = want.get_submodule(name)
        by_hand = SCHEMES[scheme](linear.weight, linear.bias)
        assert type(module) is type(by_hand) and module.form == by_hand.form
        if scheme in FP8_FORMS:
            assert module.form == FP8_FORMS[scheme]
        else:
            assert scheme.endswith(f"-{module.form.replace('group_size ', 'g')}") or "48" in scheme
        for key, value in by_hand.state_dict().items():
            assert torch.equal(module.state_dict()[key], value)
        setattr(want.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], by_hand)
    ids = torch.randint(0, 50, (2, 9))
    assert torch.equal(model(ids), want(ids))


def test_bytes_are_counted_from_the_formula():
    model = Model()
    before = sum(p.numel() * 4 for p in model.parameters())
    report = farro.quantize_(model, "int8-g32")
    weights, groups = 4 * 64 * 128, 4 * 64 * 128 // 32
    biases = 2 * 64 * 4
    assert report.bytes_before == 4 * weights + biases
    assert report.bytes_after == weights + 4 * groups + biases
    assert report.model_bytes_before == before
    assert report.model_bytes_after == before - report.bytes_before + report.bytes_after
    assert report.swapped[0].shape == (128, 64)


@pytest.mark.parametrize("scheme, scales", [("fp8-tensor", 4), ("fp8-row", 4), ("fp8-block128", 4)])
def test_bytes_of_fp8(scheme, scales):
    """One byte a weight; a block of 128 holds all of each of these layers."""
    report = farro.quantize_(Model(), scheme)
    assert report.bytes_after == 4 * 64 * 128 + 4 * scales + 2 * 64 * 4
    assert "fp8" in str(report)


def test_fp8_linears_with_one_weight_share_codes():
    for scheme in FP8_FORMS:
        model = nn.ModuleDict({"a": nn.Linear(300, 8), "b": nn.Linear(300, 8)})
        model["b"].weight = model["a"].weight
        report = farro.quantize_(model, scheme)
        assert model["a"].weight is model["b"].weight
        scales = 3 if scheme == "fp8-block128" else 1
        assert report.bytes_after == 300 * 8 + 4 * scales + 2 * 4 * 8
        again = farro.quantize_(model, "int8-g32")
        assert FP8_FORMS[scheme] in reasons(again)["a"] and "Linear already" in reasons(again)["a"]


def test_report_reads_and_serializes():
    report = farro.quantize_(Model(tied=True), "int8-g64", skip=("layers.1.*", "typo"))
    text = str(report)
    assert text.splitlines()[0] == "int8-g64: 2 linear layers swapped, 3 skipped"
    assert "skipped layers.1.up_proj: matches skip pattern 'layers.1.*'" in text
    assert "skipped lm_head: its weight is tied to embed.weight" in text
    assert "matched nothing: typo" in text
    data = json.loads(json.dumps(report.as_dict()))
    assert data["scheme"] == "int8-g64"
    assert data["bytes_after"] == report.bytes_after
    assert [layer["name"] for layer in data["swapped"]] == LINEARS[:2]
    assert data["unmatched"] == ["typo"]


@pytest.mark.parametrize(
    "skip, kept",
    [
        ((), []),
        (("*_proj",), LINEARS),
        (("up_proj",), [LINEARS[0], LINEARS[2]]),
        (("layers.0.down_proj", "layers.1.down*"), [LINEARS[1], LINEARS[3]]),
        (("layers.[0]*",), LINEARS[:2]),
        ("down_proj", [LINEARS[1], LINEARS[3]]),
        (("layers",), []),
        (("UP_PROJ",), []),
    ],
)
def test_skip_patterns_match_the_dotted_name_or_its_last_part(skip, kept):
    model = Model()
    report = farro.quantize_(model, skip=skip)
    assert [name for name in names(report.skipped) if name in LINEARS] == kept
    for name in LINEARS:
        assert isinstance(model.get_submodule(name), nn.Linear) == (name in kept)
    assert isinstance(model.lm_head, Int8Linear)


# Tied and shared


def test_a_linear_tied_to_an_embedding_stays_even_when_not_skipped():
    model = Model(tied=True)
    report = farro.quantize_(model, skip=())
    assert reasons(report) == {
        "lm_head": "its weight is tied to embed.weight, which stays as it is"
    }
    assert model.lm_head.weight is model.embed.weight


def test_a_weight_tied_by_memory_alone_is_found():
    model = Model()
    model.lm_head.weight = nn.Parameter(model.embed.weight.data)
    assert "tied to embed.weight" in reasons(farro.quantize_(model, skip=()))["lm_head"]


def test_a_linear_tied_to_a_skipped_linear_stays():
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    model["b"].weight = model["a"].weight
    report = farro.quantize_(model, skip=("a",))
    assert reasons(report)["b"] == "its weight is tied to a.weight, which stays as it is"


def test_two_linears_with_one_weight_share_codes_and_keep_their_biases():
    model = nn.ModuleDict({"a": nn.Linear(300, 8), "b": nn.Linear(300, 8)})
    model["b"].weight = model["a"].weight
    want = {name: Int8Linear.from_linear(linear) for name, linear in model.items()}
    report = farro.quantize_(model)
    assert names(report.swapped) == ["a", "b"]
    assert model["a"]._codes is model["b"]._codes
    assert report.bytes_before == 4 * (300 * 8 + 8 + 8)
    assert report.bytes_after == model["a"]._codes.nbytes + 4 * (2 * 8 + 8 + 8)
    assert report.model_bytes_after == report.bytes_after
    x = torch.randn(3, 300)
    for name in "ab":
        assert torch.equal(model[name](x), want[name](x))


def test_a_module_used_twice_is_swapped_once():
    model = nn.Module()
    model.one = model.two = nn.Linear(8, 8)
    model.block = nn.Sequential(nn.Linear(8, 8))
    model.again = model.block
    report = farro.quantize_(model)
    assert [(layer.name, layer.also) for layer in report.swapped] == [
        ("one", ("two",)),
        ("block.0", ("again.0",)),
    ]
    assert model.one is model.two
    assert type(model.one) is type(model.again[0]) is Int8Linear


def test_a_module_used_twice_is_skipped_by_either_name():
    model = nn.Module()
    model.one = model.two = nn.Linear(8, 8)
    report = farro.quantize_(model, skip=("two",))
    assert reasons(report) == {"one": "matches skip pattern 'two'"}


# Linear-like modules


def test_transformers_conv1d_is_swapped_with_its_weight_turned():
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D(24, 300)
    conv1d.bias.data.normal_()
    model = nn.Sequential(conv1d)
    x = torch.randn(2, 5, 300)
    exact = conv1d(x)
    report = farro.quantize_(model, "int8-g64")
    assert report.swapped[0].shape == (24, 300)
    assert torch.equal(model[0].weight, farro.quantize_int8_groups(conv1d.weight.detach().T, 64)[0])
    error = (model(x) - exact).square().mean() / exact.square().mean()
    assert 0 < error < 1e-3


class Doubling(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Initialized(nn.Linear):
    def reset_parameters(self):
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)


def hooked():
    linear = nn.Linear(8, 8)
    linear.register_forward_hook(lambda module, inputs, output: output + 1)
    return linear


def patched():
    linear = nn.Linear(8, 8)
    linear.forward = lambda x: x
    return linear


def with_bias(bias):
    linear = nn.Linear(8, 8)
    linear.bias = nn.Parameter(bias)
    return linear


LEFT = {
    "bias of one": (lambda: with_bias(torch.ones(1)), "its bias has shape [1]; needed [8]"),
    "bias elsewhere": (
        lambda: with_bias(torch.ones(8, device="meta")),
        "its bias is on meta and its weight on cpu",
    ),
    "own forward": (lambda: Doubling(8, 8), "Doubling is a subclass of Linear"),
    "hook": (hooked, "has hooks"),
    "patched": (patched, "has hooks"),
    "parametrized": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        "parametrized",
    ),
    "lazy": (lambda: nn.LazyLinear(8), "UninitializedParameter"),
    "float64": (lambda: nn.Linear(8, 8, dtype=torch.float64), "weight has dtype float64"),
}


@pytest.mark.parametrize("make, reason", LEFT.values(), ids=LEFT)
def test_left_as_it_is_and_named(make, reason):
    linear = make()
    model = nn.Sequential(linear, nn.Linear(8, 8))
    report = farro.quantize_(model)
    assert model[0] is linear
    assert reason in reasons(report)["0"]
    assert names(report.swapped) == ["1"]


def test_a_subclass_without_a_forward_of_its_own_is_swapped():
    model = nn.Sequential(Initialized(8, 8))
    assert names(farro.quantize_(model).swapped) == ["0"]


@pytest.mark.parametrize("training", [True, False])
def test_torch_transformer_layers_still_run(training):
    model = nn.Sequential(
        nn.TransformerEncoderLayer(32, 4, batch_first=True, dropout=0.0), nn.Linear(32, 32)
    ).train(training)
    x = torch.randn(2, 5, 32)
    inner = model[0](x)
    report = farro.quantize_(model)
    assert names(report.swapped) == ["1"]
    assert set(reasons(report)) == {"0.self_attn.out_proj", "0.linear1", "0.linear2"}
    with torch.no_grad():
        torch.testing.assert_close(model[0](x), inner)
        assert model(x).shape == x.shape


def test_an_already_quantized_model_is_left_and_named():
    model = Model()
    farro.quantize_(model, "int8-g32")
    report = farro.quantize_(model, "int8-g64")
    assert not report.swapped
    assert reasons(report)["layers.0.up_proj"] == "is an Int8Linear already, group_size 32"


# Errors come before any swap


def test_a_root_that_is_a_linear_is_refused_with_the_way_out():
    for root in (nn.Linear(8, 8), Int8Linear(8, 8)):
        with pytest.raises(ValueError, match=r"Int8Linear\.from_linear"):
            farro.quantize_(root)


def test_argument_errors():
    with pytest.raises(ValueError, match=r"'int4'; needed one of int8-g32, int8-g64"):
        farro.quantize_(Model(), "int4")
    with pytest.raises(TypeError, match="Module"):
        farro.quantize_("model")
    with pytest.raises(TypeError, match="skip holds a int"):
        farro.quantize_(Model(), skip=(3,))
    for skip in (None, 3):
        with pytest.raises(TypeError, match=r"skip must be str patterns, got .*\(\) for none"):
            farro.quantize_(Model(), skip=skip)
    with pytest.raises(TypeError, match="scheme must be a str, got list"):
        farro.quantize_(Model(), ["int8-g32"])
    with pytest.raises(ValueError, match="backend"):
        farro.quantize_(Model(), backend="gpu")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_weight_is_named_and_nothing_is_swapped(bad):
    model = Model().bfloat16()
    model.layers[1].down_proj.weight.data[3, 5] = bad
    with pytest.raises(ValueError, match=r"layers\.1\.down_proj holds NaN or Inf"):
        farro.quantize_(model)
    assert not any(isinstance(module, Int8Linear) for module in model.modules())
    assert len(farro.quantize_(model, skip=("layers.1.down_proj",)).swapped) == 4


# The rest


def test_old_layers_are_freed_one_by_one():
    model = Model()
    linear = model.layers[0].up_proj
    died_before = []
    weakref.finalize(linear, lambda: died_before.append(type(model.layers[1].down_proj).__name__))
    del linear
    farro.quantize_(model)
    gc.collect()
    assert died_before == ["Linear"]  # the last layer was still to be swapped


def test_training_mode_and_backend_are_passed_on():
    model = Model().eval()
    farro.quantize_(model, backend="reference")
    assert not model.layers[0].up_proj.training
    assert model.layers[0].up_proj.backend == "reference"


def test_a_meta_model_is_swapped_and_loaded_afterwards():
    source = Model()
    with torch.device("meta"):
        model = Model()
    farro.quantize_(source, "int8-g32")
    report = farro.quantize_(model, "int8-g32")
    assert names(report.swapped) == LINEARS
    model.load_state_dict(source.state_dict(), assign=True)
    ids = torch.randint(0, 50, (2, 9))
    assert torch.equal(model(ids), source(ids))


def test_quantized_model_state_dict_round_trip():
    source, target = Model().bfloat16(), Model().bfloat16()
    for model in (source, target):
        farro.quantize_(model, "int8-g64")
    target.load_state_dict(source.state_dict())
    ids = torch.randint(0, 50, (2, 9))
    assert torch.equal(target(ids), source(ids))


def test_quantized_model_compiles_in_one_graph():
    torch._dynamo.reset()
    model = Model().bfloat16()
    farro.quantize_(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    ids = torch.randint(0, 50, (2, 9))
    with torch.no_grad():
        assert torch.equal(compiled(ids), model(ids))


@pytest.mark.gpu
def test_a_model_on_the_gpu_gives_the_bits_of_the_cpu_in_fp32_layers():
    model = Model()
    farro.quantize_(model, "int8-g64")
    x = torch.randn(5, 64)
    want = model.layers[0].up_proj(x)
    on_gpu = copy.deepcopy(model).cuda()
    assert torch.equal(on_gpu.layers[0].up_proj(x.cuda()).cpu(), want)
