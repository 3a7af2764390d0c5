"""Peers of grouped products: what they are handed, with stand-ins for libraries that need a GPU."""

from __future__ import annotations

import importlib.machinery
import sys
import types

import pytest
import torch

from farro.bench import grouped_peers, kept, layer_peers
from farro.bench.case import Missing, Options, Subject
from farro.bench.grouped_peers import Experts

CPU = torch.device("cpu")
COUNTS = (3, 0, 18, 1)


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(kept, "_KEPT", {})


@pytest.fixture
def experts():
    x = torch.full((4, 20, 256), float("nan")).bfloat16()
    for expert, count in enumerate(COUNTS):
        x[expert, :count] = torch.randn(count, 256).bfloat16()
    weight = torch.randn(4, 40, 256).bfloat16()
    return Experts(x, COUNTS, lambda: weight, "the weight")


def error(made, experts):
    call, value = made
    rows = value(call()).double()
    assert rows.shape == experts.truth.shape == (22, 40)
    return float((rows - experts.truth).norm() / experts.truth.norm())


def dequantized(pair, block):
    codes, scales = pair
    spread = scales
    for dim, size in zip((-2, -1), block):
        if size:
            spread = spread.repeat_interleave(size, dim).narrow(dim, 0, codes.shape[dim])
    return codes.double() * spread.double()


@pytest.fixture
def deep_gemm(monkeypatch):
    """What farro uses of DeepGEMM: formats of its operands as it documents them."""

    def per_token(x, use_ue8m0):
        assert x.dim() == 2 and not use_ue8m0 and not x.isnan().any()
        blocks = x.float().view(len(x), -1, 128)
        scale = blocks.abs().amax(-1).clamp(1e-4) / 448
        return (blocks / scale.unsqueeze(-1)).view(x.shape).to(torch.float8_e4m3fn), scale

    def per_block(w, use_ue8m0):
        k = w.shape[1]
        scale = torch.stack([part.float().abs().amax() for part in w.split(128, 1)])[None] / 448
        spread = scale.repeat_interleave(128, 1)[:, :k]
        return (w.float() / spread).to(torch.float8_e4m3fn), scale

    def masked(a, b, out, counts, expected, disable_ue8m0_cast):
        assert disable_ue8m0_cast and out.shape[1] % 64 == 0 and expected == 5
        x, w = dequantized(a, (0, 128)), dequantized(b, (128, 128))
        out.fill_(float("nan"))
        for expert, count in enumerate(counts.tolist()):
            out[expert, :count] = (x[expert, :count] @ w[expert].T).bfloat16()

    def contiguous(a, b, out, owner, disable_ue8m0_cast):
        assert disable_ue8m0_cast and len(out) % 128 == 0
        x, w = dequantized(a, (0, 128)), dequantized(b, (128, 128))
        assert all(len(set(part.tolist())) == 1 for part in owner.view(-1, 128))
        for row, expert in enumerate(owner.tolist()):
            out[row] = (x[row] @ w[expert].T).bfloat16()

    parts = {
        "deep_gemm": {
            "fp8_m_grouped_gemm_nt_masked": masked,
            "m_grouped_fp8_gemm_nt_contiguous": contiguous,
            "get_mk_alignment_for_contiguous_layout": lambda: 128,
        },
        "deep_gemm.utils": {},
        "deep_gemm.utils.math": {
            "per_token_cast_to_fp8": per_token,
            "per_block_cast_to_fp8": per_block,
        },
    }
    install(monkeypatch, parts)


def install(monkeypatch, parts):
    for name, values in parts.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, module)


def test_torch_gets_tokens_sorted_by_expert(experts):
    assert error(grouped_peers._grouped_mm(experts), experts) < 5e-3


def test_deep_gemm_gets_both_layouts(experts, deep_gemm):
    assert error(grouped_peers._deep_gemm_masked(experts), experts) < 5e-2
    assert error(grouped_peers._deep_gemm_contiguous(experts), experts) < 5e-2


def test_rows_are_filled_up_to_a_multiple_by_zeros(experts):
    rows, ends, place = experts.packed(16)
    assert ends.tolist() == [16, 16, 48, 64] and rows.shape == (64, 256)
    assert torch.equal(rows[place], experts.x[experts.mine]) and len(place) == 22
    rows[place] = 0
    assert not rows.any()


@pytest.mark.parametrize("kind", grouped_peers._HUMMING)
def test_humming_gets_offsets_and_keeps_its_layer(experts, monkeypatch, kind):
    made = []

    class Layer(torch.nn.Module):
        humming_config = "its configuration"

        def __init__(self, shape_n, shape_k, num_experts, weight_config, input_config, torch_dtype):
            super().__init__()
            assert (shape_n, shape_k, num_experts, torch_dtype) == (40, 256, 4, torch.bfloat16)
            made.append(weight_config["dtype"])

        def load_from_unquantized(self, weight):
            self.weight = torch.nn.Parameter(weight, requires_grad=False)

        def transform(self):
            pass

        def forward(self, x, input_scale, expert_layout, compute_config, tuning_config=None):
            assert compute_config == {"gemm_type": "grouped_contiguous"}
            assert expert_layout.tolist() == [0, 3, 3, 21, 22]
            assert (input_scale == "scale") == (kind != "NVFP4 W4A16")
            return torch._grouped_mm(x, self.weight.mT, offs=expert_layout[1:].int())

    parts = {
        "humming": {},
        "humming.layer": {"HummingLayer": Layer},
        "humming.forward": {"may_quant_input": lambda config, x: (x, "scale")},
    }
    install(monkeypatch, parts)
    for _ in range(2):
        assert error(grouped_peers._humming(kind, experts), experts) < 5e-3
    assert made == [grouped_peers._HUMMING[kind][0]["dtype"]]


def test_humming_is_tuned_for_grouped_products(experts, monkeypatch):
    asked = {}

    def tuned(name, layer, call, device, compute):
        asked.update(name=name, layer=layer, compute=compute)
        assert torch.equal(call(tuning_config="best"), call()), "a call takes a configuration"
        return "best"

    def layer(x, input_scale, expert_layout, compute_config, tuning_config="default"):
        return torch._grouped_mm(x, experts.weight().mT, offs=expert_layout[1:].int())

    monkeypatch.setattr(grouped_peers, "tuned", tuned)
    monkeypatch.setattr(grouped_peers, "_humming_layer", lambda kind, weight: layer)
    monkeypatch.setattr(grouped_peers.importlib.util, "find_spec", lambda name: object())
    install(monkeypatch, {"humming": {}, "humming.forward": {"may_quant_input": None}})
    make = grouped_peers._humming
    default = grouped_peers._subject(
        "Humming NVFP4 W4A16", lambda given: make("NVFP4 W4A16", given), experts
    )
    best = grouped_peers._tuned(default, experts)
    assert asked == {"name": best.name, "layer": layer, "compute": grouped_peers._GROUPED}
    assert best.name == "Humming NVFP4 W4A16 tuned" and best.config == "best"
    assert best.call.keywords["tuning_config"] == "best"
    assert error((best.call, best.value), experts) < 5e-3
    monkeypatch.setattr(grouped_peers, "tuned", lambda name, *more: Missing(name, "none"))
    assert grouped_peers._tuned(default, experts) == Missing(best.name, "none")


def test_peers_are_named_where_they_are_missing_and_by_what_was_asked(experts, monkeypatch):
    (one,) = grouped_peers.grouped(experts, Options(CPU))
    assert isinstance(one, Subject) and one.name == "torch _grouped_mm BF16"
    assert list(grouped_peers.grouped(experts, Options(CPU, peers="humming"))) == []
    missing = grouped_peers._subject("x", grouped_peers._deep_gemm_masked, experts)
    assert missing == Missing("x", "deep_gemm is not installed")
    monkeypatch.setattr(grouped_peers.importlib.util, "find_spec", lambda name: None)
    make = lambda experts: grouped_peers._humming("FP8 block", experts)  # noqa: E731
    assert "humming-kernels" in grouped_peers._subject("x", make, experts).reason


def test_a_layer_in_torch_leaves_out_routes_to_other_ranks():
    x, up, down = (torch.randn(*s).bfloat16() for s in ((9, 64), (3, 64, 64), (3, 64, 32)))
    ids = torch.randint(0, 6, (9, 2))
    ids[4] = 5  # a token of which nothing is computed here
    weights = torch.rand(9, 2)
    (peer,) = layer_peers.layers(x, ids, weights, lambda: (up, down), Options(CPU))
    want = torch.zeros(9, 64, dtype=torch.float64)
    for token in range(9):
        for slot in range(2):
            if (expert := int(ids[token, slot])) < 3:
                gate, top = (x[token].double() @ up[expert].double().T).chunk(2)
                row = (torch.nn.functional.silu(gate) * top) @ down[expert].double().T
                want[token] += row * weights[token, slot]
    assert (peer.call().double() - want).norm() < 2e-2 * want.norm()
    other = Options(CPU, peers="humming")
    assert not list(layer_peers.layers(x, ids, weights, lambda: (up, down), other))


def test_the_oldest_leaves_where_there_is_no_memory(monkeypatch):
    monkeypatch.setattr(kept, "_CPU_BYTES", 100)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    calls = []

    def get(key, size):
        return kept.kept(key, lambda: (calls.append(key), torch.zeros(size, dtype=torch.int8))[1:])

    for key, size in (("a", 40), ("b", 40), ("a", 40), ("c", 40), ("a", 40), ("b", 40), ("d", 900)):
        get(key, size)
    assert calls == ["a", "b", "c", "b", "d"]
    assert list(kept._KEPT) == ["d"]
