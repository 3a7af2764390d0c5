"""FP8Linear and FP8BlockLinear: what they compute, their state dicts, casts, moves and errors."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from farro.formats.fp8 import dequantize, encode, inverse_of, quantize
from farro.nn import FP8BlockLinear, FP8Linear

KINDS = ("tensor", "row", "static", "block")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STATIC = 4.5 / 448


def build(kind, linear, **options):
    if kind == "block":
        return FP8BlockLinear.from_linear(linear, **options)
    if kind == "static":
        return FP8Linear.from_linear(linear, input_scale=STATIC, **options)
    return FP8Linear.from_linear(linear, kind, **options)


def make(kind, n=48, k=316, bias=True, **options):
    linear = torch.nn.Linear(k, n, bias=bias)
    return linear, build(kind, linear, **options)


def empty(kind, n=48, k=316, **options):
    if kind == "block":
        return FP8BlockLinear(k, n, **options)
    return FP8Linear(k, n, scaling=kind, **options)


def values(kind, x, weight):
    """What x and the weight are rounded to, in float64, by the formats' formulas alone."""
    if kind == "block":
        return (
            dequantize(*quantize(x, "1x128"), "1x128", torch.float64),
            dequantize(*quantize(weight, "128x128"), "128x128", torch.float64),
        )
    if kind == "static":
        scale = torch.tensor(STATIC)
        rounded = encode(x.float() * inverse_of(scale)).double() * scale.double()
    else:
        of_x = "per_row" if kind == "row" else "per_tensor"
        rounded = dequantize(*quantize(x, of_x), of_x, torch.float64)
    return rounded, dequantize(*quantize(weight, "per_tensor"), "per_tensor", torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_forward_is_the_product_of_the_rounded_values(kind, dtype):
    linear, module = make(kind)
    x = torch.randn(2, 5, 316).to(dtype)
    y = module(x)
    assert y.shape == (2, 5, 48) and y.dtype == dtype
    left, right = values(kind, x.flatten(0, 1), linear.weight.detach())
    want = left @ right.T + linear.bias.double()
    assert (y.flatten(0, 1).double() - want).norm() <= 4e-3 * want.norm()
    exact = torch.nn.functional.linear(x.float(), linear.weight, linear.bias)
    assert 5e-3 < (y.float() - exact).norm() / exact.norm() < 6e-2
    assert torch.equal(module.dequantized_input(x).flatten(0, 1), left.float())
    assert torch.equal(module.dequantized_weight(), right.float())


@pytest.mark.parametrize("kind", KINDS)
def test_leading_dimensions_strides_and_empty_inputs(kind):
    _, module = make(kind)
    x = torch.randn(6, 316)
    whole = module(x)
    assert torch.equal(module(x.view(2, 1, 3, 316)), whole.view(2, 1, 3, 48))
    wide = torch.randn(6, 700)
    wide[:, 3:319] = x
    assert torch.equal(module(wide[:, 3:319]), whole)
    assert torch.equal(module(x[:1].expand(4, 316)), module(x[:1].repeat(4, 1)))
    assert module(x[0]).shape == (48,)
    assert module(x[:0].view(0, 7, 316)).shape == (0, 7, 48)
    linear, none = make(kind, k=0)
    assert torch.equal(none(torch.ones(2, 0)), linear.bias.bfloat16().float().expand(2, 48))
    assert make(kind, n=0)[1](x).shape == (6, 0)


def test_rows_of_their_own_scale_do_not_depend_on_each_other():
    x = torch.randn(9, 316)
    x[3] *= 1000
    _, module = make("row")
    assert torch.equal(module(x)[:1], module(torch.cat([x[:1], x[4:]]))[:1])
    x[5, 7] = float("nan")
    y = module(x)
    assert y[5].isnan().all() and y[[0, 1, 2, 3, 4, 6, 7, 8]].isfinite().all()
    _, module = make("tensor")
    assert module(x).isnan().all()  # they share it


def test_a_static_scale_clamps_and_never_looks_at_the_input():
    _, module = make("static", bias=False)
    x = torch.randn(3, 316)
    x[1] = 100.0
    assert torch.equal(module(x)[1], module(torch.full((1, 316), STATIC * 448))[0])
    assert torch.equal(module(x)[:1], module(x[:1]))


@pytest.mark.parametrize("kind", KINDS)
def test_state_dict_has_the_documented_names_shapes_and_dtypes(kind):
    _, module = make(kind)
    state = module.state_dict()
    shapes = {"weight": (48, 316), "weight_scale": (1, 3) if kind == "block" else ()}
    shapes |= {"input_scale": ()} if kind == "static" else {}
    assert {key: tuple(value.shape) for key, value in state.items()} == {**shapes, "bias": (48,)}
    assert state["weight"].dtype == torch.float8_e4m3fn
    assert state["weight_scale"].dtype == torch.float32
    fresh = empty(kind)
    x = torch.randn(4, 316)
    assert torch.equal(fresh(x), torch.zeros(4, 48))
    addresses = [tensor.data_ptr() for tensor in fresh.buffers()]
    fresh.load_state_dict(state)
    assert [tensor.data_ptr() for tensor in fresh.buffers()] == addresses
    assert torch.equal(fresh(x), module(x))


@pytest.mark.parametrize("assign", (True, False))
@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_of_checkpoints_are_kept_as_fp32(dtype, assign):
    """compressed-tensors writes [1] in the model's dtype."""
    _, module = make("static")
    state = module.state_dict()
    for name in ("weight_scale", "input_scale"):
        state[name] = state[name].to(dtype).reshape(1)
    module.load_state_dict(state, assign=assign)
    for name in ("weight_scale", "input_scale"):
        scale = getattr(module, name)
        assert scale.dtype == torch.float32 and scale.shape == ()
        assert scale == state[name].float()


@pytest.mark.parametrize("kind", KINDS)
def test_meta_modules_load_by_assignment_and_to_empty(kind):
    _, source = make(kind)
    with torch.device("meta"):
        target = torch.nn.Sequential(empty(kind))
    assert target(torch.empty(2, 316, device="meta")).shape == (2, 48)
    state = {f"0.{name}": tensor for name, tensor in source.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"0\.weight cannot be copied.*assign=True"):
        target.load_state_dict(state)
    target.load_state_dict(state, assign=True)
    x = torch.randn(4, 316)
    assert torch.equal(target(x), source(x))
    target = empty(kind, device="meta").to_empty(device="cpu")
    target.load_state_dict(source.state_dict())
    assert torch.equal(target(x), source(x))
    on_meta = build(kind, torch.nn.Linear(316, 48, device="meta"))
    assert all(tensor.is_meta for tensor in on_meta.buffers())


def broken_states():
    def change(name, function):
        return lambda state: {**state, name: function(state[name])}

    def drop(name):
        return lambda state: {key: value for key, value in state.items() if key != name}

    for name in ("weight", "weight_scale", "input_scale", "bias"):
        yield f"no {name}", "static", drop(name), rf"Missing key\(s\).*{name}"
    yield "float weight", "tensor", change("weight", lambda t: t.float()), "dtype float32; needed"
    bytes_ = change("weight", lambda t: t.view(torch.uint8))
    yield "bytes", "block", bytes_, "weight has dtype uint8; needed float8_e4m3fn"
    yield "other size", "row", change("weight", lambda t: t[:, :300]), r"shape \[48, 300\]"
    yield "row scales", "tensor", change("weight_scale", lambda t: t.expand(48, 1)), "weight_scale"
    blocks = change("weight_scale", lambda t: t[:, :2])
    yield "blocks missing", "block", blocks, r"weight_scale has shape \[1, 2\]; needed \[1, 3\]"
    e8m0 = change("weight_scale", lambda t: t.to(torch.float8_e8m0fnu))
    yield "e8m0", "block", e8m0, "dtype float8_e8m0fnu"
    more = lambda state: {**state, "input_scale": state["weight_scale"]}  # noqa: E731
    yield "a static scale", "tensor", more, "Unexpected key.*input_scale"


BROKEN = list(broken_states())


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("_, kind, change, message", BROKEN, ids=[b[0] for b in BROKEN])
def test_a_wrong_state_dict_is_refused(_, kind, change, message, assign):
    source, module = make(kind)[1], make(kind)[1]
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(RuntimeError, match=f"(?s){message}"):
        module.load_state_dict(change(source.state_dict()), assign=assign)
    if "has " in message:  # a value that was refused: nothing is half loaded
        for name, tensor in module.state_dict().items():
            assert torch.equal(tensor.float(), before[name].float())


def test_safetensors_round_trip(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model = torch.nn.Sequential(make("static")[1], make("block", 20, 48)[1])
    safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors")
    fresh = torch.nn.Sequential(empty("static"), empty("block", 20, 48))
    fresh.load_state_dict(safetensors.load_file(tmp_path / "model.safetensors"))
    x = torch.randn(3, 316)
    assert torch.equal(fresh(x), model(x))


CASTS = {
    "half": lambda m: m.half(),
    "to": lambda m: m.to(torch.bfloat16),
    "type": lambda m: m.type(torch.float16),
    "double and back": lambda m: m.double().float(),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_cast_leaves_codes_and_scales_as_they_are(kind, cast):
    _, module = make(kind, bias=False)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    x = torch.randn(3, 316)
    want = module(x)
    cast(module)
    for name, tensor in module.state_dict().items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor.float(), before[name].float())
    assert torch.equal(module(x), want)


@pytest.mark.parametrize("kind", ("tensor", "block"))
def test_a_bias_of_any_dtype_is_added(kind):
    _, module = make(kind)
    x = torch.randn(3, 316)
    want = module(x)
    module.half()
    assert module.bias.dtype == torch.float16
    assert (module(x) - want).norm() < 5e-3 * want.norm()
    assert module(x.half()).dtype == torch.float16


@pytest.mark.parametrize(
    "clone",  # not pickle alone, which torch does not offer for E4M3 tensors
    [copy.deepcopy, lambda module: torch_save_round_trip(module)],
    ids=["deepcopy", "torch.save"],
)
@pytest.mark.parametrize("kind", ("static", "row", "block"))
def test_copies_are_equal_and_independent(kind, clone):
    _, module = make(kind)
    twin, x = clone(module), torch.randn(3, 316)
    want = module(x)
    assert torch.equal(twin(x), want)
    twin.weight.zero_()
    assert torch.equal(module(x), want)


def torch_save_round_trip(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_tie_weight_shares_memory_and_says_how_much():
    one, two = make("block", bias=False)[1], make("block", bias=False)[1]
    assert two.tie_weight_(one) == 48 * 316 + 4 * 3
    x = torch.randn(3, 316)
    assert torch.equal(two(x), one(x)) and two.weight.data_ptr() == one.weight.data_ptr()


def test_from_linear_leaves_the_linear_alone():
    for kind in KINDS:
        linear = torch.nn.Linear(316, 8).eval()
        before = copy.deepcopy(linear.state_dict())
        module = build(kind, linear)
        assert not module.training
        module.bias.add_(1)
        assert all(torch.equal(tensor, before[n]) for n, tensor in linear.state_dict().items())
        expanded = torch.randn(1, 40).expand(8, 40)
        again = type(module).from_weight(expanded)
        assert torch.equal(
            again.weight.float(), type(module).from_weight(expanded + 0).weight.float()
        )


def test_construction_errors():
    for kind, name in (("tensor", "FP8Linear"), ("block", "FP8BlockLinear")):
        cls = type(empty(kind))
        with pytest.raises(ValueError, match=f"{name}: .*backend"):
            empty(kind, backend="gpu")
        with pytest.raises(TypeError, match=f"{name}.from_linear: linear is a Embedding"):
            cls.from_linear(torch.nn.Embedding(8, 8))
        with pytest.raises(TypeError, match=f"{name}: weight"):
            cls.from_weight(torch.zeros(8, 8, dtype=torch.int8))
        with pytest.raises(ValueError, match=r"\[8\]; needed \[N, K\]"):
            cls.from_weight(torch.zeros(8))
        with pytest.raises(ValueError, match="bias has shape"):
            cls.from_weight(torch.zeros(8, 8), torch.zeros(7))
        with pytest.raises(ValueError, match="bias is on meta and weight on cpu"):
            cls.from_weight(torch.zeros(8, 8), torch.zeros(8, device="meta"))
        with pytest.raises(TypeError, match=f"{name}: in_features must be an int, got float"):
            cls(8.0, 8)
        for bad in (float("nan"), float("inf")):
            linear = torch.nn.Linear(316, 8)
            linear.weight.data[5, 315] = bad
            with pytest.raises(ValueError, match=f"{name}: the weight holds NaN or Inf; FP8"):
                cls.from_linear(linear)
    weight = torch.zeros(8, 8)
    with pytest.raises(ValueError, match="scaling is 'column'; needed one of 'tensor', 'row', 's"):
        FP8Linear(8, 8, scaling="column")
    with pytest.raises(TypeError, match="fast_accum must be a bool, got int"):
        FP8Linear(8, 8, fast_accum=1)
    with pytest.raises(ValueError, match="fast_accum is not for scaling 'row'"):
        FP8Linear(8, 8, scaling="row", fast_accum=True)
    with pytest.raises(ValueError, match="scaling 'static' needs input_scale"):
        FP8Linear.from_weight(weight, scaling="static")
    with pytest.raises(ValueError, match="scaling 'row' takes no input_scale"):
        FP8Linear.from_weight(weight, scaling="row", input_scale=1.0)
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="needed a number above zero"):
            FP8Linear.from_weight(weight, input_scale=bad)
    with pytest.raises(TypeError, match="input_scale must be a number or a tensor of one, got str"):
        FP8Linear.from_weight(weight, input_scale="1")
    with pytest.raises(ValueError, match=r"input_scale has shape \[2\]; needed one element"):
        FP8Linear.from_weight(weight, input_scale=torch.ones(2))
    scale = torch.ones(1, dtype=torch.bfloat16)
    assert FP8Linear.from_weight(weight, input_scale=scale).input_scale.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_input_is_refused(kind):
    _, module = make(kind)
    with pytest.raises(ValueError, match=r"\[2, 315\]; needed \[\.\.\., 316\]"):
        module(torch.randn(2, 315))
    with pytest.raises(ValueError, match="needed"):
        module(torch.tensor(1.0))
    with pytest.raises(TypeError, match="float64; needed bfloat16 or float16 or float32"):
        module(torch.randn(2, 316, dtype=torch.float64))
    with pytest.raises(TypeError, match="Linear: x must be a tensor, got NoneType"):
        module(None)


def test_options_reach_the_operators(monkeypatch):
    seen = []

    def spy(q, weight, *rest, **options):
        seen.append(options)
        return torch.zeros(len(q), len(weight), dtype=torch.bfloat16)

    for name in ("fp8_linear_bf16", "fp8_linear_bias_bf16", "fp8_blockwise_linear_bf16"):
        monkeypatch.setattr(f"farro.nn.fp8_linear.{name}", spy)
    x = torch.randn(2, 316)
    make("tensor", fast_accum=True, backend="cpu")[1](x)
    make("static", bias=False, backend="reference")[1](x)
    make("row", backend="cpu")[1](x)
    assert seen[0] == {"fast_accum": True, "backend": "cpu"}
    assert seen[1] == {"fast_accum": False, "backend": "reference"}
    assert seen[2]["backend"] == "cpu" and "fast_accum" not in seen[2]


@pytest.mark.parametrize("kind", KINDS)
def test_forward_runs_in_every_grad_mode_and_backward_refuses(kind):
    _, module = make(kind)
    x = torch.randn(3, 316)
    want = module(x)
    with torch.inference_mode():
        assert torch.equal(module(x), want)
    x.requires_grad_()
    y = module(x)
    assert torch.equal(y, want)
    with pytest.raises(RuntimeError, match="inference"):
        y.sum().backward()


@pytest.mark.parametrize("kind", ("static", "row", "block"))
def test_compile_in_one_graph_and_three_at_most_over_many_batch_sizes(kind):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    module = make(kind)[1]
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    with torch.no_grad():
        for m in (0, 1, 2, 3, 17, 64):
            x = torch.randn(m, 316)
            assert torch.equal(compiled(x), module(x))
    assert counter.frame_count <= 3


def test_repr_says_what_it_is():
    assert repr(make("row", bias=False)[1]) == (
        "FP8Linear(in_features=316, out_features=48, bias=False, scaling='row')"
    )
    assert "fast_accum=True, backend='triton'" in repr(
        FP8Linear(8, 8, fast_accum=True, backend="triton")
    )
    assert repr(make("block")[1]) == "FP8BlockLinear(in_features=316, out_features=48, bias=True)"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_the_same_codes_and_nearly_the_same_results(kind):
    linear, module = make(kind, n=64, k=320)
    x = torch.randn(5, 320)
    want, state = module(x), module.state_dict()
    module.cuda()
    for name, tensor in module.state_dict().items():
        assert tensor.is_cuda and torch.equal(tensor.cpu().float(), state[name].float())
    result = module(x.cuda()).cpu()
    assert (result - want).norm() <= 8e-3 * want.norm()
    again = build(kind, linear.cuda()).state_dict()
    for name, tensor in again.items():
        assert torch.equal(tensor.cpu().float(), state[name].float())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_replays_with_new_values(kind):
    _, module = make(kind, n=64, k=320)
    module.cuda()
    x = torch.randn(5, 320, device="cuda").bfloat16()
    module(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = module(x)
    x.copy_(torch.randn(5, 320))
    graph.replay()
    assert torch.equal(y, module(x))
