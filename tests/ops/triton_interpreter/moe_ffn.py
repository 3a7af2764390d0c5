"""The Triton moe_ffn in the interpreter: few and tiny problems, each kernel and orientation."""

from __future__ import annotations

import numpy
import pytest
import torch

from farro import bench
from farro.arch import interpreting
from farro.bench import runner
from farro.bench.case import Options
from farro.ops.moe_ffn import triton
from farro.ops.moe_ffn.triton import Config, Tile
from farro.testing import MoeCase, assert_bit_equal

from ..triton_silu import check_silu

pytestmark = [
    pytest.mark.skipif(not interpreting(), reason="run by run_again"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, on Inf and NaN
]


def seed_of(generator: torch.Generator) -> int:
    return int(torch.randint(2**31, (1,), generator=generator))


def result(config: Config | None, call) -> torch.Tensor:
    given = call.arguments
    out = torch.full(given["x_int8"].shape, float("nan"))
    config = config or triton.config(call.problem)
    triton.run(config, *call.operands, out, given["group_size"], call.interleaved)
    return out


def tiles(tokens: int, features: int, columns: int, swap: bool) -> Config:
    return Config(Tile(tokens, features, swap, 4, 2), Tile(tokens, columns, swap, 4, 2), 256)


# tails in H, I, rows and groups; several experts; a group of several products, several in one
FORCED = [
    (MoeCase("narrow", 9, 2, 3, 70, 40, 32), tiles(16, 32, 64, True)),
    (MoeCase("groups of several", 7, 2, 2, 64, 75, 32), tiles(16, 64, 32, False)),
    (MoeCase("several of a group", 5, 3, 2, 130, 135, 128), tiles(16, 32, 64, True)),
    (
        MoeCase("interleaved", 6, 1, 2, 64, 70, 64, "interleaved", id_dtype=torch.int32),
        tiles(16, 32, 128, False),
    ),
    (
        MoeCase("interleaved, swapped", 20, 2, 2, 96, 33, 64, "interleaved"),
        tiles(32, 64, 64, True),
    ),
]


@pytest.mark.parametrize("case, config", FORCED, ids=lambda v: str(getattr(v, "name", "")))
def test_exact_gates_have_the_reference_s_bits(case, config, generator):
    call = case.build(seed=seed_of(generator))
    assert_bit_equal(result(config, call), call.expected[0])


def test_other_gates_are_as_near_as_silu_allows(generator):
    case = MoeCase("usual", 20, 2, 3, 70, 64, 32, values="usual")
    call = case.build(seed=seed_of(generator))
    call.precise = False
    found = call.differs(0, result(None, call), call.expected[0])
    assert found is None, found


def test_products_of_the_benchmark_are_near_their_truth():
    """`farro bench moe_ffn` times each launch of a product by itself."""
    sizes = {"m": 5, "n": 64, "k": 64, "e": 2, "all": 3, "topk": 2}
    case = bench.adapter("moe_ffn").build(sizes, Options(torch.device("cpu"), 64))
    *_, gate_up, down = case.extra()
    assert [gate_up.name, down.name] == [
        f"farro triton, {name}" for name in ("gate_up alone", "down alone")
    ]
    for subject, error in ((gate_up, 2e-2), (down, 1e-2)):
        assert runner.relative_error(subject.value(subject.call()), subject.truth()) < error


def test_silu(monkeypatch):
    """With exp2 as a GPU has it: below the normal numbers it gives 0."""
    exp2 = numpy.exp2

    def flushed(x):
        y = exp2(x)
        return numpy.where(abs(y) < 2.0**-126, 0, y).astype(y.dtype)

    monkeypatch.setattr(numpy, "exp2", flushed)
    check_silu("cpu")


def test_non_finite_values_and_dropped_routes(generator):
    case = MoeCase("nonfinite", 12, 2, 3, 40, 40, 32, values="nonfinite", weights="columns")
    call = case.build(seed=seed_of(generator))
    assert_bit_equal(result(None, call), call.expected[0])


def test_many_routes_of_one_token(generator):
    call = MoeCase("topk", 2, 19, 2, 32, 32, 32).build(seed=seed_of(generator))
    assert_bit_equal(result(None, call), call.expected[0])
