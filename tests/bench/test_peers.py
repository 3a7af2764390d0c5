"""The peers' data and choices, with a stand-in for Humming's interface."""

from __future__ import annotations

import contextlib
import json
import sys
import types

import pytest
import torch

from farro.bench import humming, kept, peers, timing
from farro.bench.case import Missing, Options, Subject
from farro.formats.int8_group import quantize

CPU = torch.device("cpu")


def operands(m=5, n=6, k=96, peer="tuned"):
    a, scale_a = quantize(torch.randn(m, k), 32)
    b, scale_b = quantize(torch.randn(n, k), 32)
    return peers.Operands(a, scale_a, b, scale_b.T.contiguous(), 32, Options(CPU, 32, peers=peer))


def test_all_peers_get_the_values_of_the_codes():
    given = operands()
    found = list(peers.dense(given))
    assert [s.name for s in found] == ["oneDNN BF16", "oneDNN INT8, no scales"]
    want = given.x(torch.float64) @ given.weight(torch.float64).T
    for subject in found:
        exact = subject.truth()
        assert (subject.call().double() - exact).norm() <= 1e-2 * exact.norm()
    assert (found[0].truth() - want).norm() < 1e-2 * want.norm()
    assert torch.equal(found[1].call().double(), given.a.double() @ given.b.double().T)


def test_peers_are_chosen_by_name():
    assert list(peers.dense(operands(peer="triton"))) == []  # a GPU's
    assert [s.name for s in peers.dense(operands(peer="int_mm,humming"))] == [
        "oneDNN INT8, no scales"
    ]


def test_the_fastest_call_that_runs(monkeypatch):
    monkeypatch.setattr(peers, "_quick_timer", lambda device: timing.CpuTimer())

    def boom():
        raise RuntimeError("out of resources")

    slow = lambda: torch.randn(300_000).sort()  # noqa: E731
    best, failed = peers.fastest({"boom": boom, "slow": slow, "fast": lambda: None}, CPU)
    assert best == "fast" and "out of resources" in failed
    assert peers.fastest({"boom": boom}, CPU)[0] is None


class Config:
    def __init__(self, n, k):
        self.n, self.k = n, k

    def to_str(self):
        return json.dumps({"shape_n": self.n, "shape_k": self.k})


class Layer:
    """What farro uses of HummingLayer; a configuration with 4 stages is wrong, 5 does not run."""

    def __init__(self, shape_n, shape_k, weight_config, input_config, torch_dtype):
        assert weight_config == input_config == {"dtype": "int8", "group_size": 32}
        self.humming_config = Config(shape_n, shape_k)

    def cuda(self):
        return self

    def load_from_unquantized(self, weight):
        self.weight = weight

    def transform(self):
        pass

    def __call__(self, codes, input_scale, tuning_config=None):
        given = json.loads(tuning_config) if tuning_config else {}
        if given.get("num_stages") == 5:
            raise RuntimeError("launch failed")
        x = peers.exact(codes, input_scale, 32, torch.float32)
        return (x @ self.weight.float().T).bfloat16() + (given.get("num_stages") == 4)


@pytest.fixture
def stand_in(monkeypatch):
    prepared = []

    class Kernel:
        @staticmethod
        def prepare_kernels(layer, compute, tuning, device):
            if json.loads(tuning).get("raster_group_m") == 8:
                raise AssertionError("not legal")
            prepared.append(json.loads(tuning))

    def heuristics(config, device):
        base = {"block_shape": (64, 64, 64), "num_stages": 3, "use_stream_k": True}
        return [[0, 8, base], [8, 99, {**base, "num_stages": 6}]]

    parts = {
        "humming": {},
        "humming.layer": {"HummingLayer": Layer},
        "humming.forward": {"may_quant_input": lambda config, x: quantize(x, 32)},
        "humming.kernel": {},
        "humming.kernel.humming": {"HummingKernel": Kernel},
        "humming.tune": {"get_heuristics_config": heuristics},
    }
    for name, values in parts.items():
        module = types.ModuleType(name)
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(humming.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(peers, "_quick_timer", lambda device: timing.CpuTimer())
    monkeypatch.setattr(kept, "_KEPT", {})
    monkeypatch.setattr(humming, "_CANDIDATES", {})
    return prepared


def test_humming_in_its_default_and_a_tuned_configuration(stand_in):
    default, tuned = humming.humming(operands())
    assert isinstance(default, Subject) and isinstance(tuned, Subject)
    assert (default.name, tuned.name) == ("Humming INT8 G32", "Humming INT8 G32 tuned")
    for subject in (default, tuned):
        exact = subject.truth()
        assert (subject.call().double() - exact).norm() < 2e-2 * exact.norm()
    chosen = json.loads(tuned.config)
    assert chosen["num_stages"] not in (4, 5) and chosen in stand_in
    assert {c["num_stages"] for c in stand_in} == {3, 4, 5, 6, 7}
    assert any(c["use_stream_k"] is False for c in stand_in)


def test_humming_untuned_and_failing(stand_in, monkeypatch):
    (default,) = humming.humming(operands(peer="default"))
    assert default.name == "Humming INT8 G32"

    def fails(self, weight):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(Layer, "load_from_unquantized", fails)
    kept._KEPT.clear()
    (missing,) = humming.humming(operands())
    assert isinstance(missing, Missing) and "no compiler" in missing.reason
