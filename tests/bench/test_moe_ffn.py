"""farro bench moe_ffn: every way to compute the layer is near the truth; peers by stand-ins."""

from __future__ import annotations

import sys

import pytest
import torch

from farro.bench import adapter, kept, moe_ffn_products, plans, quantized_layer_peers, runner
from farro.bench.case import Missing, Options, Subject
from farro.bench.quantized_layer_peers import Layer
from farro.bench.runner import relative_error

from .test_grouped_peers import deep_gemm, install  # noqa: F401

CPU = torch.device("cpu")
SIZES = {"m": 9, "n": 128, "k": 256, "e": 3, "all": 6, "topk": 2}
ADAPTER = adapter("moe_ffn")


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(kept, "_KEPT", {})


def test_all_ways_are_near_the_truth():
    case = ADAPTER.build(SIZES, Options(CPU, 128))
    assert case.sizes == SIZES
    subjects = [*case.farro(["auto", "reference"]), *case.extra(), *case.peers()]
    names = [subject.name for subject in subjects]
    assert names == [
        *("farro auto", "farro reference", "farro auto, operators apart", "torch BF16 layer")
    ]
    results = {subject.name: subject.call() for subject in subjects}
    for name, result in results.items():
        assert relative_error(result, case.truth()) < 0.03, name
    assert torch.equal(results["farro auto"], results["farro reference"])
    apart = results["farro auto, operators apart"]  # whose silu is torch's
    assert relative_error(apart, results["farro auto"].double()) < 1e-3
    used = int((case.args[6] < 3).sum())
    assert case.ops == 2 * used * 3 * 128 * 256
    active = len(set(case.args[6][case.args[6] < 3].tolist()))
    weights = active * (3 * 128 * 256 + 4 * (2 * 256 + 256))
    assert case.nbytes == weights + 9 * 256 + 4 * 9 * 2 + 2 * 9 * 256


def test_a_configuration_can_be_forced():
    case = ADAPTER.build(SIZES, Options(CPU, 256))
    operator, problem = case.problem()
    kernel = next(k for k in operator.kernels if k.backend == "cpu")
    assert torch.equal(
        case.run(kernel.function(), kernel.config(problem)), case.farro(["cpu"])[0].call()
    )


def test_a_run_from_its_shapes():
    sets = plans.parse_shapes(ADAPTER, "64x96x4x4x2")
    session = runner.open_session(ADAPTER, CPU, ["test"], None, quick=True, rounds=1)
    listed = list(plans.cases(ADAPTER, sets, (3,), [Options(CPU, 128)]))
    result = runner.run(session, listed)
    assert not result["failed"]
    rows = {row["subject"]: row for row in result["rows"]}
    assert rows["farro auto"]["error"] < ADAPTER.max_error
    assert (rows["farro auto"]["e"], rows["farro auto"]["topk"]) == (4, 2)
    assert result["settings"]["routing"]["bias"] == 0.5
    models = [shape["n"] for shape in ADAPTER.shapes["default"]]
    assert models == [768, 1536, 14336, 2048]


# --- peers ---------------------------------------------------------------------------------------


@pytest.fixture
def layer():
    case = ADAPTER.build({**SIZES, "m": 40}, Options(CPU, 128))
    inputs = case.peers.__self__
    x = torch.randn(40, 256).bfloat16()
    dense = lambda: (inputs.gate_up.bf16(), inputs.down.bf16())  # noqa: E731
    return Layer(x, inputs.ids, inputs.weights, dense, "key")


def truth(layer):
    up, down = layer.experts()
    total = torch.zeros(layer.x.shape, dtype=torch.float64)
    for t, j in (layer.ids < layer.count).nonzero().tolist():
        e = int(layer.ids[t, j])
        gate, top = (up[e].double() @ layer.x[t].double()).chunk(2)
        row = down[e].double() @ (torch.nn.functional.silu(gate) * top)
        total[t] += row * layer.weights[t, j]
    return total


def test_deep_gemm_gets_both_layouts(layer, deep_gemm, monkeypatch):  # noqa: F811
    scale = layer.x.float().view(40, 2, 128).abs().amax(-1) / 448
    codes = layer.x.float().view(40, 2, 128) / scale.unsqueeze(-1)
    tokens = codes.view(40, 256).to(torch.float8_e4m3fn), scale

    def per_block(w, use_ue8m0):  # the stand-in's own is for one row of blocks
        n, k = w.shape
        blocks = w.float().view(n // 128, 128, k // 128, 128)
        scale = blocks.abs().amax((1, 3)) / 448
        return (blocks / scale[:, None, :, None]).view(n, k).to(torch.float8_e4m3fn), scale

    monkeypatch.setattr(sys.modules["deep_gemm.utils.math"], "per_block_cast_to_fp8", per_block)
    contiguous = quantized_layer_peers._deep_gemm_contiguous(layer, *tokens)
    assert relative_error(contiguous(), truth(layer)) < 0.08
    import deep_gemm as library

    masked = library.fp8_m_grouped_gemm_nt_masked
    expected = max(1, len(layer.order) // 3)

    def checked(a, b, out, counts, given, disable_ue8m0_cast):
        assert given == expected  # the stand-in has a number of its own
        masked(a, b, out, counts, 5, disable_ue8m0_cast)

    monkeypatch.setattr(library, "fp8_m_grouped_gemm_nt_masked", checked)
    call = quantized_layer_peers._deep_gemm(layer)
    assert relative_error(call(), truth(layer)) < 0.08


def test_humming_gets_offsets_and_keeps_its_layers(layer, monkeypatch):
    made = []

    class Stand(torch.nn.Module):
        humming_config = "its configuration"

        def __init__(self, shape_n, shape_k, num_experts, weight_config, input_config, torch_dtype):
            super().__init__()
            assert weight_config == input_config == {"dtype": "int8", "group_size": 128}
            made.append((num_experts, shape_n, shape_k))

        def load_from_unquantized(self, weight):
            self.weight = torch.nn.Parameter(weight, requires_grad=False)

        def transform(self):
            pass

        def forward(self, x, input_scale, expert_layout, compute_config):
            assert compute_config == {"gemm_type": "grouped_contiguous"}
            assert expert_layout.dtype == torch.int64 and len(input_scale) == len(x)
            return torch._grouped_mm(x, self.weight.mT, offs=expert_layout[1:].int())

    parts = {
        "humming": {},
        "humming.layer": {"HummingLayer": Stand},
        "humming.forward": {"may_quant_input": lambda config, x: (x, x[:, :2].float())},
    }
    install(monkeypatch, parts)
    for _ in range(2):
        call = quantized_layer_peers._humming(128, layer)
        assert relative_error(call(), truth(layer)) < 0.02
    assert made == [(3, 256, 256), (3, 256, 128)]
    options = Options(torch.device("cuda"), 128, peers="humming")
    alone = list(moe_ffn_products.peer_products(layer, options))
    assert [one.name for one in alone] == [
        f"Humming INT8 G128, {name}" for name in ("gate_up alone", "down alone")
    ]
    for one in alone:
        assert relative_error(one.call(), one.truth()) < 0.02


def test_peers_are_named_where_they_are_missing(layer):
    assert list(quantized_layer_peers.quantized_layers(layer, Options(CPU))) == []
    options = Options(torch.device("cuda"), 128)
    found = list(quantized_layer_peers.quantized_layers(layer, options))
    names = ["plain Triton fused MoE", "Humming INT8 G128 layer", "DeepGEMM FP8 block layer"]
    assert [one.name for one in found] == names
    for one in found:
        assert isinstance(one, (Missing, Subject))
        if isinstance(one, Missing) and one.name != names[0]:
            assert "not installed" in one.reason
    (one,) = quantized_layer_peers.quantized_layers(
        layer, Options(torch.device("cuda"), 128, peers="humming")
    )
    assert one.name == names[1]
