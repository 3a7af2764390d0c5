"""SparseNVFP4Linear and the emulated NVFP4Linear: what they compute, keep, load and refuse."""

from __future__ import annotations

import copy

import pytest
import torch

import farro
from farro import nvfp4
from farro.formats.nvfp4 import E2M1_VALUES
from farro.nn import NVFP4Linear, SparseNVFP4Linear

N, K, ROWS = 96, 160, 9
KINDS = {
    "sparse": SparseNVFP4Linear,
    "sparse a16": SparseNVFP4Linear,
    "g16": NVFP4Linear,
    "g32": NVFP4Linear,
}
OPTIONS = {"sparse a16": {"quantize_input": False}, "g32": {"group_size": 32}}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def make(kind, linear, **more):
    return KINDS[kind].from_linear(linear, **OPTIONS.get(kind, {}), **more)


def empty(kind, **more):
    return KINDS[kind](K, N, **OPTIONS.get(kind, {}), **more)


@pytest.fixture
def linear():
    return torch.nn.Linear(K, N).requires_grad_(False)


@pytest.fixture
def x(generator):
    return torch.randn(ROWS, K, generator=generator).bfloat16()


def quantized(values, block, factor):
    """The format's formula in float64, but for the scale, which E4M3 rounds: values [R, K]."""
    blocks = values.double().unflatten(-1, (-1, block))
    scale = (blocks.abs().amax(-1) / 6 * factor).float().clamp(2.0**-9, 448)
    scale = scale.to(torch.float8_e4m3fn).double().unsqueeze(-1) / factor
    grid = torch.tensor(E2M1_VALUES, dtype=torch.float64)
    size = (blocks.abs() / scale).unsqueeze(-1)
    odd = torch.arange(len(grid)) % 2 * 1e-12  # ties go to the even code
    near = grid[((size - grid).abs() + odd).argmin(-1)]
    return (near * blocks.sign() * scale).flatten(-2)


def error(got, want):
    return float((got.double().cpu() - want.double()).norm() / want.double().norm())


def test_it_is_its_formula(kind, linear, x):
    module = make(kind, linear, input_gscale=3.0)
    weight = module.dequantized_weight().double()
    given = x.double() if kind == "sparse a16" else module.dequantized_input(x).double()
    want = given @ weight.T + linear.bias.double()
    assert error(module(x), want) < 4e-3 and module(x).dtype == torch.bfloat16
    # and what it multiplies is what its format makes of weight and input
    block = 16 if kind == "g16" else 32
    dense = nvfp4.prune_paired_4of8(linear.weight) if "sparse" in kind else linear.weight
    assert error(weight, quantized(dense, block, 448 * 6 / float(dense.abs().max()))) < 5e-3
    if kind != "sparse a16":
        assert error(given, quantized(x, block, 3.0)) < 5e-3
        assert 0.05 < error(given, x) < 0.15


def test_the_dense_weight_in_groups_of_32_is_that_of_quantize_weight(linear):
    module = NVFP4Linear.from_linear(linear, 32)
    packed, scale, alpha = nvfp4.quantize_weight(linear.weight[None])
    assert torch.equal(module.weight, packed[0]) and torch.equal(module.weight_scale, scale[0])
    assert torch.equal(module.alpha, alpha)


def test_shapes_and_dtypes_of_inputs(kind, linear, x):
    module = make(kind, linear)
    want = module(x)
    assert torch.equal(module(x[0]), want[0])
    assert torch.equal(module(x.view(3, 3, K)), want.view(3, 3, N))
    assert module(x[:0]).shape == (0, N)
    wide = module(x.float())
    assert wide.dtype == torch.float32 and torch.equal(wide.bfloat16(), want)
    assert torch.equal(module(x.half()), wide.half())
    assert torch.equal(module(x[:1].expand(4, K))[3], want[0])
    bare = torch.nn.Linear(K, N, bias=False)
    assert make(kind, bare).bias is None
    with pytest.raises(ValueError, match=r"needed \[..., 160\]"):
        module(x[:, :32])


def test_state_dict(kind, linear, x):
    module = make(kind, linear, input_gscale=2.0)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    fresh = empty(kind)
    assert not fresh(x).any()
    fresh.load_state_dict(state)
    assert torch.equal(fresh(x), module(x))
    hollow = empty(kind, device="meta")
    hollow.load_state_dict(state, assign=True)
    assert torch.equal(hollow(x), module(x))
    dtypes = {value.dtype for value in state.values()}
    assert dtypes <= {torch.uint8, torch.float32, torch.int32}
    stored = sum(v.nbytes for name, v in state.items() if v.dtype == torch.uint8)
    assert stored == N * K * {"g16": 9 / 16, "g32": 17 / 32}.get(kind, 11 / 32)


def test_copies_and_casts_keep_codes_and_scales(kind, linear, x):
    module = make(kind, linear, input_gscale=3.3)
    module.bias.zero_()
    want = module(x)
    assert torch.equal(copy.deepcopy(module).half()(x), want)
    assert torch.equal(module.double()(x), want)
    assert module.state_dict()["input_gscale"].dtype == torch.float32


def test_tied_weights_are_one(kind, linear, x):
    one, two = make(kind, linear), make(kind, torch.nn.Linear(K, N))
    two.bias.copy_(one.bias)
    assert two.tie_weight_(one) >= N * K * 11 / 32
    assert torch.equal(one(x), two(x))


def test_compiles_whole(kind, linear, x):
    module = make(kind, linear)
    compiled = torch.compile(module, fullgraph=True, backend="eager", dynamic=True)
    with torch.no_grad():
        assert torch.equal(compiled(x), module(x))


def test_backward_says_that_there_is_none(kind, linear, x):
    module = make(kind, linear)
    given = x.float().requires_grad_()
    y = module(given)
    assert torch.equal(y.detach(), module(x.float()))
    with pytest.raises(RuntimeError, match=r"NVFP4Linear.*torch\.no_grad"):
        (y.sum() + given.sum()).backward()


def test_wrong_arguments():
    for given, kind, words in (
        (lambda: SparseNVFP4Linear(48, 64), ValueError, r"\[64, 48\].*multiples of 32"),
        (lambda: SparseNVFP4Linear.from_weight(torch.ones(64)), ValueError, r"\[N, K\]"),
        (lambda: SparseNVFP4Linear.from_weight(torch.ones(64, 64).int()), TypeError, "int32"),
        (lambda: SparseNVFP4Linear.from_linear(torch.ones(64, 64)), TypeError, "from_weight"),
        (lambda: NVFP4Linear(40, 64), ValueError, "K = 40 is no multiple of 16"),
        (lambda: NVFP4Linear(64, 64, group_size=64), ValueError, "needed 16 or 32"),
        (lambda: NVFP4Linear(64, 64, backend="triton"), ValueError, "emulated"),
    ):
        with pytest.raises(kind, match=words):
            given()
    bad = torch.randn(64, 64)
    bad[3, 4] = torch.inf
    for cls in (SparseNVFP4Linear, NVFP4Linear):
        with pytest.raises(ValueError, match="NaN or Inf"):
            cls.from_weight(bad)


@pytest.mark.parametrize("scheme", ["nvfp4-48", "nvfp4-48-a16", "nvfp4-g16", "nvfp4-g32"])
def test_quantize_swaps_what_fits_and_says_what_does_not(scheme, x):
    sizes = ((K, N), (N, K), (K, 40), (48, N), (40, N))
    model = torch.nn.ModuleDict({str(i): torch.nn.Linear(*size) for i, size in enumerate(sizes)})
    kind = {"nvfp4-48": "sparse", "nvfp4-48-a16": "sparse a16"}.get(scheme, scheme[6:])
    want = make(kind, model["0"])
    report = farro.quantize_(model, scheme)
    swapped = [layer.name for layer in report.swapped]
    fits = {"nvfp4-g16": ["0", "1", "2", "3"], "nvfp4-g32": ["0", "1", "2"]}
    assert swapped == fits.get(scheme, ["0", "1"])
    assert torch.equal(model["0"](x), want(x)) and repr(model["0"]) == repr(want)
    reasons = {layer.name: layer.reason for layer in report.skipped}
    assert "multiple" in reasons["4"] and type(model["4"]) is torch.nn.Linear
    again = farro.quantize_(model, "int8-g32")
    assert "already" in {layer.name: layer.reason for layer in again.skipped}["0"]


@pytest.mark.gpu
def test_on_a_gpu_from_a_state_of_a_cpu(kind, linear, x):
    module = make(kind, linear, input_gscale=2.0)
    there = empty(kind, device="cuda")
    there.load_state_dict(module.state_dict())
    assert error(there(x.cuda()), module(x)) < 4e-3
    made = make(kind, linear.cuda(), input_gscale=2.0)
    for name, value in made.state_dict().items():
        assert torch.equal(value, there.state_dict()[name]), name
