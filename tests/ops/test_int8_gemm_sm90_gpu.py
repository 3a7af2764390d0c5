"""Results of the native SM90 int8_gemm on a GPU: each tile of each kernel, bit for bit."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

import farro
from farro.ops.int8_gemm import sm90, sm90_launch
from farro.ops.int8_gemm.sm90 import Config
from farro.testing import assert_bit_equal

from .sm90_forced import (
    BF16,
    FP16,
    FP32,
    GROUP_SIZES,
    LARGE,
    NARROW,
    PAIRED,
    SMALL,
    SOME,
    compile_all,
    expected,
    forced,
    operands,
    same,
    shapes,
    skip_without_it,
)

pytestmark = pytest.mark.gpu
# beyond a tile of each size and a single tile of all; K with tails of a group and of 16 bytes
SHAPES = ((1, 1, 1), (9, 70, 300), (130, 392, 1040), (257, 1000, 528), (65, 129, 256))
MANY_TILES = (2100, 1100, 456)  # more tiles than SMs, so that rings go on from tile to tile
CHOICES = (1, 7, 8, 9, 16, 17, 32, 33, 64, 65, 100, 128, 129, 256, 257, 300)  # rows, to 1000 x 2560


# Without the exhaustive run: every tile with groups of 64, every fifth with others
SWEEPS = (False, pytest.param(True, marks=pytest.mark.slow))
every_tile = pytest.mark.parametrize("every", SWEEPS, ids=("usual", "exhaustive"))


def tiles(policy, group_size, every):
    found = shapes(policy, group_size)
    return found if every or group_size == 64 else found[GROUP_SIZES.index(group_size) :: 5]


def usual_types(group_size):
    """Beside FP32 each group size has one of the 16-bit types."""
    return FP32, (BF16 if group_size in (64, 256) else FP16)


def depths(group_size):
    """SMALL and PAIRED with every legal ring from 2 to 24 stages, in steps."""
    wanted = (dataclasses.replace(c, stages=s) for c in (SMALL, PAIRED) for s in (2, 3, 5, 12, 24))
    return [c for c in wanted if sm90.is_legal(c, group_size)]


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """What every run takes; an exhaustive test compiles the rest by itself."""
    skip_without_it()
    found = [
        (config, group_size, FP32)
        for group_size in GROUP_SIZES
        for policy in ("large", "small")
        for config in tiles(policy, group_size, False)
    ]
    found += [
        (config, g, dtype) for config in SOME for g in GROUP_SIZES for dtype in usual_types(g)
    ]
    found += [(sm90.heuristic(m, 1000, 2560, g), g, FP32) for m in CHOICES for g in GROUP_SIZES]
    compile_all([sm90_launch.kernel_name(*each) for each in found])


@every_tile
@pytest.mark.parametrize("policy", ("large", "small"))
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_every_tile(group_size, policy, every, generator):
    configs = tiles(policy, group_size, every)
    compile_all([sm90_launch.kernel_name(c, group_size, FP32) for c in configs])
    problems = [*SHAPES, MANY_TILES] if policy == "large" else SHAPES
    for m, n, k in problems:
        inputs = operands(m, n, k, group_size, generator)
        want = expected(inputs, group_size)
        for config in configs:
            out = forced(config, inputs, group_size)
            same(out, want, f"{config} {m}x{n}x{k} G{group_size}")


@pytest.mark.parametrize("config", SOME, ids=str)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_every_k_tail(group_size, config, generator):
    for k in (*range(15, 18), *range(31, 34), *range(63, 66), *range(127, 130), *range(255, 258)):
        for more in (0, 4 * group_size, 1024):
            inputs = operands(20, 136, k + more, group_size, generator)
            out = forced(config, inputs, group_size)
            same(out, expected(inputs, group_size), f"{config} K={k + more} G{group_size}")


@pytest.mark.parametrize("config", SOME, ids=str)
@pytest.mark.parametrize("dtype", (BF16, FP16, FP32), ids=str)
def test_output_types_biases_and_views(dtype, config, generator):
    sizes = ((70, 264, 700), (33, 131, 300), (300, 192, 528))
    groups = [g for g in GROUP_SIZES if dtype in usual_types(g)]
    for (m, n, k), group_size in zip(sizes, itertools.cycle(groups)):
        plain = operands(m, n, k, group_size, generator)
        for bias in (None, BF16, FP16, FP32, "strided"):
            added = None
            if bias is not None:
                kind = FP32 if bias == "strided" else bias
                step = 3 if bias == "strided" else 1
                added = torch.randn(n * step, generator=generator).to(kind).cuda()[::step]
            inputs = (*plain[:4], added)
            want = expected(inputs, group_size, dtype)
            what = f"{config} {m}x{n}x{k} bias {bias}"
            same(forced(config, inputs, group_size, dtype), want, what)
            wide = torch.empty(m, 2 * n + 3, dtype=dtype, device="cuda")
            views = {
                "transposed": torch.empty(n, m, dtype=dtype, device="cuda").T,
                "odd rows": wide[:, 1 : n + 1],
                "every second": wide[:, 1 : 2 * n + 1 : 2],
                "rows turned": torch.empty(m * 2, n, dtype=dtype, device="cuda")[::2],
            }
            for name, view in views.items():
                wide.fill_(float("nan"))
                same(forced(config, inputs, group_size, dtype, view), want, f"{what} {name}")
            around = torch.ones_like(wide, dtype=torch.bool)
            around[:, 1 : 2 * n + 1 : 2] = False
            wide.fill_(float("nan"))
            forced(config, inputs, group_size, dtype, views["every second"])
            assert wide[around].isnan().all(), f"{what} wrote between the columns of out"


@pytest.mark.parametrize("config", SOME, ids=str)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_scales_of_any_stride(group_size, config, generator):
    m, n, k = 40, 260, 9 * group_size + 5
    a, b, scale_a, scale_b, _ = operands(m, n, k, group_size, generator)
    want = expected((a, b, scale_a, scale_b, None), group_size)
    groups = scale_a.shape[1]

    def inside(scale, before, after, step):
        rows, columns = scale.shape
        whole = torch.full((rows, before + columns * step + after), float("nan"), device="cuda")
        view = whole[:, before : before + columns * step : step]
        view.copy_(scale)
        return view

    layouts = [(0, 0, 1), (1, 2, 1), (2, 6 - groups % 4, 1), (4, 4 - groups % 4, 1), (0, 0, 3)]
    for how in layouts:
        for turned in (False, True):
            of_a, of_b = (
                inside(s.T.contiguous(), *how).T if turned else inside(s, *how)
                for s in (scale_a, scale_b)
            )
            for given in ((of_a, scale_b), (scale_a, of_b), (of_a, of_b)):
                out = forced(config, (a, b, *given, None), group_size)
                same(out, want, f"{config} scales {how} turned {turned}")


@pytest.mark.parametrize("config", SOME, ids=str)
def test_values(config, generator):
    """Lowest codes, and scales of every kind: NaN and Inf stay in their rows and columns."""
    kinds = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), -3.0, 1e-40, 3e38]
    for group_size in GROUP_SIZES:
        inputs = operands(50, 300, 700, group_size, generator, values=kinds)
        for dtype in usual_types(group_size):
            out = forced(config, inputs, group_size, dtype)
            assert_bit_equal(out, expected(inputs, group_size, dtype), f"{config} {dtype}")
        inputs[0].fill_(-128)
        inputs[1].fill_(-128)
        finite = (*inputs[:2], *(s.nan_to_num(1, 2, 3) for s in inputs[2:4]), None)
        out = forced(config, finite, group_size)
        assert_bit_equal(out, expected(finite, group_size), f"{config} all codes -128")


def test_one_fused_multiply_add_a_group():
    """Terms of -1 and 4097 * (1 / 4097) give exactly 2^-36; product and sum apart give 0."""
    for config in SOME:
        a = torch.zeros(40, 64, dtype=torch.int8, device="cuda")
        b = torch.ones(64, 128, dtype=torch.int8, device="cuda").T.contiguous().T
        a[:, 0], a[:, 32:63], a[:, 63] = -1, 127, 10
        b[63] = 16  # 31 * 127 + 160 = 4097
        scale_b = torch.ones(2, 128, device="cuda")
        scale_b[1] = torch.tensor(1.0) / 4097
        out = forced(config, (a, b, torch.ones(40, 2, device="cuda"), scale_b, None), 32)
        assert (out == 2.0**-36).all(), (config, out[0, 0].item())


@pytest.mark.parametrize("config", SOME, ids=str)
def test_rows_do_not_depend_on_rows(config, generator):
    a, b, scale_a, scale_b, _ = operands(300, 400, 1000, 128, generator)
    whole = forced(config, (a, b, scale_a, scale_b, None), 128, BF16)
    for rows in (slice(0, 1), slice(299, 300), slice(5, 70), slice(100, 257)):
        part = forced(config, (a[rows], b, scale_a[rows], scale_b, None), 128, BF16)
        same(part, whole[rows].contiguous(), f"{config} {rows}")


@every_tile
def test_runs_are_equal(every, generator):
    """Races between producers and consumers would show as differences."""
    for group_size in GROUP_SIZES:
        for policy, m in (("large", 1000), ("small", 100)):
            inputs = operands(m, 4096, 2048, group_size, generator)
            want = expected(inputs, group_size)
            for config in tiles(policy, group_size, every):
                for turn in range(6):
                    out = forced(config, inputs, group_size)
                    same(out, want, f"{config} G{group_size} turn {turn}")


@pytest.mark.parametrize(
    "group_size", [g if g == 64 else pytest.param(g, marks=pytest.mark.slow) for g in GROUP_SIZES]
)
def test_every_depth_of_the_ring(group_size, generator):
    """Few rows: rings that hold all of K, and rings that go around many times."""
    inputs = operands(70, 200, 5000, group_size, generator)
    want = expected(inputs, group_size)
    compile_all([sm90_launch.kernel_name(c, group_size, FP32) for c in depths(group_size)])
    for config in depths(group_size):
        same(forced(config, inputs, group_size), want, f"{config} G{group_size}")


@pytest.mark.parametrize("raster", (1, 3, 8, 16))
def test_the_order_of_tiles_changes_nothing(raster, generator):
    inputs = operands(2000, 1500, 300, 256, generator)
    want = expected(inputs, 256)
    for config in (LARGE, NARROW):
        chosen = Config("large", config.rows, config.columns, config.stages, raster=raster)
        same(forced(chosen, inputs, 256), want, chosen)


def test_a_choice_runs_for_every_m(generator):
    """Through the public function, past each boundary of the heuristic or the tuned table."""
    for group_size in GROUP_SIZES:
        n, k = 1000, 2560
        inputs = operands(300, n, k, group_size, generator)
        want = expected(inputs, group_size)
        for m in CHOICES:
            a, b, scale_a, scale_b, _ = inputs
            out = farro.int8_gemm(
                *(a[:m], b, scale_a[:m], scale_b),
                group_size=group_size,
                output_dtype=FP32,
                backend="cuda",
            )
            same(out, want[:m], f"M={m} G{group_size}")
