"""Int8Linear: its values, its state dict, and that no move or cast changes what it holds."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import farro
from farro.nn import Int8Linear

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def make(n=48, k=316, group_size=64, bias=True, dtype=torch.float32, backend="auto"):
    linear = torch.nn.Linear(k, n, bias=bias, dtype=dtype)
    return linear, Int8Linear.from_linear(linear, group_size, backend=backend)


def quantize_with_numpy(x, group_size):
    """The spec's formula, written again: codes and scales as float64 [rows, groups, G]."""
    np = pytest.importorskip("numpy")
    x = x.float().numpy()
    rows, k = x.shape
    padded = np.zeros((rows, -(-k // group_size) * group_size), np.float32)
    padded[:, :k] = x
    padded = padded.reshape(rows, -1, group_size)
    scale = np.maximum(np.abs(padded).max(-1, keepdims=True) / np.float32(127), np.float32(1e-12))
    return np.rint(padded / scale).clip(-127, 127).astype(np.float64), scale.astype(np.float64)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("group_size", [32, 64, 128, 256])
@pytest.mark.parametrize("bias", [True, False])
def test_output_is_the_formula_in_float64(dtype, group_size, bias):
    np = pytest.importorskip("numpy")
    linear, module = make(group_size=group_size, bias=bias, dtype=dtype)
    x = torch.randn(7, 316, dtype=dtype)
    a, scale_a = quantize_with_numpy(x, group_size)
    b, scale_b = quantize_with_numpy(linear.weight.detach(), group_size)
    want = np.einsum("mgk,ngk->mn", a * scale_a, b * scale_b)
    if bias:
        want = want + linear.bias.detach().double().numpy()
    got = module(x)
    assert got.dtype == dtype
    step = torch.finfo(dtype).eps
    np.testing.assert_allclose(got.double().numpy(), want, rtol=step, atol=2e-6 + step * 1e-3)


@pytest.mark.parametrize("dtype", FLOATS)
def test_output_is_int8_gemm_of_the_plain_weight_bit_for_bit(dtype):
    linear, module = make(dtype=dtype)
    x = torch.randn(5, 316, dtype=dtype)
    q, scale = farro.quantize_int8_groups(x, 64, backend="reference")
    codes, weight_scale = farro.quantize_int8_groups(linear.weight.detach(), 64)
    want = farro.int8_gemm(
        *(q, codes.T, scale, weight_scale.T),
        group_size=64,
        output_dtype=dtype,
        bias=linear.bias.detach(),
        backend="reference",
    )
    assert torch.equal(module(x), want)


@pytest.mark.parametrize("leading", [(), (1,), (6,), (2, 3), (2, 1, 3), (0,), (2, 0, 3)])
def test_any_leading_dimensions(leading):
    _, module = make()
    x = torch.randn(*leading, 316)
    y = module(x)
    assert y.shape == (*leading, 48)
    for row, out in zip(x.reshape(y.shape[:-1].numel(), 316), y.reshape(-1, 48)):
        assert torch.equal(module(row), out)


def test_views_and_expanded_inputs_are_read_as_they_are():
    _, module = make()
    base = torch.randn(4, 6, 700)
    column_slice, turned = base[..., 13:329], base[..., :316].transpose(0, 1)
    expanded = torch.randn(1, 1, 316).expand(1, 5, 316)
    for x in (column_slice, turned, expanded):
        assert torch.equal(module(x), module(x.contiguous()))


@pytest.mark.parametrize("n, k", [(0, 316), (48, 0), (0, 0), (1, 1), (3, 64), (5, 257)])
def test_odd_sizes(n, k):
    _, module = make(n, k)
    y = module(torch.randn(3, k))
    assert y.shape == (3, n)
    assert module.weight.shape == (n, k)
    if k == 0:
        assert torch.equal(y, module.bias.expand(3, n))


def test_input_errors_name_what_is_needed():
    _, module = make()
    with pytest.raises(ValueError, match=r"\[2, 315\]; needed \[\.\.\., 316\]"):
        module(torch.randn(2, 315))
    with pytest.raises(ValueError, match="needed"):
        module(torch.tensor(1.0))
    with pytest.raises(TypeError, match="float64; needed bfloat16 or float16 or float32"):
        module(torch.randn(2, 316, dtype=torch.float64))
    with pytest.raises(TypeError, match="Int8Linear: x must be a tensor, got NoneType"):
        module(None)


def test_construction_errors():
    with pytest.raises(ValueError, match="group_size"):
        Int8Linear(8, 8, group_size=True)
    with pytest.raises(ValueError, match="group_size"):
        Int8Linear.from_linear(torch.nn.Linear(8, 8), 48)
    with pytest.raises(ValueError, match="backend"):
        Int8Linear(8, 8, backend="gpu")
    with pytest.raises(TypeError, match="Embedding"):
        Int8Linear.from_linear(torch.nn.Embedding(8, 8))
    with pytest.raises(TypeError, match="int8"):
        Int8Linear.from_weight(torch.zeros(8, 8, dtype=torch.int8))
    with pytest.raises(ValueError, match=r"\[8\]; needed \[N, K\]"):
        Int8Linear.from_weight(torch.zeros(8))
    with pytest.raises(ValueError, match="bias has shape"):
        Int8Linear.from_weight(torch.zeros(8, 8), torch.zeros(7))
    with pytest.raises(TypeError, match="bias must be a tensor, got list"):
        Int8Linear.from_weight(torch.zeros(8, 8), [0.0] * 8)
    with pytest.raises(ValueError, match="bias is on meta and weight on cpu"):
        Int8Linear.from_weight(torch.zeros(8, 8), torch.zeros(8, device="meta"))
    for size, error, message in (
        ("8", TypeError, "must be an int, got str"),
        (8.0, TypeError, "must be an int, got float"),
        (True, TypeError, "must be an int, got bool"),
        (-1, ValueError, "is -1; needed 0 or more"),
    ):
        with pytest.raises(error, match=f"Int8Linear: in_features {message}"):
            Int8Linear(size, 8)
        with pytest.raises(error, match=f"Int8Linear: out_features {message}"):
            Int8Linear(8, size)
    for bad in (float("nan"), float("inf")):
        linear = torch.nn.Linear(316, 8)
        linear.weight.data[5, 315] = bad
        with pytest.raises(ValueError, match="NaN or Inf"):
            Int8Linear.from_linear(linear)


def test_an_expanded_weight_is_read_as_it_is():
    weight = torch.randn(1, 40).expand(8, 40)
    module = Int8Linear.from_weight(weight)
    assert torch.equal(module.weight, Int8Linear.from_weight(weight.contiguous()).weight)


def test_a_fresh_module_is_zero():
    module = Int8Linear(316, 8)
    assert torch.equal(module(torch.randn(2, 316)), torch.zeros(2, 8))


def test_from_linear_keeps_training_mode_and_leaves_the_linear_alone():
    linear = torch.nn.Linear(316, 8).eval()
    before = copy.deepcopy(linear.state_dict())
    module = Int8Linear.from_linear(linear)
    assert not module.training
    module.bias.add_(1)
    for name, tensor in linear.state_dict().items():
        assert torch.equal(tensor, before[name])


# The weight: packed on a CPU, plain elsewhere, one copy


def test_on_a_cpu_the_codes_are_held_once_and_packed():
    linear, module = make()
    codes, scale = farro.quantize_int8_groups(linear.weight.detach(), 64)
    held = [t for t in (*module.buffers(), *module.parameters()) if t.dtype == torch.int8]
    assert [tuple(t.shape) for t in held] == [(5, 48, 64)]
    assert held[0].is_contiguous()
    assert torch.equal(farro.int8.unpack_groups(held[0], 316), codes)
    assert torch.count_nonzero(held[0][-1, :, 316 - 4 * 64 :]) == 0
    assert torch.equal(module.weight, codes)
    assert torch.equal(module.weight_scale, scale)


@pytest.mark.parametrize(
    "k, group_size, packed",
    [(256, 256, True), (4000, 256, True)] + [(576, 256, False), (300, 64, False), (1, 32, False)],
)
def test_packing_never_pads_by_more_than_a_sixteenth(k, group_size, packed):
    linear, module = make(24, k, group_size)
    assert (module._codes.dim() == 3) == packed
    assert module._codes.nbytes <= 24 * k * 17 / 16
    plain = Int8Linear.from_linear(linear, group_size, backend="triton")
    assert torch.equal(module.weight, plain._codes)


def test_a_back_end_that_reads_plain_weights_gets_them_plain():
    _, module = make(backend="triton")
    assert module._codes.shape == (48, 316)


def test_dequantized_weight_and_input_are_within_half_a_step():
    linear, module = make()
    weight = linear.weight.detach()
    step = module.weight_scale.repeat_interleave(64, -1)[:, :316]
    error = (module.dequantized_weight() - weight).abs()
    assert torch.all(error <= 0.5001 * step)
    assert error.max() > 0
    x = torch.randn(2, 3, 316)
    codes, scale = farro.quantize_int8_groups(x, 64)
    assert torch.equal(module.dequantized_input(x), farro.dequantize_int8_groups(codes, scale, 64))


# State dict


@pytest.mark.parametrize("bias", [True, False])
def test_state_dict_has_the_documented_names_shapes_and_dtypes(bias):
    linear, module = make(bias=bias)
    codes, scale = farro.quantize_int8_groups(linear.weight.detach(), 64)
    state = module.state_dict()
    assert list(state) == ["weight", "weight_scale", "bias"][: 2 + bias]
    assert torch.equal(state["weight"], codes)
    assert state["weight"].dtype == torch.int8
    assert torch.equal(state["weight_scale"], scale)
    assert all(tensor.is_contiguous() for tensor in state.values())


def test_load_state_dict_in_place_keeps_the_memory():
    _, source = make()
    target = Int8Linear(316, 48, group_size=64)
    addresses = [t.data_ptr() for t in target.buffers()]
    target.load_state_dict(source.state_dict())
    assert [t.data_ptr() for t in target.buffers()] == addresses
    x = torch.randn(4, 316)
    assert torch.equal(target(x), source(x))


def test_meta_module_is_loaded_by_assignment():
    _, source = make()
    with torch.device("meta"):
        target = torch.nn.Sequential(Int8Linear(316, 48, group_size=64))
    assert target(torch.empty(2, 316, device="meta")).shape == (2, 48)
    state = {f"0.{name}": tensor for name, tensor in source.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"0\.weight cannot be copied.*assign=True"):
        target.load_state_dict(state)
    target.load_state_dict(state, assign=True)
    x = torch.randn(4, 316)
    assert torch.equal(target(x), source(x))
    assert target[0]._codes.shape == (5, 48, 64)


def test_to_empty_lays_out_for_the_device_and_loads():
    _, source = make()
    target = Int8Linear(316, 48, group_size=64, device="meta").to_empty(device="cpu")
    target.load_state_dict(source.state_dict())
    x = torch.randn(4, 316)
    assert torch.equal(target(x), source(x))


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scales_of_other_float_dtypes_are_kept_as_fp32(assign, dtype):
    _, module = make()
    state = module.state_dict()
    state["weight_scale"] = state["weight_scale"].to(dtype)
    module.load_state_dict(state, assign=assign)
    assert module.weight_scale.dtype == torch.float32
    assert torch.equal(module.weight_scale, state["weight_scale"].float())


def broken_states():
    def change(name, function):
        return lambda state: {**state, name: function(state[name])}

    def drop(name):
        return lambda state: {key: value for key, value in state.items() if key != name}

    yield "no scale", drop("weight_scale"), r"Missing key\(s\).*weight_scale"
    yield "no weight", drop("weight"), r"Missing key\(s\).*weight"
    yield "no bias", drop("bias"), r"Missing key\(s\).*bias"
    yield "float weight", change("weight", lambda t: t.float()), "weight has dtype float32"
    yield "uint8 weight", change("weight", lambda t: t.view(torch.uint8)), "dtype uint8"
    yield "packed weight", change("weight", lambda t: t[None]), r"weight has shape \[1, 48, 316\]"
    yield "uint8 scale", change("weight_scale", lambda t: t.to(torch.uint8)), "dtype uint8"
    e8m0 = torch.float8_e8m0fnu
    yield "e8m0 scale", change("weight_scale", lambda t: t.to(e8m0)), "dtype float8_e8m0fnu"
    yield "other groups", change("weight_scale", lambda t: t[:, :2]), "made with group_size 64"
    yield "turned scale", change("weight_scale", lambda t: t.T), "weight_scale has shape"
    yield "unknown key", lambda state: {**state, "zero_point": state["bias"]}, "Unexpected key"


BROKEN = list(broken_states())


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("_, change, message", BROKEN, ids=[b[0] for b in BROKEN])
def test_a_wrong_state_dict_is_refused_and_codes_keep_their_values(_, change, message, assign):
    _, source = make()
    _, module = make()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(RuntimeError, match=f"(?s){message}"):
        module.load_state_dict(change(source.state_dict()), assign=assign)
    if "has " in message:  # a value that was refused: nothing of ours is half loaded
        assert torch.equal(module.weight, before["weight"])
        assert torch.equal(module.weight_scale, before["weight_scale"])


def test_safetensors_round_trip(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    _, inner = make()
    model = torch.nn.Sequential(inner, make(20, 48)[1])
    safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors")
    state = safetensors.load_file(tmp_path / "model.safetensors")
    assert state["0.weight"].shape == (48, 316)
    assert state["0.weight"].dtype == torch.int8
    assert state["1.weight_scale"].shape == (20, 1)
    fresh = torch.nn.Sequential(
        Int8Linear(316, 48, group_size=64), Int8Linear(48, 20, group_size=64)
    )
    fresh.load_state_dict(state)
    x = torch.randn(3, 316)
    assert torch.equal(fresh(x), model(x))
    safetensors.save_model(model, str(tmp_path / "whole.safetensors"))
    again = copy.deepcopy(fresh)
    again[0]._codes.zero_()
    safetensors.load_model(again, str(tmp_path / "whole.safetensors"))
    assert torch.equal(again(x), model(x))


# Casts, moves, copies


@pytest.mark.parametrize(
    "cast",
    [
        lambda m: m.half(),
        lambda m: m.bfloat16(),
        lambda m: m.to(torch.float16),
        lambda m: m.type(torch.float16),
        lambda m: m.double().float(),
        lambda m: m.half().float(),
    ],
    ids=["half", "bfloat16", "to", "type", "double", "half and back"],
)
def test_a_cast_leaves_codes_and_scales_as_they_are(cast):
    _, module = make(bias=False)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    x = torch.randn(3, 316)
    want = module(x)
    cast(module)
    for name, tensor in module.state_dict().items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor, before[name])
    assert torch.equal(module(x), want)


def test_a_cast_casts_the_bias():
    _, module = make()
    assert module.half().bias.dtype == torch.float16


def test_moving_to_meta_unpacks_and_keeps_shapes():
    _, module = make()
    module.to("meta")
    assert module._codes.shape == module.weight.shape == (48, 316)
    assert module.weight_scale.shape == (48, 5)


@pytest.mark.parametrize(
    "clone",
    [
        copy.deepcopy,
        lambda module: pickle.loads(pickle.dumps(module)),
        lambda module: torch_save_round_trip(module),
    ],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_copies_are_equal_and_independent(clone):
    _, module = make()
    twin = clone(module)
    x = torch.randn(3, 316)
    want = module(x)
    assert torch.equal(twin(x), want)
    twin._codes.zero_()
    assert torch.equal(module(x), want)


def torch_save_round_trip(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_tie_weight_shares_memory_and_says_how_much():
    one, two = make(bias=False)[1], make(bias=False)[1]
    held = two._codes.nbytes + two._scale.nbytes
    assert two.tie_weight_(one) == held
    x = torch.randn(3, 316)
    assert torch.equal(two(x), one(x))
    assert two._codes.data_ptr() == one._codes.data_ptr()


# Grad modes and compile


def test_forward_runs_in_every_grad_mode_and_backward_refuses():
    _, module = make()
    x = torch.randn(3, 316)
    want = module(x)
    with torch.no_grad():
        assert torch.equal(module(x), want)
    with torch.inference_mode():
        assert torch.equal(module(x), want)
    x.requires_grad_()
    y = module(x)
    assert torch.equal(y, want)
    with pytest.raises(RuntimeError, match="inference"):
        y.sum().backward()


def test_compile_in_one_graph_and_three_at_most_over_many_batch_sizes():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model = torch.nn.Sequential(make()[1], torch.nn.GELU(), make(20, 48)[1])
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    with torch.no_grad():
        for m in (0, 1, 2, 3, 17, 64, 1000):
            x = torch.randn(m, 316)
            assert torch.equal(compiled(x), model(x))
    assert counter.frame_count <= 3


def test_repr_says_what_it_is():
    assert repr(make(bias=False)[1]) == (
        "Int8Linear(in_features=316, out_features=48, bias=False, group_size=64)"
    )
    assert "backend='triton'" in repr(make(backend="triton")[1])


# A GPU


@pytest.mark.gpu
def test_moves_between_cpu_and_gpu_keep_the_values_bit_for_bit():
    _, module = make()
    x = torch.randn(5, 316)
    want, state = module(x), module.state_dict()
    module.cuda()
    assert module._codes.shape == (48, 316)
    assert torch.equal(module(x.cuda()).cpu(), want)
    for name, tensor in module.state_dict().items():
        assert tensor.is_cuda
        assert torch.equal(tensor.cpu(), state[name])
    module.cpu()
    assert module._codes.shape == (5, 48, 64)
    assert torch.equal(module(x), want)


@pytest.mark.gpu
def test_quantizing_on_the_gpu_gives_the_same_state_dict():
    linear = torch.nn.Linear(316, 48)
    on_cpu = Int8Linear.from_linear(linear, 64).state_dict()
    on_gpu = Int8Linear.from_linear(linear.cuda(), 64).state_dict()
    for name, tensor in on_gpu.items():
        assert torch.equal(tensor.cpu(), on_cpu[name])


@pytest.mark.gpu
def test_a_pickle_mapped_to_the_gpu_is_laid_out_for_it():
    _, module = make()
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False, map_location="cuda")
    assert loaded._codes.shape == (48, 316)
    x = torch.randn(5, 316)
    assert torch.equal(loaded(x.cuda()).cpu(), module(x))
