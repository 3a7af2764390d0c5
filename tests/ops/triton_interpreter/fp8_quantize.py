"""The Triton fp8_quantize in the interpreter, byte for byte: its integer conversion to E4M3."""

from __future__ import annotations

import math

import pytest
import torch

import farro
from farro.arch import interpreting
from farro.catalogue import operator_named
from farro.formats.fp8 import E4M3, KINDS, quantize, scale_shape
from farro.ops.fp8_quantize import triton
from farro.ops.fp8_quantize.triton import Config
from farro.testing import assert_bit_equal, fp8_quantize_cases

pytestmark = [
    pytest.mark.skipif(not interpreting(), reason="run by run_again"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, on Inf and NaN
]
# the largest cases belong to a GPU; of the others, most are slow here
CASES = [
    pytest.param(case, id=str(case), marks=() if case.quick else pytest.mark.slow)
    for case in fp8_quantize_cases()
    if math.prod(case.shape) <= 20_000
]
KERNEL = next(k for k in operator_named("fp8_quantize").kernels if k.backend == "triton")


def seed_of(generator: torch.Generator) -> int:
    return int(torch.randint(2**31, (1,), generator=generator))


def assert_same_bytes(actual, expected) -> None:
    for result, want in zip(actual, expected):
        assert_bit_equal(result.reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("case", CASES)
def test_cases(case, generator):
    call = case.build(seed=seed_of(generator))
    outcome = call.check(KERNEL)
    assert outcome.status == "ok", outcome.detail


@pytest.mark.parametrize("kind", KINDS)
def test_nan_has_one_pattern(kind):
    x = torch.ones(3, 150)
    x.view(torch.int32)[1, 140] = -1
    x[1, 141] = math.inf
    assert_same_bytes(triton_result(x, kind), quantize(x, kind))


def triton_result(x, kind, config=None):
    """Run into memory full of what no right result holds."""
    q = torch.full(x.shape, 0x55, dtype=torch.uint8).view(E4M3)
    scale = torch.full(scale_shape(x.shape, kind), -1.0)
    function = getattr(farro, f"quantize_fp8_{kind}")
    if config is None:
        return function(x, backend="triton")
    triton.run(config, x, q, scale, kind)
    return q, scale


# a whole tensor in one program and in several, rows in registers and in passes, uneven tiles
FORCED = {
    "per_tensor": [
        Config(32, 1, 512, 8),
        *(
            Config(rows, 1, 128, 4, programs=p, policy="two launches")
            for rows, p in ((1, 64), (4, 2))
        ),
    ],
    "per_row": [
        Config(1, 1, 512, 4),
        Config(16, 1, 512, 4),
        Config(1, 1, 128, 4, policy="rows in two passes"),
    ],
    "1x128": [Config(1, 1, 128, 1), Config(4, 2, 128, 4), Config(16, 4, 128, 8)],
    "128x128": [Config(32, 1, 128, 4), Config(32, 2, 128, 8)],
}


@pytest.mark.parametrize("kind, config", [(k, c) for k in KINDS for c in FORCED[k]], ids=str)
def test_any_configuration(kind, config, generator):
    for shape in ((17, 1), (5, 300), (2, 512)):
        x = torch.randn(shape, generator=generator)
        x[-1, -1] *= 100
        assert_same_bytes(triton_result(x, kind, config), quantize(x, kind))


def test_every_rounding(generator):
    """All midpoints of E4M3, the floats beside them, and random ones; the scale is 1."""
    grid = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    middle = (grid[1:] + grid[:-1]) / 2
    near = [torch.nextafter(middle, torch.tensor(way)) for way in (math.inf, 0.0)]
    some = torch.exp2(torch.rand(2000, generator=generator) * 30 - 21.2)
    x = torch.cat([grid, middle, *near, some])
    x = torch.cat([x, -x])[None]
    assert x.abs().max() == 448
    assert_same_bytes(triton_result(x, "per_tensor"), quantize(x, "per_tensor"))


def test_leading_dimensions_are_read_in_place(generator):
    x = torch.randn(4, 6, 5, 130, generator=generator)
    for kind in ("per_tensor", "per_row", "1x128"):
        for view in (x[::2, :2], x.transpose(0, 2)[:2], x[:, ::3, 1:3, ::3], x[0, 0, 0]):
            assert_same_bytes(triton_result(view, kind), quantize(view, kind))


def test_more_strides_than_it_takes_are_refused(generator):
    x = torch.randn(4, 4, 4, 4, 40, generator=generator)[::2, ::2, ::2, ::2]
    with pytest.raises(farro.UnsupportedError, match="leading dimensions need 4 strides"):
        farro.quantize_fp8_per_row(x, backend="triton")
