"""experts_implementation="farro" on a tiny, randomly initialised Qwen3-MoE."""

from __future__ import annotations

import copy

import pytest
import torch

import farro
from farro.nn import Int8Experts, SparseNVFP4Experts
from farro.testing import assert_bit_equal

transformers = pytest.importorskip("transformers", minversion="5.0")
from farro.integrations import transformers as integration  # noqa: E402


def tiny(inner, vocabulary=96, **more):
    config = transformers.Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=inner,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        **more,
    )
    torch.manual_seed(0)
    made = transformers.Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "experts" in name or name.endswith("gate.weight"):
                weight.normal_(0, weight.shape[-1] ** -0.5)  # so that experts are most of a layer
    return made


@pytest.fixture(scope="module")
def model():
    integration.register()
    return tiny(48)


@pytest.fixture
def tokens(generator):
    return torch.randint(96, (2, 9), generator=generator)


@pytest.fixture(autouse=True)
def eager(model):
    model.set_experts_implementation("eager")
    yield
    model.set_experts_implementation("eager")


def logits(model, tokens):
    with torch.inference_mode():
        return model(tokens).logits


def experts_of(model):
    return [layer.mlp.experts for layer in model.model.layers]


def test_a_model_runs_its_experts_through_moe_ffn(model, tokens, monkeypatch):
    """Each expert module gets its inputs to moe_ffn, and its result out of it, bit for bit."""
    dense = logits(model, tokens)
    seen = []
    original = integration.experts_forward

    def watched(self, *given):
        seen.append((self, given, original(self, *given)))
        return seen[-1][2]

    monkeypatch.setattr(integration, "experts_forward", watched)
    integration.register("farro-watched")
    model.set_experts_implementation("farro-watched")
    got = logits(model, tokens)
    assert [module for module, _, _ in seen] == experts_of(model)
    for module, (x, ids, weights), result in seen:
        rows = farro.quantize_int8_groups(x, 256)
        given = []
        for part in (module.gate_up_proj, module.down_proj):
            codes, scale = farro.quantize_int8_groups(part.detach(), 256)
            given += [codes.transpose(1, 2), scale.transpose(1, 2)]
        want = farro.moe_ffn(*rows, *given, ids, weights.float(), output_dtype=x.dtype)
        assert_bit_equal(result, want)
        model.set_experts_implementation("eager")
        with torch.inference_mode():
            exact = module(x, ids, weights)
        assert 0 < (result - exact).norm() < 0.03 * exact.norm()
    # a changed route changes a whole token
    assert 0 < (got - dense).norm() < 0.5 * dense.norm()
    model.set_experts_implementation("farro")
    assert_bit_equal(logits(model, tokens), got)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_half_precision_models(model, tokens, dtype):
    half = copy.deepcopy(model).to(dtype)
    dense = logits(half, tokens).float()
    half.set_experts_implementation("farro")
    got = logits(half, tokens)
    assert got.dtype == dtype
    assert 0 < (got.float() - dense).norm() < 0.5 * dense.norm()


def test_changed_weights_are_quantized_anew(model, tokens):
    changed = copy.deepcopy(model)
    changed.set_experts_implementation("farro")
    before = logits(changed, tokens)
    assert_bit_equal(logits(changed, tokens), before)
    with torch.no_grad():
        experts_of(changed)[0].down_proj.mul_(-1)
    after = logits(changed, tokens)
    assert not torch.equal(after, before)
    with torch.no_grad():
        experts_of(changed)[0].down_proj.mul_(-1)
    assert_bit_equal(logits(changed, tokens), before)


def test_from_pretrained_takes_the_name(model, tokens, tmp_path):
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, experts_implementation="farro")
    model.set_experts_implementation("farro")
    assert_bit_equal(logits(again, tokens), logits(model, tokens))


def test_swapped_modules_serve_any_implementation(model, tokens):
    model.set_experts_implementation("farro")
    want = logits(model, tokens)
    swapped = copy.deepcopy(model)
    names = integration.quantize_experts_(swapped)
    assert names == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    assert all(isinstance(module, Int8Experts) for module in experts_of(swapped))
    assert integration.quantize_experts_(swapped) == []
    for implementation in ("farro", "eager", "grouped_mm"):
        swapped.set_experts_implementation(implementation)
        assert_bit_equal(logits(swapped, tokens), want)
    assert "gate_up_proj_scale" in str(list(swapped.state_dict()))
    generated = swapped.generate(tokens[:1, :3], max_new_tokens=4, do_sample=False)
    assert generated.shape == (1, 7)


def test_quantize_swaps_experts_too(model, tokens):
    """In INT8 as quantize_experts_ does, in NVFP4 where sizes are multiples of 32; else it says."""
    apart, whole = copy.deepcopy(model), copy.deepcopy(model)
    names = integration.quantize_experts_(apart, 32)
    linear = farro.quantize_(apart, "int8-g32")
    report = farro.quantize_(whole, "int8-g32")
    assert [layer.name for layer in report.swapped] == [*(s.name for s in linear.swapped), *names]
    assert report.swapped[-1].shape == (6, 96, 64)
    assert report.model_bytes_after == linear.model_bytes_after
    assert report.swapped[-1].bytes_before > 3 * report.swapped[-1].bytes_after
    assert "8 linear layers and 2 modules of experts swapped" in str(report)
    assert_bit_equal(logits(whole, tokens), logits(apart, tokens))
    assert not farro.quantize_(whole, "int8-g32").swapped

    def why(scheme, **options):
        report = farro.quantize_(copy.deepcopy(model), scheme, **options)
        return {layer.name: layer.reason for layer in report.skipped}

    assert "48 are not both multiples of 32" in why("nvfp4-48")[names[0]]
    assert "fp8-row has no experts" in why("fp8-row")[names[1]]
    told = why("int8-g32", skip=("experts",))
    assert "skip pattern" in told[names[0]] and "skip pattern" in told[names[1]]
    wrong = copy.deepcopy(model)
    experts_of(wrong)[1].act_fn = torch.nn.GELU()
    assert [s.name for s in farro.quantize_(wrong, "int8-g32").swapped][-1] == names[0]
    with torch.no_grad():
        experts_of(wrong)[1].act_fn = experts_of(model)[1].act_fn
        experts_of(wrong)[1].down_proj[2, 3, 4] = float("nan")
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.down_proj holds NaN"):
        farro.quantize_(wrong, "int8-g32")


def test_experts_in_nvfp4(generator):
    model, tokens = tiny(64), torch.randint(96, (1, 9), generator=generator)
    module = experts_of(model)[0]
    want = SparseNVFP4Experts.from_dense(module.gate_up_proj, module.down_proj)
    farro.quantize_(model, "nvfp4-48")
    swapped = experts_of(model)
    assert all(isinstance(module, SparseNVFP4Experts) for module in swapped)
    x = torch.randn(5, 64, generator=generator)
    ids, weights = torch.randint(6, (5, 2), generator=generator), torch.rand(5, 2)
    assert_bit_equal(swapped[0](x, ids, weights), want(x, ids, weights))
    assert logits(model, tokens).isfinite().all()


def test_an_evaluation_of_a_mixture(tmp_path):
    """`farro eval` on a model whose experts are swapped with its linear layers."""
    from farro.evaluation.run import Settings, evaluate
    from tests.evaluation.conftest import byte_tokenizer

    tiny(64, 258, bos_token_id=256, eos_token_id=257).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    text = tmp_path / "text"
    text.write_text("The rain in Spain stays mainly in the plain. " * 8)
    small = {"windows": 1, "window_tokens": 16, "dtype": "float32", "device": "cpu"}
    schemes = ("int8-g32", "nvfp4-48")
    rows = evaluate(Settings(tmp_path / "model", text, schemes, new_tokens=1, **small)).rows
    loaded, int8, nvfp4 = rows
    assert 0 == loaded.kl < int8.kl < nvfp4.kl
    assert loaded.model_bytes > int8.model_bytes > nvfp4.model_bytes


def test_routes_of_other_ranks_add_nothing(model, generator):
    """transformers marks them with num_experts, and leaves their weights as they are."""
    module = experts_of(model)[0]
    x = torch.randn(5, 64, generator=generator)
    ids = torch.tensor([[0, 1], [6, 2], [3, 6], [6, 6], [5, 4]])
    weights = torch.rand(5, 2, generator=generator)
    weights[ids == 6] = float("nan")
    got = integration.experts_forward(module, x, ids, weights)
    assert got.isfinite().all() and not got[3].any()
    clean = torch.where(ids == 6, 0.0, weights)
    assert_bit_equal(got, integration.experts_forward(module, x, ids.clamp_max(5), clean))


class Layout(torch.nn.Module):
    """Experts as other models hold them: what transformers' decorator sets, and the weights."""

    def __init__(self, module, **flags):
        super().__init__()
        gate_up, down = module.gate_up_proj.detach(), module.down_proj.detach()
        self.act_fn = module.act_fn
        for name, value in flags.items():
            setattr(self, name, value)
        if not flags.get("is_concatenated", True):
            gate_up = torch.stack(gate_up.chunk(2, 1), 2).flatten(1, 2)
        if flags.get("is_transposed"):
            gate_up, down = (w.transpose(1, 2).contiguous() for w in (gate_up, down))
        self.gate_up_proj, self.down_proj = map(torch.nn.Parameter, (gate_up, down))


@pytest.mark.parametrize("concatenated", (True, False))
@pytest.mark.parametrize("transposed", (True, False))
def test_other_layouts_of_the_same_weights(model, generator, concatenated, transposed):
    module = experts_of(model)[1]
    x, ids = torch.randn(7, 64, generator=generator), torch.randint(6, (7, 3), generator=generator)
    weights = torch.rand(7, 3, generator=generator)
    other = Layout(module, is_concatenated=concatenated, is_transposed=transposed)
    want = integration.experts_forward(module, x, ids, weights)
    assert_bit_equal(integration.experts_forward(other, x, ids, weights), want)


def test_experts_that_are_something_else_are_refused(model):
    module = experts_of(model)[0]

    def told(**flags):
        return str(integration.why_not(Layout(module, **flags)))

    assert told() == "None"
    assert "biases" in told(has_bias=True)
    assert "no gate" in told(has_gate=False)
    assert "norm" in told(has_post_expert_norm=True)
    assert "GELU" in told(act_fn=torch.nn.GELU())
    fp8 = Layout(module)
    fp8.down_proj = torch.nn.Parameter(
        fp8.down_proj.detach().to(torch.float8_e4m3fn), requires_grad=False
    )
    with pytest.raises(farro.UnsupportedError, match=r"Layout: down_proj has dtype float8_e4m3fn"):
        integration.experts_forward(fp8, torch.zeros(1, 64), torch.zeros(1, 1).long(), None)

    class Own(Layout):
        def _apply_gate(self, gate_up):
            return gate_up

    assert "gating of their own" in str(integration.why_not(Own(module)))
    wrong = copy.deepcopy(model)
    experts_of(wrong)[1].act_fn = torch.nn.GELU()
    with pytest.raises(farro.UnsupportedError, match=r"layers\.1\.mlp\.experts.*GELU"):
        integration.quantize_experts_(wrong)
    assert not any(isinstance(module, Int8Experts) for module in experts_of(wrong))


def test_both_registries_know_the_name():
    from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
    from transformers.integrations.moe import ExpertsInterface

    integration.register()
    assert "farro" in ExpertsInterface() and "farro" in FP8ExpertsInterface()


def test_compiled_models(model, generator):
    """In one graph, once the experts are quantized."""
    module = copy.deepcopy(experts_of(model)[0])
    module.__dict__.pop("_farro_int8", None)  # as before its first call
    x, ids = torch.randn(4, 64, generator=generator), torch.randint(6, (4, 2), generator=generator)
    weights = torch.rand(4, 2, generator=generator)
    forward = torch.compile(integration.experts_forward, backend="eager", fullgraph=True)
    with torch.no_grad():
        with pytest.raises(Exception, match="call the model once before"):
            forward(module, x, ids, weights)
        want = integration.experts_forward(module, x, ids, weights)
        torch.compiler.reset()
        assert_bit_equal(forward(module, x, ids, weights), want)
    assert not any("farro" in name for name in module.state_dict())
