"""Int8Experts: what it computes, keeps, loads and refuses."""

from __future__ import annotations

import copy
import io

import pytest
import torch

import farro
from farro.nn import Int8Experts
from farro.testing import assert_bit_equal
from tests import moe_model

TOKENS, EXPERTS, HIDDEN, INNER, TOPK = 17, 6, 70, 48, 2


@pytest.fixture
def dense(generator):
    return moe_model.synthetic(generator, EXPERTS, HIDDEN, INNER, TOPK)


@pytest.fixture
def routed(dense, generator):
    """(x, ids, weights)"""
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    return x, *dense.route(x)


def make(dense, group_size=32, **options):
    return Int8Experts.from_dense(dense.gate_up, dense.down, group_size, **options)


@pytest.mark.parametrize("backend", ("reference", "cpu"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_it_is_moe_ffn_on_quantized_weights(dense, routed, backend, dtype):
    x, ids, weights = routed
    x = x.to(dtype)
    module = make(dense, backend=backend)
    given = []
    for weight in (dense.gate_up, dense.down):
        codes, scale = farro.quantize_int8_groups(weight, 32)
        given += [codes.transpose(1, 2), scale.transpose(1, 2)]
    rows = farro.quantize_int8_groups(x, 32)
    want = farro.moe_ffn(*rows, *given, ids, weights, group_size=32, output_dtype=dtype)
    got = module(x, ids, weights)
    assert got.dtype == dtype
    assert_bit_equal(got, want)
    assert_bit_equal(module(x, ids.int(), weights.to(torch.float64)), want)


def test_it_is_near_the_dense_experts(dense, routed):
    x, ids, weights = routed
    want = dense.apply_experts(x, ids, weights)
    assert (make(dense)(x, ids, weights) - want).norm() < 0.03 * want.norm()


def test_interleaved_rows(dense, routed):
    gate, up = dense.gate_up.detach().chunk(2, 1)
    turned = torch.stack((gate, up), 2).flatten(1, 2)
    module = Int8Experts.from_dense(turned, dense.down, 32, gate_up_layout="interleaved")
    assert_bit_equal(module(*routed), make(dense)(*routed))


def test_state_dict_and_its_layout(dense, routed):
    module = make(dense)
    state = module.state_dict()
    shapes = {name: (tuple(t.shape), t.dtype, t.is_contiguous()) for name, t in state.items()}
    assert shapes == {
        "gate_up_proj": ((EXPERTS, 2 * INNER, HIDDEN), torch.int8, True),
        "gate_up_proj_scale": ((EXPERTS, 2 * INNER, 3), torch.float32, True),
        "down_proj": ((EXPERTS, HIDDEN, INNER), torch.int8, True),
        "down_proj_scale": ((EXPERTS, HIDDEN, 2), torch.float32, True),
    }
    codes, scale = farro.quantize_int8_groups(dense.gate_up, 32)
    assert torch.equal(state["gate_up_proj"], codes)
    assert torch.equal(state["gate_up_proj_scale"], scale)
    want = module(*routed)
    other = Int8Experts(EXPERTS, HIDDEN, INNER, 32)
    assert not other(*routed).any()
    other.load_state_dict(state)
    assigned = Int8Experts(EXPERTS, HIDDEN, INNER, 32, device="meta")
    assigned.load_state_dict(state, assign=True)
    for one in (other, assigned, copy.deepcopy(module)):
        assert_bit_equal(one(*routed), want)
        assert all(t.is_contiguous() for t in one.weights[1::2])  # as kernels read them
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    assert_bit_equal(torch.load(file, weights_only=False)(*routed), want)


def test_safetensors(dense, routed, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    module = make(dense)
    safetensors.save_file(module.state_dict(), tmp_path / "experts.safetensors")
    other = Int8Experts(EXPERTS, HIDDEN, INNER, 32)
    other.load_state_dict(safetensors.load_file(tmp_path / "experts.safetensors"))
    assert_bit_equal(other(*routed), module(*routed))


@pytest.mark.parametrize("assign", (False, True))
def test_half_precision_scales_are_read(dense, routed, assign):
    """compressed-tensors stores scales in the model's dtype."""
    state = make(dense).state_dict()
    for name in ("gate_up_proj_scale", "down_proj_scale"):
        state[name] = state[name].bfloat16()
    module = Int8Experts(EXPERTS, HIDDEN, INNER, 32)
    module.load_state_dict(state, assign=assign)
    assert module.down_proj_scale.dtype == torch.float32
    assert torch.equal(module.down_proj_scale, state["down_proj_scale"].float())
    module(*routed)


def test_wrong_state_dicts_are_refused_and_change_nothing(dense, routed):
    module = make(dense)
    state, want = module.state_dict(), module(*routed)
    bad = {
        "from_dense": {"gate_up_proj": dense.gate_up.bfloat16()},
        "group_size 32": {"down_proj_scale": torch.ones(EXPERTS, HIDDEN, 1)},
        "needed [6, 70, 48]": {"down_proj": torch.zeros(EXPERTS, INNER, HIDDEN, dtype=torch.int8)},
        "uint8": {"down_proj_scale": torch.ones(EXPERTS, HIDDEN, 2).byte()},
    }
    for words, change in bad.items():
        for assign in (False, True):
            with pytest.raises(RuntimeError) as error:
                module.load_state_dict({**state, **change}, assign=assign)
            assert words in str(error.value)
            assert_bit_equal(module(*routed), want)
    with pytest.raises(RuntimeError, match="down_proj_scale"):
        module.load_state_dict({k: v for k, v in state.items() if k != "down_proj_scale"})


def test_casts_leave_codes_and_scales(dense, routed):
    module = make(dense)
    want = module(*routed)
    for cast in (module.half(), module.bfloat16(), module.double(), module.to(torch.float16)):
        assert cast.gate_up_proj_scale.dtype == torch.float32
        assert cast.down_proj.dtype == torch.int8
        assert_bit_equal(cast(*routed), want)


def test_dropped_routes_empty_batches_and_gradients(dense, routed):
    x, ids, weights = routed
    module = make(dense)
    dropped = module(x, torch.full_like(ids, EXPERTS), weights)
    assert dropped.shape == x.shape and not dropped.any()
    assert module(x[:0], ids[:0], weights[:0]).shape == (0, HIDDEN)
    expanded = module(x[:1].expand(3, -1), ids[:1].repeat(3, 1), weights[:1].repeat(3, 1))
    assert_bit_equal(expanded[2:], module(x[:1], ids[:1], weights[:1]))
    out = module(x.clone().requires_grad_(), ids, weights)
    assert_bit_equal(out.detach(), module(*routed))


def test_dequantized_weights(dense):
    module = make(dense)
    for restored, weight in zip(module.dequantized(), (dense.gate_up, dense.down)):
        assert (restored - weight).norm() < 0.01 * weight.norm()
    assert module.dequantized(torch.bfloat16)[0].dtype == torch.bfloat16


def test_wrong_arguments(dense, routed):
    x, ids, weights = routed
    up, down = dense.gate_up.detach(), dense.down.detach()
    for given, error, words in (
        ((up[:, :-1], down), ValueError, r"\[6, 95, 70\].*\[E, 2I, H\]"),
        ((up, down[0]), ValueError, r"\[70, 48\]"),
        ((up.to(torch.int8), down), TypeError, "gate_up_proj has dtype int8"),
        ((up, "down"), TypeError, "down_proj must be a tensor"),
        ((up * float("nan"), down), ValueError, "gate_up_proj holds NaN"),
        ((up, down, 48), ValueError, "group_size is 48"),
    ):
        with pytest.raises(error, match=words):
            Int8Experts.from_dense(*given)
    with pytest.raises(ValueError, match="gate_up_layout is 'stacked'"):
        Int8Experts(2, 32, 32, gate_up_layout="stacked")
    with pytest.raises(ValueError, match="hidden_size is -1"):
        Int8Experts(2, -1, 32)
    module = make(dense)
    with pytest.raises(ValueError, match=r"hidden_states has shape \[1, 17, 70\].*flatten"):
        module(x[None], ids, weights)
    with pytest.raises(TypeError, match="hidden_states has dtype float64"):
        module(x.double(), ids, weights)
    with pytest.raises(ValueError, match=r"topk_ids has shape \[16, 2\]"):
        module(x, ids[1:], weights)
    assert "num_experts=6, hidden_size=70, intermediate_size=48, group_size=32" in str(module)


@pytest.mark.gpu
def test_on_a_gpu(dense, routed):
    module = make(dense)
    want = module(*routed)
    got = module.cuda()(*(t.cuda() for t in routed))
    assert (got.cpu() - want).norm() < 1e-3 * want.norm()
    back = module.cpu()(*routed)
    assert_bit_equal(back, want)
