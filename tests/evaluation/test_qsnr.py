"""The arithmetic of farro qsnr, against float64 and definitions written again."""

from __future__ import annotations

import math

import pytest
import torch

from farro.evaluation.qsnr import theory
from farro.evaluation.qsnr.formats import ELEMENTS, SCALES, Element, restored, scales_of
from farro.evaluation.qsnr.measure import (
    BINS,
    ROTATIONS,
    Bins,
    Cell,
    Study,
    columns_of,
    measured_crossover,
    points,
    rotated,
    rotation_size,
)
from farro.formats import fp8, nvfp4

BY_NAME = {element.name: element for element in ELEMENTS}
SCALE = {scale.name: scale for scale in SCALES}


def grid_of(element: Element) -> torch.Tensor:
    """Every non-negative number of a format in ascending order, float64."""
    if element.mantissa is None:
        return torch.arange(int(element.largest) + 1).double()
    values = [
        (m + (2**element.mantissa if e else 0))
        * 2.0 ** (max(e, 1) - element.bias - element.mantissa)
        for e in range(16)
        for m in range(2**element.mantissa)
    ]
    found = torch.tensor(values, dtype=torch.float64)
    return found[found <= element.largest]


def nearest(x: torch.Tensor, element: Element) -> torch.Tensor:
    """By a search through the grid; of two as near the one of even index, which is even."""
    grid = grid_of(element)
    size = x.double().abs().clamp(max=element.largest)
    distance = (size[..., None] - grid).abs()
    least = distance.amin(-1, keepdim=True)
    ties = distance == least
    index = torch.arange(len(grid)).expand(ties.shape)
    even = torch.where(ties & (index % 2 == 0), index, -1).amax(-1)
    first = torch.where(ties, index, len(grid)).amin(-1)
    return grid[torch.where(even >= 0, even, first)] * x.double().sign()


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_nearest_is_that_of_a_search(element, generator):
    grid = grid_of(element).float()
    middle = (grid[1:] + grid[:-1]) / 2
    near = [torch.nextafter(middle, torch.tensor(way)) for way in (math.inf, 0.0)]
    some = torch.randn(500, generator=generator) * element.largest
    x = torch.cat([grid, middle, *near, some, torch.tensor([1e30, 1e-30])])
    x = torch.cat([x, -x])
    assert torch.equal(element.nearest(x.clone()).double(), nearest(x, element))


def test_formats_are_those_of_the_library(generator):
    x = torch.randn(10_000, generator=generator) * torch.exp2(
        torch.rand(10_000, generator=generator) * 30 - 20
    )
    assert torch.equal(BY_NAME["fp8"].nearest(x.clone()), fp8.encode(x).float())
    want = nvfp4.decode_e2m1(nvfp4.encode_e2m1(x))
    assert torch.equal(BY_NAME["fp4"].nearest(x.clone()), want)
    assert BY_NAME["fp8"].largest == fp8.MAX and BY_NAME["fp4"].largest == nvfp4.MAX_CODE


def test_e8m0_scales_are_the_next_power_of_two(generator):
    largest = torch.exp2(torch.rand(500, generator=generator) * 80 - 40)
    largest[:3] = torch.tensor([448.0, 448.0 * 2, 0.0])
    scale = scales_of(SCALE["e8m0"], largest, BY_NAME["fp8"])
    assert scale[:3].tolist() == [1.0, 2.0, 1.0]
    for value, found in zip(largest[3:].tolist(), scale[3:].tolist()):
        assert math.log2(found) % 1 == 0
        assert found >= value / 448 * (1 - 2**-23) and found / 2 < value / 448


def test_e4m3_scales_reach_448_and_stop_at_the_smallest(generator):
    largest = torch.tensor([6.0, 3.0, 6.0 * 2.0**-20, 0.0])
    scale = scales_of(SCALE["e4m3"], largest, BY_NAME["fp4"])
    factor = 1.0 / 448
    assert scale.tolist() == pytest.approx([1.0, 0.5, 2.0**-9 * factor, 1.0])
    assert not SCALE["e4m3"].fits(BY_NAME["fp4"], 64) and SCALE["e4m3"].fits(BY_NAME["int4"], 16)
    assert not SCALE["e4m3"].fits(BY_NAME["fp8"], 16)


def hadamard(size: int) -> torch.Tensor:
    return torch.tensor(
        [[(-1.0) ** bin(i & j).count("1") for j in range(size)] for i in range(size)],
        dtype=torch.float64,
    )


@pytest.mark.parametrize("size", (2, 16, 64))
def test_a_rotation_is_signs_and_a_hadamard_matrix(size, generator):
    x = torch.randn(5, 2 * size, generator=generator)
    signs = torch.randint(0, 2, (size,), generator=generator).mul(2).sub(1).float()
    blocks = x.double().view(-1, size) * signs.double()
    want = (blocks @ hadamard(size) / math.sqrt(size)).view(x.shape)
    found = rotated(x, size, signs)
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.norm(dim=1), x.norm(dim=1))
    # a product keeps its value where both operands are rotated
    y = torch.randn(3, 2 * size, generator=generator)
    torch.testing.assert_close(found @ rotated(y, size, signs).T, x @ y.T, rtol=1e-4, atol=1e-4)


def test_sizes_of_rotations_and_columns():
    assert rotation_size("block", 32, 512) == 32
    assert rotation_size("row", 32, 1536) == 512
    assert rotation_size("row", 32, 14336) == 1024
    assert columns_of(576, (16, 256)) == (512, (16, 256))
    assert columns_of(80, (16, 64, 128)) == (64, (16, 64))
    assert columns_of(8, (16, 32)) == (0, ())


def decibels_in_float64(x: torch.Tensor, element: Element, scale: str, block: int) -> float:
    """A tensor's signal to noise, by definitions in float64."""
    values = x.double().reshape(-1, block)
    largest = values.abs().amax(-1) / element.largest
    if scale == "e8m0":
        largest = torch.exp2(torch.ceil(torch.log2(largest)))
    if scale == "e4m3":
        factor = largest.max() / 448
        largest = nearest((largest / factor).clamp_min(2.0**-9), BY_NAME["fp8"]) * factor
    scales = torch.where(largest > 0, largest, 1.0)[:, None]
    noise = (nearest(values / scales, element) * scales - values).square().sum()
    return 10 * math.log10(values.square().sum() / noise)


@pytest.mark.parametrize("block", (16, 32, 64))
def test_a_tensor_s_decibels_are_those_of_float64(block, generator):
    x = torch.randn(6, 128, generator=generator)
    x[2] *= 100
    x[3, 16:80] = 0  # whole blocks of zeros among others
    study = Study((16, 32, 64), ("none",))
    study.add("weights", "w", x)
    for element in ELEMENTS:
        for scale in SCALES:
            cell = Cell("weights", element, scale, block, "none")
            assert (cell in study.db) == scale.fits(element, block)
            if cell in study.db:
                want = decibels_in_float64(x, element, scale.name, block)
                assert study.db[cell]["w"] == pytest.approx(want, abs=0.02)
                assert study.mean(cell) == study.db[cell]["w"]


def test_rotations_are_measured_on_rotated_values(generator):
    x = torch.randn(8, 64, generator=generator)
    x[:, [5, 40]] *= 50  # outlier channels
    study = Study((32,), ROTATIONS, seed=3)
    study.add("inputs", "x", x)
    element, scale = BY_NAME["int4"], SCALE["fp32"]
    random = torch.Generator().manual_seed(3)
    signs = torch.randint(0, 2, (64,), generator=random).mul(2).sub(1).float()
    want = decibels_in_float64(rotated(x, 64, signs), element, "fp32", 32)
    found = {r: study.mean(Cell("inputs", element, scale, 32, r)) for r in ROTATIONS}
    assert found["row"] == pytest.approx(want, abs=0.02)
    assert found["row"] > found["none"] + 1
    assert found["block"] != found["row"]
    crest = {r: study.crests["inputs", 32, r] for r in ROTATIONS}
    assert crest["row"][0] < 3.5 < 4.2 < crest["none"][0] <= math.sqrt(32) + 1e-5


def test_what_cannot_be_measured_is_left_out():
    study = Study((16, 32), ("none",))
    study.add("weights", "zeros", torch.zeros(4, 64))
    study.add("weights", "narrow", torch.ones(4, 8))
    study.add("weights", "nan", torch.full((4, 64), math.nan))
    assert study.db == {} and study.bins == {}
    study.add("weights", "short", torch.randn(4, 24))
    assert {cell.block for cell in study.db} == {16}


def test_bins_hold_mean_noise_by_crest_factor():
    bins = Bins()
    crest = torch.tensor([2.0] * 40 + [5.0] * 40 + [9.0] * 3)
    noise = torch.tensor([0.1, 0.3] * 20 + [0.01] * 40 + [1.0] * 3)
    bins.add(crest[:50], {("a", "s"): noise[:50]})
    bins.add(crest[50:], {("a", "s"): noise[50:]})
    assert bins.count.sum() == 83 and len(bins.count) == BINS
    low, high = points([bins], "a", "s")  # three blocks are too few
    assert low == (2.0, pytest.approx(-10 * math.log10(0.2)), 40)
    assert high == (5.0, pytest.approx(20.0), 40)
    assert points([bins, bins], "a", "s")[0][2] == 80
    assert points([bins], "b", "s") == []


# Theory


def normal_integrals(t: float) -> tuple[float, float]:
    """Share and energy of normal values below t, by summing the density."""
    steps = 20_000
    x = (torch.arange(steps, dtype=torch.float64) + 0.5) * t / steps
    density = 2 * torch.exp(-(x**2) / 2) / math.sqrt(2 * math.pi) * t / steps
    return float(density.sum()), float((density * x**2).sum())


@pytest.mark.parametrize("t", (0.05, 0.7, 2.0, 5.0))
def test_shares_of_normal_values(t):
    share, energy = normal_integrals(t)
    assert theory._share_below(t) == pytest.approx(share, rel=1e-6)
    assert theory._energy_below(t) == pytest.approx(energy, rel=1e-6)


def test_theory_has_the_paper_s_form():
    """4.78 + 6.02 b - 20 log10(rho) - 20 log10(c), and the flat line of FP8."""
    for bits in (4, 8):
        integer = Element("", "", bits, 2.0 ** (bits - 1))
        for crest in (1.5, 4.0, 9.0):
            want = 4.78 + 6.02 * bits - 20 * math.log10(1.5) - 20 * math.log10(crest)
            found = theory.predicted(integer, SCALE["e8m0"], crest)
            assert found == pytest.approx(want, abs=0.02)
            exact = theory.predicted(integer, SCALE["fp32"], crest, 32)
            gain = 10 * math.log10(32 / 31) + 20 * math.log10(1.5)
            assert exact == pytest.approx(want + gain, abs=0.02)
    for crest in (2.0, 5.0, 12.0):
        flat = 10 * math.log10(24 * 64)
        assert theory.predicted(BY_NAME["fp8"], SCALE["e8m0"], crest) == pytest.approx(
            flat, abs=0.01
        )


def test_theory_has_the_paper_s_crossovers():
    """7.55 for 8 bits and 2.04 for 4, where integers count 2^(b-1) steps as the paper's do."""
    scale = SCALE["e8m0"]
    for bits, floating, want in ((8, "fp8", 7.55), (4, "fp4", 2.04)):
        integer = Element("", "", bits, 2.0 ** (bits - 1))
        found = theory.crossover(
            lambda c, e=integer: theory.predicted(e, scale, c),
            lambda c, e=BY_NAME[floating]: theory.predicted(e, scale, c),
            *(1.0, 50.0),
        )
        assert found == pytest.approx(want, abs=0.02)


def test_crossover_of_functions_that_do_not_cross():
    assert theory.crossover(lambda c: 1.0, lambda c: 2.0, 1, 9) is None
    assert theory.crossover(lambda c: 3.0, lambda c: 2.0, 1, 9) is None
    assert theory.crossover(lambda c: 9 - c, lambda c: c, 1, 9) == pytest.approx(4.5)


@pytest.mark.parametrize("name", ("int8", "int4", "fp4"))
@pytest.mark.parametrize("block", (32, 256))
def test_theory_predicts_normal_values(name, block, generator):
    """With exact scales, whose step is known. FP8's 1/24 is an approximation of its own."""
    element, scale = BY_NAME[name], SCALE["fp32"]
    x = torch.randn(4000, block, generator=generator)
    crest = x.abs().amax(1) / x.square().mean(1).sqrt()
    near = restored(x, scales_of(scale, x.abs().amax(1), element), element)
    noise = (near - x).square().sum(1) / x.square().sum(1)
    middle = (crest - crest.median()).abs() < 0.1
    found = theory.decibels(noise[middle].mean().item())
    want = theory.predicted(element, scale, crest[middle].mean().item(), block)
    assert found == pytest.approx(want, abs=0.5)


def test_measured_crossover_lies_between_two_bins():
    crests = [2 ** ((i + 0.5) / 8) for i in range(32)]
    low = [(c, 50 - 20 * math.log10(c), 100) for c in crests]
    high = [(c, 32.0, 100) for c in crests if c > 3]
    want = 10 ** (18 / 20)
    assert measured_crossover(low, high) == pytest.approx(want, rel=0.01)
    assert measured_crossover(low[:10], high) is None
    assert measured_crossover(high, low) is None


def test_blocks_of_many_crest_factors_cross_where_theory_says(generator):
    """Normal values with one outlier of a random size a block: INT8 and FP8 meet near 7.5."""
    study = Study((256,), ("none",), (BY_NAME["int8"], BY_NAME["fp8"]))
    x = torch.randn(4000, 256, generator=generator)
    x[:, 7] *= torch.exp2(torch.rand(4000, generator=generator) * 8)
    study.add("inputs", "x", x)
    low, high = (points(list(study.bins.values()), name, "e8m0") for name in ("int8", "fp8"))
    assert 7.0 < measured_crossover(low, high) < 8.6
